"""Distillation losses on sparse teacher targets, at about the cost of plain cross-entropy.

The naive code for one token, with the teacher's sparse target t over the vocabulary and its entropy:

    loss = T**2 * ((t * -log_softmax(logits / T)).sum() - entropy)
    gradient = T * (t.sum() * softmax(logits / T) - t)

Where E[t] = p, the expected loss is T^2 KL(p || student) and the expected gradient is that loss's gradient, that of
`compress.distillation.divergences.divergence_chunk`. Shape suffixes: N tokens, C tokens of a chunk, V vocabulary, M
stored ids.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sportsllm.text.packing import IGNORE
from sportsllm.training.chunked_loss import ChunkLoss, cross_entropy_chunk

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class SparseTargets:
    """Stored distributions of N tokens.

    Attributes:
        starts: (N + 1,) places in the M ids, on the CPU; token n owns starts[n] to starts[n + 1].
        ids_M: int64.
        weights_M: float32 target of each id.
        entropy_N: float32, of the teacher's distribution in nats; 0 where nothing is stored.
        tail_N: float32 mass of all ids that are not stored, for top-k; else None.
    """

    starts: npt.NDArray[np.int64]
    ids_M: Tensor
    weights_M: Tensor
    entropy_N: Tensor
    tail_N: Tensor | None = None

    def part(self, start: int, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of `count` tokens from `start`: each id's row in the chunk, its place in (count * width,), its weight."""
        first, last = int(self.starts[start]), int(self.starts[start + count])
        lengths = np.diff(self.starts[start : start + count + 1])
        rows = torch.from_numpy(np.repeat(np.arange(count), lengths)).to(self.ids_M.device)
        return rows, rows * width + self.ids_M[first:last], self.weights_M[first:last]


def sparse_chunk(
    sparse: SparseTargets, targets_N: Tensor, kl_weight: float = 1.0, temperature: float = 1.0
) -> ChunkLoss:
    """kl_weight * T^2 * KL from stored targets + (1 - kl_weight) * cross-entropy, 0 where the target is IGNORE.

    Args:
        sparse: made at `temperature`. With weights that are unbiased the loss is an unbiased estimate of the KL; for
            top-k it is the KL between the k + 1 outcomes "this id" and "any other".
        targets_N: the tokens that followed.
        kl_weight: share of the KL.
        temperature: T.
    """
    truth = cross_entropy_chunk(targets_N)
    if kl_weight == 0.0:
        return truth
    if kl_weight < 1.0 and temperature == 1.0 and sparse.tail_N is None:
        return _divergence_chunk(_with_truth(sparse, targets_N, kl_weight), temperature)
    if sparse.tail_N is None:
        stored = _divergence_chunk(sparse, temperature)
    else:
        stored = _bucket_chunk(sparse, sparse.tail_N, temperature)
    if kl_weight == 1.0:
        return stored

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        first_loss, first_gradient = truth(start, logits_CV.clone())
        second_loss, second_gradient = stored(start, logits_CV)
        loss = (1 - kl_weight) * first_loss + kl_weight * second_loss
        return loss, second_gradient.mul_(kl_weight).add_(first_gradient, alpha=1 - kl_weight)

    return chunk_loss


def _with_truth(sparse: SparseTargets, targets_N: Tensor, kl_weight: float) -> SparseTargets:
    """Targets kl_weight * t + (1 - kl_weight) * the token that followed, so that one pass gives both losses."""
    targets = targets_N.cpu().numpy()
    scored = targets != IGNORE
    places = sparse.starts[:-1][scored]
    ids = np.insert(sparse.ids_M.cpu().numpy(), places, targets[scored])
    weights = np.insert(kl_weight * sparse.weights_M.cpu().numpy(), places, np.float32(1 - kl_weight))
    device = sparse.ids_M.device
    return dataclasses.replace(
        sparse,
        starts=sparse.starts + np.concatenate([[0], np.cumsum(scored)]),
        ids_M=torch.from_numpy(ids).to(device),
        weights_M=torch.from_numpy(weights).to(device),
        entropy_N=kl_weight * sparse.entropy_N,
    )


def _divergence_chunk(sparse: SparseTargets, temperature: float) -> ChunkLoss:
    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        count, width = logits_CV.shape
        rows, places, weights = sparse.part(start, count, width)
        logits_CV = logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
        log_z_C = logits_CV.logsumexp(dim=-1)
        loss = (weights * (log_z_C[rows] - logits_CV.view(-1)[places])).sum()
        loss -= sparse.entropy_N[start : start + count].sum()
        mass_C = weights.new_zeros(count).index_add_(0, rows, weights)
        gradient = logits_CV.sub_(log_z_C[:, None]).exp_().mul_(mass_C[:, None])
        gradient.view(-1).index_add_(0, places, weights, alpha=-1)
        return loss * temperature**2, gradient if temperature == 1.0 else gradient.mul_(temperature)

    return chunk_loss


def _bucket_chunk(sparse: SparseTargets, tail_N: Tensor, temperature: float) -> ChunkLoss:
    """KL between k + 1 outcomes. With m the stored tail, q the student's and s its softmax, the gradient by a logit is

    s[v] - t[v] for a stored id, and s[v] * (1 - m / q) for any other, where 1 stands for what t and m add up to.
    """

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        count, width = logits_CV.shape
        rows, places, weights = sparse.part(start, count, width)
        tail_C = tail_N[start : start + count]
        log_s = logits_CV.div_(temperature)
        log_s -= log_s.logsumexp(dim=-1, keepdim=True)
        log_kept = log_s.view(-1)[places]
        gradient = log_s.exp_()
        # Summed over what is left: 1 - what is kept would be rounding only where the tail is small.
        gradient.view(-1)[places] = 0.0
        student_C = gradient.sum(dim=-1).clamp(min=_TINY)
        loss = (torch.xlogy(weights, weights) - weights * log_kept).sum()
        loss += (torch.xlogy(tail_C, tail_C) - tail_C * student_C.log()).sum()
        mass_C = tail_C.index_add(0, rows, weights)
        gradient *= (mass_C - tail_C / student_C)[:, None]
        gradient.view(-1)[places] = mass_C[rows] * log_kept.exp() - weights
        return loss * temperature**2, gradient.mul_(temperature)

    return chunk_loss
