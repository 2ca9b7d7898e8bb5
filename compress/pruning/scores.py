"""Importance of units: by the error of a layer's output, by activations, or by the weights alone.

    output      (default) How early greedy selection picks the unit, see `compress.pruning.selection`.
    activation  Baseline, Minitron's (https://arxiv.org/abs/2407.14679): sqrt(sum over samples of (mean over tokens of
                |a|)^2), a the input of the matrix whose columns the unit is, its L2 norm over these columns.
    magnitude   Baseline without text: the L2 norm of the weights that a unit owns.

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
from compress.pruning.hidden import Directions, directions_from, norm_moment
from compress.pruning.selection import pick_order
from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import LAST_NORM, NORMS, block_matrices, block_units
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.parts import HIDDEN, Matrix, Unit

IMPORTANCES = ("output", "activation", "magnitude")
MEASURED = ("output", "activation")  # on calibration text
SCORES_FILE = "importance.safetensors"
_DISTANCE_SAMPLES = 32  # of which distances of layers are taken; the runs that come out nearest are tried

Found = dict[tuple[str, int], Tensor]
"""Scores by a unit's name and layer."""


@dataclass(frozen=True)
class Scores:
    """Importance of every unit.

    Attributes:
        directions: the residual stream's principal directions.
        units: by the unit's name, one (K,) a layer; empty in layers that have none of it.
        layer_distance: (L + 1, L + 1); [i, j] is how far layers i..j-1 together move the residual stream.
    """

    directions: Directions
    units: dict[str, list[Tensor]]
    layer_distance: Tensor

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Scores of one layer's units by name."""
        return {name: scores[layer] for name, scores in self.units.items()}


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


def by_unit(found: Found, layers: int) -> dict[str, list[Tensor]]:
    """`Scores.units` of what each unit of each layer has."""
    names = dict.fromkeys(name for name, _ in found)
    return {name: [found.get((name, layer), torch.zeros(0)) for layer in range(layers)] for name in names}


@torch.no_grad()
def measure_scores(
    model: SportsLLM, samples: Sequence[Tensor], importance: str = "output", known: KnownStates | None = None
) -> Scores:
    """Scores by one of `IMPORTANCES`, over calibration token ids, (B, T) each, whose states are `known` afterwards.

    Raises:
        ArtifactError: there are no samples.
    """
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    found, moments, distance = _streamed(model, samples, importance, known or KnownStates(model))
    if importance == "magnitude":
        found, distance = _magnitudes(model)
    return Scores(directions_from(model, moments), by_unit(found, model.config.num_hidden_layers), distance)


def _unit_squares(size: int) -> Statistic:
    """(K,) sum over samples of (mean over tokens of |a|)^2, a the L2 norm of a unit's `size` inputs."""

    def statistic(inputs_BTU: Tensor, _output: Tensor) -> Tensor:
        if inputs_BTU.ndim == 2:  # some tokens, perhaps none, without their order
            inputs_BTU = inputs_BTU[None] if len(inputs_BTU) else inputs_BTU.new_zeros(1, 1, inputs_BTU.shape[1])
        parts = inputs_BTU.float().view(*inputs_BTU.shape[:-1], -1, size)
        size_BTK = parts[..., 0].abs() if size == 1 else parts.norm(dim=-1)
        return size_BTK.mean(dim=1).square().sum(dim=0)

    return statistic


def _magnitudes(model: SportsLLM) -> tuple[Found, Tensor]:
    """Scores by weights, and the distances of runs of layers: the norm of their matrices."""
    found: Found = {}
    sizes = [torch.zeros(())]
    for layer, block in enumerate(blocks_of(model)):
        matrices, units = block_matrices(model.config.of_layer(layer)), scored_units(model.config.of_layer(layer))
        squares = {matrix.name: block.get_parameter(f"{matrix.name}.weight").square() for matrix in matrices}
        for name, (unit, _) in units.items():
            found[name, layer] = _owned(name, unit.count, matrices, squares).sqrt().cpu()
        sizes.append(sum((weights.sum().cpu() for weights in squares.values()), torch.zeros(())))
    reach = torch.stack(sizes).cumsum(dim=0)
    return found, (reach[None, :] - reach[:, None]).clamp(min=0).sqrt()


