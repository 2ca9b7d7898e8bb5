"""Every variant of the comparison opens and runs."""

import pytest

from benchmarks.studies.expert_operators import VARIANTS, measure
from export.kernels.library import VERSION, library_of


def test_all_variants_run() -> None:
    if library_of(VERSION) is None:
        pytest.skip("the kernels are not built")
    sizes = {"layers": 1, "hidden": 128, "inner": 128, "experts": 4, "prompt": 5}
    found = measure({**sizes, "threads": 1, "rounds": 1})
    assert [one["variant"] for one in found] == list(VARIANTS)
    assert all(set(one["ms_a_layer"]) == {1, 5} and min(one["ms_a_layer"].values()) > 0 for one in found)
