"""LSTM layers against torch.nn.LSTM, in float32: another order of additions moves the last few bits, below 2e-6 of
numbers near 1; gradients sum over all tokens and are allowed 1e-5 of their largest.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from sportsllm.models.kinds import GATES
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import KVCache
from sportsllm.models.lstm import multiplied_by
from sportsllm.models.memory import kv_cache_bytes_per_token, state_bytes, tensor_shapes
from sportsllm.models.presets import preset
from sportsllm.training.lora import LoRALinear, add_adapters
from tests.support.lstm_models import LSTM
from tests.support.models import fresh, tiny_config

LENGTHS = [9, 3, 14, 3, 1, 2]  # of documents, 32 tokens


def lstm_model() -> SportsLLM:
    """Random weights, biases too."""
    model = SportsLLM(tiny_config(**LSTM))
    model.initialize(0, std=0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def reference(attention: Any) -> nn.LSTM:
    """torch's own layer with the same weights."""
    layer = nn.LSTM(attention.config.hidden_size, attention.config.cells, batch_first=True)
    parts = [[attention.get_submodule(f"{h}{gate}_proj") for gate in GATES] for h in ("", "h")]
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.cat([module.weight for module in parts[0]]))
        layer.weight_hh_l0.copy_(torch.cat([module.weight for module in parts[1]]))
        layer.bias_ih_l0.copy_(torch.cat([module.bias for module in parts[0]]))
        layer.bias_hh_l0.zero_()
    return layer


def test_documents_are_read_as_torch_reads_them_one_by_one() -> None:
    attention = lstm_model().model.layers[0].self_attn
    layer, ends = reference(attention), list(itertools.accumulate(LENGTHS))
    x_BTD = torch.randn(2, 16, attention.config.hidden_size, generator=torch.Generator().manual_seed(3))
    found = attention(x_BTD, documents=ends)
    rows = [layer(x[None])[0][0] for x in torch.split(x_BTD.flatten(0, 1), LENGTHS)]
    expected = torch.cat(rows) @ attention.out_proj.weight.T
    assert torch.allclose(found.flatten(0, 1), expected, atol=2e-6)
    gradients = []
    for result, matrix in ((found, attention.hf_proj.weight), (expected, layer.weight_hh_l0)):
        (gradient,) = torch.autograd.grad(result.square().sum(), matrix)
        gradients.append(gradient)
    of_forget = gradients[1].chunk(4)[1]
    assert torch.allclose(gradients[0], of_forget, atol=1e-5 * float(of_forget.abs().max()))


def test_a_cache_holds_what_was_read() -> None:
    model = lstm_model().eval()
    tokens = torch.randint(0, model.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole, cache = model(tokens), KVCache(model.config, 3, 13)
        parts = [model(piece, cache) for piece in torch.split(tokens, [5, 1, 4, 1, 1], dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
        assert [tuple(tensor.shape) for tensor in cache.tensors] == [(model.config.num_hidden_layers, 3, 48)] * 2
        cache.keep(torch.tensor([2, 1]))
        expected = model(torch.cat([tokens, tokens[:, :1]], dim=1))[[2, 1], -1]
        assert torch.allclose(model(tokens[[2, 1], :1], cache)[:, -1], expected, atol=1e-5)


def test_its_state_does_not_grow() -> None:
    config = preset("lstm-1m")
    assert not any(kv_cache_bytes_per_token(config).values())
    assert state_bytes(config)["fp32"] == 3 * 2 * 128 * 4
    kept = [[s.shape for s in tensor_shapes(config, 2, length) if s.kind == "state"] for length in (8, 800)]
    assert kept[0] == kept[1] == [(2, 128)] * 2
    assert state_bytes(tiny_config())["fp32"] == 0


def test_forget_gates_start_open_and_recurrent_matrices_orthogonal() -> None:
    attention = fresh(**LSTM).model.layers[1].self_attn
    assert torch.equal(attention.f_proj.bias, torch.ones(48)) and not attention.i_proj.bias.any()
    for matrix in attention.state_matrices:
        assert torch.allclose(matrix.weight @ matrix.weight.T, torch.eye(48), atol=1e-5)


def test_adapters_change_the_recurrent_product() -> None:
    model = lstm_model()
    add_adapters(model, 2)
    adapted = model.model.layers[0].self_attn.hi_proj
    assert isinstance(adapted, LoRALinear)
    nn.init.normal_(adapted.lora_b)
    before = multiplied_by(adapted, adapted.base.in_features)
    assert torch.autograd.grad(model(torch.arange(10)[None]).sum(), adapted.lora_b)[0].any()
    assert torch.allclose(before, adapted.merged().weight, atol=1e-5)  # unit vectors instead of a sum: float32


def test_who_watches_a_matrix_sees_all_that_it_reads() -> None:
    attention: Any = lstm_model().model.layers[0].self_attn
    seen: dict[str, Tensor] = {}
    for name in ("f_proj", "hf_proj", "out_proj"):
        attention.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    x_BTD = torch.randn(2, 7, attention.config.hidden_size)
    attention(x_BTD)
    h_BTH, _ = reference(attention)(x_BTD)
    assert torch.equal(seen["f_proj"], x_BTD)
    assert torch.allclose(seen["out_proj"], h_BTH, atol=2e-6)
    assert torch.allclose(seen["hf_proj"][:, 1:], h_BTH[:, :-1], atol=2e-6) and not seen["hf_proj"][:, 0].any()
