"""Chunked losses against plain float64 code and autograd."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compress.distillation.divergences import (
    DIVERGENCES,
    KLWeight,
    TeacherLogits,
    divergence_chunk,
    mixed_chunk,
    mixed_teachers,
    parse_kl_weight,
)
from sportsllm.errors import UsageError
from sportsllm.text.packing import IGNORE
from sportsllm.training.chunked_loss import (
    CHUNK_TOKENS,
    ChunkLoss,
    chunk_tokens,
    cross_entropy,
    head_loss,
    softmax_into,
)

TOKENS, WIDTH, VOCAB = 37, 24, 101
# float32 keeps 24 bits, 6e-8: a loss of ~100 summed from 30 rows of 101 terms, and gradients of ~1 times hidden states
# of ~3, keep five digits.
LOSS_RTOL, GRADIENT_ATOL = 1e-5, 2e-5


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g) * 0.5
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[::5] = IGNORE
    teacher = torch.randn(TOKENS, VOCAB, generator=g) * 2
    return hidden, weight, targets, teacher


def rows_of(logits: Tensor) -> TeacherLogits:
    return lambda start, count: logits[start : start + count].clone()


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


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


def fused(hidden: Tensor, weight: Tensor, chunk_loss: ChunkLoss, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = head_loss(h, w, chunk_loss, chunk)
    (loss * 3).backward()  # a factor that the saved gradients must take up
    return loss.detach().double(), h.grad.double() / 3, w.grad.double() / 3


def assert_equal(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours[0], expected[0], rtol=LOSS_RTOL, atol=LOSS_RTOL)
    for gradient, exact in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(gradient, exact, rtol=0, atol=GRADIENT_ATOL)


@pytest.mark.parametrize("chunk", [1, 5, 16, 37, 64])
def test_cross_entropy_equals_float64(chunk: int) -> None:
    hidden, weight, targets, teacher = inputs()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy(h, w, targets, chunk)
    (loss * 3).backward()
    ours = (loss.detach().double(), h.grad.double() / 3, w.grad.double() / 3)
    assert_equal(ours, naive(hidden, weight, targets, teacher, 0.0))


@pytest.mark.parametrize("chunk", [5, 37, 64])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("kind", "mix"), [*((kind, None) for kind in DIVERGENCES), ("skew-kl", 0.7), ("skew-reverse-kl", 0.3), ("js", 0.9)]
)
def test_divergences_equal_float64(kind: str, mix: float | None, temperature: float, chunk: int) -> None:
    hidden, weight, targets, teacher = inputs()
    ours = fused(hidden, weight, divergence_chunk(kind, targets, rows_of(teacher), temperature, mix), chunk)
    assert_equal(ours, naive(hidden, weight, targets, teacher, 1.0, temperature, kind, mix))


@pytest.mark.parametrize("chunk", [8, 37])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["forward-kl", "js"])
def test_mixtures_with_cross_entropy_equal_float64(kind: str, kl_weight: float, temperature: float, chunk: int) -> None:
    hidden, weight, targets, teacher = inputs()
    ours = fused(hidden, weight, mixed_chunk(targets, rows_of(teacher), kl_weight, temperature, kind), chunk)
    assert_equal(ours, naive(hidden, weight, targets, teacher, kl_weight, temperature, kind))


def test_forward_kl_alone_is_the_divergence_of_that_kind() -> None:
    hidden, weight, targets, teacher = inputs()
    ours = fused(hidden, weight, divergence_chunk("forward-kl", targets, rows_of(teacher), 2.0), 8)
    assert_equal(ours, naive(hidden, weight, targets, teacher, 1.0, 2.0))


def test_a_weight_of_0_never_asks_the_teacher() -> None:
    hidden, weight, targets, _ = inputs()

    def teacher(start: int, count: int) -> Tensor:
        raise AssertionError("asked")

    fused(hidden, weight, mixed_chunk(targets, teacher, 0.0), 8)


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


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(kind: str, temperature: float) -> None:
    hidden, weight, targets, _ = inputs()
    chunk_loss = divergence_chunk(
        kind, targets, lambda start, count: hidden[start : start + count] @ weight.T, temperature
    )
    loss, grad_h, grad_w = fused(hidden, weight, chunk_loss, TOKENS)
    # A sum of probabilities is 1 but for float32's rounding, 6e-8 a term.
    assert abs(float(loss)) < 1e-4
    assert float(grad_h.abs().max()) < 1e-5 and float(grad_w.abs().max()) < 1e-5


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_unscored_tokens_take_no_part_whatever_their_logits(kind: str) -> None:
    hidden, weight, targets, teacher = inputs()
    expected = fused(hidden, weight, mixed_chunk(targets, rows_of(teacher), 0.5, kind=kind), 8)
    teacher[targets == IGNORE] = torch.nan
    ours = fused(hidden, weight, mixed_chunk(targets, rows_of(teacher), 0.5, kind=kind), 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    everything = fused(hidden, weight, divergence_chunk(kind, torch.full_like(targets, IGNORE), rows_of(teacher)), 8)
    assert not any(part.any() for part in everything)


def test_a_mixture_of_teachers_is_the_mixture_of_their_distributions() -> None:
    g = torch.Generator().manual_seed(5)
    first, second, third = (torch.randn(9, VOCAB, generator=g) * 40 for _ in range(3))
    mixture = mixed_teachers([(rows_of(first), 3.0), (rows_of(second), 1.0), (rows_of(third), 4.0)])(2, 6)
    shares = torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64) / 8
    stacked = torch.stack([F.log_softmax(part[2:8].double(), -1) for part in (first, second, third)])
    exact = torch.logsumexp(stacked + shares.log()[:, None, None], dim=0)
    # Logarithms of up to some hundreds, rounded a few times by 6e-8 of their size.
    torch.testing.assert_close(mixture.double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(mixture.double().exp().sum(-1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0], [math.inf], [math.nan]])
def test_weights_of_teachers_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="teacher weights"):
        mixed_teachers([(rows_of(torch.zeros(1, 1)), weight) for weight in weights])


def test_settings_out_of_range_are_refused() -> None:
    targets, teacher = torch.zeros(1, dtype=torch.int64), rows_of(torch.zeros(1, 2))
    for mix in (0.0, 1.0, -0.1, math.nan):
        for kind in ("skew-kl", "skew-reverse-kl", "js"):
            with pytest.raises(UsageError, match=r"--mix .* above 0 and below 1"):
                divergence_chunk(kind, targets, teacher, mix=mix)
    with pytest.raises(UsageError, match=r"--mix 0\.5 means nothing with reverse-kl"):
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


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 63, 101, 1000, 2049, 32_000])
def test_softmax_in_place_is_the_softmax(size: int) -> None:
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * 5
    expected, exact = torch.softmax(logits, -1), logits.double().logsumexp(-1, keepdim=True)
    log_z = softmax_into(logits, logits)
    assert torch.equal(logits, expected)
    # 32,000 terms added in float32, 6e-8 of the sum at a time.
    torch.testing.assert_close(log_z.double(), exact, rtol=0, atol=1e-5)


def test_gradients_are_handed_over_once() -> None:
    hidden, weight, targets, _ = inputs()
    loss = cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


@pytest.mark.parametrize("wanted", ["hidden", "weight", "none"])
def test_only_the_wanted_gradients_are_made(wanted: str) -> None:
    hidden, weight, targets, teacher = inputs()
    expected = naive(hidden, weight, targets, teacher, 0.0)
    h, w = hidden.requires_grad_(wanted == "hidden"), weight.requires_grad_(wanted == "weight")
    loss = cross_entropy(h, w, targets, 16)
    torch.testing.assert_close(loss.detach().double(), expected[0], rtol=LOSS_RTOL, atol=0)
    assert loss.requires_grad == (wanted != "none")
    if wanted != "none":
        loss.backward()
        gradient, exact = (h.grad, expected[1]) if wanted == "hidden" else (w.grad, expected[2])
        torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=GRADIENT_ATOL)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_logits_of_all_tokens_never_exist(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight, teacher = (torch.randn(rows, 4, generator=g) for rows in (300, 50, 50))
    targets = torch.zeros(300, dtype=torch.int64)
    chunk_loss = mixed_chunk(targets, lambda start, count: hidden[start : start + count] @ teacher.T, 0.5, kind=kind)
    with Sizes() as sizes:
        fused(hidden, weight, chunk_loss, 32)
    assert sizes.largest == 32 * 50


def test_chunks_shrink_with_the_vocabulary() -> None:
    assert chunk_tokens(384) == chunk_tokens(16_384) == 512
    assert chunk_tokens(32_000) == 262 and chunk_tokens(256_000) == 128
    assert chunk_tokens(256_000, "cuda") == CHUNK_TOKENS


def test_bfloat16_autocast_stays_near() -> None:
    hidden, weight, targets, teacher = inputs()
    expected, grad_h, _ = naive(hidden, weight, targets, teacher, 0.0)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(h, w, targets, 16)
    loss.backward()
    # bfloat16 keeps 8 bits: 2 ** -8 of each product.
    assert torch.allclose(loss.double(), expected, rtol=1e-2)
    assert F.cosine_similarity(h.grad.double().flatten(), grad_h.flatten(), dim=0) > 0.999
    assert w.grad.dtype == torch.float32
