"""Intervals over rounds, and losses of quality with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from sportsllm.inference.scoring import LEAST_DOCUMENTS, ratio_interval

NOISY_HALF_WIDTH = 0.05  # relative to the median; a wider interval is noisy
CONFIDENCE = 0.90
MEDIAN_TO_MEAN = 1.1  # standard error of a median over that of a mean, for 3 to 12 correlated normal rounds
AUTOCORRELATION = 0.5  # of consecutive rounds, which see the same clock, caches and neighbours
_T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796)  # two-sided, 1 to 11 degrees
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Spread:
    """The interval of a figure that several fresh processes measured.

    `low` to `high` holds the median of all such processes with probability `CONFIDENCE` or more. `half_width` and
    `noise`, a round's standard deviation, are relative to the median. `noisy` says whether `half_width` exceeds
    `NOISY_HALF_WIDTH`. A single round has no interval: `low` and `high` are its figure, `half_width` and `noisy` None.
    """

    low: Finite
    high: Finite
    half_width: Finite | None
    noisy: bool | None
    rounds: int
    noise: Finite = 0.0


def spread(rounds: Sequence[float]) -> Spread:
    """The interval around the median of the figures of one round or more.

    See `reach_of`. It covers 90% at a lag-1 autocorrelation of 0.5 and 94% at 0.3, an interval for independent rounds
    76% at 0.5 (tests/benchmarks/measure/test_rounds.py).
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
    """Half-width of the interval of two or more rounds, in standard deviations s of a round:

        MEDIAN_TO_MEAN * t * sqrt(v * (n - 1) / ((n - v) * n)),  v = 1 + 2 * sum over k < n of (1 - k / n) * r**k

    Student's t for `CONFIDENCE`; v / n is the variance of the mean of n rounds with autocorrelation r**k, in those of a
    round, and (n - v) / (n - 1) what s**2 shows of it on average.
    """
    v = 1 + 2 * sum((1 - lag / count) * AUTOCORRELATION**lag for lag in range(1, count))
    t = _T_90[min(count, len(_T_90) + 1) - 2]  # of more rounds slightly too wide
    return MEDIAN_TO_MEAN * t * math.sqrt(v * (count - 1) / ((count - v) * count))


def agree(spreads: Collection[Spread]) -> bool:
    """Whether the figures of one run agree from round to round.

    Their noise is pooled, since five rounds of one figure estimate it badly: with 2% of noise, each of five figures
    alone is steady nine times in ten, but all five only two times in three. No half-width may be twice the bound.
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
        own, teacher: negative log-likelihood of each document in nats, the same documents.
    """
    assert len(own) == len(teacher)
    ends = ratio_interval(own, teacher)
    interval = None if ends is None else (100 * (ends[0] - 1), 100 * (ends[1] - 1))
    return 100 * (math.fsum(own) / math.fsum(teacher) - 1), interval
