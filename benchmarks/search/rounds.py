"""The best model for a device: enumerate, predict, learn what things cost this teacher, try the best, choose.

1. Every shape x format x vocabulary is predicted on the device and held to its limits.
2. Rounding to each format, and a few cuts of one dimension recovered briefly, tell what they cost this teacher
   (`benchmarks.search.estimate`); the candidates are ranked by the sum.
3. The best estimate of each kind is recovered briefly, rounded and scored on text held out of the corpus. Each result
   corrects the estimates before the next is chosen. On the device itself candidates are timed before that.
4. The best two are recovered for longer and trained as rounded: successive halving (Jamieson and Talwalkar,
   https://arxiv.org/abs/1502.07943).
5. The best by what it is expected to lose at the end is finished as a recipe that can be run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from benchmarks.search.candidates import Candidate, grid_shapes, nearest_miss
from benchmarks.search.estimate import Recovered, cut_dimensions, probe_shapes
from benchmarks.search.formats import LOSSLESS_PERCENT
from benchmarks.search.search import FRONT, Search, Tried, nothing_fits
from benchmarks.search.stages import Effort
from benchmarks.search.trials import Trials
from compress.pruning.shapes import Shape
from sportsllm.console import log
from sportsllm.errors import GateError

_TIMED_IN_A_ROW = 12
_RIVAL_FACTOR = 1.5  # of the best one's loss; what is expected to lose more is not recovered for longer


def fits_whole(search: Search) -> bool:
    """Whether the whole teacher fits in a format that is as good as float32: nothing can be better."""
    whole = [one for one in search.inside() if one.shape == Shape.of(search.teacher)]
    return any(one.loss_percent <= LOSSLESS_PERCENT for one in whole)


def probe_cuts(search: Search, trials: Trials, effort: Effort, time_left: Callable[[], float]) -> None:
    """Recover a cut of each dimension that the front-runners cut, and learn what cuts cost."""
    full = Shape.of(search.teacher)
    wanted = {name for one in search.front(FRONT) for name in cut_dimensions(full, one.shape)}
    probes = [
        one for one in probe_shapes(full, list(grid_shapes(search.teacher))) if cut_dimensions(full, one) <= wanted
    ]
    if probes:
        log(f"learning what cuts cost: {len(probes)} recoveries on {effort.probe_tokens:,} tokens")
    tokens, seen = effort.probe_tokens, list[Recovered]()
    for shape in probes:
        if time_left() > 0:
            seen.append(Recovered(shape, tokens, trials.recovered(shape, tokens)))
    search.learn(seen)


def try_briefly(search: Search, trials: Trials, effort: Effort, time_left: Callable[[], float]) -> None:
    """Recover, round and score the best estimates, one of each kind, until the next can hardly be better.

    Args:
        search: learns from each.
        trials: measures them.
        effort: how many, and on how many tokens.
        time_left: seconds that trials may still take.

    Raises:
        GateError: even the nearest candidate misses a limit as timed.
    """
    longest = 0.0
    for _ in range(effort.finalists):
        candidate = _untried(search, trials)
        if candidate is None or not _may_win(search, candidate):
            break
        if search.tried and time_left() < longest:
            log(f"no time to try {candidate.name}; raise --minutes to compare more")
            break
        started = time.perf_counter()
        _try(search, trials, candidate, effort.search_tokens)
        longest = max(longest, time.perf_counter() - started)
    if not search.tried:
        raise GateError(nothing_fits(search))


def try_longer(search: Search, trials: Trials, effort: Effort, time_left: Callable[[], float]) -> None:
    """Recover the best two for longer, and train them as rounded, if the second may still win."""
    best, *others = search.ranking()
    rivals = [one for one in others if search.expected(one) <= _RIVAL_FACTOR * search.expected(best)][:1]
    for candidate in [best, *rivals] if rivals else []:
        if time_left() <= 0:
            log(f"no time to recover {candidate.name} for longer; raise --minutes")
            break
        _try(search, trials, candidate, effort.longer_tokens, longer=True)


def _untried(search: Search, trials: Trials) -> Candidate | None:
    """The best estimate of a kind that was not tried; on the device itself it keeps to the limits as timed."""
    by_name = {one.name: one for one in search.found}
    for _ in range(_TIMED_IN_A_ROW):
        kinds = {search.kind(by_name[name]) for name in search.tried}
        new = next((one for one in search.front() if search.kind(one) not in kinds), None)
        if new is None and search.decides and not search.inside():
            new, _missed = nearest_miss(search.found, search.device)  # the prediction may be too strict
            if new.name in search.timed:
                raise GateError(nothing_fits(search))
        if new is None or not search.decides or new.name in search.timed:
            return new
        search.record(new, trials.timed(new))
    return None


def _may_win(search: Search, candidate: Candidate) -> bool:
    """Whether a candidate would be best if its estimate were as far too high as its error allows."""
    best = min((search.expected(one) for one in search.ranking()), default=math.inf)
    shapes = search.estimates.shapes
    cut = shapes.percent(candidate.shape)
    return candidate.loss_percent - cut + cut / shapes.factor(candidate.shape) < best


def _try(search: Search, trials: Trials, candidate: Candidate, tokens: int, longer: bool = False) -> None:
    before = search.tried.get(candidate.name)
    foretold = before.foretold if before else candidate.loss_percent
    factor = before.factor if before else search.error_factor(candidate)
    recovered, rounded = trials.losses(candidate, tokens, trained=longer)
    search.tried[candidate.name] = Tried(tokens, recovered, rounded, foretold, factor, longer)
    if candidate.vocab_size != search.teacher.vocab_size:
        tuned = trials.vocabulary_loss(candidate.vocab_size, tuned=True)
        search.learn_vocabulary(candidate.vocab_size, tuned)
    if candidate.shape != Shape.of(search.teacher):
        cut = max(0.0, recovered - search.estimates.vocabularies[candidate.vocab_size])
        search.learn([Recovered(candidate.shape, tokens, cut)])
    log(f"{candidate.name}: {rounded:+.1f}% after {tokens:,} tokens, expected {search.expected(candidate):+.1f}%")
