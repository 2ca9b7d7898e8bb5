"""The models that a teacher could become on a device: shapes x formats, with the predicted cost of each.

Quality is estimated, to decide what is tried first. It is measured before anything is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import misses
from benchmarks.labels import LIMITS
from benchmarks.predict.latency import predict_figures, resolve
from benchmarks.predict.model_size import ModelFormat
from benchmarks.search.cut import expert_counts
from benchmarks.search.estimate import ShapeLosses
from compress.pruning.shapes import Shape, can_merge_kv_heads, shape_for_share
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

_MOST_VALUES = 6  # of a dimension; shapes of a finer grid differ by less than can be measured
_WIDTH_STEP, _SMALL_HIDDEN = 32, 96  # below that hidden sizes go by half steps
EQUAL_PERCENT = 0.3
"""Losses this close, estimated or measured, count as equal, and the faster model goes first: scoring a short text is
not surer."""


@dataclass(frozen=True)
class Estimates:
    """What things cost in percent of the teacher's bits per byte: cuts, formats, and vocabularies by their size."""

    shapes: ShapeLosses
    formats: Mapping[ModelFormat, float]
    vocabularies: Mapping[int, float]

    def loss_percent(self, shape: Shape, vocab_size: int, format: ModelFormat) -> float:
        """Of a model at the end of its recovery; the parts are taken to add up."""
        return self.shapes.percent(shape) + self.vocabularies[vocab_size] + self.formats[format]


@dataclass(frozen=True)
class Candidate:
    """One model that could be made.

    Attributes:
        shape: its dimensions.
        vocab_size: its number of tokens.
        format: how it is stored.
        parameters: their number.
        loss_percent: estimated rise of bits per byte over the teacher.
        predicted: known figures on the device, by the limits' names.
        closed_to: loaders that cannot open it.
    """

    shape: Shape
    vocab_size: int
    format: ModelFormat
    parameters: int
    loss_percent: float
    predicted: Mapping[str, float]
    closed_to: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique, for tables and directories."""
        return f"{shape_name(self.shape, self.vocab_size)}-{self.format.name}"

    def record(self) -> dict[str, Any]:
        """For the result's `candidates`."""
        return {
            "name": self.name,
            "shape": {**self.shape.sizes(), "vocab_size": self.vocab_size},
            "precision": self.format.name,
            "parameters": self.parameters,
            "estimated_loss_percent": round(self.loss_percent, 3),
            "predicted": {name: float(f"{value:.5g}") for name, value in self.predicted.items()},
            "closed_to": list(self.closed_to),
        }


def shape_name(shape: Shape, vocab_size: int) -> str:
    """Dimensions by their letters: l5-h96-f160-a3-k3-v4096, and of a mixture e4 behind them."""
    letters = (("l", shape.layers), ("h", shape.hidden), ("f", shape.intermediate), ("a", shape.heads))
    more = (("k", shape.kv_heads), ("v", vocab_size), *([("e", shape.experts)] if shape.experts else []))
    return "-".join(f"{letter}{value}" for letter, value in (*letters, *more))


def candidates(teacher: ModelConfig, device: Device, estimates: Estimates) -> list[Candidate]:
    """Every candidate, with predictions for `device`, best estimated quality first.

    Args:
        teacher: the full model; itself a candidate.
        device: whose limits and figures count.
        estimates: of losses; their formats and vocabularies are those considered.
    """
    shapes, found = list(grid_shapes(teacher)), list[Candidate]()
    device = device.model_copy(update={"coefficients": resolve(device)})  # once, not for each candidate
    with progress_bar("candidates", len(shapes) * len(estimates.vocabularies)) as bar:
        for vocab_size in estimates.vocabularies:
            for shape in shapes:
                found += candidates_of(teacher, device, estimates, shape, vocab_size, estimates.formats)
                bar.advance()
    return ranked(found)


def candidates_of(
    teacher: ModelConfig,
    device: Device,
    estimates: Estimates,
    shape: Shape,
    vocab_size: int,
    formats: Iterable[ModelFormat],
) -> list[Candidate]:
    """A shape in each of some formats."""
    config = shape.applied_to(teacher).with_changes(vocab_size=vocab_size)
    loss, parameters = estimates.shapes.percent(shape) + estimates.vocabularies[vocab_size], config.parameters
    return [
        Candidate(
            shape=shape,
            vocab_size=vocab_size,
            format=format,
            parameters=parameters,
            loss_percent=loss + estimates.formats[format],
            predicted=predict_figures(config, device, format).known(),
            closed_to=closed_to(config, format),
        )
        for format in formats
    ]


