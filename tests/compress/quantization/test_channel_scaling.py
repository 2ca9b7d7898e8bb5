"""Scaling folded into neighbours: the layer computes the same, and rounds better."""

import copy

import pytest
import torch

from compress.pruning.refit import run_layer
from compress.quantization.channel_scaling import RULES, scale_block
from compress.quantization.packed_checkpoint import Precision, round_weight
from sportsllm.storage.packed_weights import ROW_BITS
from tests.support.models import tiny_model

PRECISIONS = {"awq": Precision(), "smooth": Precision(ROW_BITS)}


def uneven(model: torch.nn.Module) -> None:
    """Some channels of the norms are far stronger than the others, as in trained models."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[::7] *= 12


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"qk_norm": True}])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_the_layer_computes_the_same(changes: dict[str, bool], kv_heads: int, rule: str) -> None:
    model = tiny_model(num_key_value_heads=kv_heads, **changes)
    uneven(model)
    rope = (model.rope_cos, model.rope_sin)
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, length, 64, generator=draw) for length in (40, 25)]
    block = model.model.layers[1]
    before, weights = run_layer(block, states, rope), copy.deepcopy(block.state_dict())
    scale_block(block, states, rope, PRECISIONS[rule], "model.layers.1", rule)
    changed = [name for name, value in block.state_dict().items() if not torch.equal(value, weights[name])]
    assert {"self_attn.q_proj.weight", "input_layernorm.weight", "mlp.up_proj.weight"} <= set(changed)
    for found, wanted in zip(run_layer(block, states, rope), before, strict=True):
        assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))


@torch.no_grad()
def test_strong_inputs_get_finer_steps() -> None:
    model = tiny_model(std=0.05)
    uneven(model)
    rope = (model.rope_cos, model.rope_sin)
    states = [torch.randn(1, 60, 64, generator=torch.Generator().manual_seed(0))]
    wanted = run_layer(model.model.layers[0], states, rope)[0]
    errors = []
    for scaled in (False, True):
        block = copy.deepcopy(model.model.layers[0])
        if scaled:
            scale_block(block, states, rope, Precision(), "model.layers.0", "awq")
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                rounded = round_weight(module.weight, 4, Precision(), search=False)
                module.weight.data = torch.from_numpy(rounded.dequantize())
        errors.append(float((run_layer(block, states, rope)[0] - wanted).square().mean()))
    assert errors[1] < 0.7 * errors[0]


class RoundedInputs(torch.nn.Module):
    """A matrix of whole rows behind inputs in 8 bits of their range, as DynamicQuantizeMatMul computes it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        rounded = round_weight(linear.weight, ROW_BITS, PRECISIONS["smooth"], search=False)
        self.weight = torch.from_numpy(rounded.dequantize())
        self.out_features = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255
        return (torch.round(x / step) * step) @ self.weight.T


@torch.no_grad()
def test_smoothing_makes_rounded_inputs_cost_less() -> None:
    """Where inputs come from a norm with strong channels; the other matrices stay as they are."""
    model = tiny_model(std=0.05)
    uneven(model)
    rope = (model.rope_cos, model.rope_sin)
    draw = torch.Generator().manual_seed(0)
    seen, unseen = ([torch.randn(1, 60, 64, generator=draw)] for _ in range(2))
    wanted = run_layer(model.model.layers[0], unseen, rope)[0]
    errors = []
    for smoothed in (False, True):
        block = copy.deepcopy(model.model.layers[0])
        if smoothed:
            scale_block(block, seen, rope, PRECISIONS["smooth"], "model.layers.0", "smooth")
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            parent, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent), leaf, RoundedInputs(block.get_submodule(name)))
        errors.append(float((run_layer(block, unseen, rope)[0] - wanted).square().mean()))
    assert errors[1] < 0.6 * errors[0]
