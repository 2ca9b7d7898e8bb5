"""Mixed precision by measurement: which matrices earn 8 bits, when the file may be a little larger than all 4 would be.

Matrices that the runtime multiplies in one piece (q, k, v; gate, up) share their bits. Each group alone is rounded to
the low precision, and what that costs is the mean KL from the full model over calibration tokens. Groups then go to
8 bits in the order of KL saved per byte, as long as they fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from compress.pruning.refit import run_layer
from compress.quantization.packed_checkpoint import EMBEDDING, HEAD, Precision, packed_bytes, round_weight
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import Block, SportsLLM

HIGH_BITS = 8
_GROUPS = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
}


@dataclass(frozen=True)
class Group:
    """Matrices that share their bits.

    Attributes:
        modules: their names.
        kl: mean KL(full || only this group rounded to the low precision), nats a token.
        extra_bytes: what 8 bits take more than the low precision.
    """

    modules: tuple[str, ...]
    kl: float
    extra_bytes: int


def matrix_shapes(config: ModelConfig, layers_only: bool = False) -> dict[str, tuple[int, int]]:
    """(N, K) of every matrix by its module's name."""
    with torch.device("meta"):
        parameters = dict(SportsLLM(config).named_parameters())
    shapes = {name.removesuffix(".weight"): (len(p), p.shape[1]) for name, p in parameters.items() if p.ndim == 2}
    return {name: shape for name, shape in shapes.items() if not layers_only or name not in (EMBEDDING, HEAD)}


def stored_bytes(config: ModelConfig, precision: Precision, layers_only: bool = False) -> int:
    """Bytes of all matrices, scales and zero points counted."""
    shapes = matrix_shapes(config, layers_only)
    return sum(packed_bytes(*shape, precision.of(name), precision) for name, shape in shapes.items())


def bits_of_layers(config: ModelConfig, precision: Precision) -> float:
    """Bits that a number of the layers' matrices takes on average, scales and zero points counted."""
    return 8 * stored_bytes(config, precision, layers_only=True) / _weights(config, layers_only=True)


def _weights(config: ModelConfig, layers_only: bool = False) -> int:
    return sum(rows * columns for rows, columns in matrix_shapes(config, layers_only).values())


@torch.inference_mode()
def measure_groups(model: SportsLLM, precision: Precision, samples: Sequence[Tensor]) -> list[Group]:
    """What rounding each group to `precision.bits` costs.

    Args:
        model: float32; unchanged at the end.
        precision: the low one.
        samples: calibration token ids, each (1, T).
    """
    rope = (model.rope_cos, model.rope_sin)
    blocks = cast("list[Block]", list(model.model.layers))
    states = [[cast(Tensor, model.model.embed_tokens(tokens)) for tokens in samples]]
    for block in blocks:
        states.append(run_layer(block, states[-1], rope))
    groups = []
    with progress_bar("sensitivity", 4 * len(blocks)) as bar:
        for number, block in enumerate(blocks):
            for owner, parts in _GROUPS.items():
                for names in parts:
                    linears = [cast(nn.Linear, block.get_submodule(f"{owner}.{name}")) for name in names]
                    kept = [linear.weight.data for linear in linears]
                    for linear in linears:
                        rounded = round_weight(linear.weight, precision.bits, precision, search=True)
                        linear.weight.data = torch.from_numpy(rounded.dequantize())
                    found = states[number]
                    for later in blocks[number:]:
                        found = run_layer(later, found, rope)
                    for linear, weight in zip(linears, kept, strict=True):
                        linear.weight.data = weight
                    groups.append(
                        Group(
                            tuple(f"model.layers.{number}.{owner}.{name}" for name in names),
                            _distance(model, states[-1], found),
                            sum(_extra(weight, precision) for weight in kept),
                        )
                    )
                    bar.advance()
    return groups


def _extra(weight_NK: Tensor, precision: Precision) -> int:
    rows, columns = weight_NK.shape
    low, high = (packed_bytes(rows, columns, bits, precision) for bits in (precision.bits, HIGH_BITS))
    return high - low


def _distance(model: SportsLLM, full: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Mean KL over all tokens, from the residual streams after the last layer."""
    total, tokens = 0.0, 0
    for before, after in zip(full, found, strict=True):
        log_p, log_q = (model.logits(model.model.norm(x)).log_softmax(-1) for x in (before, after))
        total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
        tokens += before.shape[1]
    return max(total / tokens, 0.0)


def choose_bits(precision: Precision, groups: Sequence[Group], spare_bytes: int) -> Precision:
    """Give 8 bits to the groups that save most KL for their bytes.

    Args:
        precision: the low one.
        groups: of `measure_groups`.
        spare_bytes: what may be added to it.
    """
    chosen: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: group.kl / group.extra_bytes, reverse=True):
        if group.extra_bytes <= spare_bytes:
            spare_bytes -= group.extra_bytes
            chosen |= dict.fromkeys(group.modules, HIGH_BITS)
    return dataclasses.replace(precision, modules=chosen)


def spare_bytes(
    config: ModelConfig, precision: Precision, bits_per_weight: float | None, megabytes: float | None
) -> int:
    """Bytes that a budget leaves beyond the low precision.

    Args:
        config: the model's shape.
        precision: the low one.
        bits_per_weight: of the layers' matrices on average, scales and zero points counted.
        megabytes: of all weights, 10^6 bytes; vectors count 4 bytes a number.

    Raises:
        UsageError: both or neither given, not 4 bits, or less than the low precision takes.
    """
    if (bits_per_weight is None) == (megabytes is None):
        raise UsageError("give one of --bits-per-weight and --size-mb, not both")
    if precision.bits >= HIGH_BITS:
        raise UsageError("--bits-per-weight and --size-mb mix 4 and 8 bits; leave --bits 8 out")
    if bits_per_weight is not None:
        least, smallest = stored_bytes(config, precision, layers_only=True), f"{bits_of_layers(config, precision):.3f}"
        budget, said = (
            int(bits_per_weight * _weights(config, layers_only=True) / 8),
            f"--bits-per-weight {bits_per_weight:g}",
        )
    else:
        assert megabytes is not None, "one of both is given"
        least = stored_bytes(config, precision) + 4 * (config.parameters - _weights(config))
        budget, said, smallest = int(megabytes * 1e6), f"--size-mb {megabytes:g}", f"{least / 1e6:.3f}"
    if budget < least:
        raise UsageError(
            f"{said} is less than INT{precision.bits} takes with blocks of {precision.block_size}, {smallest}; "
            "ask for more, or take a larger --block-size"
        )
    return budget - least
