"""What the exact pass allows where a cache rounds."""

from dataclasses import replace

import torch

from export.cache_scales import CacheScales
from export.parity.comparison import Comparison
from export.parity.limits import DEPLOYED, EXACT_INT8_CACHE, MOVED, int8_cache_limits

STEADY = Comparison("", 100, 0.01, 0.002, 1e-7, 1.0)


def test_limits_follow_what_moved_keys_cost_the_model_between_bounds() -> None:
    assert int8_cache_limits(STEADY) == EXACT_INT8_CACHE
    limits = int8_cache_limits(replace(STEADY, relative_error=0.2, kl=2e-4, greedy_match=0.99))
    assert (limits.error, limits.kl) == (3 * 0.2, 3 * 2e-4)
    assert abs(limits.greedy_match - 0.97) < 1e-9
    assert int8_cache_limits(replace(STEADY, relative_error=9.0, kl=1.0, greedy_match=0.1)) == DEPLOYED["int8"]


def test_moved_numbers_change_only_where_they_lie_between_two_steps() -> None:
    scales = CacheScales((torch.full((1, 1, 8), 0.5), torch.full((1, 1, 8), 0.5)))
    x = torch.randint(-100, 100, (1, 1, 5, 8)) * 0.5
    moved = replace(scales, moved=MOVED)
    for near, equal in ((x + 0.1, True), (x + 0.25, False)):
        same = [
            torch.equal(a, b) for a, b in zip(scales.rounded(0, near, near), moved.rounded(0, near, near), strict=True)
        ]
        assert all(same) == equal
