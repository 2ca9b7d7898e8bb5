"""What stays of a model: the layers and units that fill a smaller config, and the model sliced to them.

Shape suffixes: T tokens, U units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.pruning.scores import Scores
from compress.pruning.shapes import unit_span
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import EMBEDDING, HEAD, block_matrices, block_units
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.parts import HIDDEN, Matrix
from sportsllm.training.loss import cross_entropy

_RUNS_TRIED, _RUN_SAMPLES = 3, 64  # all runs read the same text, so little of it tells them apart
_LAYER = re.compile(r"^(model\.layers\.)(\d+)\.")


@dataclass(frozen=True)
class KeptUnits:
    """What stays of a model, as indices into the full one. Of the residual stream the first channels stay.

    Attributes:
        full, config: configs of the full model and of what stays.
        layers: rising.
        units: for each kept layer its units by name.
    """

    full: ModelConfig
    config: ModelConfig
    layers: list[int]
    units: list[dict[str, Tensor]]

    def of_matrix(self, matrix: Matrix, layer: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of a matrix of kept layer number `layer` that stay."""
        units = block_units(self.full.of_layer(self.layers[layer]))

        def side(name: str, length: int) -> Tensor:
            span = unit_span(matrix, units[name], length)
            hidden = torch.arange(self.config.hidden_size)
            kept = hidden if name == HIDDEN else self.units[layer][name]
            return (kept[:, None] * span + torch.arange(span)).flatten()

        return side(matrix.row_unit, matrix.rows), side(matrix.column_unit, matrix.columns)


class LayerRun(NamedTuple):
    """A run of layers left out on trial: its `distance` (see `Scores`), and nats a token without it."""

    first_dropped: int
    distance: float
    loss: float


def kept_layers(
    model: SportsLLM, scores: Scores, count: int, samples: Sequence[Tensor]
) -> tuple[list[int], list[LayerRun]]:
    """Indices of the `count` layers that stay when a contiguous run is dropped, and the runs that were tried.

    Distance alone can mislead. So the three runs that move the residual stream least are left out on trial, and the one
    that costs the first calibration samples the least loss is dropped. A mixture's first layers without experts stay.
    """
    layers = list(range(model.config.num_hidden_layers))
    dropped = len(layers) - count
    if dropped == 0:
        return layers, []
    starts = range(model.config.dense_layers, count + 1)
    distances = {start: float(scores.layer_distance[start, start + dropped]) for start in starts}
    tried = []
    for start in sorted(starts, key=distances.__getitem__)[:_RUNS_TRIED]:
        loss = loss_per_token(model, samples[:_RUN_SAMPLES], layers[:start] + layers[start + dropped :])
        tried.append(LayerRun(start, distances[start], loss))
    best = min(tried, key=lambda run: run.loss).first_dropped
    return layers[:best] + layers[best + dropped :], tried


@torch.inference_mode()
def loss_per_token(model: SportsLLM, samples: Sequence[Tensor], layers: Sequence[int] | None = None) -> float:
    """Mean next-token cross-entropy in nats over samples of token ids, each (1, T); of some layers only, if given."""
    blocks = model.model.layers
    if layers is not None:
        model.model.layers = nn.ModuleList(blocks[layer] for layer in layers)
    total = 0.0
    try:
        for tokens in samples:
            total += float(cross_entropy(model.hidden(tokens[:, :-1]), model.head_weight, tokens[:, 1:]))
    finally:
        model.model.layers = blocks
    return total / sum(tokens[:, 1:].numel() for tokens in samples)


def choose_units(
    config: ModelConfig, scores: Scores, smaller: ModelConfig, layers: Sequence[int] | None = None
) -> KeptUnits:
    """The most important units of a model that fill a smaller config, in the given layers or else in the first ones.

    Heads are chosen among the model's own; `compress.pruning.heads` makes others before.

    Raises:
        UsageError: a unit that has no scores.
    """
    chosen = list(range(smaller.num_hidden_layers) if layers is None else layers)
    units = [
        choose_in_layer(config.of_layer(layer), smaller.of_layer(new), scores.of_layer(layer))
        for new, layer in enumerate(chosen)
    ]
    types = config.with_layers(chosen).layer_types
    return KeptUnits(config, smaller.with_changes(layer_types=types), chosen, units)


def choose_in_layer(full: ModelConfig, smaller: ModelConfig, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Units of one layer: the strongest groups, and in each group the strongest of the units it groups."""
    kept: dict[str, Tensor] = {}
    units, left = block_units(full), {name: unit.count for name, unit in block_units(smaller).items()}
    del units[HIDDEN]
    for unit in units.values():
        members = [score for name, score in scores.items() if name in units and units[name].group == unit.name]
        if left[unit.name] == unit.count and unit.group is None:
            kept[unit.name] = torch.arange(unit.count)
            continue
        if unit.name in scores:
            own = scores[unit.name]
        elif members:  # a group is worth what it groups
            own = torch.stack([score.view(unit.count, -1).sum(dim=1) for score in members]).sum(dim=0)
        else:
            raise UsageError(f"unit {unit.name!r} is neither a matrix's columns nor a group of units: it has no scores")
        if unit.group is None:
            kept[unit.name] = top_indices(own, left[unit.name])
            continue
        parts = own.view(units[unit.group].count, -1)
        each = left[unit.name] // left[unit.group]
        chosen = [int(group) * parts.shape[1] + top_indices(parts[group], each) for group in kept[unit.group]]
        kept[unit.name] = torch.cat(chosen)
    return kept


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, in their old order; ties keep the lower index."""
    return torch.sort(torch.argsort(scores, descending=True, stable=True)[:count]).values


def slice_model(model: SportsLLM, kept: KeptUnits) -> SportsLLM:
    """A new model of the kept units of a float32 model; keeping everything changes nothing.

    Matrices of blocks lose the rows and columns of units that go. Of every other tensor the first entries stay:
    `compress.pruning.hidden` makes the first channels of the residual stream the ones that hold most.
    """
    full, pruned = model.state_dict(), SportsLLM(kept.config)
    chosen: dict[str, tuple[Tensor, ...]] = {}
    for new, old in enumerate(kept.layers):
        for matrix in block_matrices(kept.full.of_layer(old)):
            rows, columns = kept.of_matrix(matrix, new)
            name = f"model.layers.{new}.{matrix.name}"
            chosen |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    state: dict[str, Tensor] = {}
    for name, ours in pruned.state_dict().items():
        old_name = _LAYER.sub(lambda found: f"{found[1]}{kept.layers[int(found[2])]}.", name)
        source = full[f"{EMBEDDING}.weight" if name == f"{HEAD}.weight" and name not in full else old_name]
        if name in chosen:
            for dimension, indices in enumerate(chosen[name]):
                source = source.index_select(dimension, indices)
        state[name] = source[tuple(map(slice, ours.shape))]
    pruned.load_state_dict(state)
    return pruned.eval()
