"""Losses over the vocabulary that never hold all logits: one chunk of tokens at a time, forward and backward.

The naive code a chunked loss replaces:

    logits_NV = hidden_ND @ weight_VD.T
    loss = chunk_loss(logits_NV)          # summed over N
    loss.backward()

Here each chunk's logits are made, turned into a loss and a gradient, and overwritten by the next chunk's, so the memory
is C * V instead of several times N * V. Sources: Liger-Kernel (https://arxiv.org/abs/2410.10989) and cut
cross-entropy (https://arxiv.org/abs/2411.09009).
Shape suffixes: N tokens, C tokens of a chunk, D hidden_size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sportsllm.processors import loss_chunk_tokens
from sportsllm.text.packing import IGNORE

# (first token of the chunk, float32 logits (C, V)) -> (summed loss, gradient (C, V) of that loss).
# The callee may overwrite the logits and return them as the gradient; the next call gets the same memory.
ChunkLoss = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, chunk_loss: ChunkLoss, chunk: int, exact: bool
    ) -> Tensor:
        device = hidden_ND.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        weight = weight_VD.to(compute)
        tokens, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        buffer = hidden_ND.new_empty((min(chunk, tokens), vocabulary), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            for start in range(0, tokens, chunk):
                h_CD = hidden_ND[start : start + chunk].to(compute)
                logits_CV = buffer[: h_CD.shape[0]]
                float32_product(h_CD, weight.T, logits_CV, exact)
                loss, grad_CV = chunk_loss(start, logits_CV)
                total += loss
                grad_CV = grad_CV.to(compute)
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk] = grad_CV @ weight
                if grad_weight is not None and compute == torch.float32:
                    grad_weight.addmm_(grad_CV.T, h_CD)  # no second (V, D)
                elif grad_weight is not None:
                    grad_weight += grad_CV.T @ h_CD
        ctx.gradients = [grad_hidden, grad_weight]
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # Handed over and scaled in place, not kept: (V, D) is the largest thing left, and an optimizer's `.grad` can
        # take it without a copy.
        if ctx.gradients is None:
            raise RuntimeError("head_loss: the first backward pass used its gradients up; compute the loss again")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        return (
            None if grad_hidden is None else grad_hidden.mul_(grad),
            None if grad_weight is None else grad_weight.mul_(grad),
            None,
            None,
            None,
        )


def float32_product(a_MK: Tensor, b_KN: Tensor, out: Tensor, exact: bool = False) -> Tensor:
    """a @ b in `out`, float32 (M, N), of factors of any dtype.

    A product rounded to bfloat16 is wrong by up to 2^-9 of itself: 0.02 for a logit of 10, as much as the divergence
    of a quantized model from its original. CUDA sums 16-bit factors in float32 and writes these sums. A CPU rounds
    them, unless the product is `exact`, which takes two to three times as long.
    """
    if a_MK.dtype == torch.float32:
        return torch.mm(a_MK, b_KN, out=out)
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32, out=out)
    if exact:
        return torch.mm(a_MK.float(), b_KN.float(), out=out)
    return out.copy_(a_MK @ b_KN)


def head_loss(
    hidden_ND: Tensor, weight_VD: Tensor, chunk_loss: ChunkLoss, chunk: int | None = None, exact: bool = False
) -> Tensor:
    """Sum over tokens of a loss on hidden @ weight.T, made `chunk` (or `loss_chunk_tokens`) tokens at a time.

    With `exact` the logits of a 16-bit compute dtype are float32 sums on every device, see `float32_product`.

    Returns:
        A float32 scalar; its gradient reaches hidden states and weight, once.
    """
    size = chunk or loss_chunk_tokens(weight_VD.shape[0], hidden_ND.device.type)
    apply: Callable[..., Tensor] = _HeadLoss.apply
    return apply(hidden_ND, weight_VD, chunk_loss, size, exact)


def softcapped_chunk(chunk_loss: ChunkLoss, cap: float | None) -> ChunkLoss:
    """A loss on cap * tanh(logits / cap), whose slope is 1 - tanh(logits / cap) ** 2; the loss itself without a cap."""
    if cap is None:
        return chunk_loss

    def capped(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        slope_CV = 1 - logits_CV.div_(cap).tanh_().square()
        loss, grad_CV = chunk_loss(start, logits_CV.mul_(cap))
        return loss, grad_CV.mul_(slope_CV)

    return capped


def softmax_into(out_CV: Tensor, logits_CV: Tensor) -> Tensor:
    """Write softmax(logits) to `out`, which may be the logits' own memory, with one exponential per value.

    Returns:
        (C, 1), the logarithm of each row's normaliser: log softmax = logits - this, even if softmax underflows to 0.
    """
    top_C1 = logits_CV.amax(dim=-1, keepdim=True)
    # In place: the kernels read each value for the last time before they write to its address; tested.
    torch.softmax(logits_CV, dim=-1, out=out_CV)
    # The largest logit's probability is exp(0) / normaliser, at least 1 / V.
    return top_C1.sub_(out_CV.amax(dim=-1, keepdim=True).log_())


def scored_sum_(losses_C: Tensor, gradient_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Sum of the scored tokens' losses; both arguments become 0 in place if the target is IGNORE."""
    ignored = (targets_C == IGNORE).nonzero()[:, 0]
    gradient_CV.index_fill_(0, ignored, 0.0)
    return losses_C.index_fill_(0, ignored, 0.0).sum()


def cross_entropy_chunk(targets_N: Tensor) -> ChunkLoss:
    """Cross-entropy with whole targets: -log softmax(logits)[target], 0 if the target is IGNORE."""

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        targets_C = targets_N[start : start + logits_CV.shape[0]]
        index_C1 = targets_C.clamp(min=0)[:, None]
        chosen_C1 = logits_CV.gather(1, index_C1)
        losses_C = (softmax_into(logits_CV, logits_CV) - chosen_C1)[:, 0]
        gradient_CV = logits_CV.scatter_add_(1, index_C1, torch.full_like(chosen_C1, -1.0))
        return scored_sum_(losses_C, gradient_CV, targets_C), gradient_CV

    return chunk_loss


def cross_entropy(
    hidden: Tensor, weight_VD: Tensor, targets: Tensor, chunk: int | None = None, softcap: float | None = None
) -> Tensor:
    """Summed next-token cross-entropy in nats of hidden states (..., D) and targets (...), IGNORE unscored."""
    chunk_loss = softcapped_chunk(cross_entropy_chunk(targets.flatten()), softcap)
    return head_loss(hidden.flatten(0, -2), weight_VD, chunk_loss, chunk)
