"""The best model for a device: enumerate, predict, measure, recover briefly, finish the winner, explain.

1. Every shape x format is predicted on the device and held to its limits.
2. The front-runners by estimated quality are cut and refitted; their loss picks the finalists. One more finalist is
   always the largest even cut, the plain way to the size, so that the choice is no worse than that.
3. Finalists are exported with random weights and timed here. If this machine is the device, measurements replace
   predictions, correct the predictions of the others, and the front is drawn again.
4. Finalists inside the limits are recovered briefly, packed and scored on text held out of the corpus.
5. The winner is pruned, recovered, packed, exported and measured, as a recipe that can be run again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.devices.limits import misses
from benchmarks.devices.recognise import is_this_machine
from benchmarks.devices.schema import Device
from benchmarks.labels import LIMITS
from benchmarks.predict.latency import limit_band
from benchmarks.predict.model_size import ModelFormat
from benchmarks.search.candidates import (
    EQUAL_PERCENT,
    FORMATS,
    Candidate,
    candidates,
    cut_by_limit,
    even_cuts,
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
    _ratios: dict[ModelFormat | None, list[dict[str, float]]] = field(default_factory=dict)
    _corrections: dict[ModelFormat | None, dict[str, float]] = field(default_factory=dict)

    def figures(self, candidate: Candidate) -> Mapping[str, float | None]:
        """A candidate's figures: measured where that decides, else predicted, corrected by what was measured."""
        if not self.decides or not self.measured:
            return candidate.predicted
        if candidate.name in self.measured:
            return self.measured[candidate.name]
        ratios = self._corrections.get(candidate.format) or self._corrections[None]
        return {name: value * ratios.get(name, 1.0) for name, value in candidate.predicted.items()}

    def record(self, candidate: Candidate, figures: dict[str, float | None]) -> None:
        """Store what was measured of a candidate; it corrects the predictions of its format."""
        self.measured[candidate.name] = figures
        timed = known(figures)
        ratios = {name: timed[name] / value for name, value in candidate.predicted.items() if name in timed}
        for kind in (candidate.format, None):  # None: for formats of which nothing was measured yet
            seen = self._ratios.setdefault(kind, [])
            seen.append(ratios)
            self._corrections[kind] = {
                name: statistics.median(one[name] for one in seen if name in one) for name in ratios
            }

    def inside(self) -> list[Candidate]:
        """Those that miss no limit, best estimate first."""
        return [candidate for candidate in self.found if not misses(self.figures(candidate), self.device)]

    def front(self, count: int) -> list[Candidate]:
        """The best of each kind: depth, hidden size and format of the weights, cache and profile aside."""
        kinds: dict[tuple[Any, ...], Candidate] = {}
        for candidate in self.inside():
            shape = candidate.shape
            kind = (shape.layers, shape.hidden, candidate.vocab_size, candidate.format.weights_name)
            kinds.setdefault(kind, candidate)
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
    """The finalists, all timed here: the best after the cut among the front-runners, and the largest even cut.

    Raises:
        GateError: nothing fits.
    """
    choose = choose_on_device if search.decides else choose_by_prediction
    finalists = choose(search, trials, count)
    even = _timed_even_cut(search, trials)
    if even is not None and even not in finalists:
        finalists.append(even)
    if not finalists:
        raise GateError(nothing_fits(search))
    return finalists


def choose_by_prediction(search: Search, trials: Trials, count: int) -> list[Candidate]:
    """The front-runners by prediction that are best after the cut; timing them is for the reader."""
    finalists = _best_after_cut(search.front(_FRONT_PER_FINALIST * count), trials, count)
    _time(finalists, search, trials)
    return finalists


def choose_on_device(search: Search, trials: Trials, count: int) -> list[Candidate]:
    """Finalists that keep to the limits as timed: times correct the predictions, and the front is drawn again.

    Raises:
        GateError: even the nearest candidate misses as timed.
    """
    finalists: list[Candidate] = []
    for _ in range(_ROUNDS_OF_TIMING):
        front = search.front(_FRONT_PER_FINALIST * count)
        if not front:  # the prediction may be too strict: time the nearest before giving up
            nearest, _missed = nearest_miss(search.found, search.device)
            if nearest.name in search.measured:
                raise GateError(nothing_fits(search))
            front = [nearest]
        chosen = _best_after_cut(front, trials, count)
        new = [candidate for candidate in chosen if candidate.name not in search.measured]
        _time(new, search, trials)
        finalists = [one for one in chosen if not misses(search.measured[one.name], search.device)]
        if finalists and not new:
            break
    return finalists


def _time(candidates: Sequence[Candidate], search: Search, trials: Trials) -> None:
    with progress_bar("timed here", len(candidates)) as bar:
        for candidate in candidates:
            search.record(candidate, trials.probe(candidate))
            bar.advance(1, candidate.name)


def _timed_even_cut(search: Search, trials: Trials) -> Candidate | None:
    """The largest even cut that keeps to the limits as timed; None after `_EVEN_CUTS_TIMED` that do not."""
    for _ in range(_EVEN_CUTS_TIMED):
        even = search.even_cut()
        if even is None or even.name in search.measured:
            return even
        search.record(even, trials.probe(even))
    even = search.even_cut()
    return even if even is not None and even.name in search.measured else None


def _best_after_cut(front: Sequence[Candidate], trials: Trials, count: int) -> list[Candidate]:
    """The `count` with the least loss after cut and refit, raised by what the format costs."""
    losses = {}
    with progress_bar("cut and refitted", len(front)) as bar:
        for candidate in front:
            loss = trials.loss_after_cut(candidate.shape, candidate.vocab_size)
            losses[candidate.name] = loss * (1 + FORMATS[candidate.format] / 100)
            bar.advance(1, candidate.name)
    return sorted(front, key=lambda one: losses[one.name])[:count]


def compare_finalists(
    search: Search, trials: Trials, finalists: Sequence[Candidate], time_left: Callable[[], float]
) -> list[Candidate]:
    """Recover each briefly and rank them by bits per byte. Of those as good as the best the fastest goes first.

    Args:
        search: gets the qualities.
        trials: measures them.
        finalists: at least one.
        time_left: seconds that the comparison may still take. Finalists that do not fit are left out, and named.
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
        return (0.0 if quality <= equal else quality, figures.get("tpot_p50_ms", math.inf), figures["file_mb"])

    return sorted(compared, key=place)


def equal_quality(bits_per_byte: Iterable[float]) -> float:
    """Bits per byte up to this count as good as the best of these."""
    return min(bits_per_byte) * (1 + EQUAL_PERCENT / 100)


def nothing_fits(search: Search) -> str:
    """One line: the nearest miss, and which limits to relax by how much."""
    corrected = [replace(one, predicted=known(search.figures(one))) for one in search.found]
    nearest, missed = nearest_miss(corrected, search.device)
    source = "measured" if nearest.name in search.measured and search.decides else "predicted"
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


def summary(search: Search, chosen: Candidate, shown: int = 40) -> dict[str, Any]:
    """The result's part about the search: candidates tried and the best of the others, and what each limit ruled out.

    If measurements decide, predictions are the corrected ones.
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
        "limits": {name: getattr(search.device.limits, name) for name in LIMITS},
        "considered": len(search.found),
        "inside": len(search.inside()),
        "cut_by_limit": cut_by_limit(search.found, search.device),
        "candidates": records,
        "band": limit_band(search.device),
        "chosen": chosen.name,
        "whole_teacher": chosen.shape == Shape.of(search.teacher),
    }