def closed_to(config: ModelConfig, format: ModelFormat) -> tuple[str, ...]:
    """Loaders that do not open a model: optimum takes the heads' size from the hidden size, and makes its own cache."""
    optimum = config.hidden_size == config.query_size and format.cache != "int8"
    return () if optimum else ("optimum",)


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Best first: estimated loss in steps of `EQUAL_PERCENT`, then loaders that open it, time per token and size."""

    def key(candidate: Candidate) -> tuple[int, int, float, float]:
        return (
            int(candidate.loss_percent / EQUAL_PERCENT),
            len(candidate.closed_to),
            candidate.predicted.get("tpot_p50_ms", math.inf),  # unknown in a very short context
            candidate.predicted["file_mb"],
        )

    return sorted(found, key=key)


def widened(
    candidate: Candidate, teacher: ModelConfig, device: Device, estimates: Estimates, fits: Callable[[Candidate], bool]
) -> Candidate:
    """The candidate with the widest FFN that `fits`, between the values of the grid."""
    best = candidate
    for intermediate in range(candidate.shape.intermediate + _WIDTH_STEP, teacher.intermediate_size, _WIDTH_STEP):
        shape = replace(candidate.shape, intermediate=intermediate)
        (wider,) = candidates_of(teacher, device, estimates, shape, candidate.vocab_size, [candidate.format])
        if not fits(wider):
            break
        best = wider
    return best


def plain_candidates(
    teacher: ModelConfig, device: Device, estimates: Estimates, fits: Callable[[Candidate], bool]
) -> list[Candidate]:
    """For each dimension that can be cut alone, and for the even cut, the best estimate of those that fit.

    These are what a person would try first; estimates learnt from a few cuts may rank a mixed one wrongly before them.
    """
    best = []
    for line in (*_single_cuts(teacher), _even_cuts(teacher)):
        found = []
        for format in estimates.formats:
            for shape in line:  # largest first
                (one,) = candidates_of(teacher, device, estimates, shape, teacher.vocab_size, [format])
                if fits(one):
                    found.append(one)
                    break
        best += ranked(found)[:1]
    return ranked({one.name: one for one in best}.values())


def _single_cuts(teacher: ModelConfig) -> Iterator[list[Shape]]:
    """The cuts of one dimension, largest first: FFN, depth, heads in whole groups, hidden size, experts."""
    full = Shape.of(teacher)
    group = full.heads // full.kv_heads
    lines = [
        [replace(full, intermediate=width) for width in range(_WIDTH_STEP, full.intermediate, _WIDTH_STEP)],
        [replace(full, layers=layers) for layers in range(1, full.layers)],
        [replace(full, heads=kv * group, kv_heads=kv) for kv in range(1, full.kv_heads)],
        [replace(full, hidden=width) for width in range(_WIDTH_STEP, full.hidden, _WIDTH_STEP)],
        [replace(full, experts=count) for count in expert_counts(teacher)[:0:-1]],
    ]
    for line in lines:
        yield [shape for shape in reversed(line) if _can_be_cut(shape, teacher)]


def _even_cuts(teacher: ModelConfig) -> list[Shape]:
    """Cuts of all widths alike at full depth, largest first."""
    found = dict[Shape, None]()
    for percent in range(95, 4, -5):
        try:
            found[shape_for_share(teacher, percent / 100)] = None
        except UsageError:
            break
    return [shape for shape in found if shape != Shape.of(teacher) and _can_be_cut(shape, teacher)]


def _can_be_cut(shape: Shape, teacher: ModelConfig) -> bool:
    try:
        shape.applied_to(teacher)
    except UsageError:
        return False
    return True


def cut_by_limit(found: Sequence[Candidate], device: Device) -> dict[str, dict[str, int]]:
    """For every limit how many candidates miss it (`misses`), and how many miss no other (`alone`)."""
    counts = {name: {"misses": 0, "alone": 0} for name in LIMITS}
    for candidate in found:
        missed = misses(candidate.predicted, device)
        for name in missed:
            counts[name]["misses"] += 1
            counts[name]["alone"] += len(missed) == 1
    return counts


def nearest_miss(found: Sequence[Candidate], device: Device) -> tuple[Candidate, dict[str, float]]:
    """The candidate whose worst limit is missed by least, and the limits it misses."""

    def worst(candidate: Candidate) -> float:
        return max(misses(candidate.predicted, device).values(), default=0.0)

    nearest = min(found, key=worst)
    return nearest, misses(nearest.predicted, device)


def grid_shapes(teacher: ModelConfig) -> Iterator[Shape]:
    """A grid over the teacher's dimensions, and the teacher's own shape."""
    full = Shape.of(teacher)
    # Hidden sizes that are whole heads, as every loader wants them, are among them.
    widths = _values(full.hidden, _WIDTH_STEP if full.hidden > _SMALL_HIDDEN else _WIDTH_STEP // 2)
    inner = _values(full.intermediate, _WIDTH_STEP)
    for layers in _values(full.layers, 1):
        for hidden in widths:
            for heads, kv_heads in _head_counts(teacher):
                for intermediate, experts in product(inner, expert_counts(teacher)):
                    yield Shape(hidden, intermediate, heads, kv_heads, layers, full.head_dim, experts)


def _values(full: int, step: int) -> list[int]:
    """Multiples of `step` up to `full`, evenly spread, the largest of them `full` itself."""
    every = [*range(step, full, step), full]
    if len(every) <= _MOST_VALUES:
        return every
    return [every[round((number + 1) * len(every) / _MOST_VALUES) - 1] for number in range(_MOST_VALUES)]


def _head_counts(teacher: ModelConfig) -> list[tuple[int, int]]:
    """(heads, kv_heads): whole groups cut, or, where that may be, key/value heads merged with all query heads kept."""
    full = Shape.of(teacher)
    per_group = full.heads // full.kv_heads
    counts = {(kv * per_group, kv) for kv in _values(full.kv_heads, 1)}
    if can_merge_kv_heads(teacher):
        counts |= {(full.heads, kv) for kv in range(1, full.kv_heads) if full.kv_heads % kv == 0}
    return sorted(counts)
