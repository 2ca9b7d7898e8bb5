"""KL divergence from a teacher against plain float64 code and autograd, through the chunked loss that runs it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.distillation.loss import TeacherLogits, kl_chunk
from sportsllm.text.packing import IGNORE
from sportsllm.training.loss import ChunkLoss, head_loss
from tests.sportsllm.training.test_loss import GRADIENT_ATOL, LOSS_RTOL, TOKENS, VOCAB
from tests.sportsllm.training.test_loss import inputs as shared_inputs
from tests.support.training import allocated_peak


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, targets = shared_inputs()
    return hidden, weight, targets, torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def rows_of(logits: Tensor) -> TeacherLogits:
    return lambda start, count: logits[start : start + count].clone()


def fused(hidden: Tensor, weight: Tensor, chunk_loss: ChunkLoss, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = head_loss(h, w, chunk_loss, chunk)
    (loss * 3).backward()  # a factor that the saved gradients must take up
    return loss.detach().double(), h.grad.double() / 3, w.grad.double() / 3


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor, kl_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h @ w.T
    scored = targets != IGNORE
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    log_p, log_q = (F.log_softmax(each, -1) for each in (teacher[scored].double(), logits[scored]))
    loss = kl_weight * (log_p.exp() * (log_p - log_q)).sum() + (1 - kl_weight) * entropy
    loss.backward()
    return loss.detach(), h.grad, w.grad


@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 0.9, 1.0])
def test_mixtures_with_cross_entropy_equal_float64(kl_weight: float) -> None:
    hidden, weight, targets, teacher = inputs()
    ours = fused(hidden, weight, kl_chunk(targets, rows_of(teacher), kl_weight), 5)
    loss, *gradients = naive(hidden, weight, targets, teacher, kl_weight)
    torch.testing.assert_close(ours[0], loss, rtol=LOSS_RTOL, atol=LOSS_RTOL)
    for gradient, exact in zip(ours[1:], gradients, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=0, atol=GRADIENT_ATOL)


@pytest.mark.parametrize("scale", [60.0, 3000.0])
def test_probabilities_that_underflow_stay_right(scale: float) -> None:
    # Differences far beyond 103, where exp is 0 in float32. The weight is the identity, so logits are exact.
    g = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(TOKENS, VOCAB, generator=g) * scale for _ in range(2))
    student[0], teacher[0] = -scale, -scale
    student[0, 1], teacher[0, 2] = scale, scale
    student[1], teacher[1] = teacher[2], student[2]
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    ours = fused(student, torch.eye(VOCAB), kl_chunk(targets, rows_of(teacher), 0.5), 16)
    loss, grad_h, _ = naive(student, torch.eye(VOCAB), targets, teacher, 0.5)
    torch.testing.assert_close(ours[0], loss, rtol=LOSS_RTOL, atol=0)
    torch.testing.assert_close(ours[1], grad_h, rtol=1e-5, atol=2e-6 * scale)
    assert all(bool(part.isfinite().all()) for part in ours)


def test_unscored_tokens_take_no_part_whatever_their_logits() -> None:
    hidden, weight, targets, teacher = inputs()
    expected = fused(hidden, weight, kl_chunk(targets, rows_of(teacher), 0.5), 8)
    teacher[targets == IGNORE] = torch.nan
    ours = fused(hidden, weight, kl_chunk(targets, rows_of(teacher), 0.5), 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    everything = fused(hidden, weight, kl_chunk(torch.full_like(targets, IGNORE), rows_of(teacher)), 8)
    assert not any(part.any() for part in everything)


def test_logits_of_all_tokens_never_exist() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight, teacher = (torch.randn(rows, 4, generator=g) for rows in (3_200, 50, 50))
    targets = torch.zeros(3_200, dtype=torch.int64)
    chunk_loss = kl_chunk(targets, lambda start, count: hidden[start : start + count] @ teacher.T, 0.5)
    assert allocated_peak(lambda: fused(hidden, weight, chunk_loss, 32)) < 4 * 3_200 * 50
