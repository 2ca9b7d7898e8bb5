"""The models that a teacher could become on a device: shapes x formats, with the predicted cost of each.

Quality is estimated here, to decide what is tried first. It is measured before anything is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.devices.limits import misses
from benchmarks.devices.schema import Device
from benchmarks.labels import LIMITS
from benchmarks.predict.coefficients import resolve
from benchmarks.predict.latency import predict_figures
from benchmarks.predict.model_size import ModelFormat
from compress.pruning.shapes import Shape, even_shapes
from sportsllm.console import progress_bar
from sportsllm.models.config import ModelConfig

_EVEN_SHARES = [number / 40 for number in range(39, 0, -1)]
_MOST_VALUES = 6  # of a dimension; shapes of a finer grid differ by less than can be measured
_WIDTH_STEP = 32
EQUAL_PERCENT = 0.1
"""Losses this close, estimated or measured after a brief recovery, count as equal, and the faster model goes first."""

# Bits per byte lost, in percent, for each dimension: weight * ln(kept share) ** 2. Fitted to a teacher of 1M parameters
# cut and recovered on 5% of its tokens (docs/log.md): FFN 352 -> 192 +2.59%, 6 -> 4 layers +2.07%, both a little
# (256, 5) +1.36%, half +5.50%; these weights give 2.59, 2.07, 1.13 and 4.80. Heads from one brief run; hidden size and
# merged key/value heads are estimates.
_SHAPE_WEIGHTS = {"intermediate": 7.0, "layers": 12.6, "heads": 7.7, "hidden": 20.0, "kv_heads": 2.0}
# The same for the vocabulary, an estimate. Before fine-tuning a quarter fewer tokens cost 9% (docs/log.md).
_VOCABULARY_WEIGHT = 40.0


_WEIGHT_LOSS_PERCENT = {
    ModelFormat("fp32"): 0.0,
    ModelFormat("int8"): 0.02,
    ModelFormat("int8", per_row=True): 0.12,
    ModelFormat("int4", 32): 0.6,
    ModelFormat("int4", 128): 0.8,
}
_CACHE_LOSS_PERCENT = {"fp32": 0.0, "int8": 0.01}
_LATENCY_LOSS_PERCENT = 0.02  # of the latency profile, which takes matrices in blocks


def _all_formats() -> Iterator[tuple[ModelFormat, float]]:
    for weights, loss in _WEIGHT_LOSS_PERCENT.items():
        for cache, cache_loss in _CACHE_LOSS_PERCENT.items():
            yield replace(weights, cache=cache), loss + cache_loss
            if weights.quantized and not weights.per_row:
                yield replace(weights, cache=cache, latency=True), loss + cache_loss + _LATENCY_LOSS_PERCENT


FORMATS = dict(_all_formats())
"""Every format that is considered, with the percent of bits per byte it costs, measured on a teacher of 1M parameters
(docs/log.md)."""


@dataclass(frozen=True)
class Candidate:
    """One model that could be made.

    Attributes:
        shape: its dimensions.
        vocab_size: its number of tokens.
        format: how it is stored, a key of `FORMATS`.
        parameters: their number.
        loss_percent: estimated rise of bits per byte over the teacher.
        predicted: known figures on the device, by the limits' names.
    """

    shape: Shape
    vocab_size: int
    format: ModelFormat
    parameters: int
    loss_percent: float
    predicted: Mapping[str, float]

    @property
    def name(self) -> str:
        """Unique, for tables and directories."""
        return f"{shape_name(self.shape, self.vocab_size)}-{self.format.name}"

    def record(self) -> dict[str, Any]:
        """For the result's `candidates`."""
        return {
            "name": self.name,
            "shape": {**asdict(self.shape), "vocab_size": self.vocab_size},
            "precision": self.format.name,
            "parameters": self.parameters,
            "estimated_loss_percent": round(self.loss_percent, 3),
            "predicted": {name: float(f"{value:.5g}") for name, value in self.predicted.items()},
        }


def shape_name(shape: Shape, vocab_size: int) -> str:
    """Dimensions by their letters: l5-h96-f160-a3-k3-v4096."""
    letters = (("l", shape.layers), ("h", shape.hidden), ("f", shape.intermediate), ("a", shape.heads))
    return "-".join(f"{letter}{value}" for letter, value in (*letters, ("k", shape.kv_heads), ("v", vocab_size)))


