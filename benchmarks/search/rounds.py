"""The search: try every plain way, then mixed cuts in the best format, then the best of them for longer.

1. For each way and format the largest model inside the budget is a candidate. One in a coarser format counts only if it
   is larger by 5% than those in finer ones. On the device itself candidates are timed, elsewhere predicted.
2. Each is recovered briefly, rounded, exported and scored on held-out text.
3. In the format of the best cut, the shape search of `prune` proposes mixed cuts, which are tried the same way.
4. The best few are recovered for longer, or trained as rounded if nothing is cut: successive halving (Jamieson and
   Talwalkar, https://arxiv.org/abs/1502.07943).

Predictions decide only what is inside the budget. What is better, measured losses decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product, zip_longest

from benchmarks.devices.load import is_this_machine
from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import known, misses
from benchmarks.labels import LIMITS
from benchmarks.model_size import ModelFormat
from benchmarks.predict.latency import limit_band, resolve
from benchmarks.search.candidates import (
    ANCHORS,
    WHOLE,
    Candidate,
    Size,
    can_be_cut,
    candidate_of,
    expert_counts,
    formats,
    ways,
)
from benchmarks.search.recipe import Effort, Target
from benchmarks.search.trials import BENCH_S, Clock, Losses, Trials
from compress.pruning.shapes import Shape, widest_shapes
from sportsllm.console import log
from sportsllm.errors import ArtifactError, DivergedError, GateError, SportsLLMError
from sportsllm.models.config import ModelConfig
from sportsllm.models.memory import usual_cache

EQUAL_PERCENT = 0.3
"""Losses this close count as equal, and the faster model goes first: a short text does not tell them apart."""
FAILURES = (ArtifactError, GateError, DivergedError)
"""Errors of one candidate; the search goes on without it."""
_TIMES = ("ttft_ms", "tpot_p50_ms", "tpot_p95_ms")
_DECAY = 0.3  # a cut's loss falls with recovery's tokens to this power: 0.25 to 0.35 on teachers of 1M parameters
_LARGER = 1.05  # times the parameters of finer formats, for a model in a coarser format
_TIMINGS = 3  # of ever smaller models of a way before it is given up
_MIXED, _VALUES, _MIXED_SHARE = 2, 6, 0.1  # mixed cuts to try, values of a dimension, share of the time to find them


@dataclass(frozen=True)
class Tried:
    """Losses of a trial after a recovery on `tokens`; `longer` if that was more than the brief one."""

    tokens: int
    losses: Losses
    longer: bool = False


@dataclass
class Search:
    """The candidates and what is known of them.

    Attributes:
        teacher: the full model's config.
        device: whose limits count.
        decides: measurements decide, since this machine is the device.
        formats: finest first.
        ways: sizes by the name of the way, largest first.
        tokens: of the winner's recovery.
        found: the candidates so far, by name.
        timed: figures by the limits' names, of the candidates that were timed.
        busy: names of those whose times are not used, since other programs ran meanwhile.
        tried: trials of those that were recovered and rounded, by name.
        failed: errors of those whose trial failed, by name; they are not tried again.
    """

    teacher: ModelConfig
    device: Device
    decides: bool
    formats: list[ModelFormat]
    ways: dict[str, list[Size]]
    tokens: int
    found: dict[str, Candidate] = field(default_factory=dict)
    timed: dict[str, dict[str, float | None]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    tried: dict[str, Tried] = field(default_factory=dict)
    failed: dict[str, SportsLLMError] = field(default_factory=dict)
    _ratios: list[tuple[ModelFormat, dict[str, float]]] = field(default_factory=list)

    def figures(self, candidate: Candidate) -> Mapping[str, float | None]:
        """A candidate's figures: measured if that decides, else predicted and corrected by measurements of others."""
        if not self.decides or not self._ratios:
            return candidate.predicted
        if candidate.name in self.timed:
            return {**candidate.predicted, **known(self.timed[candidate.name])}
        alike = [ratios for format, ratios in self._ratios if format == candidate.format]
        seen = alike or [ratios for _, ratios in self._ratios]
        found = {}
        for name, value in candidate.predicted.items():
            ratios = [one[name] for one in seen if name in one]
            found[name] = value * (statistics.median(ratios) if ratios else 1.0)
        return found

    def record(self, candidate: Candidate, figures: Mapping[str, float | None], busy: bool = False) -> None:
        """Store a candidate's measured figures; they correct the predictions of its format.

        Times that were measured while other programs ran (`busy`) are replaced by predictions.
        """
        if busy:
            self.busy.add(candidate.name)
            figures = {name: None if name in _TIMES else value for name, value in figures.items()}
        self.found[candidate.name], self.timed[candidate.name] = candidate, dict(figures)
        measured = known(figures)
        ratios = {name: measured[name] / value for name, value in candidate.predicted.items() if name in measured}
        self._ratios.append((candidate.format, ratios))

    def missed(self, candidate: Candidate, sure: bool) -> dict[str, float]:
        """The limits that a candidate misses; with `sure`, those that its prediction band reaches beyond."""
        figures = self.figures(candidate)
        if sure and not self.decides:
            band = limit_band(self.device)
            figures = {name: value and value * band.get(name, 1.0) for name, value in figures.items()}
        return misses(figures, self.device)

    def largest(self, way: str, format: ModelFormat, sure: bool) -> Candidate | None:
        """The largest model of a way that keeps to the limits in a format, with those that the next larger misses."""
        bound_by: tuple[str, ...] = ()
        for size in self.ways[way]:
            candidate = candidate_of(way, size, format, self.teacher, self.device)
            if not (missed := self.missed(candidate, sure)):
                return replace(candidate, bound_by=bound_by)
            bound_by = tuple(missed)
        return None

    def plain(self, sure: bool) -> list[Candidate]:
        """The largest models of each way within the limits: `ANCHORS` first, the ways in turns, finest formats last.

        A coarser format counts only if its model is larger than in finer formats. The teacher is cut only in formats
        in which the whole teacher does not fit.
        """
        whole = [one for format in self.formats if (one := self.largest(WHOLE, format, sure))]
        fitting = {one.format for one in whole}
        whole = [one for one in whole if one.format.cache != "int8" or self._float_cache(one.format) not in fitting]
        lines: tuple[list[list[Candidate]], list[list[Candidate]]] = [], []
        for way in self.ways:
            line, most = list[Candidate](), 0
            for format in self.formats if way != WHOLE else ():
                if not format.quantized or {format, self._float_cache(format)} & fitting:
                    continue
                one = self.largest(way, format, sure)
                if one is not None and one.parameters > _LARGER * most:
                    line, most = [one, *line], one.parameters
            lines[way not in ANCHORS].append(line)
        turns = chain(zip_longest(*lines[0]), zip_longest(*lines[1]))
        return whole + [one for turn in turns for one in turn if one is not None]

    def _float_cache(self, format: ModelFormat) -> ModelFormat:
        cache = usual_cache(self.teacher, format.quantized) if format.cache == "int8" else format.cache
        return replace(format, cache=cache)

    def nearest(self) -> tuple[Candidate, dict[str, float]]:
        """The candidate whose worst limit is missed by least, and the limits that it misses."""
        every = (
            candidate_of(way, size, format, self.teacher, self.device)
            for (way, sizes), format in product(self.ways.items(), self.formats)
            for size in sizes
        )
        corrected = (replace(one, predicted=known(self.figures(one))) for one in every)
        nearest = min(corrected, key=lambda one: max(misses(one.predicted, self.device).values(), default=0.0))
        return nearest, misses(nearest.predicted, self.device)

    def mixed(self, format: ModelFormat, vocab_size: int, sure: bool) -> list[Shape]:
        """Shapes of several cut dimensions that keep to the limits in a format, each with the widest FFN that does."""

        def fits(shape: Shape) -> bool:
            if not can_be_cut(shape, self.teacher):
                return False
            size = Size(shape, vocab_size)
            return not self.missed(candidate_of("mixed", size, format, self.teacher, self.device), sure)

        counts = expert_counts(self.teacher)
        return list(widest_shapes(self.teacher, fits, experts=counts if counts != [0] else (), most=_VALUES))

    def small_enough(self) -> dict[str, Tried]:
        """The tried candidates whose exported files, if there are any, keep to the limit."""
        limit = self.device.limits.file_mb
        return {name: tried for name, tried in self.tried.items() if (tried.losses.file_mb or 0.0) <= limit}

    def expected(self, candidate: Candidate) -> float:
        """Loss at the end of the recovery, in percent: the part of a cut falls with further tokens."""
        tried, whole = self.tried[candidate.name], Shape.of(self.teacher)
        cut = 0.0 if candidate.size.shape == whole else max(0.0, tried.losses.recovered)
        return tried.losses.rounded - cut + cut * math.pow(tried.tokens / self.tokens, _DECAY)

    def ranking(self) -> list[Candidate]:
        """The tried candidates: those recovered for longer first, then by expected loss, of equal ones the fastest.

        Candidates whose exported files exceed the limit are left out, unless all do.
        """
        compared = [self.found[name] for name in self.small_enough() or self.tried]
        equal = min(map(self.expected, compared), default=0.0) + EQUAL_PERCENT

        def place(one: Candidate) -> tuple[bool, float, int, float, float]:
            figures, loss = {**one.predicted, **known(self.figures(one))}, self.expected(one)
            time_per_token = figures.get("tpot_p50_ms", math.inf)  # unknown in a very short context
            rank = 0.0 if loss <= equal else loss
            return not self.tried[one.name].longer, rank, len(one.closed_to), time_per_token, figures["file_mb"]

        return sorted(compared, key=place)


