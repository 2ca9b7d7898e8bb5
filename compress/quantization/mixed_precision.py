"""Mixed precision by measurement: which matrices get 8 bits, when the file may be a little larger than with 4 bits.

Matrices that read the same input share their bits, so that the runtime can multiply them together. Rounding one group
alone costs a mean KL from the full model over calibration tokens, computed to second order. Groups get 8 bits in the
order of KL saved per byte, as long as they fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.quantization.config import QuantizationConfig, bits_per_weight, matrix_bytes, matrix_weights
from compress.quantization.packed_checkpoint import round_weight
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import input_groups
from sportsllm.models.language_model import SportsLLM

HIGH_BITS = 8
DEFAULT_GROWTH = 0.05
"""Bytes that a mixture takes beyond the low precision by default, as a share of all weights."""
_CHUNK = 128  # tokens of one backward pass, which gives one number for each matrix


@dataclass(frozen=True)
class SensitivityGroup:
    """Matrices that share their bits.

    Attributes:
        modules: their names.
        kl: mean KL(full || only this group rounded to the low precision) to second order, nats per token.
        extra_bytes: bytes that 8 bits add; 0 if all its matrices have 8 bits anyway.
    """

    modules: tuple[str, ...]
    kl: float
    extra_bytes: int

    def to_json(self, config: QuantizationConfig) -> dict[str, Any]:
        """With the bits of the group, leaving out matrices that always have 8, such as a router."""
        return dataclasses.asdict(self) | {"bits": min(map(config.bits_for, self.modules))}


@dataclass(frozen=True)
class SizeBudget:
    """A size to mix 4 and 8 bits for; at most one field is given, none for DEFAULT_GROWTH.

    Attributes:
        bits_per_weight: average over the layers' matrices, with scales and zero points.
        size_mb: size of all weights in 10^6 bytes; norms and biases count 4 bytes per value.
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
        if self.bits_per_weight is not None and self.size_mb is not None:
            raise UsageError("give one of --bits-per-weight and --size-mb, not both")
        if config.bits >= HIGH_BITS:
            raise UsageError("--bits-per-weight and --size-mb mix 4 and 8 bits; leave --bits 8 out")
        if self == SizeBudget():
            return int(DEFAULT_GROWTH * matrix_bytes(model, config))
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
                f"{flag} is less than INT{config.bits} takes with groups of {config.block_size}, {smallest}; "
                "allow more, or use a larger --group-size"
            )
        return budget - least


@torch.enable_grad()
def measure_groups(
    model: SportsLLM, config: QuantizationConfig, samples: Sequence[Tensor], draws: int = 4, seed: int = 0
) -> list[SensitivityGroup]:
    """The KL that rounding each group alone to `config.bits` costs, to second order.

    kl = mean over tokens t drawn from the model of  (gradient of log p(t) . change of weights)**2 / 2

    Fisher information as in FIT (https://arxiv.org/abs/2210.08502). One backward pass gives all groups' gradients.

    Args:
        model: float32; unchanged at the end.
        config: the low precision.
        samples: calibration token ids, each (1, T); read 128 at a time.
        draws: tokens drawn at each position; each takes a backward pass.
        seed: for the draws.
    """
    high = dataclasses.replace(config, bits=HIGH_BITS, symmetric=True)
    groups = [
        tuple(f"model.layers.{layer}.{m.name}" for m in group)
        for layer in range(model.config.num_hidden_layers)
        for group in input_groups(model.config.of_layer(layer))
    ]
    weights = {name: model.get_parameter(f"{name}.weight") for group in groups for name in group}
    rounded = {
        name: round_weight(weight.detach(), config.grid_for(name, weight.shape[1]), search=True)
        for name, weight in weights.items()
    }
    chunks = [chunk for tokens in samples for chunk in torch.split(tokens, _CHUNK, dim=1)]
    draw = torch.Generator().manual_seed(seed)
    squares, read = [0.0] * len(groups), 0
    with progress_bar("sensitivity", len(chunks)) as bar, _changes(model, weights, rounded) as changes:
        for chunk in chunks:
            log_p_TV = model(chunk)[0].float().log_softmax(-1)
            for number in range(draws):
                drawn_T1 = torch.multinomial(log_p_TV.detach().exp(), 1, generator=draw)
                changes.clear()
                log_p_TV.gather(1, drawn_T1).sum().backward(retain_graph=number < draws - 1)
                for place, group in enumerate(groups):
                    squares[place] += sum(changes.get(name, 0.0) for name in group) ** 2 / draws
            read += chunk.shape[1]
            bar.advance()

    def extra_bytes(name: str) -> int:
        return high.bytes_for(name, *weights[name].shape) - config.bytes_for(name, *weights[name].shape)

    return [
        SensitivityGroup(group, square / (2 * read), sum(map(extra_bytes, group)))
        for group, square in zip(groups, squares, strict=True)
    ]


@contextmanager
def _changes(
    model: SportsLLM, weights: Mapping[str, nn.Parameter], rounded: Mapping[str, QuantizedWeight]
) -> Iterator[dict[str, float]]:
    """By matrix its gradient times its rounding error, of each backward pass; no gradient is kept."""
    changes: dict[str, float] = {}
    wanted = [parameter.requires_grad for parameter in model.parameters()]

    def note(name: str) -> Callable[[Tensor], None]:
        def taken(weight: Tensor) -> None:
            assert weight.grad is not None, "the hook follows the gradient"
            error = torch.from_numpy(rounded[name].dequantize()) - weight.detach()
            changes[name] = float((weight.grad * error).sum(dtype=torch.float64))
            weight.grad = None

        return taken

    model.requires_grad_(False)
    hooks = []
    for name, weight in weights.items():
        weight.requires_grad_()
        hooks.append(weight.register_post_accumulate_grad_hook(note(name)))  # type: ignore[no-untyped-call]
    try:
        yield changes
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, before in zip(model.parameters(), wanted, strict=True):
            parameter.requires_grad_(before)


def choose_bits(config: QuantizationConfig, groups: Sequence[SensitivityGroup], spare_bytes: int) -> QuantizationConfig:
    """Give 8 bits to the groups that save most KL per byte, as long as `spare_bytes` last.

    Groups that have 8 bits anyway, such as a mixture's shared experts, are left out.
    """
    chosen: dict[str, int] = {}
    open_groups = [group for group in groups if group.extra_bytes > 0]
    for group in sorted(open_groups, key=lambda group: group.kl / group.extra_bytes, reverse=True):
        if group.extra_bytes <= spare_bytes:
            spare_bytes -= group.extra_bytes
            chosen |= dict.fromkeys(group.modules, HIGH_BITS)
    return dataclasses.replace(config, modules=chosen)
