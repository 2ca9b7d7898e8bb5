"""The time that `fit --minutes` leaves: a step starts only if it is expected to end in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sportsllm.console import log

_MARGIN = 1.2  # of an expected time: recoveries of one length differ


class Clock:
    """Measures steps by kind, and expects the next ones to take as long for their work."""

    def __init__(self, minutes: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start = now, now()
        self._limit = math.inf if minutes is None else 60 * minutes
        self._seen: dict[str, list[tuple[float, float]]] = {}

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._now() - self._start

    def left(self) -> float:
        """Seconds; infinite without a limit."""
        return self._limit - self.seconds

    @contextmanager
    def step(self, kind: str, work: float = 1.0) -> Iterator[None]:
        """Measure a step of some work, such as tokens."""
        started = self._now()
        yield
        self._seen.setdefault(kind, []).append((work, self._now() - started))

    def expected(self, kind: str, work: float = 1.0) -> float:
        """Seconds of a step: on the line through the shortest and the longest of its kind; 0 if none was measured."""
        seen = sorted(self._seen.get(kind, []))
        if not seen:
            return 0.0
        (least, least_s), (most, most_s) = seen[0], seen[-1]
        if most > least:
            slope = max(0.0, (most_s - least_s) / (most - least))
            return max(0.0, most_s + slope * (work - most))
        return max(seconds for _, seconds in seen) * max(1.0, work / most)

    def allows(self, what: str, kind: str, work: float = 1.0, keep: float = 0.0, share: float = 1.0) -> bool:
        """Whether a step is expected to end in time, with `keep` seconds left for what must follow; else says so.

        `share` of the whole time is the limit of steps that only prepare others.
        """
        needed = _MARGIN * (self.expected(kind, work) + keep)
        if self._limit * share - self.seconds > max(0.0, needed):
            return True
        left = max(0.0, self.left()) / 60
        log(f"no time for {what}: about {needed / 60:.1f} minutes, the finish included, and {left:.1f} are left")
        return False

    def affordable(self, kind: str, work: int, least: int) -> int:
        """The most work, between `least` and `work`, whose step is expected to end in time."""
        if self.left() == math.inf or _MARGIN * self.expected(kind, work) <= self.left():
            return work
        low, high = least, work
        while high - low > max(1, work // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if _MARGIN * self.expected(kind, middle) <= self.left() else (low, middle)
        return low
