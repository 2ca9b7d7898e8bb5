"""The loss that a student is trained with: from a `DistillationConfig`, a teacher or its cache, and a batch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from compress.distillation.divergences import mixed_chunk
from compress.distillation.hidden_states import HiddenMatching
from compress.distillation.settings import DistillationConfig
from compress.distillation.teacher import teacher_logits
from compress.teacher_cache.read import TeacherCache
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import Batch
from sportsllm.training.loop import Loss
from sportsllm.training.loss import cross_entropy, head_loss


def distillation_loss(
    config: DistillationConfig, teacher: SportsLLM | None, batches: int = 1, cache: TeacherCache | None = None
) -> Loss:
    """The training loss, summed over scored tokens; neither model's logits exist as a whole.

    w * T^2 * D(teacher, student) + (1 - w) * cross-entropy + hidden_weight * `HiddenMatching`, w on its way over
    training.

    Args:
        config: with hidden_weight, the student's `matching` is attached.
        teacher: None if it does not have to run.
        batches: of the whole training, accumulated ones counted singly.
        cache: to learn from instead of the teacher's logits.
    """

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        weight = config.kl_weight.at(batch.index / max(1, batches - 1))
        if cache is None and weight == 0.0 and not config.hidden_weight:
            return cross_entropy(student.hidden(batch.tokens, batch.documents), student.head_weight, batch.targets)
        states: tuple[list[Tensor], list[Tensor]] | None = ([], []) if config.hidden_weight else None
        logits = (
            None
            if teacher is None
            else teacher_logits(teacher, batch, states[1] if states else None, config.exact_logits)
        )
        hidden = student.hidden(batch.tokens, batch.documents, states=states[0] if states else None)
        if cache is not None:
            chunk_loss = cache.chunk_loss(batch, weight)
        else:
            assert logits is not None, "without a cache the teacher runs"
            chunk_loss = mixed_chunk(
                batch.targets.flatten(), logits, weight, config.temperature, config.divergence, config.mix
            )
        total = head_loss(hidden.flatten(0, 1), student.head_weight, chunk_loss, exact=config.exact_logits)
        if states:
            matching = cast(HiddenMatching, student.matching)
            total = total + config.hidden_weight * matching(states[0], states[1], batch.targets)
        return total

    return loss


@torch.no_grad()
def fit_matching(matching: HiddenMatching, student: SportsLLM, teacher: SportsLLM, batch: Batch) -> None:
    """`HiddenMatching.fit` on a batch, which is moved to the student's device."""
    moved = batch.to(student.head_weight.device)
    states: tuple[list[Tensor], list[Tensor]] = ([], [])
    for model, found in zip((student, teacher), states, strict=True):
        model.hidden(moved.tokens, moved.documents, states=found)
    matching.to(student.head_weight.device).fit(*states, moved.targets)
