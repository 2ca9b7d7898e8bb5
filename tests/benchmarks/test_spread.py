"""The interval of a figure over rounds, by simulation, and the interval of a quality loss."""

import math

import numpy as np
import pytest

from benchmarks.quality import quality_loss
from benchmarks.spread import agree, spread
from sportsllm.inference.scoring import LEAST_DOCUMENTS


def rounds(count: int, runs: int, noise: float, correlation: float, seed: int = 0) -> list[list[float]]:
    """Figures around 1: a first-order autoregressive series for each run."""
    rng = np.random.default_rng(seed)
    fresh = rng.normal(size=(runs, count))
    series = np.empty_like(fresh)
    series[:, 0] = fresh[:, 0]
    for place in range(1, count):
        series[:, place] = correlation * series[:, place - 1] + math.sqrt(1 - correlation**2) * fresh[:, place]
    found: list[list[float]] = (1 + noise * series).tolist()
    return found


@pytest.mark.parametrize(
    ("count", "correlation", "least"), [(5, 0.0, 0.95), (5, 0.3, 0.92), (5, 0.5, 0.85), (8, 0.5, 0.85)]
)
def test_the_interval_covers_the_median_on_machines_whose_rounds_resemble_each_other(
    count: int, correlation: float, least: float
) -> None:
    """2,000 runs: three standard errors of a coverage of 90% are 2 points."""
    found = [spread(one) for one in rounds(count, 2_000, 0.02, correlation)]
    covered = sum(one.low <= 1 <= one.high for one in found) / len(found)
    assert covered >= least


def test_noise_of_two_percent_mostly_passes_as_steady_and_of_six_percent_hardly_ever() -> None:
    share = {
        noise: sum(spread(one).noisy is False for one in rounds(5, 2_000, noise, 0.0)) / 2_000 for noise in (0.02, 0.06)
    }
    assert share[0.02] > 0.85 and share[0.06] < 0.12


def test_a_run_called_steady_is_seldom_wrong_and_a_calm_one_is_seldom_refused() -> None:
    """Five figures of one run, rounds of correlation 0.5. Wrong: called steady, and a figure is more than 5% off.

    The false-positive rate is below 4% for each figure, and 11% for any of the five, at the worst noise (4%, eight
    rounds; 20,000 runs). It is 0 at noise of 2% or less and at 8% or more.
    """
    steady, wrong = {}, {}
    for count in (5, 8):
        for noise in (0.01, 0.02, 0.03, 0.04, 0.08):
            runs = np.array(rounds(count, 5 * 150, noise, 0.5)).reshape(150, 5, count)
            calls = np.array([agree([spread(one) for one in figures.tolist()]) for figures in runs])
            off = np.abs(np.median(runs, axis=2) - 1) > 0.05
            steady[count, noise] = calls.mean()
            wrong[count, noise] = (calls[:, None] & off).mean()
    assert steady[5, 0.01] > 0.99 and steady[5, 0.02] > 0.95 and steady[8, 0.03] > 0.95, steady
    assert steady[5, 0.08] < 0.02 and steady[8, 0.08] < 0.02, steady
    assert max(wrong.values()) < 0.04, wrong
    assert agree([]) is False and agree([spread([1.0])]) is False


def test_one_round_has_no_interval() -> None:
    one = spread([3.0])
    assert (one.low, one.high, one.half_width, one.noisy) == (3.0, 3.0, None, None)
    even = spread([2.0, 2.0, 2.0])
    assert (even.low, even.high, even.noisy) == (2.0, 2.0, False)


def test_a_paired_interval_of_a_loss_covers_it_and_is_narrow() -> None:
    """Documents differ by 100%, the loss between the models by 1%: the pairs show it, both sums apart would not."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        teacher = rng.lognormal(5, 1, 60)
        own = teacher * (1.02 + 0.01 * rng.normal(size=60))
        found = quality_loss(own.tolist(), teacher.tolist(), seed=1)
        assert found.interval is not None and found.interval[1] - found.interval[0] < 1.5
        held += found.interval[0] <= 2.0 <= found.interval[1]
    assert held >= 85  # 95% less what a percentile bootstrap of 60 skewed ratios lacks, and three standard errors


def test_few_documents_give_no_interval() -> None:
    few = quality_loss([2.0] * (LEAST_DOCUMENTS - 1), [1.0] * (LEAST_DOCUMENTS - 1))
    assert few.percent == pytest.approx(100.0) and few.interval is None
    with pytest.raises(ValueError, match="the same ones"):
        quality_loss([1.0], [1.0, 2.0])
