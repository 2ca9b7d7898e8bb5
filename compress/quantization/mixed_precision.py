"""Mixed precision by measurement: which matrices get 8 bits, when the file may be a little larger than with 4 bits.

Matrices that the runtime multiplies in one piece, since they read the same input, share their bits. What rounding each
group alone costs is its mean KL from the full model over calibration tokens, to second order. Groups then go to 8 bits
in the order of KL saved per byte, as long as they fit.
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
_PIECE = 128  # tokens of one pass back, which gives one number for each matrix


@dataclass(frozen=True)
class SensitivityGroup:
    """Matrices that share their bits.

    Attributes:
        modules: their names.
        kl: mean KL(full || only this group rounded to the low precision) to second order, nats a token.
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


@torch.enable_grad()
def measure_groups(
    model: SportsLLM, config: QuantizationConfig, samples: Sequence[Tensor], draws: int = 4, seed: int = 0
) -> list[SensitivityGroup]:
    """What rounding each group alone to `config.bits` costs, to second order.

    To that order the KL is half the mean square of how much the change of weights moves the log-probability of tokens
    that are drawn from the model itself (Fisher information as in FIT, https://arxiv.org/abs/2210.08502). Gradients of
    all groups come from one pass back, so that a deep model takes no more passes than a shallow one.

    Args:
        model: float32; unchanged at the end.
        config: the low precision.
        samples: calibration token ids, each (1, T); read in pieces of at most 128.
        draws: of a token at each place; each is a pass back.
        seed: of the draws.
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
    pieces = [piece for tokens in samples for piece in torch.split(tokens, _PIECE, dim=1)]
    draw = torch.Generator().manual_seed(seed)
    squares, read = [0.0] * len(groups), 0
    with progress_bar("sensitivity", len(pieces)) as bar, _changes(model, weights, rounded) as changes:
        for piece in pieces:
            log_p_TV = model(piece)[0].float().log_softmax(-1)
            for number in range(draws):
                drawn_T1 = torch.multinomial(log_p_TV.detach().exp(), 1, generator=draw)
                changes.clear()
                log_p_TV.gather(1, drawn_T1).sum().backward(retain_graph=number < draws - 1)
                for place, group in enumerate(groups):
                    squares[place] += sum(changes.get(name, 0.0) for name in group) ** 2 / draws
            read += piece.shape[1]
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
    """By matrix, what each pass back finds: its gradient times the error of rounding it. No gradient is kept."""
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
