"""Which matrices need inputs of 16 bits, in a packed model that rounding all inputs to 8 bits changes too much.

Matrices that read the same tensor form a group. A group's damage is measured in PyTorch with the inputs of this group
alone rounded, block by block as the runtime does:

    damage = mean over probe tokens of (largest logit error / spread of the logits) ** 2

Rounding errors are independent, so damages add up. Groups get 16 bits in the order of damage per weight until the
damage that is left is small enough. The probe's tokens are not the gate's.
Shape suffixes: B sequences, T tokens, D hidden_size, V vocabulary, K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export.parity.comparison import ParityReport
from sportsllm.console import progress_bar
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.packed_modules import QuantizedMatrix
from sportsllm.models.description import EMBEDDING, HEAD, input_groups
from sportsllm.models.language_model import SportsLLM, first_positions

_TOKENS, _SEQUENCES, _SEED = 48, 2, 1  # of the probe; first tokens of a random text are changed most
_MARGIN = 0.5  # of the damage that would just pass


@dataclass(frozen=True)
class InputGroup:
    """Matrices that read the same tensor: modules, weights, and the damage of rounding this tensor to 8 bits."""

    modules: tuple[str, ...]
    numel: int
    damage: float


@dataclass(frozen=True)
class Remedy:
    """Modules whose inputs get 16 bits, and the share of all products that is computed twice for it."""

    modules: frozenset[str]
    twice: float

    def __str__(self) -> str:
        layers: dict[str, list[int]] = {}
        for name in sorted(self.modules):
            number = name.split(".")[2] if name.startswith("model.layers.") else None
            layers.setdefault(name.rpartition(".")[2] if number else "head", []).append(int(number or -1))
        alike: dict[tuple[int, ...], list[str]] = {}
        for kind, numbers in layers.items():
            alike.setdefault(tuple(sorted(set(numbers))), []).append(kind)
        where = [
            ", ".join(kinds)
            + (f" of layer{'s'[: len(numbers) - 1]} {', '.join(map(str, numbers))}" if numbers[0] >= 0 else "")
            for numbers, kinds in alike.items()
        ]
        return f"16-bit inputs for {'; '.join(where)}: {self.twice:.1%} of all products are computed twice"


def remedies(checkpoint: Path, report: ParityReport, wide: Collection[str]) -> Iterator[Remedy]:
    """What gets 16 bits, more each time, for a checkpoint whose export missed the gate; `wide` has them already."""
    groups = measure_groups(load_checkpoint(checkpoint))
    excess, tried = max(report.excess(), 1.0), set[frozenset[str]]()
    already = [group for group in groups if set(group.modules) <= set(wide)]
    for share in (_MARGIN / excess, _MARGIN / excess / 4, 0.0):
        chosen = [*already, *choose_groups([group for group in groups if group not in already], share)]
        modules = frozenset(name for group in chosen for name in group.modules)
        if modules not in tried:
            yield Remedy(modules, sum(group.numel for group in chosen) / sum(group.numel for group in groups))
        tried.add(modules)


def choose_groups(groups: Sequence[InputGroup], share: float) -> list[InputGroup]:
    """The groups with most damage per weight, until the rest has no more than `share` of all damage."""
    left = sum(group.damage for group in groups)
    allowed, chosen = share * left, list[InputGroup]()
    for group in sorted(groups, key=lambda group: group.damage / group.numel, reverse=True):
        if left <= allowed:
            break
        chosen.append(group)
        left -= group.damage
    return chosen


@torch.inference_mode()
def measure_groups(model: SportsLLM) -> list[InputGroup]:
    """The damage of every group of packed matrices, in their order; the head is the last."""
    config, packed = model.config, _packed(model)
    draw = torch.Generator().manual_seed(_SEED)
    length = min(_TOKENS, config.max_position_embeddings)
    tokens_BT = torch.randint(config.vocab_size, (_SEQUENCES, length), generator=draw)
    states_BTD: list[Tensor] = []
    wanted_BTV = model.logits(model.hidden(tokens_BT, states=states_BTD))
    spread = wanted_BTV.std(dim=-1).mean()
    layers, rope = list(model.model.layers), first_positions(model.rope, states_BTD[0])
    found: list[InputGroup] = []

    def add(modules: Sequence[str], hidden_BTD: Tensor) -> None:
        error_BT = (model.logits(hidden_BTD) - wanted_BTV).abs().amax(dim=-1) / spread
        found.append(
            InputGroup(tuple(modules), sum(packed[n].weight.numel() for n in modules), float(error_BT.square().mean()))
        )

    with progress_bar("8-bit inputs", len(layers)) as bar:
        for layer in range(len(layers)):
            for group in input_groups(config.of_layer(layer)):
                names = [f"model.layers.{layer}.{matrix.name}" for matrix in group]
                names = [name for name in names if name in packed]
                if not names:
                    continue
                x_BTD = states_BTD[layer]
                with _rounded_inputs([packed[name] for name in names]):
                    for block in layers[layer:]:
                        x_BTD = block(x_BTD, rope)
                add(names, model.model.norm(x_BTD))
            bar.advance()
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    if head in packed:
        normed_BTD = model.model.norm(states_BTD[-1])
        add([head], round_inputs(normed_BTD, packed[head].block_size))
    return found


def round_inputs(x: Tensor, block_size: int) -> Tensor:
    """(..., K) rounded to 8 bits, each block to multiples of its max|x| / 127."""
    columns = x.shape[-1]
    blocks = F.pad(x, (0, -columns % block_size)).reshape(*x.shape[:-1], -1, block_size)
    step = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    rounded: Tensor = ((blocks / step).round() * step).flatten(-2)[..., :columns]
    return rounded


def _packed(model: SportsLLM) -> dict[str, QuantizedMatrix]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedMatrix)}


@contextmanager
def _rounded_inputs(modules: Sequence[QuantizedMatrix]) -> Iterator[None]:
    def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert isinstance(module, QuantizedMatrix)
        return (round_inputs(args[0], module.block_size),)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(rounded))
        yield
