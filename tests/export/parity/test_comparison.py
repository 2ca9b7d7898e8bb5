"""The figures of the gate, and the limits they are held to."""

import numpy as np
import pytest

from export.parity.comparison import compare
from export.parity.limits import DEPLOYED, EXACT


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


def test_limits_are_ordered() -> None:
    for limits in DEPLOYED.values():
        assert limits.error > EXACT.error and limits.kl > EXACT.kl
        assert limits.greedy_match < EXACT.greedy_match