def _owned(unit: str, count: int, matrices: Sequence[Matrix], squares: Mapping[str, Tensor]) -> Tensor:
    """(K,) sums over the rows and columns of each unit, whose number may differ from matrix to matrix."""
    columns = [squares[m.name].sum(dim=0) for m in matrices if m.column_unit == unit]
    rows = [squares[m.name].sum(dim=1) for m in matrices if m.row_unit == unit]
    parts = [torch.stack([side.view(count, -1).sum(1) for side in sides]).sum(0) for sides in (rows, columns) if sides]
    return torch.stack(parts).sum(dim=0)


def _streamed(
    model: SportsLLM, samples: Sequence[Tensor], importance: str, known: KnownStates
) -> tuple[Found, Sequence[Tensor], Tensor]:
    """Scores by selection or by activations, the moments of `directions_from`, and distances of runs of layers, one
    layer after the other: memory is that of one layer's products and of the residual streams.
    """
    found: Found = {}
    states_BTD = embedded(model, samples)
    streams_LBTD, moments = [kept_like(states_BTD, islice(states_BTD, _DISTANCE_SAMPLES))], kept_like(states_BTD, ())
    units = layer_units(model.config)
    with progress_bar("importance", len(units)) as bar:
        for layer, (block, own) in enumerate(zip(blocks_of(model), units, strict=True)):
            watched: dict[str, tuple[nn.Module, Statistic]] = {
                norm: (block.get_submodule(norm), norm_moment) for norm in NORMS.values()
            }
            if importance in MEASURED:
                for name, (unit, matrix) in own.items():
                    statistic = input_moment if importance == "output" else _unit_squares(unit.size)
                    watched[name] = block.get_submodule(matrix), statistic
            with summed(watched) as sums:
                states_BTD = known.of(layer, samples, states_BTD, block).end
            streams_LBTD.append(kept_like(states_BTD, islice(states_BTD, _DISTANCE_SAMPLES)))
            moments.extend(sums.pop(norm) for norm in NORMS.values())
            for name, (unit, matrix) in own.items() if importance in MEASURED else ():
                value = sums.pop(name)
                if importance == "output":
                    value = pick_order(mirrored(value), block.get_parameter(f"{matrix}.weight"), unit.size)
                else:
                    value = value.sqrt()
                found[name, layer] = value.cpu()
            bar.advance()
    with summed({LAST_NORM: (model.model.norm, norm_moment)}) as sums:
        for x_BTD in states_BTD:
            model.model.norm(x_BTD)
    moments.extend(sums.values())
    cosines = model.head_weight.new_zeros(len(streams_LBTD), len(streams_LBTD))
    for sample_LTD in zip(*streams_LBTD, strict=True):
        states = nn.functional.normalize(torch.stack(sample_LTD).flatten(1, 2).float(), dim=-1)
        cosines += torch.einsum("itd,jtd->ij", states, states) / states.shape[1]
    return found, moments, (1 - cosines / len(streams_LBTD[0])).cpu()


def save_scores(directory: Path, scores: Scores, config: ModelConfig) -> None:
    """Write scores beside a checkpoint, so that other shapes can be cut without measuring again."""
    tensors = {"layer_distance": scores.layer_distance}
    tensors |= {f"directions.{name}": tensor for name, tensor in scores.directions._asdict().items()}
    tensors |= {
        f"{name}.{layer}": scores.units[name][layer] for layer, own in enumerate(layer_units(config)) for name in own
    }
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
        found = {name: tuple(tensors[name].shape) for name in wanted}
    except (SafetensorError, OSError, KeyError) as error:
        message = f"{file}: holds no importance scores ({error}); make them with prune --calibration"
        raise ArtifactError(message) from None
    if found != wanted:
        raise ArtifactError(f"{file}: scores of a model of another shape; make them from this one with --calibration")
    per_unit = by_unit({(name, layer): tensors[f"{name}.{layer}"] for name, layer in counts}, layers)
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
