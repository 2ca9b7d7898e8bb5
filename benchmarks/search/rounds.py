"""The best model for a device: enumerate, predict, learn what things cost this teacher, try the best, choose.

1. Every shape x format x vocabulary is predicted on the device and held to its limits.
2. Rounding to each format tells what it costs this teacher (`benchmarks.search.estimate`).
3. The plain cuts, of one dimension each and the even one, are recovered briefly, rounded and scored on held-out text.
   Cuts that no plain candidate has are recovered alone. The candidates are ranked by what that teaches.
4. The best estimate of each other kind follows. Each result corrects the estimates before the next is chosen. On the
   device itself candidates are timed before that.
5. The best two are recovered for longer and trained as rounded: successive halving (Jamieson and Talwalkar,
   https://arxiv.org/abs/1502.07943).
6. The best by what it is expected to lose at the end is finished as a recipe that can be run again.
"""

from __future__ import annotations

import math

from benchmarks.search.candidates import Candidate, grid_shapes, nearest_miss
from benchmarks.search.clock import Clock
from benchmarks.search.estimate import Recovered, cut_dimensions, probe_shapes
from benchmarks.search.search import FRONT, ROUNDING_FACTOR, Search, Tried, nothing_fits
from benchmarks.search.stages import Effort
from benchmarks.search.trials import Trials
from compress.pruning.shapes import Shape
from sportsllm.console import log
from sportsllm.errors import GateError

_TIMED_IN_A_ROW = 12
_RIVAL_FACTOR = 1.5  # of the best one's loss; what is expected to lose more is not recovered for longer


def fits_whole(search: Search) -> bool:
    """Whether the whole teacher fits unrounded: nothing can be better, only faster."""
    return any(one.shape == Shape.of(search.teacher) and not one.format.quantized for one in search.inside())


def try_plain(search: Search, trials: Trials, effort: Effort, clock: Clock) -> None:
    """Try the cuts of a single dimension and the even cut, and learn from them what cuts cost.

    A dimension that the best estimates cut, but which alone does not reach the budget, is recovered alone.
    """
    full, seen = Shape.of(search.teacher), set[str]()
    for candidate in search.plain():
        if not clock.allows(candidate.name, "trial", effort.search_tokens, finish_seconds(clock, effort)):
            return
        if search.decides and candidate.name not in search.timed:
            _time(search, trials, candidate)
            if not search.is_inside(candidate):
                log(f"{candidate.name}: outside the budget as timed")
                continue
        _try(search, trials, candidate, effort.search_tokens, clock)
        seen |= cut_dimensions(full, candidate.shape)
    wanted = {name for one in search.front(FRONT) for name in cut_dimensions(full, one.shape)} - seen
    tokens, found = effort.probe_tokens, list[Recovered]()
    for shape in probe_shapes(full, list(grid_shapes(search.teacher))):
        if not cut_dimensions(full, shape) <= wanted:
            continue
        if not clock.allows(f"a cut of {', '.join(wanted)}", "trial", tokens, finish_seconds(clock, effort)):
            break
        with clock.step("trial", tokens):
            found.append(Recovered(shape, tokens, trials.recovered(shape, tokens)))
    search.learn(found)


def try_briefly(search: Search, trials: Trials, effort: Effort, clock: Clock) -> None:
    """Recover, round and score the best estimates, one of each kind, while one of them may win.

    Raises:
        GateError: even the nearest candidate misses a limit as timed.
    """
    for _ in range(effort.finalists):
        candidate = _untried(search, trials)
        if candidate is None:
            break
        keep = finish_seconds(clock, effort)
        if search.tried and not clock.allows(candidate.name, "trial", effort.search_tokens, keep):
            break
        _try(search, trials, candidate, effort.search_tokens, clock)
    if not search.tried:
        raise GateError(nothing_fits(search))


def try_longer(search: Search, trials: Trials, effort: Effort, clock: Clock) -> None:
    """Recover the best two for longer, and train them as rounded, if the second may still win."""
    best, *others = search.ranking()
    rivals = [one for one in others if search.expected(one) <= _RIVAL_FACTOR * search.expected(best)][:1]
    tokens, pair = effort.longer_tokens, [best, *rivals] if rivals else []
    keep = finish_seconds(clock, effort) + clock.expected("trial", tokens) * (len(pair) - 1)
    if pair and clock.allows("longer recoveries of the best two", "trial", tokens, keep):  # one alone compares nothing
        for candidate in pair:
            _try(search, trials, candidate, tokens, clock, longer=True)


def finish_seconds(clock: Clock, effort: Effort) -> float:
    """What finishing a winner is expected to take, by the trials so far."""
    return clock.expected("trial", effort.tokens)


def _untried(search: Search, trials: Trials) -> Candidate | None:
    """The best estimate of a kind that was not tried and may win; on the device itself inside the limits as timed."""
    by_name = {one.name: one for one in search.found}
    for _ in range(_TIMED_IN_A_ROW):
        kinds = {search.kind(by_name[name]) for name in search.tried if name in by_name}
        left = (one for one in search.front() if search.kind(one) not in kinds)
        new = next((one for one in left if _may_win(search, one)), None)
        if new is None and search.decides and not search.inside():
            new, _missed = nearest_miss(search.found, search.device)  # the prediction may be too strict
            if new.name in search.timed:
                raise GateError(nothing_fits(search))
        if new is None or not search.decides or new.name in search.timed:
            return new
        _time(search, trials, new)
    return None


def _time(search: Search, trials: Trials, candidate: Candidate) -> None:
    figures, busy = trials.timed(candidate)
    search.record(candidate, figures, busy)


def _may_win(search: Search, candidate: Candidate) -> bool:
    """Whether a candidate would be best if its estimate were as far too high as its error allows."""
    best = min((search.expected(one) for one in search.ranking()), default=math.inf)
    shapes = search.estimates.shapes
    cut = shapes.percent(candidate.shape)
    return cut / shapes.factor(candidate.shape) + (candidate.loss_percent - cut) / ROUNDING_FACTOR < best


def _try(search: Search, trials: Trials, candidate: Candidate, tokens: int, clock: Clock, longer: bool = False) -> None:
    before = search.tried.get(candidate.name)
    foretold = before.foretold if before else candidate.loss_percent
    factor = before.factor if before else search.error_factor(candidate)
    cuts = candidate.shape != Shape.of(search.teacher)
    with clock.step("trial" if cuts else "rounding", tokens if cuts else 1.0):
        losses = trials.losses(candidate, tokens, trained=longer)
    recovered, rounded, interval = losses
    search.tried[candidate.name] = Tried(tokens, recovered, rounded, foretold, factor, longer, interval)
    if candidate.vocab_size != search.teacher.vocab_size:
        tuned = trials.vocabulary_loss(candidate.vocab_size, tuned=True)
        search.learn_vocabulary(candidate.vocab_size, tuned)
    if cuts:
        cut = max(0.0, recovered - search.estimates.vocabularies[candidate.vocab_size])
        search.learn([Recovered(candidate.shape, tokens, cut)])
    log(f"{candidate.name}: {rounded:+.1f}% after {tokens:,} tokens, expected {search.expected(candidate):+.1f}%")
