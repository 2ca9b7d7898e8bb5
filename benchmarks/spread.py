"""Percentiles, and how far a figure moves from round to round. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISY_HALF_WIDTH = 0.05  # an interval that reaches further than this share of its median is called noisy
CONFIDENCE = 0.90
MEDIAN_TO_MEAN = 1.2533  # standard error of a median over that of a mean, sqrt(pi / 2) for normal figures
AUTOCORRELATION = 1.5  # widens the interval for rounds that follow one another: sqrt((1 + r) / (1 - r)) at r = 0.4
_T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # two-sided, 1 to 10 degrees of freedom
_T_90_MANY = 1.796
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


@dataclass(frozen=True)
class Spread:
    """How far a figure moves when the same thing is measured again in fresh processes.

    `low` to `high` holds the median of all such processes with probability `CONFIDENCE` or more; both are the only
    figure for a single round. `half_width` is the interval's reach as a share of the median, None for a single round.
    `noisy` says whether that exceeds `NOISY_HALF_WIDTH`; None for a single round, which says nothing.
    """

    low: float
    high: float
    half_width: float | None
    noisy: bool | None
    rounds: int


def spread(rounds: Sequence[float]) -> Spread:
    """The interval around the median of the rounds' figures, at least one.

        median +- t * s * MEDIAN_TO_MEAN / sqrt(n) * AUTOCORRELATION

    with Student's t for `CONFIDENCE` and the sample's standard deviation s. Rounds on a shared machine are not
    independent: without the last factor the interval covers 76% at a lag-1 autocorrelation of 0.5, with it 89%, and
    95% at 0.3 (five rounds; tests/benchmarks/test_spread.py). Calling figures noisy by it passes independent noise of
    2% nine times in ten, of 3% every second time, of 5% one time in eight.
    """
    count, middle = len(rounds), statistics.median(rounds)
    if count == 1:
        return Spread(middle, middle, None, None, 1)
    t = _T_90[count - 2] if count - 2 < len(_T_90) else _T_90_MANY
    reach = t * statistics.stdev(rounds) * MEDIAN_TO_MEAN / math.sqrt(count) * AUTOCORRELATION
    half_width = reach / middle if middle > 0 else 0.0
    return Spread(middle - reach, middle + reach, half_width, half_width > NOISY_HALF_WIDTH, count)