def start_search(
    teacher: ModelConfig, device: Device, target: Target, tokens: int, vocabularies: list[int] | None = None
) -> Search:
    """Enumerate what the search may try.

    Raises:
        GateError: by prediction nothing fits, and nothing is measured here.
    """
    decides = target.on_device or is_this_machine(device, target.processor)
    device = device.model_copy(update={"coefficients": resolve(device)})  # once, not for each candidate
    kinds = formats(teacher, target.processor)
    search = Search(teacher, device, decides, kinds, ways(teacher, vocabularies or []), tokens)
    if not decides and not search.plain(sure=False):
        raise GateError(nothing_fits(search))
    return search


def run_rounds(search: Search, trials: Trials, effort: Effort, clock: Clock) -> list[Candidate]:
    """Try candidates as the module says; returns them best first.

    Raises:
        GateError: even the nearest candidate misses a limit as timed.
        SportsLLMError: that of the first trial, if all failed.
    """
    for sure in (False,) if search.decides else (True, False):
        try_plain(search, trials, effort, clock, sure)
        if search.tried and not _good_enough(search):
            try_mixed(search, trials, effort, clock, sure)
        best = min((search.expected(search.found[name]) for name in search.small_enough()), default=math.inf)
        if best <= search.device.limits.quality_loss_percent:
            break  # what is surely inside is good enough: nothing else need be tried
    try_longer(search, trials, effort, clock)
    if not search.tried:
        raise next(iter(search.failed.values()), GateError(nothing_fits(search)))
    return search.ranking()


