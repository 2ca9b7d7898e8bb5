"""Scaling folded into neighbours: the layer computes the same, and rounds better."""

import copy
from typing import Any

import pytest
import torch

from compress.layerwise import run_layer
from compress.quantization.channel_scaling import balanced_scale, scale_block
from compress.quantization.config import GridSpec, QuantizationConfig
from sportsllm.models.config import Experts
from sportsllm.models.language_model import first_positions
from tests.compress.pruning.test_refit import BIASES
from tests.support.gelu_kind import registered
from tests.support.models import tiny_model
from tests.support.training import allocated_peak


def uneven(model: torch.nn.Module) -> None:
    """Some channels of the norms are far stronger than the others, as in trained models."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[::7] *= 12
            parameter.data += 0.5 * name.endswith("bias")


@pytest.mark.parametrize("changes", [{}, BIASES | {"norm_kind": "layer"}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_the_layer_computes_the_same(changes: dict[str, Any], kv_heads: int) -> None:
    model = tiny_model(num_key_value_heads=kv_heads, **changes)
    uneven(model)
    rope = model.rope
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, length, 64, generator=draw) for length in (40, 25)]
    block = model.model.layers[1]
    before, weights = run_layer(block, states, rope), copy.deepcopy(block.state_dict())
    scale_block(block, states, rope, QuantizationConfig(8), "model.layers.1")
    changed = [name for name, value in block.state_dict().items() if not torch.equal(value, weights[name])]
    assert {"self_attn.q_proj.weight", "input_layernorm.weight", "mlp.up_proj.weight"} <= set(changed)
    for found, wanted in zip(run_layer(block, states, rope), before, strict=True):
        assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))
    # In float64, before any rounding: the product along every way through the layer stays as it was. Of the float32
    # products and quotients in it, at most five, each is off by 6e-8 of itself.
    now = {name: value.double() for name, value in block.state_dict().items()}
    old = {name: value.double() for name, value in weights.items()}
    size, group = model.config.head_dim, 4 // kv_heads
    rows = torch.tensor([(head // group) * size + place for head in range(4) for place in range(size)])

    def ways(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        norms = {"self_attn": state["input_layernorm.weight"], "mlp": state["post_attention_layernorm.weight"]}
        direct = [norms["self_attn"] * state[f"self_attn.{name}_proj.weight"] for name in "qk"]
        direct.append(norms["mlp"] * state["mlp.gate_proj.weight"])
        values = (norms["self_attn"] * state["self_attn.v_proj.weight"])[rows]
        inner = norms["mlp"] * state["mlp.up_proj.weight"]
        outputs = state["self_attn.o_proj.weight"], state["mlp.down_proj.weight"]
        return direct + [out[:, :, None] * made for out, made in zip(outputs, (values, inner), strict=True)]

    for found, wanted in zip(ways(now), ways(old), strict=True):
        torch.testing.assert_close(found, wanted, rtol=5e-7, atol=0)


@torch.no_grad()
def test_a_matrix_without_a_source_is_left_alone() -> None:
    """gelu(x / c) is not gelu(x) / c: the second matrix of that kind cannot be scaled."""
    with registered() as kind:
        model = tiny_model(mlp_kind=kind)
        uneven(model)
        rope = model.rope
        states = [torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0))]
        block = model.model.layers[0]
        before, down = run_layer(block, states, rope)[0], block.mlp.down_proj.weight.clone()
        scale_block(block, states, rope, QuantizationConfig(), "model.layers.0")
        assert torch.equal(block.mlp.down_proj.weight, down)
        assert torch.allclose(run_layer(block, states, rope)[0], before, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize(
    ("bits", "alpha", "changes"),
    [
        (4, 0.25, {}),
        (8, 0.5, {}),
        (4, 0.25, {"mlp_kind": "experts", "experts": Experts(4, 2)}),  # the router has 8 bits; the experts decide
    ],
)
@torch.no_grad()
def test_balance_follows_its_formula(bits: int, alpha: float, changes: dict[str, Any]) -> None:
    """Of what reads norm(x), such as gate and up: all tokens' inputs, and the columns of all these matrices."""
    model = tiny_model(**changes)
    uneven(model)
    states = [torch.randn(1, length, 64, generator=torch.Generator().manual_seed(length)) for length in (40, 25)]
    block, before = copy.deepcopy(model.model.layers[0]), model.model.layers[0]
    scale_block(block, states, model.rope, QuantizationConfig(bits), "model.layers.0")
    halves = [before.add_sublayer("self_attn", x, first_positions(model.rope, x)) for x in states]
    inputs = torch.cat([before.post_attention_layernorm(x)[0] for x in halves]).double()
    ends = ("gate", "gate_proj", "up_proj")
    readers = [module.weight for name, module in before.mlp.named_modules() if name.rpartition(".")[2] in ends]
    scale = inputs.square().mean(0).sqrt() ** alpha / torch.cat(readers).double().square().mean(0).sqrt() ** 0.5
    scale /= scale.log().mean().exp()
    found = before.post_attention_layernorm.weight / block.post_attention_layernorm.weight
    assert torch.allclose(found.double(), scale, rtol=1e-4)


def test_the_scale_of_many_matrices_takes_the_memory_of_one() -> None:
    """In float64 and squared, besides vectors: a layer of experts has hundreds."""
    weights, specs = [torch.ones(96, 64)] * 16, [GridSpec(4, 32, True)]
    peak = allocated_peak(lambda: balanced_scale(torch.ones(64), weights, torch.arange(64), specs))
    assert peak < 3 * 8 * 96 * 64
