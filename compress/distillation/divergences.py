"""Distillation losses on one chunk of logits; `sportsllm.training.chunked_loss.head_loss` runs them chunk by chunk.

With p the teacher's distribution and q the student's, both at temperature T, every loss is T^2 * D(p, q); the factor
keeps the gradient's size (Hinton et al., https://arxiv.org/abs/1503.02531). The gradient of D by the student's logits
is q * (g - sum(q * g)) / T with g = dD/dq.
Shape suffixes: N tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sportsllm.errors import UsageError
from sportsllm.training.chunked_loss import ChunkLoss, cross_entropy_chunk, scored_sum_, softmax_into

# (first token, number of tokens) -> the teacher's finite logits for them, (C, V) float32, the caller's to overwrite
TeacherLogits = Callable[[int, int], Tensor]
DIVERGENCES = ("forward-kl", "reverse-kl", "skew-kl", "skew-reverse-kl", "js")
# (student's logits, teacher's logits) -> (C,) divergences; the first become their gradient, the second are used up
_Rows = Callable[[Tensor, Tensor], Tensor]
_TINY = torch.finfo(torch.float32).tiny


def forward_kl_rows(student_CV: Tensor, teacher_CV: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor]:
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


def _forward_kl(student_CV: Tensor, teacher_CV: Tensor) -> Tensor:
    return forward_kl_rows(student_CV, teacher_CV)[0]


def _reverse_kl(student_CV: Tensor, teacher_CV: Tensor) -> Tensor:
    """KL(q || p), g = log q - log p: in logarithms, since q / p has no bound."""
    q_CV = torch.empty_like(student_CV)
    log_zt_C1 = softmax_into(q_CV, teacher_CV)
    log_zs_C1 = softmax_into(q_CV, student_CV)
    log_ratio_CV = student_CV.sub_(teacher_CV).sub_(log_zs_C1 - log_zt_C1)
    losses_C1 = torch.mul(q_CV, log_ratio_CV, out=teacher_CV).sum(dim=-1, keepdim=True)
    log_ratio_CV.sub_(losses_C1).mul_(q_CV)
    return losses_C1[:, 0]


def _ratio(part_CV: Tensor, whole_CV: Tensor, out: Tensor) -> Tensor:
    """part / whole, bounded where whole is a mixture that holds part; no 0, so that its logarithm is a number."""
    return torch.div(part_CV, whole_CV, out=out).clamp_(min=_TINY)


def _skew_kl(student_CV: Tensor, teacher_CV: Tensor, share: float) -> Tensor:
    """KL(p || m), m = share * p + (1 - share) * q, g = -(1 - share) * p / m."""
    p_CV, q_CV = torch.softmax(teacher_CV, dim=-1, out=teacher_CV), torch.softmax(student_CV, dim=-1, out=student_CV)
    mixture_CV = torch.lerp(q_CV, p_CV, share).clamp_(min=_TINY)
    ratio_CV = _ratio(p_CV, mixture_CV, out=mixture_CV)
    losses_C = ratio_CV.log().mul_(p_CV).sum(dim=-1)
    ratio_CV.mul_(q_CV)
    q_CV.mul_(ratio_CV.sum(dim=-1, keepdim=True)).sub_(ratio_CV).mul_(1 - share)
    return losses_C


def _skew_reverse_kl(student_CV: Tensor, teacher_CV: Tensor, share: float) -> Tensor:
    """KL(q || m), m = (1 - share) * p + share * q, g = log(q / m) - share * q / m."""
    p_CV, q_CV = torch.softmax(teacher_CV, dim=-1, out=teacher_CV), torch.softmax(student_CV, dim=-1, out=student_CV)
    mixture_CV = torch.lerp(p_CV, q_CV, share).clamp_(min=_TINY)
    ratio_CV = _ratio(q_CV, mixture_CV, out=mixture_CV)
    weighted_log_CV = torch.log(ratio_CV, out=teacher_CV).mul_(q_CV)
    losses_C1 = weighted_log_CV.sum(dim=-1, keepdim=True)
    weighted_CV = ratio_CV.mul_(q_CV)
    mean_C1 = losses_C1 - share * weighted_CV.sum(dim=-1, keepdim=True)
    q_CV.mul_(mean_C1.neg_()).add_(weighted_log_CV).sub_(weighted_CV, alpha=share)
    return losses_C1[:, 0]


def _jensen_shannon(student_CV: Tensor, teacher_CV: Tensor, share: float) -> Tensor:
    """share * KL(p || m) + (1 - share) * KL(q || m), m = share * p + (1 - share) * q, g = (1 - share) * log(q / m)."""
    p_CV, q_CV = torch.softmax(teacher_CV, dim=-1, out=teacher_CV), torch.softmax(student_CV, dim=-1, out=student_CV)
    mixture_CV = torch.lerp(q_CV, p_CV, share).clamp_(min=_TINY)
    scratch_CV = torch.empty_like(p_CV)
    losses_C = _ratio(p_CV, mixture_CV, out=scratch_CV).log_().mul_(p_CV).sum(dim=-1)
    weighted_log_CV = _ratio(q_CV, mixture_CV, out=scratch_CV).log_().mul_(q_CV)
    reverse_C1 = weighted_log_CV.sum(dim=-1, keepdim=True)
    q_CV.mul_(-reverse_C1).add_(weighted_log_CV).mul_(1 - share)
    return losses_C.mul_(share).add_(reverse_C1[:, 0], alpha=1 - share)


_PLAIN: dict[str, _Rows] = {"forward-kl": _forward_kl, "reverse-kl": _reverse_kl}
# with the share that is used where none is given
_MIXED: dict[str, tuple[Callable[[Tensor, Tensor, float], Tensor], float]] = {
    "skew-kl": (_skew_kl, 0.1),
    "skew-reverse-kl": (_skew_reverse_kl, 0.1),
    "js": (_jensen_shannon, 0.5),
}


def _rows(kind: str, mix: float | None) -> _Rows:
    if kind not in DIVERGENCES:
        raise UsageError(f"divergence {kind!r} is not known; use one of {', '.join(DIVERGENCES)}")
    if kind in _PLAIN:
        if mix is not None:
            raise UsageError(
                f"--mix {mix:g} means nothing with {kind}; leave it out, or use one of {', '.join(_MIXED)}"
            )
        return _PLAIN[kind]
    function, default = _MIXED[kind]
    share = default if mix is None else mix
    if not 0.0 < share < 1.0:
        raise UsageError(f"--mix is {share:g}; with {kind} it must be above 0 and below 1")
    return lambda student_CV, teacher_CV: function(student_CV, teacher_CV, share)


def check_divergence(kind: str, mix: float | None) -> None:
    """Whether the two go together.

    Raises:
        UsageError: an unknown kind, or a mix out of (0, 1) or where the kind has none.
    """
    _rows(kind, mix)


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

    At most four (C, V) are alive, the logits of both models among them.

    Args:
        kind: one of DIVERGENCES.
        targets_N: only says which tokens are scored.
        teacher: its logits.
        temperature: T.
        mix: a (0.1 if None) or b (0.5 if None).

    Raises:
        UsageError: an unknown kind, or a mix out of (0, 1) or where the kind has none.
    """
    rows = _rows(kind, mix)

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        count = logits_CV.shape[0]
        teacher_CV = teacher(start, count)
        if temperature != 1.0:
            logits_CV.div_(temperature)
            teacher_CV.div_(temperature)
        losses_C = rows(logits_CV, teacher_CV)
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
        losses_C, log_z_C1 = forward_kl_rows(logits_CV, teacher(start, count), kl_weight)
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

    Args and errors are `divergence_chunk`'s. Forward KL at temperature 1 shares the student's softmax with the
    cross-entropy; every other mixture keeps one more (C, V).
    """
    divergence = divergence_chunk(kind, targets_N, teacher, temperature, mix)
    if kl_weight == 1.0:
        return divergence
    entropy = cross_entropy_chunk(targets_N)
    if kl_weight == 0.0:
        return entropy
    if kind == "forward-kl" and temperature == 1.0:
        return _kl_and_entropy_chunk(targets_N, teacher, kl_weight)

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        entropy_loss, entropy_gradient_CV = entropy(start, logits_CV.clone())
        loss, gradient_CV = divergence(start, logits_CV)
        gradient_CV.mul_(kl_weight).add_(entropy_gradient_CV, alpha=1 - kl_weight)
        return kl_weight * loss + (1 - kl_weight) * entropy_loss, gradient_CV

    return chunk_loss


def mixed_teachers(teachers: Sequence[tuple[TeacherLogits, float]]) -> TeacherLogits:
    """The logits log(sum_i w_i * softmax(z_i)) of several teachers' mixture, at temperature 1.

    Args:
        teachers: each with its weight; the weights are divided by their sum.

    Raises:
        UsageError: there are none, or a weight is not above 0.
    """
    weights = [weight for _, weight in teachers]
    if not weights or not all(0.0 < weight < math.inf for weight in weights):
        raise UsageError(f"teacher weights are {weights}; give each teacher one that is above 0 and finite")
    offsets = [math.log(weight) - math.log(sum(weights)) for weight in weights]

    def logits(start: int, count: int) -> Tensor:
        parts = (
            _log_softmax_(teacher(start, count)).add_(offset)
            for (teacher, _), offset in zip(teachers, offsets, strict=True)
        )
        total_CV = next(parts)
        for part_CV in parts:
            torch.logaddexp(total_CV, part_CV, out=total_CV)
        return total_CV

    return logits


def _log_softmax_(logits_CV: Tensor) -> Tensor:
    return logits_CV.sub_(softmax_into(torch.empty_like(logits_CV), logits_CV))


@dataclass(frozen=True)
class KLWeight:
    """Share of the divergence in the loss, on a straight line from `start` to `end` over training."""

    start: float
    end: float

    def __post_init__(self) -> None:
        for value in (self.start, self.end):
            if not 0.0 <= value <= 1.0:
                raise UsageError(f"--kl-weight {value:g} must be in [0, 1]")

    def at(self, progress: float) -> float:
        """The share at `progress`, 0 at the first step and 1 at the last; exactly `start` and `end` there."""
        if progress >= 1.0:
            return self.end
        return self.start + max(0.0, progress) * (self.end - self.start)


def parse_kl_weight(text: str) -> KLWeight:
    """`0.9`, or `0.5:1.0` for a weight that moves from the first to the second over training.

    Raises:
        UsageError: neither form, or a value out of [0, 1].
    """
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if len(values) not in (1, 2):
        raise UsageError(f"--kl-weight {text!r} is neither a number such as 0.9 nor a range such as 0.5:1.0")
    return KLWeight(values[0], values[-1])
