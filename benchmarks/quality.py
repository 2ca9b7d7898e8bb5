"""How much worse a model predicts held-out text than its teacher, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sportsllm.inference.scoring import ratio_interval


@dataclass(frozen=True)
class QualityLoss:
    """Rise of bits per byte over the teacher's on the same documents, in percent; negative is an improvement.

    `interval` is a 95% interval over documents; None for few, see `ratio_interval`.
    """

    percent: float
    documents: int
    interval: tuple[float, float] | None


def quality_loss(own: Sequence[float], teacher: Sequence[float], seed: int = 0) -> QualityLoss:
    """100 * (sum of own / sum of teacher - 1), with its interval.

    Args:
        own, teacher: negative log-likelihood of each document in nats.

    Raises:
        ValueError: not equally many, or none.
    """
    if len(own) != len(teacher) or not own:
        raise ValueError(f"{len(own)} and {len(teacher)} documents; both models must score the same ones")
    ends = ratio_interval(own, teacher, seed)
    interval = None if ends is None else (100 * (ends[0] - 1), 100 * (ends[1] - 1))
    return QualityLoss(100 * (math.fsum(own) / math.fsum(teacher) - 1), len(own), interval)
