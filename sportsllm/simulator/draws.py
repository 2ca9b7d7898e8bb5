"""Random draws that `random` does not have."""

from collections.abc import Mapping
from math import exp
from random import Random


def skewed(rng: Random, count: int, power: float) -> int:
    """An index below `count`; the higher the power, the likelier the low ones. A power of 1 is uniform."""
    return int(count * rng.random() ** power)


def weighted(rng: Random, weights: Mapping[str, float]) -> str:
    """A key, with probability in proportion to its weight."""
    draw = rng.random() * sum(weights.values())
    for key, weight in weights.items():
        draw -= weight
        if draw < 0:
            return key
    return key


def poisson(rng: Random, mean: float) -> int:
    """A Poisson draw (Knuth's product of uniforms); means are small here."""
    limit, product, count = exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count
