"""Chunked losses against plain float64 code and autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sportsllm.processors import LOSS_CHUNK_TOKENS, loss_chunk_tokens
from sportsllm.text.packing import IGNORE
from sportsllm.training.loss import cross_entropy, softmax_into

TOKENS, WIDTH, VOCAB = 37, 24, 101
# float32 keeps 24 bits, 6e-8: a loss of ~100 summed from 30 rows of 101 terms, and gradients of ~1 times hidden states
# of ~3, keep five digits.
LOSS_RTOL, GRADIENT_ATOL = 1e-5, 2e-5


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g) * 0.5
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    targets[::5] = IGNORE
    return hidden, weight, targets


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(h @ w.T, targets, ignore_index=IGNORE, reduction="sum")
    loss.backward()
    return loss.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [1, 16, 37, 64])
def test_cross_entropy_equals_float64(chunk: int) -> None:
    hidden, weight, targets = inputs()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy(h, w, targets, chunk)
    (loss * 3).backward()  # a factor that the saved gradients must take up
    expected, *gradients = naive(hidden, weight, targets)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=LOSS_RTOL, atol=LOSS_RTOL)
    for ours, exact in zip((h.grad, w.grad), gradients, strict=True):
        torch.testing.assert_close(ours.double() / 3, exact, rtol=0, atol=GRADIENT_ATOL)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 101, 2049, 32_000])
def test_softmax_in_place_is_the_softmax(size: int) -> None:
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * 5
    expected, exact = torch.softmax(logits, -1), logits.double().logsumexp(-1, keepdim=True)
    log_z = softmax_into(logits, logits)
    assert torch.equal(logits, expected)
    # 32,000 terms added in float32, 6e-8 of the sum at a time.
    torch.testing.assert_close(log_z.double(), exact, rtol=0, atol=1e-5)


def test_gradients_are_handed_over_once() -> None:
    hidden, weight, targets = inputs()
    loss = cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


@pytest.mark.parametrize("wanted", ["hidden", "weight", "none"])
def test_only_the_wanted_gradients_are_made(wanted: str) -> None:
    hidden, weight, targets = inputs()
    expected = naive(hidden, weight, targets)
    h, w = hidden.requires_grad_(wanted == "hidden"), weight.requires_grad_(wanted == "weight")
    loss = cross_entropy(h, w, targets, 16)
    torch.testing.assert_close(loss.detach().double(), expected[0], rtol=LOSS_RTOL, atol=0)
    assert loss.requires_grad == (wanted != "none")
    if wanted != "none":
        loss.backward()
        gradient, exact = (h.grad, expected[1]) if wanted == "hidden" else (w.grad, expected[2])
        torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=GRADIENT_ATOL)


def test_chunks_shrink_with_the_vocabulary() -> None:
    assert loss_chunk_tokens(384) == loss_chunk_tokens(16_384) == 512
    assert loss_chunk_tokens(32_000) == 262 and loss_chunk_tokens(256_000) == 128
    assert loss_chunk_tokens(256_000, "cuda") == LOSS_CHUNK_TOKENS


def test_bfloat16_autocast_stays_near() -> None:
    hidden, weight, targets = inputs()
    expected, grad_h, _ = naive(hidden, weight, targets)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(h, w, targets, 16)
    loss.backward()
    # bfloat16 keeps 8 bits: 2 ** -8 of each product.
    assert torch.allclose(loss.double(), expected, rtol=1e-2)
    assert F.cosine_similarity(h.grad.double().flatten(), grad_h.flatten(), dim=0) > 0.999
    assert w.grad.dtype == torch.float32
