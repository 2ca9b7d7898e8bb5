"""How much each unit of a model matters: from one forward pass over calibration text, or from plain baselines.

Score of a unit = sqrt(sum over samples of (mean over tokens of |a|) ** 2), Minitron (https://arxiv.org/abs/2407.14679):
    a = the input of the matrix whose columns the unit is, its L2 norm over these columns:
        FFN neurons at down_proj, query heads at o_proj
Distance of a run of layers = 1 - E[cos(x before, x after)], ShortGPT's block influence (https://arxiv.org/abs/2403.03853)
for one layer, and its form for several (https://arxiv.org/abs/2403.17887).
Shape suffixes: B samples, T tokens, D hidden_size, U units or inputs, S inputs of a unit, L layers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.layerwise import Statistic, summed
from compress.pruning.rotation import Directions, directions_from, watched_norms
from compress.pruning.shapes import dimension_of
from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import save_tensors
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS, block_matrices, block_units
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.models.parts import HIDDEN, Matrix, Unit

IMPORTANCES = ("output", "activation", "magnitude", "random")
MEASURED = ("output", "activation")  # on calibration text
SCORES_FILE = "importance.safetensors"


@dataclass(frozen=True)
class Scores:
    """Importance of every unit.

    Attributes:
        directions: the residual stream's principal directions.
        units: by the unit's name, one (U,) a layer; empty in layers that have none of it.
        layer_distance: (L + 1, L + 1); [i, j] is how far layers i..j-1 together move the residual stream.
    """

    directions: Directions
    units: dict[str, list[Tensor]]
    layer_distance: Tensor


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


def by_unit(found: Mapping[tuple[str, int], Tensor], layers: int) -> dict[str, list[Tensor]]:
    """`Scores.units` of what each unit of each layer has."""
    names = dict.fromkeys(name for name, _ in found)
    return {name: [found.get((name, layer), torch.zeros(0)) for layer in range(layers)] for name in names}


@torch.no_grad()
def importance_scores(model: SportsLLM, samples: Sequence[Tensor]) -> Scores:
    """Scores over calibration token ids, (B, T) each; every row is a sample.

    Raises:
        ArtifactError: there are no samples.
    """
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    units, layers = layer_units(model.config), model.config.num_hidden_layers
    watched: dict[tuple[str, int], tuple[nn.Module, Statistic]] = {}
    for number, block in enumerate(cast("list[Block]", list(model.model.layers))):
        for name, (unit, matrix) in units[number].items():
            watched[name, number] = block.get_submodule(matrix), _unit_squares(unit.size)
    cosines = torch.zeros(layers + 1, layers + 1)
    with (
        summed(watched) as sums,
        summed(watched_norms(model)) as moments,
        progress_bar("importance", len(samples)) as bar,
    ):
        for tokens_BT in samples:
            stream: list[Tensor] = []
            model.hidden(tokens_BT, states=stream)
            states = nn.functional.normalize(torch.stack(stream).flatten(1, 2).float(), dim=-1)
            cosines += torch.einsum("itd,jtd->ij", states, states) / states.shape[1]
            bar.advance()
    return Scores(
        directions=directions_from(model, moments),
        units=by_unit({key: sums[key].sqrt() for key in watched}, layers),
        layer_distance=1 - cosines / len(samples),
    )


def _squares(activations_BTU: Tensor) -> Tensor:
    """(U,) sum over samples of (mean over tokens of |a|) ** 2."""
    return activations_BTU.float().abs().mean(dim=1).square().sum(dim=0)


def _unit_squares(size: int) -> Statistic:
    """`_squares` of the L2 norm of each unit's inputs, `size` of them side by side."""

    def statistic(inputs_BTI: Tensor, _output: Tensor) -> Tensor:
        if inputs_BTI.ndim == 2:  # some tokens, perhaps none, without their order
            inputs_BTI = inputs_BTI[None] if len(inputs_BTI) else inputs_BTI.new_zeros(1, 1, inputs_BTI.shape[1])
        parts = inputs_BTI.float().view(*inputs_BTI.shape[:-1], -1, size)
        return _squares(parts[..., 0] if size == 1 else parts.norm(dim=-1))

    return statistic


