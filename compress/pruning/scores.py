"""Importance of units, by the error of a layer's output: greedy selection (`compress.pruning.greedy`) scores them.

Distance of a run of layers = 1 - E[cos(x before, x after)], ShortGPT's block influence (https://arxiv.org/abs/2403.03853)
for one layer, and its form for several (https://arxiv.org/abs/2403.17887).
Shape suffixes: B samples, T tokens, D hidden_size, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.layerwise import KnownStates, Statistic, blocks_of, embedded, input_moment, kept_like, mirrored, summed
from compress.pruning.greedy import pick_order
from compress.pruning.hidden import Directions, directions_from, norm_moment
from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import LAST_NORM, NORMS, block_matrices, block_units
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.sublayer import HIDDEN, Unit

SCORES_FILE = "importance.safetensors"
_DISTANCE_SAMPLES = 32  # of which distances of layers are taken; the runs that come out nearest are tried


@dataclass(frozen=True)
class Scores:
    """Importance of every unit.

    Attributes:
        directions: the residual stream's principal directions.
        units: (K,) by the unit's name and the layer.
        layer_distance: (L + 1, L + 1); [i, j] is how far layers i..j-1 together move the residual stream.
    """

    directions: Directions
    units: dict[tuple[str, int], Tensor]
    layer_distance: Tensor

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Scores of one layer's units by name."""
        return {name: scores for (name, number), scores in self.units.items() if number == layer}


def scored_units(config: ModelConfig) -> dict[str, tuple[Unit, str]]:
    """The units that are columns of a matrix in a block, and the last such matrix; the feed-forward's come first."""
    units = block_units(config)
    found: dict[str, tuple[Unit, str]] = {}
    for matrix in reversed(block_matrices(config)):
        if matrix.column_unit != HIDDEN:
            found.setdefault(matrix.column_unit, (units[matrix.column_unit], matrix.name))
    return found


def layer_units(config: ModelConfig) -> list[dict[str, tuple[Unit, str]]]:
    """`scored_units` of each layer."""
    return [scored_units(config.of_layer(layer)) for layer in range(config.num_hidden_layers)]


@torch.no_grad()
def measure_scores(model: SportsLLM, samples: Sequence[Tensor], known: KnownStates | None = None) -> Scores:
    """Scores over calibration token ids, (B, T) each, whose states are `known` afterwards.

    One layer after the other: memory is that of one layer's products and of the residual streams.
    """
    known, found = known or KnownStates(model), dict[tuple[str, int], Tensor]()
    states_BTD = embedded(model, samples)
    streams_LBTD, moments = [kept_like(states_BTD, islice(states_BTD, _DISTANCE_SAMPLES))], kept_like(states_BTD, ())
    units = layer_units(model.config)
    with progress_bar("importance", len(units)) as bar:
        for layer, (block, own) in enumerate(zip(blocks_of(model), units, strict=True)):
            watched: dict[str, tuple[nn.Module, Statistic]] = {
                norm: (block.get_submodule(norm), norm_moment) for norm in NORMS.values()
            }
            watched |= {name: (block.get_submodule(matrix), input_moment) for name, (_, matrix) in own.items()}
            with summed(watched) as sums:
                states_BTD = known.of(layer, samples, states_BTD, block).end
            streams_LBTD.append(kept_like(states_BTD, islice(states_BTD, _DISTANCE_SAMPLES)))
            moments.extend(sums.pop(norm) for norm in NORMS.values())
            for name, (unit, matrix) in own.items():
                weight_OU = block.get_parameter(f"{matrix}.weight")
                found[name, layer] = pick_order(mirrored(sums.pop(name)), weight_OU, unit.size).cpu()
            bar.advance()
    with summed({LAST_NORM: (model.model.norm, norm_moment)}) as sums:
        for x_BTD in states_BTD:
            model.model.norm(x_BTD)
    moments.extend(sums.values())
    cosines = model.head_weight.new_zeros(len(streams_LBTD), len(streams_LBTD))
    for sample_LTD in zip(*streams_LBTD, strict=True):
        states = nn.functional.normalize(torch.stack(sample_LTD).flatten(1, 2).float(), dim=-1)
        cosines += torch.einsum("itd,jtd->ij", states, states) / states.shape[1]
    distance = (1 - cosines / len(streams_LBTD[0])).cpu()
    return Scores(directions_from(model, moments), found, distance)


def save_scores(directory: Path, scores: Scores) -> None:
    """Write scores beside a checkpoint, so that other shapes can be cut without measuring again."""
    tensors = {"layer_distance": scores.layer_distance}
    tensors |= {f"directions.{name}": tensor for name, tensor in scores.directions._asdict().items()}
    tensors |= {f"{name}.{layer}": each for (name, layer), each in scores.units.items()}
    save_tensors(directory / SCORES_FILE, {name: tensor.contiguous() for name, tensor in tensors.items()})


def load_scores(path: Path, config: ModelConfig) -> Scores:
    """Scores of a model with this config from a file, or from the directory it lies in.

    Raises:
        ArtifactError: missing, damaged, or scores of a model of another shape.
    """
    file = path / SCORES_FILE if path.is_dir() else path
    layers, hidden = config.num_hidden_layers, config.hidden_size
    counts = {
        (name, layer): unit.count for layer, own in enumerate(layer_units(config)) for name, (unit, _) in own.items()
    }
    wanted: dict[str, tuple[int, ...]] = {"layer_distance": (layers + 1, layers + 1), "directions.scale": (hidden,)}
    wanted |= {"directions.basis": (hidden, hidden), "directions.squares": (len(NORMS) * layers + 1, hidden)}
    wanted |= {f"{name}.{layer}": (count,) for (name, layer), count in counts.items()}
    try:
        tensors = load_file(str(file))
    except (SafetensorError, OSError) as error:
        message = f"{file}: holds no importance scores ({error}); make them with prune --calibration"
        raise ArtifactError(message) from None
    if wanted != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise ArtifactError(f"{file}: not scores of a model of this shape; make them from it with prune --calibration")
    per_unit = {(name, layer): tensors[f"{name}.{layer}"] for name, layer in counts}
    directions = Directions(*(tensors[f"directions.{name}"] for name in Directions._fields))
    return Scores(directions, per_unit, tensors["layer_distance"])


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
        else:  # a group is worth what it groups
            assert members, f"unit {unit.name!r} is neither a matrix's columns nor a group of units"
            own = torch.stack([score.view(unit.count, -1).sum(dim=1) for score in members]).sum(dim=0)
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
