"""What a cut costs: the usual estimate, and what recoveries of a teacher teach."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.search import estimate
from benchmarks.search.estimate import Recovered, ShapeLosses, probe_shapes
from compress.pruning.shapes import Shape

FULL = Shape(96, 352, 3, 3, 6, 32)


def test_without_recoveries_the_estimate_is_that_of_the_log() -> None:
    """The cuts that the weights were fitted to (docs/log.md), within what a single run may differ."""
    losses = ShapeLosses(FULL, 1_000_000)
    for shape, measured in (
        (replace(FULL, intermediate=192), 2.59),
        (replace(FULL, layers=4), 2.07),
        (replace(FULL, intermediate=256, layers=5), 1.36),
        (replace(FULL, intermediate=160, layers=5), 5.50),
    ):
        assert losses.percent(shape) == pytest.approx(measured, rel=0.2)
    assert losses.percent(FULL) == 0 and losses.factor(FULL) == 1


def other_teacher(shape: Shape, tokens: int) -> float:
    """Percent lost by a teacher unlike the usual one: ten times as much, and nearly in proportion to the cut."""
    weights = {"hidden": 60.0, "intermediate": 30.0, "heads": 15.0, "layers": 45.0}
    cut = {name: -math.log(getattr(shape, name) / getattr(FULL, name)) for name in weights}
    return sum(weights[name] * amount**1.1 for name, amount in cut.items()) * (tokens / 1e6) ** -0.25


def test_a_few_recoveries_of_probes_foretell_cuts_of_everything() -> None:
    """Ten times off before, within a third after four probes of one dimension, and within the stated error."""
    grid = [
        Shape(hidden, intermediate, heads, heads, layers, 32)
        for hidden, intermediate, heads, layers in product((32, 64, 96), (96, 224, 352), (1, 2, 3), range(1, 7))
    ]
    probes = probe_shapes(FULL, grid)
    assert set(probes) == {
        replace(FULL, layers=4),
        replace(FULL, intermediate=224),
        replace(FULL, hidden=64),
        replace(FULL, heads=2, kv_heads=2),
    }
    seen = [Recovered(shape, 50_000, other_teacher(shape, 50_000)) for shape in probes]
    wanted = Shape(64, 160, 3, 3, 5, 32)
    before, after = ShapeLosses(FULL, 1_000_000), ShapeLosses(FULL, 1_000_000, seen)
    truth = other_teacher(wanted, 1_000_000)
    assert before.percent(wanted) < truth / 2
    assert after.percent(wanted) == pytest.approx(truth, rel=0.35)
    assert truth / after.factor(wanted) < after.percent(wanted) < truth * after.factor(wanted)
    assert 1 < after.factor(wanted) < before.factor(wanted)


def test_the_most_probable_parameters_are_found() -> None:
    """No random step from them makes recoveries and prior together more probable; factors come from the curvature."""
    rng = np.random.default_rng(0)
    shapes = [replace(FULL, layers=4), replace(FULL, intermediate=160), Shape(64, 224, 3, 3, 5, 32)]
    seen = [Recovered(shape, tokens, other_teacher(shape, tokens)) for shape in shapes for tokens in (10_000, 90_000)]
    losses = ShapeLosses(FULL, 1_000_000, seen)

    def objective(parameters: np.ndarray) -> float:
        noise = [math.hypot(0.15, 0.2 / one.loss_percent) for one in seen]
        off = [
            (losses._log_loss(parameters, one.shape, one.tokens)[0] - math.log(one.loss_percent)) / each
            for one, each in zip(seen, noise, strict=True)
        ]
        prior = (parameters - estimate._MEANS) / estimate._SPREADS
        return float(np.square(off).sum() + prior @ prior)

    least = objective(losses._parameters)
    assert all(
        objective(losses._parameters + rng.normal(0, size, len(estimate._MEANS))) > least - 1e-6
        for size in (1e-3, 1e-2, 0.1)
        for _ in range(50)
    )


def test_losses_of_nothing_and_of_noise_are_held_apart_from_zero() -> None:
    """A recovery that ends better than its teacher is a small loss, not an impossible one."""
    losses = ShapeLosses(FULL, 1_000, [Recovered(replace(FULL, layers=5), 1_000, -0.3), Recovered(FULL, 1_000, 0.0)])
    assert 0 < losses.percent(replace(FULL, layers=5)) < 0.5
    assert losses.grown(100) < 1 == losses.grown(1_000)
