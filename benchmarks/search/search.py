"""The best model for a device: enumerate, predict, measure, recover briefly, finish the winner, explain.

1. every shape x stored form is predicted on the device and held to its limits
2. the front-runners by estimated quality are cut and repaired; their loss picks the finalists. One more finalist is
   always the largest even cut, the plain way to the size, so that the choice is no worse than that
3. finalists are exported with random weights and timed here. Where here is the device, what was measured replaces
   the prediction, corrects those of the others, and the front is drawn again
4. finalists inside the limits are recovered briefly, packed and scored on text held out of the corpus
5. the winner is pruned, recovered, packed, exported and measured, as a recipe that can be run again
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.devices.load import is_this_machine
from benchmarks.devices.schema import LIMIT_UNITS, Device
from benchmarks.search.candidates import (
    EQUAL_PERCENT,
    Candidate,
    Form,
    candidates,
    cut_by_limit,
    even_cuts,
    misses,
    nearest_miss,
    ranked,
    widened,
)
from benchmarks.search.trials import Trials
from compress.pruning.shapes import Shape
from sportsllm.console import progress_bar, say
from sportsllm.errors import GateError
from sportsllm.models.config import ModelConfig

_FRONT_PER_FINALIST = 3
_ROUNDS_OF_TIMING = 3
_EVEN_CUTS_TIMED = 6


@dataclass
class Search:
    """What is known of the candidates so far.

    Attributes:
        teacher: the full model's config.
        device: whose limits count.
        decides: what is measured here decides, since this machine is the device.
        found: every candidate, best estimate first.
        measured: figures by the limits' names, of the candidates that were timed.
        quality: bits per byte of those that were recovered, held out of the corpus.
        even: names of the candidates with all widths cut alike, see `even_cuts`.
    """

    teacher: ModelConfig
    device: Device
    decides: bool
    found: list[Candidate]
    measured: dict[str, dict[str, float | None]] = field(default_factory=dict)
    quality: dict[str, float] = field(default_factory=dict)
    even: frozenset[str] = frozenset()
    _ratios: dict[Form | None, list[dict[str, float]]] = field(default_factory=dict)
    _corrections: dict[Form | None, dict[str, float]] = field(default_factory=dict)

    def figures(self, candidate: Candidate) -> Mapping[str, float | None]:
        """What a candidate costs: measured where that decides, else predicted, corrected by what was measured."""
        if not self.decides or not self.measured:
            return candidate.predicted
        if candidate.name in self.measured:
            return self.measured[candidate.name]
        ratios = self._corrections.get(candidate.form) or self._corrections[None]
        return {name: value * ratios.get(name, 1.0) for name, value in candidate.predicted.items()}

    def record(self, candidate: Candidate, figures: dict[str, float | None]) -> None:
        """Take in what was measured of a candidate; it corrects the prediction of those alike."""
        self.measured[candidate.name] = figures
        timed = known(figures)
        ratios = {name: timed[name] / value for name, value in candidate.predicted.items() if name in timed}
        for kind in (candidate.form, None):  # its own form's, and what other forms go by until they are measured
            seen = self._ratios.setdefault(kind, [])
            seen.append(ratios)
            self._corrections[kind] = {
                name: statistics.median(one[name] for one in seen if name in one) for name in ratios
            }

    def inside(self) -> list[Candidate]:
        """Those that miss no limit, best estimate first."""
        return [candidate for candidate in self.found if not misses(self.figures(candidate), self.device)]

    def front(self, count: int) -> list[Candidate]:
        """The best of each kind: depth, hidden size and form of the weights, cache and profile aside."""
        kinds: dict[tuple[Any, ...], Candidate] = {}
        for candidate in self.inside():
            shape, form = candidate.shape, replace(candidate.form, cache="fp32", profile="memory", loss_percent=0.0)
            kinds.setdefault((shape.layers, shape.hidden, candidate.vocab_size, form), candidate)
            if len(kinds) == count:
                break
        return list(kinds.values())

    def even_cut(self) -> Candidate | None:
        """The largest of those inside with all widths cut alike, of equal ones the best estimate."""
        even = [candidate for candidate in self.inside() if candidate.name in self.even]
        return max(even, key=lambda candidate: candidate.parameters, default=None)


def start_search(teacher: ModelConfig, device: Device, vocabularies: Sequence[int], on_device: bool) -> Search:
    """Enumerate and predict; widen the best so that they use up the budget.

    Raises:
        GateError: by prediction nothing fits, and nothing measured here can say otherwise.
    """
    decides = on_device or is_this_machine(device)
    found = {candidate.name: candidate for candidate in candidates(teacher, device, vocabularies)}
    even = {candidate.name: candidate for candidate in even_cuts(teacher, device, vocabularies)}
    search = Search(teacher, device, decides, ranked([*(even | found).values()]), even=frozenset(even))
    best = {candidate.name: candidate for candidate in (widened(one, teacher, device) for one in search.front(64))}
    search.found = ranked([*(best | even | found).values()])
    if not decides and not search.inside():
        raise GateError(nothing_fits(search))
    return search


def choose_finalists(search: Search, trials: Trials, count: int) -> list[Candidate]:
    """The finalists: best after the cut among the front-runners, the largest even cut, and inside the limits as timed.

    Raises:
        GateError: nothing fits.
    """
    finalists: list[Candidate] = []
    for _ in range(_ROUNDS_OF_TIMING):
        front = search.front(_FRONT_PER_FINALIST * count)
        if not front:
            # The prediction may be too strict: what comes nearest is timed before giving up.
            nearest, _missed = nearest_miss(search.found, search.device)
            if nearest.name in search.measured:
                raise GateError(nothing_fits(search))
            front = [nearest]
        finalists = _best_after_cut(front, trials, count)
        fresh = [candidate for candidate in finalists if candidate.name not in search.measured]
        with progress_bar("timed here", len(fresh)) as bar:
            for candidate in fresh:
                search.record(candidate, trials.probe(candidate))
                bar.advance(1, candidate.name)
        if not search.decides:
            break
        finalists = [one for one in finalists if not misses(search.measured[one.name], search.device)]
        if finalists and not fresh:
            break
    even = _timed_even_cut(search, trials)
    if even is not None and even not in finalists:
        finalists.append(even)
    if not finalists:
        raise GateError(nothing_fits(search))
    return finalists


def _timed_even_cut(search: Search, trials: Trials) -> Candidate | None:
    """The largest even cut that keeps to the limits as timed, or none after some that did not."""
    for _ in range(_EVEN_CUTS_TIMED):
        even = search.even_cut()
        if even is None or even.name in search.measured:
            return even
        search.record(even, trials.probe(even))
    even = search.even_cut()
    return even if even is not None and even.name in search.measured else None


def _best_after_cut(front: Sequence[Candidate], trials: Trials, count: int) -> list[Candidate]:
    """By loss after cut and repair, raised by what the form costs."""
    losses = {}
    with progress_bar("cut and repaired", len(front)) as bar:
        for candidate in front:
            loss = trials.loss_after_cut(candidate.shape, candidate.vocab_size)
            losses[candidate.name] = loss * (1 + candidate.form.loss_percent / 100)
            bar.advance(1, candidate.name)
    return sorted(front, key=lambda one: losses[one.name])[:count]


def compare_finalists(
    search: Search, trials: Trials, finalists: Sequence[Candidate], time_left: Callable[[], float]
) -> list[Candidate]:
    """Recover each briefly and rank them by bits per byte; of those as good as the best the fastest goes first.

    Args:
        search: gets the qualities.
        trials: makes them.
        finalists: what to compare, at least one.
        time_left: seconds that the comparison may still take; those that do not fit are left out, and named.
    """
    longest = 0.0
    for number, candidate in enumerate(finalists):
        if number and time_left() < longest:
            names = ", ".join(one.name for one in finalists[number:])
            say(f"no time for a brief recovery of {names}; raise --minutes to compare them too")
            break
        started = time.perf_counter()
        search.quality[candidate.name] = trials.quality(candidate)
        longest = max(longest, time.perf_counter() - started)
        say(f"{candidate.name}: {search.quality[candidate.name]:.4f} bits per byte after a brief recovery")
    compared = [one for one in finalists if one.name in search.quality]
    equal = equal_quality(search.quality[one.name] for one in compared)

    def place(one: Candidate) -> tuple[float, float, float]:
        figures = {**one.predicted, **known(search.figures(one))}
        quality = search.quality[one.name]
        return (0.0 if quality <= equal else quality, figures["tpot_p50_ms"], figures["file_mb"])

    return sorted(compared, key=place)


def equal_quality(bits_per_byte: Iterable[float]) -> float:
    """The most bits per byte that count as good as the best of these."""
    return min(bits_per_byte) * (1 + EQUAL_PERCENT / 100)


def nothing_fits(search: Search) -> str:
    """One line: the nearest miss, and which limits to relax to what."""
    corrected = [replace(one, predicted=known(search.figures(one))) for one in search.found]
    nearest, missed = nearest_miss(corrected, search.device)
    source = "measured" if nearest.name in search.measured and search.decides else "predicted"
    parts = []
    for name, share in sorted(missed.items(), key=lambda item: -item[1]):
        limit = getattr(search.device.limits, name)
        parts.append(f"{name} {limit * share:.4g} of {limit:g} {LIMIT_UNITS[name]}")
    relax = " and ".join(f"{name} to {_rounded_up(nearest.predicted[name])}" for name in missed)
    return (
        f"nothing fits {search.device.name}: of {len(search.found):,} candidates {nearest.name} comes nearest, with "
        f"{', '.join(parts)} ({source}); relax {relax}, or start from a smaller teacher"
    )


def known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """The figures that there are."""
    return {name: value for name, value in figures.items() if value is not None}


def _rounded_up(value: float) -> str:
    return f"{value * 1.005:.3g}"


def summary(search: Search, chosen: Candidate | None, shown: int = 40) -> dict[str, Any]:
    """The result's part about the search: candidates tried and the best of the others, and what each limit cut.

    Where what is measured here decides, predictions are those that measurements have corrected.
    """
    tried = {*search.measured, *search.quality}
    kept = [one for one in search.found if one.name in tried or one is chosen]
    kept += [one for one in search.front(shown) if one.name not in tried and one is not chosen]
    records = []
    for candidate in kept:
        measured = search.measured.get(candidate.name)
        expected = candidate.predicted if measured else known(search.figures(candidate))  # as it was held to the limits
        records.append(
            replace(candidate, predicted=expected).record()
            | {
                "measured": measured,
                "bits_per_byte": search.quality.get(candidate.name),
                "within": not misses(search.figures(candidate), search.device),
                "even": candidate.name in search.even,
            }
        )
    return {
        "device": search.device.name,
        "decided_by": "measurement" if search.decides else "prediction",
        "limits": {name: getattr(search.device.limits, name) for name in LIMIT_UNITS},
        "considered": len(search.found),
        "inside": len(search.inside()),
        "cut_by_limit": cut_by_limit(search.found, search.device),
        "candidates": records,
        "chosen": None if chosen is None else chosen.name,
        "whole_teacher": chosen is not None and chosen.shape == Shape.of(search.teacher),
    }
