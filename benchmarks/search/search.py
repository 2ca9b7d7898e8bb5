"""What a search knows: every candidate, what was measured of some, and what all are expected to lose."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.devices.load import is_this_machine
from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import misses
from benchmarks.labels import LIMITS
from benchmarks.predict.latency import limit_band
from benchmarks.predict.model_size import ModelFormat
from benchmarks.search.candidates import (
    EQUAL_PERCENT,
    Candidate,
    Estimates,
    candidates,
    nearest_miss,
    plain_candidates,
    ranked,
    widened,
)
from benchmarks.search.estimate import Recovered, ShapeLosses
from benchmarks.search.formats import on_gpu
from benchmarks.search.stages import Target
from compress.pruning.shapes import Shape
from sportsllm.errors import GateError
from sportsllm.models.config import ModelConfig

FRONT = 24
"""Kinds that are widened, and whose cut dimensions are probed."""
ROUNDING_FACTOR = 1.4
"""How far off the cost of rounding may be, either way: calibration helps some formats more than others."""
_TIMES = ("ttft_ms", "tpot_p50_ms", "tpot_p95_ms")


@dataclass(frozen=True)
class Tried:
    """What a trial measured: the loss in percent, recovered on `tokens`, and the same as rounded.

    `foretold` and `factor` are the estimate of the loss at the end before the trial, and its error either way;
    `interval` is the 95% interval of `rounded` over documents, None for too few of them.
    """

    tokens: int
    recovered: float
    rounded: float
    foretold: float
    factor: float
    longer: bool = False
    interval: tuple[float, float] | None = None


@dataclass
class Search:
    """What is known of the candidates so far.

    Attributes:
        teacher: the full model's config.
        device: whose limits count.
        decides: what is measured here decides, since this machine is the device.
        estimates: of losses.
        found: every candidate, best estimate first.
        tokens: of the winner's recovery.
        seen: cuts that were recovered.
        timed: figures by the limits' names, of the candidates that were timed.
        tried: what was measured of those that were recovered and rounded, by name.
        busy: names of those whose times were measured beside other programs and are not used.
    """

    teacher: ModelConfig
    device: Device
    decides: bool
    estimates: Estimates
    found: list[Candidate]
    tokens: int = 1_000_000
    seen: list[Recovered] = field(default_factory=list)
    timed: dict[str, dict[str, float | None]] = field(default_factory=dict)
    tried: dict[str, Tried] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    _sure: bool = False
    _ratios: dict[ModelFormat | None, list[dict[str, float]]] = field(default_factory=dict)
    _corrections: dict[ModelFormat | None, dict[str, float]] = field(default_factory=dict)

    def figures(self, candidate: Candidate) -> Mapping[str, float | None]:
        """A candidate's figures: measured where that decides, else predicted, corrected by what was measured."""
        if not self.decides or not self.timed:
            return candidate.predicted
        if candidate.name in self.timed:
            return {**candidate.predicted, **known(self.timed[candidate.name])}
        ratios = self._corrections.get(candidate.format) or self._corrections[None]
        return {name: value * ratios.get(name, 1.0) for name, value in candidate.predicted.items()}

    def record(self, candidate: Candidate, figures: Mapping[str, float | None], busy: bool = False) -> None:
        """Store a candidate's measured figures; they correct the predictions of its format.

        Times that were measured beside other programs (`busy`) are left out: predictions stand for them.
        """
        if busy:
            self.busy.add(candidate.name)
            figures = {name: None if name in _TIMES else value for name, value in figures.items()}
        self.timed[candidate.name] = dict(figures)
        measured = known(figures)
        ratios = {name: measured[name] / value for name, value in candidate.predicted.items() if name in measured}
        for kind in (candidate.format, None):  # None: for formats of which nothing was measured yet
            seen = self._ratios.setdefault(kind, [])
            seen.append(ratios)
            self._corrections[kind] = {
                name: statistics.median(one[name] for one in seen if name in one) for name in ratios
            }

    def learn(self, recovered: Sequence[Recovered]) -> None:
        """Correct all estimates by cuts that were recovered, and rank the candidates again.

        The best of each kind with the widest FFN that fits, between the values of the grid, are among them.
        """
        self.seen += recovered
        shapes = ShapeLosses(Shape.of(self.teacher), self.tokens, self.seen)
        self.estimates = replace(self.estimates, shapes=shapes)
        loss = self.estimates.loss_percent
        self.found = ranked(
            replace(one, loss_percent=loss(one.shape, one.vocab_size, one.format)) for one in self.found
        )
        self._sure = self._prefers_sure()
        wider = [widened(one, self.teacher, self.device, self.estimates, self.is_inside) for one in self.front(FRONT)]
        self.found = ranked({one.name: one for one in [*self.found, *wider]}.values())

    def plain(self) -> list[Candidate]:
        """The best cut of each dimension alone and the even cut, inside the budget; see `plain_candidates`."""
        found = plain_candidates(self.teacher, self.device, self.estimates, self.is_inside)
        self.found = ranked({one.name: one for one in [*self.found, *found]}.values())
        return found

    def _prefers_sure(self) -> bool:
        """Whether candidates inside with the whole band of their predictions are enough to keep to the quality limit.

        Nothing is timed on another device: there a candidate whose limit lies inside the band is uncertain.
        """
        if self.decides:
            return False
        best = min((one.loss_percent for one in self.found if self.keeps_to_limits(one, sure=True)), default=math.inf)
        return best <= self.device.limits.quality_loss_percent

    def keeps_to_limits(self, candidate: Candidate, sure: bool) -> bool:
        """Whether its figures miss no limit; `sure` asks for the whole band of predictions."""
        figures = self.figures(candidate)
        if sure:
            figures = {name: value and value * self.band.get(name, 1.0) for name, value in figures.items()}
        return not misses(figures, self.device)

    @functools.cached_property
    def band(self) -> dict[str, float]:
        """Factors, either way, that hold 90% of predictions, by the limits' names."""
        return limit_band(self.device)

    def is_inside(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps to the limits: with the band of its predictions, if enough others do."""
        return self.keeps_to_limits(candidate, self._sure)

    @property
    def uncertain(self) -> bool:
        """Whether candidates inside may turn out outside, their limits being inside the band of the predictions."""
        return not self.decides and not self._sure

    def learn_vocabulary(self, vocab_size: int, loss_percent: float) -> None:
        """Replace the estimate of what a smaller vocabulary costs by that of the fine-tuned teacher."""
        known_losses = {**self.estimates.vocabularies, vocab_size: max(0.0, loss_percent)}
        self.estimates = replace(self.estimates, vocabularies=known_losses)
        self.learn([])

    def inside(self) -> list[Candidate]:
        """Those that keep to the limits, best estimate first."""
        return list(filter(self.is_inside, self.found))

    def front(self, count: int | None = None) -> list[Candidate]:
        """The best inside of each kind, see `kind`; all kinds if None."""
        kinds: dict[tuple[Any, ...], Candidate] = {}
        for candidate in filter(self.is_inside, self.found):
            kinds.setdefault(self.kind(candidate), candidate)
            if len(kinds) == count:
                break
        return list(kinds.values())

    def kind(self, candidate: Candidate) -> tuple[Any, ...]:
        """Depth, hidden size, experts, whether anything is cut, vocabulary, bits: those alike in these are rivals."""
        shape, whole = candidate.shape, candidate.shape == Shape.of(self.teacher)
        return shape.layers, shape.hidden, shape.experts, whole, candidate.vocab_size, candidate.format.layer_format

    def expected(self, candidate: Candidate) -> float:
        """Loss at the end of the recovery, in percent: from the trial, if there was one, else estimated."""
        tried = self.tried.get(candidate.name)
        if tried is None:
            return candidate.loss_percent
        fixed = self.estimates.vocabularies[candidate.vocab_size]
        cut = max(0.0, tried.recovered - fixed)
        left = cut * self.estimates.shapes.grown(tried.tokens) if candidate.shape != Shape.of(self.teacher) else cut
        return fixed + left + tried.rounded - tried.recovered

    def error_factor(self, candidate: Candidate) -> float:
        """How far off a candidate's estimated loss may be, either way."""
        if candidate.loss_percent <= 0:
            return 1.0
        cut = self.estimates.shapes.percent(candidate.shape)
        high = cut * self.estimates.shapes.factor(candidate.shape)
        return (high + (candidate.loss_percent - cut) * ROUNDING_FACTOR) / candidate.loss_percent

    def ranking(self) -> list[Candidate]:
        """Those that were tried: the ones recovered for longer first, then by expected loss; equal ones the fastest."""
        compared = [one for one in self.found if one.name in self.tried]
        equal = min((self.expected(one) for one in compared), default=0.0) + EQUAL_PERCENT

        def place(one: Candidate) -> tuple[bool, float, int, float, float]:
            figures, loss = {**one.predicted, **known(self.figures(one))}, self.expected(one)
            time_per_token = figures.get("tpot_p50_ms", math.inf)
            rank = 0.0 if loss <= equal else loss
            return not self.tried[one.name].longer, rank, len(one.closed_to), time_per_token, figures["file_mb"]

        return sorted(compared, key=place)


def start_search(teacher: ModelConfig, device: Device, estimates: Estimates, target: Target, tokens: int) -> Search:
    """Enumerate and predict; widen the best so that they use up the budget.

    Raises:
        GateError: by prediction nothing fits, and nothing measured here can say otherwise.
    """
    decides = target.on_device or is_this_machine(device, target.processor)
    if target.processor == "gpu":
        estimates = replace(estimates, formats=on_gpu(estimates.formats))
    search = Search(teacher, device, decides, estimates, candidates(teacher, device, estimates), tokens)
    search.learn([])
    if not decides and not search.inside():
        raise GateError(nothing_fits(search))
    return search


def nothing_fits(search: Search) -> str:
    """One line: the nearest miss, and which limits to relax by how much."""
    corrected = [replace(one, predicted=known(search.figures(one))) for one in search.found]
    nearest, missed = nearest_miss(corrected, search.device)
    source = "measured" if nearest.name in search.timed and search.decides else "predicted"
    parts = []
    for name, share in sorted(missed.items(), key=lambda item: -item[1]):
        limit = getattr(search.device.limits, name)
        parts.append(f"{name} {limit * share:.4g} of {limit:g} {LIMITS[name].unit}")
    relax = " and ".join(f"{name} to {_rounded_up(nearest.predicted[name])}" for name in missed)
    return (
        f"nothing fits {search.device.name}: of {len(search.found):,} candidates {nearest.name} comes nearest, with "
        f"{', '.join(parts)} ({source}); relax {relax}, or start from a smaller teacher"
    )


def known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """The figures that are not None."""
    return {name: value for name, value in figures.items() if value is not None}


def _rounded_up(value: float) -> str:
    return f"{value * 1.005:.3g}"
