"""Percentiles, how far a figure moves from round to round, and a loss of quality with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from sportsllm.inference.scoring import LEAST_DOCUMENTS, ratio_interval

NOISY_HALF_WIDTH = 0.05  # an interval that reaches further than this share of its median is called noisy
CONFIDENCE = 0.90
MEDIAN_TO_MEAN = 1.1  # standard error of a median over that of a mean, for 3 to 12 correlated normal rounds
AUTOCORRELATION = 0.5  # of consecutive rounds, which see the same clock, caches and neighbours
_T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796)  # two-sided, 1 to 11 degrees
Finite = Annotated[float, Field(allow_inf_nan=False)]
PERCENTILES = ("p50", "p90", "p95", "p99")


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Those at 50, 90, 95 and 99%, keyed "p50" and so on."""
    return dict(zip(PERCENTILES, np.percentile(samples, [int(name[1:]) for name in PERCENTILES]).tolist(), strict=True))


@dataclass(frozen=True)
class Spread:
    """How far a figure moves when the same thing is measured again in fresh processes.

    `low` to `high` holds the median of all such processes with probability `CONFIDENCE` or more; both are the only
    figure for a single round. `half_width` is the interval's reach as a share of the median, None for a single round.
    `noise` is a round's standard deviation as a share of the median. `noisy` says whether `half_width` exceeds
    `NOISY_HALF_WIDTH`; None for a single round, which says nothing.
    """

    low: Finite
    high: Finite
    half_width: Finite | None
    noisy: bool | None
    rounds: int
    noise: Finite = 0.0


def spread(rounds: Sequence[float]) -> Spread:
    """The interval around the median of the rounds' figures, at least one.

    See `reach_of`. An interval for independent rounds covers 76% at a lag-1 autocorrelation of 0.5, this one 90%, and
    94% at 0.3 (tests/benchmarks/measure/test_rounds.py).
    """
    assert all(map(math.isfinite, rounds)), rounds
    count, middle = len(rounds), statistics.median(rounds)
    if count == 1:
        return Spread(middle, middle, None, None, 1)
    deviation = statistics.stdev(rounds)
    reach = reach_of(count) * deviation
    half_width, noise = (reach / middle, deviation / middle) if middle > 0 else (0.0, 0.0)
    return Spread(max(0.0, middle - reach), middle + reach, half_width, half_width > NOISY_HALF_WIDTH, count, noise)


def reach_of(count: int) -> float:
    """How far the interval of two or more rounds reaches, in standard deviations s of a round:

        MEDIAN_TO_MEAN * t * sqrt(v * (n - 1) / ((n - v) * n)),  v = 1 + 2 * sum over k < n of (1 - k / n) * r**k

    Student's t for `CONFIDENCE`; v / n is the variance of the mean of n rounds with autocorrelation r**k, in those of a
    round, and (n - v) / (n - 1) what s**2 shows of it on average.
    """
    v = 1 + 2 * sum((1 - lag / count) * AUTOCORRELATION**lag for lag in range(1, count))
    t = _T_90[min(count, len(_T_90) + 1) - 2]  # of more rounds slightly too wide
    return MEDIAN_TO_MEAN * t * math.sqrt(v * (count - 1) / ((count - v) * count))


def agree(spreads: Collection[Spread]) -> bool:
    """Whether the figures of one run are steady together.

    Their noise is pooled, which knows it better than five rounds of one figure do: at 2% of noise each of five figures
    is called steady nine times in ten, but all five only two times in three. No figure may reach twice as far.
    """
    if not spreads or any(each.noisy is None for each in spreads):
        return False
    reach, pooled = reach_of(min(each.rounds for each in spreads)), statistics.fmean(each.noise**2 for each in spreads)
    widest = max(each.noise for each in spreads)
    return reach * math.sqrt(pooled) <= NOISY_HALF_WIDTH and reach * widest <= 2 * NOISY_HALF_WIDTH


def accuracy_loss(own: Sequence[float], teacher: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Percentage points of accuracy below the teacher's on the same documents, and the 95% interval.

    The interval is that of matched pairs with half a document more for each of the four outcomes, so that models which
    agree on few documents are not equal for certain (Agresti and Min, https://doi.org/10.1002/sim.1781). None for fewer
    than `LEAST_DOCUMENTS`.
    """
    lost = np.asarray(teacher) - np.asarray(own)
    points = 100 * float(lost.mean())
    if len(lost) < LEAST_DOCUMENTS:
        return points, None
    count = len(lost) + 2
    middle, square = float(lost.sum()) / count, (float((lost**2).sum()) + 1) / count
    reach = 1.96 * math.sqrt((square - middle**2) / count)
    return points, (100 * (middle - reach), 100 * (middle + reach))


def quality_loss(own: Sequence[float], teacher: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Rise of bits per byte over the teacher's, in percent, and its 95% interval over documents (`ratio_interval`).

    Args:
        own, teacher: negative log-likelihood of each document in nats.

    Raises:
        ValueError: not equally many, or none.
    """
    if len(own) != len(teacher) or not own:
        raise ValueError(f"{len(own)} and {len(teacher)} documents; both models must score the same ones")
    ends = ratio_interval(own, teacher)
    interval = None if ends is None else (100 * (ends[0] - 1), 100 * (ends[1] - 1))
    return 100 * (math.fsum(own) / math.fsum(teacher) - 1), interval
