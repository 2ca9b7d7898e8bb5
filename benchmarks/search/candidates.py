"""What could be made of a teacher for a device: shapes x stored forms, with what each is predicted to cost.

Quality is estimated here to decide what is tried first; it is measured before anything is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.devices.schema import LIMIT_UNITS, Device
from benchmarks.predict.latency import efficiency_of, predict_figures
from benchmarks.predict.model_size import Stored
from compress.pruning.shapes import Shape, even_shapes
from sportsllm.console import progress_bar
from sportsllm.models.config import ModelConfig

_EVEN_SHARES = [number / 40 for number in range(39, 0, -1)]
_MOST_VALUES = 6  # of a dimension: a grid of more has shapes whose difference nobody measures
_WIDTH_STEP = 32
EQUAL_PERCENT = 0.1
"""Losses this close, estimated or measured after a brief recovery, count as equal, and the faster model goes first."""

# Bits per byte lost, in percent, for each dimension: weight * ln(kept share) ** 2. Fitted to a teacher of 1M parameters
# cut and recovered on 5% of its tokens (docs/log.md): FFN 352 -> 192 +2.59%, 6 -> 4 layers +2.07%, both a little
# (256, 5) +1.36%, half +5.50%; these weights give 2.59, 2.07, 1.13 and 4.80. Heads from one brief run; hidden size and
# merged key/value heads are estimates.
_SHAPE_WEIGHTS = {"intermediate": 7.0, "layers": 12.6, "heads": 7.7, "hidden": 20.0, "kv_heads": 2.0}
# Of a vocabulary, the same; before fine-tuning a quarter fewer tokens cost 9% (docs/log.md), an estimate after it.
_VOCABULARY_WEIGHT = 40.0


@dataclass(frozen=True)
class Form:
    """How a model is stored: the weights' precision, the cache's, and the exporter's profile.

    `loss_percent` is what the weights cost in bits per byte, measured on a teacher of 1M parameters (docs/log.md).
    """

    precision: str
    block_size: int
    loss_percent: float
    per_row: bool = False
    cache: str = "fp32"
    profile: str = "memory"

    @property
    def name(self) -> str:
        """For people and directories, such as int4-b32-kv8."""
        weights = self.precision
        if self.per_row:
            weights += "-rows"
        elif self.precision.startswith("int"):
            weights += f"-b{self.block_size}"
        return weights + ("-kv8" if self.cache == "int8" else "") + ("-latency" if self.profile == "latency" else "")

    def stored(self) -> Stored:
        """For `benchmarks.predict.latency`."""
        return Stored(
            self.precision,
            self.block_size,
            cache=self.cache,
            per_row=self.per_row,
            latency=self.profile == "latency",
        )


_WEIGHTS = (
    Form("fp32", 32, 0.0),
    Form("int8", 32, 0.02),
    Form("int8", 32, 0.12, per_row=True),
    Form("int4", 32, 0.6),
    Form("int4", 128, 0.8),
)
_CACHE_LOSS_PERCENT = {"fp32": 0.0, "int8": 0.01}
_PROFILE_LOSS_PERCENT = {"memory": 0.0, "latency": 0.02}


def all_forms() -> list[Form]:
    """Every form that is considered."""
    return [
        replace(form, loss_percent=form.loss_percent + cache_loss + loss, cache=cache, profile=profile)
        for form in _WEIGHTS
        for cache, cache_loss in _CACHE_LOSS_PERCENT.items()
        for profile, loss in _PROFILE_LOSS_PERCENT.items()
        if profile == "memory" or (form.precision.startswith("int") and not form.per_row)
    ]


@dataclass(frozen=True)
class Candidate:
    """One model that could be made.

    Attributes:
        shape: its dimensions.
        vocab_size: its tokens.
        form: how it is stored.
        parameters: of it.
        loss_percent: estimated rise of bits per byte over the teacher.
        predicted: figures by the limits' names, `file_mb` and so on, on the device.
    """

    shape: Shape
    vocab_size: int
    form: Form
    parameters: int
    loss_percent: float
    predicted: Mapping[str, float]

    @property
    def name(self) -> str:
        """Of its own, for tables and directories."""
        return f"{shape_name(self.shape, self.vocab_size)}-{self.form.name}"

    def record(self) -> dict[str, Any]:
        """For the result's `candidates`."""
        return {
            "name": self.name,
            "shape": {**asdict(self.shape), "vocab_size": self.vocab_size},
            "precision": self.form.name,
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
    shapes = list(_shapes(teacher))
    forms, found = all_forms(), []
    with_efficiency = device.model_copy(update={"efficiency": efficiency_of(device)})  # worked out once, not each time
    with progress_bar("candidates", len(shapes) * len(vocabularies)) as bar:
        for vocab_size in vocabularies:
            for shape in shapes:
                found += _candidates(teacher, with_efficiency, shape, vocab_size, forms)
                bar.advance()
    return ranked(found)


def even_cuts(teacher: ModelConfig, device: Device, vocabularies: Sequence[int]) -> list[Candidate]:
    """The plain way to any size, which a search has to beat: all widths cut alike, as `prune --params` does it.

    Every fortieth of the parameters in every form.
    """
    shapes = dict.fromkeys(shape for shape in even_shapes(teacher, _EVEN_SHARES) if shape is not None)
    return [
        candidate
        for vocab_size in vocabularies
        for shape in shapes
        for candidate in _candidates(teacher, device, shape, vocab_size, all_forms())
    ]


def _candidates(
    teacher: ModelConfig, device: Device, shape: Shape, vocab_size: int, forms: Sequence[Form]
) -> list[Candidate]:
    config = shape.applied_to(teacher).with_changes(vocab_size=vocab_size)
    loss = shape_loss_percent(Shape.of(teacher), shape) + _vocabulary_loss(teacher, vocab_size)
    return [
        Candidate(
            shape=shape,
            vocab_size=vocab_size,
            form=form,
            parameters=config.parameters,
            loss_percent=loss + form.loss_percent,
            predicted=predict_figures(config, device, form.stored()),
        )
        for form in forms
    ]


def ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """Best first: estimated loss in steps of `EQUAL_PERCENT`, then the time per token, then the size."""

    def key(candidate: Candidate) -> tuple[int, float, float]:
        return (
            round(candidate.loss_percent / EQUAL_PERCENT),
            candidate.predicted["tpot_p50_ms"],
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


def _vocabulary_loss(teacher: ModelConfig, vocab_size: int) -> float:
    return _VOCABULARY_WEIGHT * math.log(vocab_size / teacher.vocab_size) ** 2


def misses(figures: Mapping[str, float | None], device: Device) -> dict[str, float]:
    """The limits that known figures miss, with value / limit."""
    known = ((name, figures.get(name)) for name in LIMIT_UNITS)
    shares = {name: value / getattr(device.limits, name) for name, value in known if value is not None}
    return {name: share for name, share in shares.items() if share > 1}


def widened(candidate: Candidate, teacher: ModelConfig, device: Device) -> Candidate:
    """The candidate with the widest FFN that its limits have room for; the grid is coarser than that."""
    best = candidate
    full = Shape.of(teacher)
    for intermediate in range(candidate.shape.intermediate + _WIDTH_STEP, full.intermediate, _WIDTH_STEP):
        shape = replace(candidate.shape, intermediate=intermediate)
        (wider,) = _candidates(teacher, device, shape, candidate.vocab_size, [candidate.form])
        if misses(wider.predicted, device):
            break
        best = wider
    return best


def cut_by_limit(found: Sequence[Candidate], device: Device) -> dict[str, dict[str, int]]:
    """For every limit how many candidates miss it (`misses`), and how many miss it alone (`alone`)."""
    counts = {name: {"misses": 0, "alone": 0} for name in LIMIT_UNITS}
    for candidate in found:
        missed = misses(candidate.predicted, device)
        for name in missed:
            counts[name]["misses"] += 1
            counts[name]["alone"] += len(missed) == 1
    return counts


def nearest_miss(found: Sequence[Candidate], device: Device) -> tuple[Candidate, dict[str, float]]:
    """The candidate whose worst limit is missed by least, and what it misses."""

    def worst(candidate: Candidate) -> float:
        return max(misses(candidate.predicted, device).values(), default=0.0)

    nearest = min(found, key=worst)
    return nearest, misses(nearest.predicted, device)


def pareto(rows: Sequence[Mapping[str, float]]) -> list[bool]:
    """Which rows no other row beats: at least as good in every figure (lower is better), better in one."""

    def beats(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
        return all(one[name] <= other[name] for name in one) and any(one[name] < other[name] for name in one)

    return [not any(beats(other, row) for other in rows) for row in rows]


def _shapes(teacher: ModelConfig) -> Iterator[Shape]:
    """A grid over the teacher's dimensions, and the teacher's own shape."""
    full = Shape.of(teacher)
    widths, inner = _values(full.hidden, _WIDTH_STEP), _values(full.intermediate, _WIDTH_STEP)
    for layers in _values(full.layers, 1):
        for hidden in widths:
            for heads, kv_heads in _head_counts(full):
                for intermediate in inner:
                    yield Shape(hidden, intermediate, heads, kv_heads, layers)


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