def candidates(teacher: ModelConfig, device: Device, vocabularies: Sequence[int]) -> list[Candidate]:
    """Every candidate, with predictions for `device`, best estimated quality first.

    Args:
        teacher: the full model; itself a candidate.
        device: whose limits and figures count.
        vocabularies: numbers of tokens to consider.
    """
    shapes, found = list(_shapes(teacher)), list[Candidate]()
    device = device.model_copy(update={"coefficients": resolve(device)})  # once, not for each candidate
    with progress_bar("candidates", len(shapes) * len(vocabularies)) as bar:
        for vocab_size in vocabularies:
            for shape in shapes:
                found += _candidates(teacher, device, shape, vocab_size)
                bar.advance()
    return ranked(found)


def even_cuts(teacher: ModelConfig, device: Device, vocabularies: Sequence[int]) -> list[Candidate]:
    """All widths cut alike, as `prune --params` does: the plain way to any size, which a search has to beat.

    Every fortieth of the parameters, in every format.
    """
    shapes = dict.fromkeys(shape for shape in even_shapes(teacher, _EVEN_SHARES) if shape is not None)
    return [
        candidate
        for vocab_size in vocabularies
        for shape in shapes
        for candidate in _candidates(teacher, device, shape, vocab_size)
    ]


def _candidates(
    teacher: ModelConfig, device: Device, shape: Shape, vocab_size: int, formats: Iterable[ModelFormat] = FORMATS
) -> list[Candidate]:
    config = shape.applied_to(teacher).with_changes(vocab_size=vocab_size)
    loss = shape_loss_percent(Shape.of(teacher), shape)
    loss += _VOCABULARY_WEIGHT * math.log(vocab_size / teacher.vocab_size) ** 2
    return [
        Candidate(
            shape=shape,
            vocab_size=vocab_size,
            format=format,
            parameters=config.parameters,
            loss_percent=loss + FORMATS[format],
            predicted=predict_figures(config, device, format).known(),
        )
        for format in formats
    ]


def ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """Best first: estimated loss in steps of `EQUAL_PERCENT`, then the time per token, then the size."""

    def key(candidate: Candidate) -> tuple[int, float, float]:
        return (
            round(candidate.loss_percent / EQUAL_PERCENT),
            candidate.predicted.get("tpot_p50_ms", math.inf),  # unknown in a very short context
            candidate.predicted["file_mb"],
        )

    return sorted(found, key=key)


def shape_loss_percent(full: Shape, shape: Shape) -> float:
    """Estimated rise of bits per byte, in percent, of a model cut to `shape` and recovered.

    Query heads that are cut take their key/value heads along; merged key/value heads count on their own.
    """
    kept, whole = asdict(shape), asdict(full)
    ratios = {name: kept[name] / whole[name] for name in _SHAPE_WEIGHTS}
    ratios["kv_heads"] = min(1.0, ratios["kv_heads"] / ratios["heads"])
    return sum(weight * math.log(ratios[name]) ** 2 for name, weight in _SHAPE_WEIGHTS.items())


def widened(candidate: Candidate, teacher: ModelConfig, device: Device) -> Candidate:
    """The candidate with the widest FFN that the limits allow, between the values of the grid."""
    best = candidate
    full = Shape.of(teacher)
    for intermediate in range(candidate.shape.intermediate + _WIDTH_STEP, full.intermediate, _WIDTH_STEP):
        shape = replace(candidate.shape, intermediate=intermediate)
        (wider,) = _candidates(teacher, device, shape, candidate.vocab_size, [candidate.format])
        if misses(wider.predicted, device):
            break
        best = wider
    return best


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


def _shapes(teacher: ModelConfig) -> Iterator[Shape]:
    """A grid over the teacher's dimensions, and the teacher's own shape."""
    full = Shape.of(teacher)
    widths, inner = _values(full.hidden, _WIDTH_STEP), _values(full.intermediate, _WIDTH_STEP)
    for layers in _values(full.layers, 1):
        for hidden in widths:
            for heads, kv_heads in _head_counts(full):
                for intermediate in inner:
                    yield Shape(hidden, intermediate, heads, kv_heads, layers, full.head_dim)


def _values(full: int, step: int) -> list[int]:
    """Multiples of `step` up to `full`, evenly spread, the largest of them `full` itself."""
    every = [*range(step, full, step), full]
    if len(every) <= _MOST_VALUES:
        return every
    return [every[round((number + 1) * len(every) / _MOST_VALUES) - 1] for number in range(_MOST_VALUES)]


def _head_counts(full: Shape) -> list[tuple[int, int]]:
    """(heads, kv_heads): whole groups cut, or key/value heads merged with all query heads kept."""
    per_group = full.heads // full.kv_heads
    groups = {(kv * per_group, kv) for kv in _values(full.kv_heads, 1)}
    merged = {(full.heads, kv) for kv in range(1, full.kv_heads) if full.kv_heads % kv == 0}
    return sorted(groups | merged)