@torch.no_grad()
def magnitude_scores(model: SportsLLM, directions: Directions) -> Scores:
    """The baseline without text: the L2 norm of the weights that a unit owns; for a run of layers, of its matrices."""
    scores: dict[tuple[str, int], Tensor] = {}
    sizes = [torch.zeros(())]
    for layer, block in enumerate(cast("list[Block]", list(model.model.layers))):
        matrices, units = block_matrices(model.config.of_layer(layer)), scored_units(model.config.of_layer(layer))
        squares = {matrix.name: block.get_parameter(f"{matrix.name}.weight").square() for matrix in matrices}

        for name, (unit, _) in units.items():
            scores[name, layer] = _owned(name, unit.count, matrices, squares).sqrt()
        sizes.append(sum((weights.sum() for weights in squares.values()), torch.zeros(())))
    reach = torch.stack(sizes).cumsum(dim=0)
    distance = (reach[None, :] - reach[:, None]).clamp(min=0).sqrt()
    return Scores(directions, by_unit(scores, len(sizes) - 1), distance)


def _owned(unit: str, count: int, matrices: Sequence[Matrix], squares: Mapping[str, Tensor]) -> Tensor:
    """Sums over the columns of each unit, and over its rows, whose number may differ from matrix to matrix."""
    sides = ((0, "column_unit"), (1, "row_unit"))
    columns, rows = (
        sum(squares[m.name].sum(dim=axis).view(count, -1).sum(1) for m in matrices if getattr(m, side) == unit)
        for axis, side in sides
    )
    return cast(Tensor, rows + columns)


def random_scores(config: ModelConfig, seed: int, directions: Directions) -> Scores:
    """The other baseline: random scores, uniform in [0, 1)."""
    draw = functools.partial(torch.rand, generator=torch.Generator().manual_seed(seed))
    layers, units = config.num_hidden_layers, layer_units(config)
    names = dict.fromkeys(name for own in units for name in own)
    drawn = {
        (name, layer): draw(own[name][0].count) for name in names for layer, own in enumerate(units) if name in own
    }
    return Scores(directions, by_unit(drawn, layers), draw(layers + 1, layers + 1))


def save_scores(directory: Path, scores: Scores, config: ModelConfig) -> None:
    """Write scores beside a checkpoint, so that other shapes can be cut without reading the text again."""
    tensors = {"layer_distance": scores.layer_distance}
    tensors |= {f"directions.{name}": tensor for name, tensor in scores.directions._asdict().items()}
    tensors |= {key: scores.units[name][layer] for (name, layer), key in _keys(config).items()}
    save_tensors(directory / SCORES_FILE, {name: tensor.contiguous() for name, tensor in tensors.items()})


def load_scores(path: Path, config: ModelConfig) -> Scores:
    """Scores of a model with this config from a file, or from the directory it lies in.

    Raises:
        ArtifactError: missing, damaged, or of a model of another shape.
    """
    file = path / SCORES_FILE if path.is_dir() else path
    layers, units, keys = config.num_hidden_layers, layer_units(config), _keys(config)
    try:
        tensors = load_file(str(file))
        hidden = config.hidden_size
        wanted: dict[str, tuple[int, ...]] = {"layer_distance": (layers + 1, layers + 1)}
        sizes = {"scale": (hidden,), "basis": (hidden, hidden), "squares": (len(NORMS) * layers + 1, hidden)}
        wanted |= {f"directions.{name}": sizes[name] for name in Directions._fields}
        wanted |= {key: (units[layer][name][0].count,) for (name, layer), key in keys.items()}
        found = {name: tuple(tensors[name].shape) for name in wanted}
    except (SafetensorError, OSError, KeyError) as error:
        message = f"{file}: holds no importance scores ({error}); make them with prune --calibration"
        raise ArtifactError(message) from None
    if found != wanted:
        raise ArtifactError(f"{file}: scores of a model of another shape; make them from this one with --calibration")
    per_unit = by_unit({place: tensors[key] for place, key in keys.items()}, layers)
    directions = Directions(*(tensors[f"directions.{name}"] for name in Directions._fields))
    return Scores(directions, per_unit, tensors["layer_distance"])


def _keys(config: ModelConfig) -> dict[tuple[str, int], str]:
    """By a unit's name and layer its tensor's name in the file: that of the dimension which it alone makes up."""
    keys = {}
    for layer, units in enumerate(layer_units(config)):
        alike = Counter(dimension_of(unit) for unit, _ in units.values())
        for name, (unit, _) in units.items():
            dimension = dimension_of(unit)
            keys[name, layer] = f"{dimension if dimension and alike[dimension] == 1 else name}.{layer}"
    return keys
