"""How much worse a model predicts held-out text than its teacher, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_DOCUMENTS = 16
"""Fewer give no interval: resampling a handful of documents says little about others."""
RESAMPLES = 4_000
CONFIDENCE_PERCENT = 95
_MOST_DRAWN = 1_000_000  # documents at a time, to bound the memory


@dataclass(frozen=True)
class QualityLoss:
    """Rise of bits per byte over the teacher's on the same documents, in percent; negative is an improvement.

    `interval` is a 95% interval over documents, None for fewer than `LEAST_DOCUMENTS`.
    """

    percent: float
    documents: int
    interval: tuple[float, float] | None


def quality_loss(own: Sequence[float], teacher: Sequence[float], seed: int = 0) -> QualityLoss:
    """100 * (sum of own / sum of teacher - 1), with a paired bootstrap over documents.

    Pairs are resampled, so most of the variance between documents cancels; the interval is the percentiles of the
    resampled ratios (Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13; ratios of paired sums as
    in https://aclanthology.org/W04-3250).

    Args:
        own, teacher: negative log-likelihood of each document in nats.

    Raises:
        ValueError: not equally many, or none.
    """
    if len(own) != len(teacher) or not own:
        raise ValueError(f"{len(own)} and {len(teacher)} documents; both models must score the same ones")
    ours, theirs = np.asarray(own, dtype=np.float64), np.asarray(teacher, dtype=np.float64)
    percent = 100 * (ours.sum() / theirs.sum() - 1)
    if len(own) < LEAST_DOCUMENTS:
        return QualityLoss(float(percent), len(own), None)
    rng, size, ratios = np.random.default_rng(seed), len(own), list[NDArray[np.float64]]()
    for start in range(0, RESAMPLES, block := max(1, _MOST_DRAWN // size)):
        chosen = rng.integers(0, size, (min(block, RESAMPLES - start), size))
        ratios.append(ours[chosen].sum(axis=1) / theirs[chosen].sum(axis=1))
    tail = (100 - CONFIDENCE_PERCENT) / 2
    low, high = 100 * (np.percentile(np.concatenate(ratios), [tail, 100 - tail]) - 1)
    return QualityLoss(float(percent), len(own), (float(low), float(high)))