def try_plain(search: Search, trials: Trials, effort: Effort, clock: Clock, sure: bool = False) -> None:
    """Try the largest model of each way and format, the whole teacher first.

    If that loses nothing, only a faster format that loses nothing either can be better.
    """
    if search.decides and not search.plain(sure):  # the prediction may be too strict
        nearest, _ = search.nearest()
        search.record(nearest, *trials.timed(nearest))
    for planned in search.plain(sure):
        worst = max((tried.losses.rounded for tried in search.tried.values()), default=0.0)
        if _good_enough(search) and (planned.way != WHOLE or worst > EQUAL_PERCENT):
            return
        if planned.name in (seen := {*search.tried, *search.failed}):
            continue
        if search.tried and not _has_time(planned, effort, clock):
            return
        candidate = _as_timed(search, trials, planned, sure)
        if candidate is None or candidate.name in seen:
            continue
        _try(search, trials, candidate, effort.search_tokens, clock)


def try_mixed(search: Search, trials: Trials, effort: Effort, clock: Clock, sure: bool = False) -> None:
    """Try the best shapes of `prune`'s search right after the cut, in the format of the best cut so far."""
    best = next((one for one in search.ranking() if one.way != WHOLE), None)
    if best is None:
        return
    shapes = search.mixed(best.format, best.size.vocab_size, sure)
    if not shapes or not clock.allows("mixed cuts", "trial", effort.search_tokens, _finish_seconds(clock, effort)):
        return
    for shape in trials.best_right_after_the_cut(shapes, _MIXED, _MIXED_SHARE * clock.left()):
        size = Size(shape, best.size.vocab_size)
        candidate = candidate_of("mixed", size, best.format, search.teacher, search.device)
        if search.decides and candidate.name not in search.timed:
            search.record(candidate, *trials.timed(candidate))
        if candidate.name in {*search.tried, *search.failed} or search.missed(candidate, sure):
            continue
        if not _has_time(candidate, effort, clock):
            return
        _try(search, trials, candidate, effort.search_tokens, clock)


