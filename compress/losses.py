"""Distillation losses on one chunk of logits; `sportsllm.losses.head_loss` runs them chunk by chunk.

Shape suffixes: N tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sportsllm.data import IGNORE
from sportsllm.losses import ChunkLoss, cross_entropy_chunk

# (first token, number of tokens) -> the teacher's logits for them, (C, V) float32
TeacherLogits = Callable[[int, int], Tensor]


def forward_kl_chunk(targets_N: Tensor, teacher: TeacherLogits, temperature: float = 1.0) -> ChunkLoss:
    """T^2 * KL(p_teacher || p_student) at temperature T, 0 where the target is IGNORE.

    KL = sum_v p_t[v] * (log p_t[v] - log p_s[v]);  its gradient by the student's logits is (p_s - p_t) / T.
    The factor T^2 keeps the gradient's size (Hinton et al., https://arxiv.org/abs/1503.02531).
    """

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        count = logits_CV.shape[0]
        scored = (targets_N[start : start + count] != IGNORE)[:, None]
        log_s = logits_CV.div_(temperature)
        log_s -= log_s.logsumexp(dim=-1, keepdim=True)
        log_t = teacher(start, count) / temperature
        log_t -= log_t.logsumexp(dim=-1, keepdim=True)
        p_t = log_t.exp()
        loss = (torch.einsum("cv,cv->c", p_t, log_t - log_s) * scored[:, 0]).sum()
        gradient = log_s.exp_().sub_(p_t).mul_(scored)
        return loss * temperature**2, gradient.mul_(temperature)

    return chunk_loss


def mixed_chunk(targets_N: Tensor, teacher: TeacherLogits, kl_weight: float, temperature: float) -> ChunkLoss:
    """kl_weight * forward KL + (1 - kl_weight) * cross-entropy; a weight of 1 or 0 leaves the other out."""
    entropy = cross_entropy_chunk(targets_N)
    divergence = forward_kl_chunk(targets_N, teacher, temperature)
    if kl_weight == 1.0:
        return divergence
    if kl_weight == 0.0:
        return entropy

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        first_loss, first_gradient = entropy(start, logits_CV.clone())
        second_loss, second_gradient = divergence(start, logits_CV)
        loss = (1 - kl_weight) * first_loss + kl_weight * second_loss
        return loss, second_gradient.mul_(kl_weight).add_(first_gradient, alpha=1 - kl_weight)

    return chunk_loss
