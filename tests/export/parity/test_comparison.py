"""The figures of the gate, and the limits they are held to."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from export.cache_scales import CacheScales
from export.parity.comparison import DEPLOYED, EXACT_INT8_CACHE, MOVED, Comparison, compare, int8_cache_limits


def test_figures_by_hand() -> None:
    """Two positions, three tokens: error 1 of spread 0.8165; KL worked out from the two distributions."""
    expected = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], np.float32)
    found = np.array([[0.0, 1.0, 2.0], [0.0, 2.0, 2.0]], np.float32)
    figures = compare(expected, found)
    p = np.exp(expected[1]) / np.exp(expected[1]).sum()
    q = np.exp(found[1]) / np.exp(found[1]).sum()
    assert figures.max_abs_logit_error == 1.0
    assert figures.relative_error == pytest.approx(1 / np.sqrt(2 / 3), rel=1e-6)
    assert figures.kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-5)
    assert figures.greedy_match == 0.5


def test_limits_follow_what_moved_keys_cost_the_model_between_bounds() -> None:
    steady = Comparison("", 100, 0.01, 0.002, 1e-7, 1.0)
    assert int8_cache_limits(steady) == EXACT_INT8_CACHE
    limits = int8_cache_limits(replace(steady, relative_error=0.2, kl=2e-4, greedy_match=0.99))
    assert (limits.error, limits.kl) == (3 * 0.2, 3 * 2e-4)
    assert abs(limits.greedy_match - 0.97) < 1e-9
    assert int8_cache_limits(replace(steady, relative_error=9.0, kl=1.0, greedy_match=0.1)) == DEPLOYED["int8"]


def test_moved_numbers_change_only_where_they_lie_between_two_steps() -> None:
    scales = CacheScales((torch.full((1, 1, 8), 0.5), torch.full((1, 1, 8), 0.5)))
    x = torch.randint(-100, 100, (1, 1, 5, 8)) * 0.5
    moved = replace(scales, moved=MOVED)
    for near, equal in ((x + 0.1, True), (x + 0.25, False)):
        pairs = zip(scales.rounded(0, near, near), moved.rounded(0, near, near), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == equal