def try_longer(search: Search, trials: Trials, effort: Effort, clock: Clock) -> None:
    """Recover the best for longer, or train them as rounded if nothing is cut, if there is more than one.

    The best export so far is one of them, however much more tokens are expected to gain for others.
    """
    best, tried = search.ranking()[: effort.finalists], search.small_enough() or search.tried
    if len(best) < 2 or _good_enough(search):
        return
    first = search.found[min(tried, key=lambda name: tried[name].losses.rounded)]
    if first not in best:
        best[-1] = first
    for candidate in best:
        keep = _finish_seconds(clock, effort)
        if not clock.allows(f"{candidate.name} on more tokens", "trial", effort.longer_tokens, keep):
            return
        _try(search, trials, candidate, effort.longer_tokens, clock, longer=True)


def nothing_fits(search: Search) -> str:
    """One line: the nearest miss, and which limits to relax by how much."""
    nearest, missed = search.nearest()
    source = "measured" if nearest.name in search.timed and search.decides else "predicted"
    parts = []
    for name, share in sorted(missed.items(), key=lambda item: -item[1]):
        limit = getattr(search.device.limits, name)
        parts.append(f"{name} {_digits(limit * share, 4)} of {limit:g} {LIMITS[name].unit}")
    relax = " and ".join(f"{name} to {_digits(1.005 * nearest.predicted[name], 3)}" for name in missed)
    return (
        f"nothing fits {search.device.name}: {nearest.name} comes nearest, with "
        f"{', '.join(parts)} ({source}); relax {relax}, or start from a smaller teacher"
    )


def _digits(value: float, count: int) -> str:
    """Significant digits without an exponent, as `--limit` takes them."""
    return f"{float(f'{value:.{count}g}'):.10g}"


def _good_enough(search: Search) -> bool:
    """Whether the whole teacher's loss counts as none, so that no cut can be better."""
    whole = [name for name in search.small_enough() if search.found[name].way == WHOLE]
    return any(search.tried[name].losses.rounded <= EQUAL_PERCENT for name in whole)


def _finish_seconds(clock: Clock, effort: Effort) -> float:
    """Expected seconds to finish a winner, by the trials so far."""
    return clock.expected("trial", effort.tokens) + BENCH_S


def _has_time(candidate: Candidate, effort: Effort, clock: Clock) -> bool:
    kind, work = ("rounding", 1) if candidate.way == WHOLE else ("trial", effort.search_tokens)
    return clock.allows(candidate.name, kind, work, _finish_seconds(clock, effort))


def _as_timed(search: Search, trials: Trials, planned: Candidate, sure: bool) -> Candidate | None:
    """The largest model of a way and format inside the limits; on the device itself as timed."""
    for _ in range(_TIMINGS):
        candidate = search.largest(planned.way, planned.format, sure)
        if candidate is None or not search.decides or candidate.name in search.timed:
            return candidate
        search.record(candidate, *trials.timed(candidate))
    log(f"{planned.way} in {planned.format.name}: outside the budget as timed")
    return None


def _try(search: Search, trials: Trials, candidate: Candidate, tokens: int, clock: Clock, longer: bool = False) -> None:
    cuts = candidate.way != WHOLE
    log(f"trying {candidate.name} ({candidate.way})" + f", recovered on {tokens:,} tokens" * cuts)
    try:
        with clock.step("trial" if cuts else "rounding", tokens if cuts else 1.0):
            losses = trials.losses(candidate, tokens, trained=longer)
    except FAILURES as error:
        log(f"{candidate.name}: the trial failed, and the search goes on without it: {error}")
        search.failed[candidate.name] = error
        search.tried.pop(candidate.name, None)  # a shorter trial of it may have succeeded
        return
    search.found.setdefault(candidate.name, candidate)
    search.tried[candidate.name] = Tried(tokens, losses, longer)
    later = f" now, {search.expected(candidate):+.1f}% expected after {search.tokens:,} tokens" * cuts
    log(f"{candidate.name}: {losses.rounded:+.1f}% bits per byte{later}")
