"""Chunked losses against plain float64 code and autograd."""

import pytest
import torch
import torch.nn.functional as F

from compress.losses import mixed_chunk
from sportsllm.data import IGNORE
from sportsllm.losses import cross_entropy, head_loss

TOKENS, WIDTH, VOCAB = 37, 24, 101


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g) * 0.5
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[::5] = IGNORE
    teacher = torch.randn(TOKENS, VOCAB, generator=g) * 2
    return hidden, weight, targets, teacher


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, kl: float, t: float
):
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h @ w.T
    scored = targets != IGNORE
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    divergence = F.kl_div(
        F.log_softmax(logits[scored] / t, -1),
        F.log_softmax(teacher[scored].double() / t, -1),
        log_target=True,
        reduction="sum",
    )
    loss = kl * t**2 * divergence + (1 - kl) * entropy
    loss.backward()
    return loss, h.grad, w.grad


@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_cross_entropy_equals_float64(chunk: int) -> None:
    hidden, weight, targets, teacher = inputs()
    expected, grad_h, grad_w = naive(hidden, weight, targets, teacher, 0.0, 1.0)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy(h, w, targets, chunk)
    (loss * 3).backward()
    assert torch.allclose(loss.double(), expected, rtol=1e-6)
    assert torch.allclose(h.grad.double(), 3 * grad_h, atol=1e-5)
    assert torch.allclose(w.grad.double(), 3 * grad_w, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kl_weight", [0.0, 0.9, 1.0])
def test_distillation_equals_float64(kl_weight: float, temperature: float) -> None:
    hidden, weight, targets, teacher = inputs()
    expected, grad_h, grad_w = naive(hidden, weight, targets, teacher, kl_weight, temperature)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    chunk = mixed_chunk(targets, lambda start, count: teacher[start : start + count].clone(), kl_weight, temperature)
    loss = head_loss(h, w, chunk, chunk=8)
    loss.backward()
    assert torch.allclose(loss.double(), expected, rtol=1e-5)
    assert torch.allclose(h.grad.double(), grad_h, atol=2e-5)
    assert torch.allclose(w.grad.double(), grad_w, atol=2e-5)


def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    hidden, weight, targets, _ = inputs()
    h = hidden.clone().requires_grad_()
    chunk = mixed_chunk(targets, lambda start, count: hidden[start : start + count] @ weight.T, 1.0, 1.0)
    loss = head_loss(h, weight, chunk)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-4
    assert float(h.grad.abs().max()) < 1e-5


def test_bfloat16_autocast_stays_near() -> None:
    hidden, weight, targets, teacher = inputs()
    expected, grad_h, _ = naive(hidden, weight, targets, teacher, 0.0, 1.0)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(h, w, targets, 16)
    loss.backward()
    # bfloat16 keeps 8 bits: 2 ** -8 of each product.
    assert torch.allclose(loss.double(), expected, rtol=1e-2)
    assert torch.nn.functional.cosine_similarity(h.grad.double().flatten(), grad_h.flatten(), dim=0) > 0.999
    assert w.grad.dtype == torch.float32
