"""Divergences between teacher and student on one chunk of logits, run by `sportsllm.training.loss.head_loss`.

With p the teacher's distribution and q the student's, both at temperature T, every loss is T^2 * D(p, q); the factor
keeps the gradient's size (Hinton et al., https://arxiv.org/abs/1503.02531). Forward KL has a gradient by hand, since it
is the default and 1.5 times as fast that way; the others are differentiated by autograd, a chunk at a time.
Shape suffixes: N tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from compress.distillation.settings import divergence_share
from compress.teacher_cache.loss import TeacherLogits, blended_chunk
from sportsllm.training.loss import ChunkLoss, cross_entropy_chunk, scored_sum_, softmax_into


def _kl(log_a_CV: Tensor, log_b_CV: Tensor) -> Tensor:
    """(C,) KL(a || b)."""
    return (log_a_CV.exp() * (log_a_CV - log_b_CV)).sum(dim=-1)


def _blend(log_a_CV: Tensor, log_b_CV: Tensor, share: float) -> Tensor:
    """log(share * a + (1 - share) * b)."""
    return torch.logaddexp(log_a_CV + math.log(share), log_b_CV + math.log(1 - share))


def _jensen_shannon(log_p_CV: Tensor, log_q_CV: Tensor, share: float) -> Tensor:
    log_m_CV = _blend(log_p_CV, log_q_CV, share)
    return share * _kl(log_p_CV, log_m_CV) + (1 - share) * _kl(log_q_CV, log_m_CV)


# (log p, log q, share) -> (C,); the formulas are those of `divergence_chunk`
_BY_AUTOGRAD: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "reverse-kl": lambda log_p, log_q, _share: _kl(log_q, log_p),
    "skew-kl": lambda log_p, log_q, share: _kl(log_p, _blend(log_p, log_q, share)),
    "skew-reverse-kl": lambda log_p, log_q, share: _kl(log_q, _blend(log_q, log_p, share)),
    "js": _jensen_shannon,
}


def _differentiated(kind: str, share: float, student_CV: Tensor, teacher_CV: Tensor) -> Tensor:
    """(C,) divergences; the student's logits become their gradient."""
    with torch.enable_grad():
        logits_CV = student_CV.detach().requires_grad_()
        losses_C = _BY_AUTOGRAD[kind](teacher_CV.log_softmax(dim=-1), logits_CV.log_softmax(dim=-1), share)
        (gradient_CV,) = torch.autograd.grad(losses_C.sum(), logits_CV)
    student_CV.copy_(gradient_CV)
    return losses_C.detach()


def _forward_kl(student_CV: Tensor, teacher_CV: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum_v p * (log p - log q), its gradient being q - p.

    Args:
        student_CV: logits; become q - weight * p.
        teacher_CV: logits; used up.
        weight: of the teacher in what the student's logits become; not in the divergence.

    Returns:
        (C,) divergences, and (C, 1) the logarithm of the student's normaliser.
    """
    p_CV = torch.empty_like(teacher_CV)
    log_zt_C1 = softmax_into(p_CV, teacher_CV)
    log_ratio_CV = teacher_CV.sub_(student_CV)
    log_zs_C1 = softmax_into(student_CV, student_CV)
    log_ratio_CV.sub_(log_zt_C1 - log_zs_C1)
    student_CV.sub_(p_CV, alpha=weight)
    return log_ratio_CV.mul_(p_CV).sum(dim=-1), log_zs_C1


def divergence_chunk(
    kind: str, targets_N: Tensor, teacher: TeacherLogits, temperature: float = 1.0, mix: float | None = None
) -> ChunkLoss:
    """T^2 * D(p, q) at temperature T, 0 where the target is IGNORE.

    forward-kl       KL(p || q)
    reverse-kl       KL(q || p)
    skew-kl          KL(p || a p + (1 - a) q)                   DistiLLM, https://arxiv.org/abs/2402.03898
    skew-reverse-kl  KL(q || (1 - a) p + a q)                   DistiLLM
    js               b KL(p || m) + (1 - b) KL(q || m),         GKD, https://arxiv.org/abs/2306.13649
                     m = b p + (1 - b) q

    Args:
        kind: one of `compress.distillation.settings.DIVERGENCES`.
        targets_N: only says which tokens are scored.
        teacher: its logits.
        temperature: T.
        mix: a (0.1 if None) or b (0.5 if None).

    Raises:
        UsageError: an unknown kind, or a mix out of (0, 1) or where the kind has none.
    """
    share = divergence_share(kind, mix)

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        count = logits_CV.shape[0]
        teacher_CV = teacher(start, count)
        if temperature != 1.0:
            logits_CV.div_(temperature)
            teacher_CV.div_(temperature)
        if kind == "forward-kl":
            losses_C = _forward_kl(logits_CV, teacher_CV)[0]
        else:
            losses_C = _differentiated(kind, share, logits_CV, teacher_CV)
        if temperature != 1.0:
            losses_C.mul_(temperature**2)
            logits_CV.mul_(temperature)
        return scored_sum_(losses_C, logits_CV, targets_N[start : start + count]), logits_CV

    return chunk_loss


def _kl_and_entropy_chunk(targets_N: Tensor, teacher: TeacherLogits, kl_weight: float) -> ChunkLoss:
    """w * KL(p || q) + (1 - w) * cross-entropy at temperature 1: one softmax of the student serves both.

    Gradient: w * (q - p) + (1 - w) * (q - onehot) = q - w * p - (1 - w) * onehot.
    """

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        count = logits_CV.shape[0]
        targets_C = targets_N[start : start + count]
        index_C1 = targets_C.clamp(min=0)[:, None]
        chosen_C1 = logits_CV.gather(1, index_C1)
        losses_C, log_z_C1 = _forward_kl(logits_CV, teacher(start, count), kl_weight)
        losses_C.mul_(kl_weight).add_((log_z_C1 - chosen_C1)[:, 0], alpha=1 - kl_weight)
        logits_CV.scatter_add_(1, index_C1, torch.full_like(chosen_C1, kl_weight - 1))
        return scored_sum_(losses_C, logits_CV, targets_C), logits_CV

    return chunk_loss


def mixed_chunk(
    targets_N: Tensor,
    teacher: TeacherLogits,
    kl_weight: float,
    temperature: float = 1.0,
    kind: str = "forward-kl",
    mix: float | None = None,
) -> ChunkLoss:
    """kl_weight * divergence + (1 - kl_weight) * cross-entropy; a weight of 1 or 0 leaves the other out.

    Args and errors are those of `divergence_chunk`.
    """
    divergence = divergence_chunk(kind, targets_N, teacher, temperature, mix)
    if kl_weight == 1.0:
        return divergence
    entropy = cross_entropy_chunk(targets_N)
    if kl_weight == 0.0:
        return entropy
    if kind == "forward-kl" and temperature == 1.0:
        return _kl_and_entropy_chunk(targets_N, teacher, kl_weight)
    return blended_chunk(kl_weight, divergence, entropy)
