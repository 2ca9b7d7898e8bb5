"""Mixed precision by measurement: which matrices get 8 bits, when the file may be a little larger than with 4 bits.

Matrices that the runtime multiplies in one piece, since they read the same input, share their bits. Each group alone is
rounded to the low precision, and its cost is the mean KL from the full model over calibration tokens. Groups then go
to 8 bits in the order of KL saved per byte, as long as they fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.pruning.refit import run_layer
from compress.quantization.config import QuantizationConfig, bits_per_weight, matrix_bytes, matrix_weights
from compress.quantization.packed_checkpoint import round_weight
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import input_groups
from sportsllm.models.language_model import Block, SportsLLM

HIGH_BITS = 8


@dataclass(frozen=True)
class SensitivityGroup:
    """Matrices that share their bits.

    Attributes:
        modules: their names.
        kl: mean KL(full || only this group rounded to the low precision), nats a token.
        extra_bytes: what 8 bits take more than the low precision.
    """

    modules: tuple[str, ...]
    kl: float
    extra_bytes: int

    def to_json(self, config: QuantizationConfig) -> dict[str, Any]:
        """With the bits that the group got."""
        return dataclasses.asdict(self) | {"bits": config.bits_for(self.modules[0])}


@dataclass(frozen=True)
class SizeBudget:
    """What the weights may take, one of two ways.

    Attributes:
        bits_per_weight: of the layers' matrices on average, scales and zero points counted.
        size_mb: of all weights, in 10^6 bytes; vectors count 4 bytes a number.
    """

    bits_per_weight: float | None = None
    size_mb: float | None = None

    def spare_bytes(self, model: ModelConfig, config: QuantizationConfig) -> int:
        """Bytes beyond the low precision.

        Args:
            model: its shape.
            config: the low precision.

        Raises:
            UsageError: both or neither given, not 4 bits, or less than the low precision takes.
        """
        if (self.bits_per_weight is None) == (self.size_mb is None):
            raise UsageError("give one of --bits-per-weight and --size-mb, not both")
        if config.bits >= HIGH_BITS:
            raise UsageError("--bits-per-weight and --size-mb mix 4 and 8 bits; leave --bits 8 out")
        if self.bits_per_weight is not None:
            least, smallest = matrix_bytes(model, config, layers_only=True), f"{bits_per_weight(model, config):.3f}"
            budget = int(self.bits_per_weight * matrix_weights(model, layers_only=True) / 8)
            flag = f"--bits-per-weight {self.bits_per_weight:g}"
        else:
            assert self.size_mb is not None, "one of both is given"
            least = matrix_bytes(model, config) + 4 * (model.parameters - matrix_weights(model))
            smallest, budget = f"{least / 1e6:.3f}", int(self.size_mb * 1e6)
            flag = f"--size-mb {self.size_mb:g}"
        if budget < least:
            raise UsageError(
                f"{flag} is less than INT{config.bits} takes with blocks of {config.block_size}, {smallest}; "
                "ask for more, or take a larger --block-size"
            )
        return budget - least


@torch.inference_mode()
def measure_groups(model: SportsLLM, config: QuantizationConfig, samples: Sequence[Tensor]) -> list[SensitivityGroup]:
    """The cost of rounding each group to `config.bits`.

    Args:
        model: float32; unchanged at the end.
        config: the low precision.
        samples: calibration token ids, each (1, T).
    """
    high = dataclasses.replace(config, bits=HIGH_BITS, symmetric=True)
    rope, blocks = model.rope, cast("list[Block]", list(model.model.layers))
    groups = [input_groups(model.config.of_layer(layer)) for layer in range(len(blocks))]
    states = [[model.embedded(tokens) for tokens in samples]]
    for block in blocks:
        states.append(run_layer(block, states[-1], rope))
    found = []
    with progress_bar("sensitivity", sum(map(len, groups))) as bar:
        for number, block in enumerate(blocks):
            for group in groups[number]:
                modules = {
                    f"model.layers.{number}.{m.name}": cast(nn.Linear, block.get_submodule(m.name)) for m in group
                }
                kept = [linear.weight.data for linear in modules.values()]
                for name, linear in modules.items():
                    rounded = round_weight(linear.weight, config.grid_for(name, linear.in_features), search=True)
                    linear.weight.data = torch.from_numpy(rounded.dequantize())
                changed = states[number]
                for later in blocks[number:]:
                    changed = run_layer(later, changed, rope)
                for linear, weight in zip(modules.values(), kept, strict=True):
                    linear.weight.data = weight
                extra = sum(
                    high.bytes_for(name, *weight.shape) - config.bytes_for(name, *weight.shape)
                    for name, weight in zip(modules, kept, strict=True)
                )
                found.append(SensitivityGroup(tuple(modules), _distance(model, states[-1], changed), extra))
                bar.advance()
    return found


def _distance(model: SportsLLM, full: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Mean KL over all tokens, from the residual streams after the last layer."""
    total, tokens = 0.0, 0
    for before, after in zip(full, found, strict=True):
        log_p, log_q = (model.logits(model.model.norm(x)).log_softmax(-1) for x in (before, after))
        total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
        tokens += before.shape[1]
    return max(total / tokens, 0.0)


def choose_bits(config: QuantizationConfig, groups: Sequence[SensitivityGroup], spare_bytes: int) -> QuantizationConfig:
    """Give 8 bits to the groups that save most KL for their bytes.

    Args:
        config: the low precision.
        groups: of `measure_groups`.
        spare_bytes: what may be added to it.
    """
    chosen: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: group.kl / group.extra_bytes, reverse=True):
        if group.extra_bytes <= spare_bytes:
            spare_bytes -= group.extra_bytes
            chosen |= dict.fromkeys(group.modules, HIGH_BITS)
    return dataclasses.replace(config, modules=chosen)
