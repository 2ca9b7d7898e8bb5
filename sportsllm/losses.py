"""Losses over the vocabulary that never hold all logits: one chunk of tokens at a time, forward and backward.

The naive code a chunked loss replaces:

    logits_NV = hidden_ND @ weight_VD.T
    loss = chunk_loss(logits_NV)          # summed over N
    loss.backward()

Here each chunk's logits are made, turned into a loss and a gradient, and dropped, so the memory is C * V
instead of several times N * V. The idea is that of Liger-Kernel and of Apple's cut cross-entropy.
Shape suffixes: N tokens, C tokens of a chunk, D hidden_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sportsllm.data import IGNORE

CHUNK_TOKENS = 1_024
# (first token of the chunk, float32 logits (C, V)) -> (summed loss, gradient (C, V) of that loss)
ChunkLoss = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, chunk_loss: ChunkLoss, chunk: int) -> Tensor:
        device = hidden_ND.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        weight = weight_VD.to(compute)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden_ND.shape[0], chunk):
                h_CD = hidden_ND[start : start + chunk].to(compute)
                loss, grad_CV = chunk_loss(start, (h_CD @ weight.T).float())
                total += loss
                grad_CV = grad_CV.to(compute)
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk] = grad_CV @ weight
                if grad_weight is not None:
                    grad_weight += grad_CV.T @ h_CD
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad,
            None if grad_weight is None else grad_weight * grad,
            None,
            None,
        )


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, chunk_loss: ChunkLoss, chunk: int = CHUNK_TOKENS) -> Tensor:
    """Sum over tokens of a loss on hidden @ weight.T, made chunk by chunk.

    Args:
        hidden_ND: final hidden states.
        weight_VD: the head, or the tied embedding.
        chunk_loss: summed loss and its gradient with respect to one chunk's logits.
        chunk: tokens at a time.

    Returns:
        A float32 scalar; its gradient reaches hidden states and weight.
    """
    return cast(Tensor, cast(Any, _HeadLoss).apply(hidden_ND, weight_VD, chunk_loss, chunk))


def cross_entropy_chunk(targets_N: Tensor) -> ChunkLoss:
    """Cross-entropy with whole targets: -log softmax(logits)[target], 0 where the target is IGNORE."""

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        targets = targets_N[start : start + logits_CV.shape[0]]
        scored = targets != IGNORE
        index = targets.clamp(min=0)[:, None]
        log_z = logits_CV.logsumexp(dim=-1, keepdim=True)
        losses = (log_z - logits_CV.gather(1, index))[:, 0]
        gradient = logits_CV.sub_(log_z).exp_()  # softmax, in place
        gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=gradient.dtype))
        gradient *= scored[:, None]
        return losses[scored].sum(), gradient

    return chunk_loss


def cross_entropy(hidden: Tensor, weight_VD: Tensor, targets: Tensor, chunk: int = CHUNK_TOKENS) -> Tensor:
    """Summed next-token cross-entropy in nats.

    Args:
        hidden: (..., D) final hidden states.
        weight_VD: the head.
        targets: (...) token ids, IGNORE where nothing is scored.
        chunk: tokens at a time.
    """
    return head_loss(hidden.flatten(0, -2), weight_VD, cross_entropy_chunk(targets.flatten()), chunk)
