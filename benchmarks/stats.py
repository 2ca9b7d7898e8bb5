"""Order statistics and spreads in plain Python, so that measuring needs no numerical library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOISY_WIDTH = 0.05
"""An interval wider than this share of its median is called noisy."""

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


@dataclass(frozen=True)
class Spread:
    """How far a figure moved when the same thing was measured again in a fresh process (an A/A comparison).

    `low` and `high` are the smallest and largest round's figure, `width` is their distance as a share of the
    median. `noisy` is True where that exceeds `NOISY_WIDTH`, and None where a single round tells nothing.
    """

    low: float
    high: float
    width: float
    noisy: bool | None


def spread(rounds: Sequence[float]) -> Spread:
    """The interval that the rounds' figures cover.

    Raises:
        ValueError: there are no rounds.
    """
    if not rounds:
        raise ValueError("a spread needs at least one round")
    low, high = min(rounds), max(rounds)
    middle = statistics.median(rounds)
    width = (high - low) / middle if middle > 0 else 0.0
    return Spread(low, high, width, width > NOISY_WIDTH if len(rounds) > 1 else None)
