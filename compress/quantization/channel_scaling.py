"""Scaling before rounding: strong inputs made weaker and their weights stronger, at no cost when the model runs.

A column of a matrix is multiplied by s, and what makes that input divides by s, so that the layer computes the same:

    q, k, v      the norm before them          o      rows of v (a key/value group's heads share them)
    gate, up     the norm before them          down   rows of up

Two rules for s, alpha being the best of eleven by the error of the outputs:

    awq     (mean |x|) ** alpha, after rounding the weights (https://arxiv.org/abs/2306.00978)
    smooth  (max |x|) ** alpha / (max |w|) ** (1 - alpha), after rounding the weights, and the inputs to 8 bits of the
            range that they have in one piece of text (https://arxiv.org/abs/2211.10438)

Shape suffixes: K inputs of a matrix, N its outputs, P pieces of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from compress.pruning.refit import first_positions
from compress.quantization.gptq import output_error
from compress.quantization.grid import fit_grid
from compress.quantization.packed_checkpoint import Precision
from sportsllm.models.language_model import Block, Rope

RULES = ("awq", "smooth")
_ALPHAS = torch.linspace(0, 1, 11).tolist()
_INPUT_STEPS = 255  # of the 8 bits that DynamicQuantizeMatMul rounds a whole tensor of inputs to
_READERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
_BESIDE = {"self_attn.q_proj": ("self_attn.k_proj", "self_attn.v_proj"), "mlp.gate_proj": ("mlp.up_proj",)}


@dataclass
class _Inputs:
    """What a matrix reads: sum of x x^T, sum of |x|; of every piece its tokens, smallest and largest x."""

    gram_KK: Tensor
    size_K: Tensor
    tokens_P: list[int] = field(default_factory=list)
    low_PK: list[Tensor] = field(default_factory=list)
    high_PK: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        flat = x.flatten(0, -2)
        self.gram_KK += (flat.T @ flat).double()
        self.size_K += flat.abs().sum(dim=0).double()
        self.tokens_P.append(len(flat))
        self.low_PK.append(flat.amin(dim=0))
        self.high_PK.append(flat.amax(dim=0))

    def rounding(self, scale_K: Tensor) -> float:
        """Sum over tokens of the variance that rounding x / s to the range of its piece adds to each number."""
        low_P = (torch.stack(self.low_PK) / scale_K).amin(dim=1).clamp(max=0)
        high_P = (torch.stack(self.high_PK) / scale_K).amax(dim=1).clamp(min=0)
        steps_P = (high_P - low_P).double() / _INPUT_STEPS
        return float((torch.tensor(self.tokens_P) * steps_P.square() / 12).sum())


@torch.no_grad()
def scale_block(
    block: Block, states_BTD: Sequence[Tensor], rope: Rope, precision: Precision, prefix: str, rule: str
) -> None:
    """Scale a layer's matrices for rounding, in place; the layer computes what it computed before.

    Args:
        block: float32.
        states_BTD: the residual stream before the layer, for every sample.
        rope: cosine and sine tables.
        precision: bits of the layer's matrices.
        prefix: of their names, for example `model.layers.0`.
        rule: one of RULES.
    """
    inputs = _measured(block, states_BTD, rope)
    for reader in _READERS:
        linears = [cast(nn.Linear, block.get_submodule(name)) for name in (reader, *_BESIDE.get(reader, ()))]
        found = inputs[reader]
        weights = [linear.weight for linear in linears]
        size_K = found.size_K if rule == "awq" else torch.stack([*found.low_PK, *found.high_PK]).abs().amax(dim=0)
        strength_K = torch.ones(len(size_K)) if rule == "awq" else torch.cat(weights).abs().amax(dim=0)
        if reader == "self_attn.o_proj":
            size_K, strength_K = _shared(size_K, block), _shared(strength_K, block)
        how = precision.grid(f"{prefix}.{reader}", len(size_K))
        scale_K = _best_scale(weights, size_K.float(), strength_K, found, how, rule)
        for linear in linears:
            linear.weight.data = linear.weight * scale_K
        _divide(block, reader, scale_K)


def _measured(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> dict[str, _Inputs]:
    found: dict[str, _Inputs] = {}
    handles = []
    for reader in _READERS:
        linear = cast(nn.Linear, block.get_submodule(reader))
        width = linear.in_features
        sums = found[reader] = _Inputs(torch.zeros(width, width).double(), torch.zeros(width).double())
        handles.append(linear.register_forward_pre_hook(lambda _module, args, sums=sums: sums.add(args[0])))
    for x_BTD in states_BTD:
        block(x_BTD, first_positions(rope, x_BTD), None, None)
    for handle in handles:
        handle.remove()
    return found


def _best_scale(
    weights_NK: Sequence[Tensor],
    size_K: Tensor,
    strength_K: Tensor,
    inputs: _Inputs,
    how: tuple[int, int, bool],
    rule: str,
) -> Tensor:
    relative_K, strength_K = ((t / t.mean()).clamp(min=1e-4) for t in (size_K, strength_K))
    best_K, least = torch.ones_like(size_K), torch.inf
    for alpha in (None, *_ALPHAS):
        scale_K = torch.ones_like(size_K)
        if alpha is not None:
            scale_K = relative_K**alpha / strength_K ** (1 - alpha)
            scale_K = scale_K / (scale_K.max() * scale_K.min()).sqrt()
        noise = inputs.rounding(scale_K) if rule == "smooth" else 0.0
        error = 0.0
        for weight_NK in weights_NK:
            scaled = weight_NK * scale_K
            grid = fit_grid(scaled, *how, search=False)
            error += output_error(weight_NK - grid.values(grid.round(scaled)) / scale_K, inputs.gram_KK.float())
            error += noise * float(scaled.square().sum())
        if error < least:
            best_K, least = scale_K, error
    return best_K


def _shared(size_HE: Tensor, block: Block) -> Tensor:
    """Sizes of o_proj's inputs, the mean of all query heads that read the same row of v."""
    return _repeated(_by_group(size_HE, block).mean(dim=1), block)


def _by_group(channels: Tensor, block: Block) -> Tensor:
    """(query heads x head_dim,) as (key/value heads, query heads of each, head_dim)."""
    attention = block.self_attn
    groups = cast(nn.Linear, attention.v_proj).out_features // attention.config.head_dim
    return channels.view(groups, -1, attention.config.head_dim)


def _repeated(by_group_KE: Tensor, block: Block) -> Tensor:
    attention = block.self_attn
    heads = cast(nn.Linear, attention.o_proj).in_features // attention.config.head_dim
    return by_group_KE[:, None].expand(-1, heads // len(by_group_KE), -1).reshape(-1)


def _divide(block: Block, reader: str, scale_K: Tensor) -> None:
    """Take the scale out of what makes the reader's inputs."""
    if reader == "self_attn.q_proj":
        block.input_layernorm.weight.data = block.input_layernorm.weight / scale_K
    elif reader == "mlp.gate_proj":
        block.post_attention_layernorm.weight.data = block.post_attention_layernorm.weight / scale_K
    else:
        of_values = reader == "self_attn.o_proj"
        maker = cast(nn.Linear, block.self_attn.v_proj if of_values else block.mlp.up_proj)
        scale = _by_group(scale_K, block)[:, 0].reshape(-1) if of_values else scale_K
        maker.weight.data = maker.weight / scale[:, None]
        if maker.bias is not None:
            maker.bias.data = maker.bias / scale
