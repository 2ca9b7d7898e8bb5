"""Percentiles, and how far a figure moves from round to round. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISY_WIDTH = 0.05  # an interval wider than this share of its median is called noisy
CONFIDENCE = 0.90  # the least of an interval that may call a figure steady; five rounds give it
PERCENTILES = (50, 90, 95, 99)


def percentile(samples: Sequence[float], percent: int) -> float:
    """The value below which `percent` % of the samples lie, interpolated linearly (Hyndman and Fan's type 7).

    Raises:
        ValueError: there are no samples, or `percent` is not from 1 to 99.
    """
    if not samples:
        raise ValueError("a percentile needs at least one sample")
    if not 1 <= percent <= 99:
        raise ValueError(f"percent is {percent}; it must be from 1 to 99")
    if len(samples) == 1:  # `quantiles` wants two before Python 3.13
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """`percentile` at 50, 90, 95 and 99, keyed "p50" and so on."""
    return {f"p{percent}": percentile(samples, percent) for percent in PERCENTILES}


def lower_quartile(seconds: Sequence[float]) -> float:
    """The 25th percentile of the rounds' times: other programs only add time, and on shared caches the minimum is luck
    (0.64 ms once, 0.71 to 0.76 ms in the eight rounds after it)."""
    return percentile(seconds, 25)


@dataclass(frozen=True)
class Spread:
    """How far a figure moved when the same thing was measured again in fresh processes (an A/A comparison).

    `low` to `high` holds the median of all such processes with probability `confidence` (see `interval_rank`); `width`
    is its length as a share of the rounds' median. `repeat_difference` is the distance between the medians of the even
    and the odd rounds as a share of the whole median, None for a single round. `noisy` says whether `width` or
    `repeat_difference` exceeds `NOISY_WIDTH`; None where neither does but the rounds are too few to say.
    """

    low: float
    high: float
    width: float
    noisy: bool | None
    rounds: int
    confidence: float
    repeat_difference: float | None


def interval_confidence(count: int, rank: int) -> float:
    """Probability that the median lies between the rank-th smallest and the rank-th largest of `count` samples.

    1 - 2 * sum over i < rank of C(count, i) / 2**count, whatever the distribution, for independent samples
    (David and Nagaraja, Order Statistics, 3rd edition, 7.1). Never below 0, which a single sample would give.
    """
    return max(0.0, 1.0 - 2.0 * sum(math.comb(count, i) for i in range(rank)) / float(2**count))


def interval_rank(count: int) -> int:
    """The largest rank whose interval has at least `CONFIDENCE`; 1, which is the whole range, for up to 7 samples."""
    good = [rank for rank in range(1, count // 2 + 1) if interval_confidence(count, rank) >= CONFIDENCE]
    return max(good, default=1)


def spread(rounds: Sequence[float]) -> Spread:
    """The interval that the rounds' figures, at least one, cover."""
    ordered, count, middle = sorted(rounds), len(rounds), statistics.median(rounds)
    rank = interval_rank(count)
    low, high = ordered[rank - 1], ordered[-rank]
    confidence, difference = interval_confidence(count, rank), None
    width = (high - low) / middle if middle > 0 else 0.0
    if count > 1:
        halves = abs(statistics.median(rounds[::2]) - statistics.median(rounds[1::2]))
        difference = halves / middle if middle > 0 else 0.0
    noisy = True if max(width, difference or 0.0) > NOISY_WIDTH else False if confidence >= CONFIDENCE else None
    return Spread(low, high, width, noisy, count, confidence, difference)
