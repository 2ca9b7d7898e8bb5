"""Which layers and units of a model stay: the most important ones that fill a shape.

Shape suffixes: T tokens, U units or hidden channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.pruning.scores import Scores
from compress.pruning.shapes import Shape, dimension_of, unit_span
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_matrices, block_units
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.parts import HIDDEN, Matrix, Unit
from sportsllm.training.chunked_loss import cross_entropy

_RUNS_TRIED = 3


@dataclass(frozen=True)
class KeptUnits:
    """What stays of a model, as indices into the full one.

    Attributes:
        layers: layers, rising.
        hidden: channels of the residual stream.
        units: for each kept layer its units by name.
    """

    layers: list[int]
    hidden: Tensor
    units: list[dict[str, Tensor]]

    def shape(self, config: ModelConfig) -> Shape:
        """The shape of what stays; `config` is the full model's."""
        kept = {HIDDEN: self.hidden, **self.units[0]}
        dimensions = {dimension_of(unit): len(kept[name]) for name, unit in block_units(config).items()}
        counts = {name: count for name, count in dimensions.items() if name is not None}
        return replace(Shape.of(config), layers=len(self.layers), **counts)

    def of_matrix(self, config: ModelConfig, matrix: Matrix, layer: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of a matrix of kept layer number `layer` that stay."""
        units = block_units(config)

        def side(name: str, length: int) -> Tensor:
            span = unit_span(matrix, units[name], length)
            kept = self.hidden if name == HIDDEN else self.units[layer][name]
            return (kept[:, None] * span + torch.arange(span)).flatten()

        return side(matrix.row_unit, matrix.rows), side(matrix.column_unit, matrix.columns)

    def rows(self, config: ModelConfig, layer: int) -> dict[str, Tensor]:
        """Rows that stay of every matrix of kept layer number `layer`, by its name in the block."""
        return {matrix.name: self.of_matrix(config, matrix, layer)[0] for matrix in block_matrices(config)}


class LayerRun(NamedTuple):
    """A run of layers that `kept_layers` tried to drop.

    Attributes:
        first_dropped: its first layer.
        distance: how far it moves the residual stream.
        loss: nats a token of the calibration text without it.
    """

    first_dropped: int
    distance: float
    loss: float


def kept_layers(
    model: SportsLLM, scores: Scores, count: int, samples: Sequence[Tensor]
) -> tuple[list[int], list[LayerRun]]:
    """Which layers stay when a contiguous run is dropped.

    The runs that move the residual stream least are candidates; of the best three the one with the lowest loss on
    the calibration samples is dropped, since distance alone can mislead.

    Returns:
        Indices kept, and what was tried.
    """
    layers = model.config.num_hidden_layers
    dropped = layers - count
    if dropped == 0:
        return list(range(layers)), []

    def without(start: int) -> list[int]:
        return [layer for layer in range(layers) if not start <= layer < start + dropped]

    distances = {start: float(scores.layer_distance[start, start + dropped]) for start in range(count + 1)}
    tried = [
        LayerRun(start, distances[start], loss_per_token(model, samples, without(start)))
        for start in sorted(distances, key=lambda key: distances[key])[:_RUNS_TRIED]
    ]
    return without(min(tried, key=lambda run: run.loss).first_dropped), tried


@torch.inference_mode()
def loss_per_token(model: SportsLLM, samples: Sequence[Tensor], layers: Sequence[int] | None = None) -> float:
    """Mean next-token cross-entropy in nats over samples of token ids, each (1, T); of some layers only, if given."""
    blocks = model.model.layers
    if layers is not None:
        model.model.layers = nn.ModuleList(blocks[layer] for layer in layers)
    try:
        total = sum(
            float(cross_entropy(model.hidden(tokens[:, :-1]), model.head_weight, tokens[:, 1:])) for tokens in samples
        )
    finally:
        model.model.layers = blocks
    return total / sum(tokens[:, 1:].numel() for tokens in samples)


def choose_units(config: ModelConfig, scores: Scores, shape: Shape, layers: Sequence[int] | None = None) -> KeptUnits:
    """The most important units that fill a shape.

    Args:
        config: of the full model.
        scores: of its units.
        shape: what is left; no key/value heads to merge (`compress.pruning.kv_heads` does that first).
        layers: indices of the layers to keep; the first `shape.layers` if None.

    Raises:
        UsageError: an impossible shape, or a unit that has no scores.
    """
    shape.applied_to(config)
    assert not shape.merges_kv_heads(config)
    units = [unit for unit in block_units(config).values() if unit.name != HIDDEN]
    chosen = list(range(shape.layers)) if layers is None else list(layers)
    return KeptUnits(
        layers=chosen,
        hidden=_top(scores.hidden, shape.hidden),
        units=[
            _choose_in_layer(units, shape, {name: score[layer] for name, score in scores.units.items()})
            for layer in chosen
        ],
    )


def _choose_in_layer(units: Sequence[Unit], shape: Shape, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Units of one layer: the strongest groups, and in each group the strongest of the units it groups."""
    kept: dict[str, Tensor] = {}
    for unit in units:
        members = [scores[other.name] for other in units if other.group == unit.name and other.name in scores]
        if unit.name in scores:
            own = scores[unit.name]
        elif members:  # a group is worth what it groups
            own = torch.stack([score.view(unit.count, -1).sum(dim=1) for score in members]).sum(dim=0)
        else:
            raise UsageError(f"unit {unit.name!r} is neither a matrix's columns nor a group of units: it has no scores")
        if unit.group is None:
            kept[unit.name] = _top(own, shape.count(unit))
            continue
        groups = next(other for other in units if other.name == unit.group)
        width, left = unit.count // groups.count, shape.count(unit) // shape.count(groups)
        parts = own.view(groups.count, width)
        kept[unit.name] = torch.cat([int(group) * width + _top(parts[group], left) for group in kept[unit.group]])
    return kept


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, in their old order; ties keep the lower index."""
    return torch.sort(torch.argsort(scores, descending=True, stable=True)[:count]).values
