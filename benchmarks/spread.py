"""Order statistics and spreads in plain Python, so that measuring needs no numerical library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISY_WIDTH = 0.05
"""An interval wider than this share of its median is called noisy."""

CONFIDENCE = 0.90
"""An interval of fewer rounds than give this is no ground for calling a figure steady: five at least."""

PERCENTILES = (50, 90, 95, 99)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the samples lie, with linear interpolation between neighbours.

    With the samples sorted as x[0..n-1] and h = (n - 1) * percent / 100:
    x[floor(h)] + (h - floor(h)) * (x[floor(h) + 1] - x[floor(h)]), numpy's default (Hyndman and Fan's type 7).

    Args:
        samples: in any order and unit; not empty.
        percent: from 0 to 100.

    Raises:
        ValueError: there are no samples, or `percent` is out of range.
    """
    if not samples:
        raise ValueError("a percentile needs at least one sample")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must be from 0 to 100")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    lower = int(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """`percentile` at 50, 90, 95 and 99, keyed "p50" and so on."""
    return {f"p{percent}": percentile(samples, percent) for percent in PERCENTILES}


def quiet_quarter(seconds: Sequence[float]) -> float:
    """The lower quartile of what the same thing took in several rounds, for a machine that others may disturb.

    What disturbs only ever makes it slower, and the median has that in it. The lowest is luck where caches are shared
    with other machines: 0.64 ms once and 0.71 to 0.76 in the eight rounds after it is none that a second run finds.
    """
    return percentile(seconds, 25)


@dataclass(frozen=True)
class Spread:
    """How far a figure moved when the same thing was measured again in fresh processes (an A/A comparison).

    `low` to `high` is the interval that holds the median of all such processes with probability `confidence` (see
    `rank`), `width` its length as a share of the rounds' median. `repeat_difference` is what comparing the thing with
    itself would have shown: the rounds dealt out in turn to two sides, the distance of the sides' medians as a share
    of the whole median; None for a single round. `noisy` is True where either exceeds `NOISY_WIDTH`, and None where
    neither does but there are too few rounds to say.
    """

    low: float
    high: float
    width: float
    noisy: bool | None
    rounds: int
    confidence: float
    repeat_difference: float | None


def coverage(count: int, rank: int) -> float:
    """Probability that the median lies between the rank-th smallest and the rank-th largest of `count` samples.

    1 - 2 * sum over i < rank of C(count, i) / 2**count, whatever the distribution, for independent samples
    (David and Nagaraja, Order Statistics, 3rd edition, 7.1).
    """
    return 1.0 - 2.0 * sum(math.comb(count, i) for i in range(rank)) / float(2**count)


def rank(count: int) -> int:
    """The largest rank with a coverage of at least `CONFIDENCE`, 1 where there is none.

    Up to 7 samples the interval is from the smallest to the largest; of 8 the outermost on each side may be outliers.
    """
    good = [rank for rank in range(1, count // 2 + 1) if coverage(count, rank) >= CONFIDENCE]
    return max(good, default=1)


def spread(rounds: Sequence[float]) -> Spread:
    """The interval that the rounds' figures cover.

    Raises:
        ValueError: there are no rounds.
    """
    if not rounds:
        raise ValueError("a spread needs at least one round")
    ordered, count = sorted(rounds), len(rounds)
    place, middle = rank(count), statistics.median(rounds)
    low, high = ordered[place - 1], ordered[-place]
    width = (high - low) / middle if middle > 0 else 0.0
    apart = None
    if count > 1:
        apart = abs(statistics.median(rounds[::2]) - statistics.median(rounds[1::2]))
        apart = apart / middle if middle > 0 else 0.0
    confidence = max(0.0, coverage(count, place))
    noisy: bool | None = max(width, apart or 0.0) > NOISY_WIDTH
    if not noisy and confidence < CONFIDENCE:
        noisy = None
    return Spread(low, high, width, noisy, count, confidence, apart)
