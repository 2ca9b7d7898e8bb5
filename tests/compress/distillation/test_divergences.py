"""Divergences against plain float64 code and autograd, through the chunked loss that runs them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.distillation.loss import TeacherLogits, divergence_chunk, mixed_chunk
from compress.distillation.settings import DIVERGENCES, KLWeight, parse_kl_weight
from sportsllm.errors import UsageError
from sportsllm.text.packing import IGNORE
from tests.sportsllm.training.test_loss import LOSS_RTOL, TOKENS, VOCAB, Sizes, assert_equal, fused
from tests.sportsllm.training.test_loss import inputs as shared_inputs


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, targets = shared_inputs()
    return hidden, weight, targets, torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def rows_of(logits: Tensor) -> TeacherLogits:
    return lambda start, count: logits[start : start + count].clone()


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum()


def blend(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """log(share * a + (1 - share) * b)."""
    return torch.logaddexp(log_a + math.log(share), log_b + math.log(1 - share))


def naive_divergence(kind: str, student: Tensor, teacher: Tensor, t: float, mix: float | None) -> Tensor:
    q, p = F.log_softmax(student / t, -1), F.log_softmax(teacher / t, -1)
    if kind == "forward-kl":
        return t**2 * kl(p, q)
    if kind == "reverse-kl":
        return t**2 * kl(q, p)
    if kind == "skew-kl":
        return t**2 * kl(p, blend(p, q, 0.1 if mix is None else mix))
    if kind == "skew-reverse-kl":
        return t**2 * kl(q, blend(q, p, 0.1 if mix is None else mix))
    share = 0.5 if mix is None else mix
    middle = blend(p, q, share)
    return t**2 * (share * kl(p, middle) + (1 - share) * kl(q, middle))


def naive(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor,
    kl_weight: float,
    t: float = 1.0,
    kind: str = "forward-kl",
    mix: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h @ w.T
    scored = targets != IGNORE
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    divergence = naive_divergence(kind, logits[scored], teacher[scored].double(), t, mix)
    loss = kl_weight * divergence + (1 - kl_weight) * entropy
    loss.backward()
    return loss.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("kind", "mix"), [*((kind, None) for kind in DIVERGENCES), ("skew-kl", 0.7), ("skew-reverse-kl", 0.3), ("js", 0.9)]
)
def test_divergences_equal_float64(kind: str, mix: float | None, temperature: float, chunk: int) -> None:
    hidden, weight, targets, teacher = inputs()
    ours = fused(hidden, weight, divergence_chunk(kind, targets, rows_of(teacher), temperature, mix), chunk)
    assert_equal(ours, naive(hidden, weight, targets, teacher, 1.0, temperature, kind, mix))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["forward-kl", "js"])
def test_mixtures_with_cross_entropy_equal_float64(kind: str, kl_weight: float, temperature: float) -> None:
    hidden, weight, targets, teacher = inputs()
    ours = fused(hidden, weight, mixed_chunk(targets, rows_of(teacher), kl_weight, temperature, kind), 8)
    assert_equal(ours, naive(hidden, weight, targets, teacher, kl_weight, temperature, kind))


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("scale", [60.0, 3000.0])
def test_probabilities_that_underflow_stay_right(kind: str, scale: float) -> None:
    # Differences far beyond 103, where exp is 0 in float32. The weight is the identity, so logits are exact.
    g = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(TOKENS, VOCAB, generator=g) * scale for _ in range(2))
    student[0], teacher[0] = -scale, -scale
    student[0, 1], teacher[0, 2] = scale, scale
    student[1], teacher[1] = teacher[2], student[2]
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    ours = fused(student, torch.eye(VOCAB), mixed_chunk(targets, rows_of(teacher), 0.5, kind=kind), 16)
    loss, grad_h, _ = naive(student, torch.eye(VOCAB), targets, teacher, 0.5, kind=kind)
    torch.testing.assert_close(ours[0], loss, rtol=LOSS_RTOL, atol=0)
    # Reverse KL's gradient has log q - log p in it: as large as the logits, which float32 rounds by 6e-8 of their size.
    torch.testing.assert_close(ours[1], grad_h, rtol=1e-5, atol=2e-6 * scale)
    assert all(bool(part.isfinite().all()) for part in ours)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_unscored_tokens_take_no_part_whatever_their_logits(kind: str) -> None:
    hidden, weight, targets, teacher = inputs()
    expected = fused(hidden, weight, mixed_chunk(targets, rows_of(teacher), 0.5, kind=kind), 8)
    teacher[targets == IGNORE] = torch.nan
    ours = fused(hidden, weight, mixed_chunk(targets, rows_of(teacher), 0.5, kind=kind), 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    everything = fused(hidden, weight, divergence_chunk(kind, torch.full_like(targets, IGNORE), rows_of(teacher)), 8)
    assert not any(part.any() for part in everything)


def test_settings_out_of_range_are_refused() -> None:
    targets, teacher = torch.zeros(1, dtype=torch.int64), rows_of(torch.zeros(1, 2))
    for mix in (0.0, 1.0, -0.1, math.nan):
        for kind in ("skew-kl", "skew-reverse-kl", "js"):
            with pytest.raises(UsageError, match=r"--set mix=.* above 0 and below 1"):
                divergence_chunk(kind, targets, teacher, mix=mix)
    with pytest.raises(UsageError, match=r"--set mix=0\.5 means nothing with reverse-kl"):
        mixed_chunk(targets, teacher, 0.0, kind="reverse-kl", mix=0.5)
    with pytest.raises(UsageError, match="'kl' is not known"):
        divergence_chunk("kl", targets, teacher)


def test_the_weight_of_the_divergence_moves_on_a_line() -> None:
    assert parse_kl_weight("0.9") == KLWeight(0.9, 0.9)
    weight = parse_kl_weight("0.5:1.0")
    assert [weight.at(progress) for progress in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [0.5, 0.5, 0.75, 1.0, 1.0]
    # Exactly 1 leaves the cross-entropy out: no rounding on the way.
    assert all(KLWeight(1.0, 1.0).at(step / 7) == 1.0 for step in range(8))
    assert KLWeight(0.3, 0.1).at(1.0) == 0.1
    for text in ("", "a", "0.5:", "0.1:0.2:0.3", "1.5", "0.5:-1", "nan"):
        with pytest.raises(UsageError, match="--kl-weight"):
            parse_kl_weight(text)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_logits_of_all_tokens_never_exist(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight, teacher = (torch.randn(rows, 4, generator=g) for rows in (300, 50, 50))
    targets = torch.zeros(300, dtype=torch.int64)
    chunk_loss = mixed_chunk(targets, lambda start, count: hidden[start : start + count] @ teacher.T, 0.5, kind=kind)
    with Sizes() as sizes:
        fused(hidden, weight, chunk_loss, 32)
    assert sizes.largest == 32 * 50
