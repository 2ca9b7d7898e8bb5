"""The distillation loss on sparse teacher targets, at about the cost of plain cross-entropy.

The naive code for one token, with the teacher's sparse target t over the vocabulary and its entropy:

    loss = T**2 * ((t * -log_softmax(logits / T)).sum() - entropy)
    gradient = T * (t.sum() * softmax(logits / T) - t)

Where E[t] = p, the expected loss is T^2 KL(p || student) and the expected gradient is that loss's gradient.
Shape suffixes: N tokens, C tokens of a chunk, V vocabulary, M stored ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sportsllm.text.packing import IGNORE
from sportsllm.training.loss import ChunkLoss, cross_entropy_chunk

# (first token, number of tokens) -> the teacher's finite logits for them, (C, V) float32, the caller's to overwrite
TeacherLogits = Callable[[int, int], Tensor]


def blended_chunk(weight: float, first: ChunkLoss, second: ChunkLoss) -> ChunkLoss:
    """weight * first + (1 - weight) * second; keeps one (C, V) more than either."""

    def chunk_loss(start: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        second_loss, second_gradient_CV = second(start, logits_CV.clone())
        loss, gradient_CV = first(start, logits_CV)
        gradient_CV.mul_(weight).add_(second_gradient_CV, alpha=1 - weight)
        return weight * loss + (1 - weight) * second_loss, gradient_CV

    return chunk_loss


@dataclass(frozen=True)
class SparseTargets:
    """Stored distributions of N tokens.

    Attributes:
        starts: (N + 1,) places in the M ids, on the CPU; token n owns starts[n] to starts[n + 1].
        ids_M: int64.
        weights_M: float32 target of each id.
        entropy_N: float32, of the teacher's distribution in nats; 0 where nothing is stored.
    """

    starts: npt.NDArray[np.int64]
    ids_M: Tensor
    weights_M: Tensor
    entropy_N: Tensor

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
        sparse: made at `temperature`; with weights that are unbiased the loss is an unbiased estimate of the KL.
        targets_N: the tokens that followed.
        kl_weight: share of the KL.
        temperature: T.
    """
    entropy = cross_entropy_chunk(targets_N)
    if kl_weight == 0.0:
        return entropy
    if kl_weight == 1.0:
        return _divergence_chunk(sparse, temperature)
    if temperature == 1.0:
        return _divergence_chunk(_with_truth(sparse, targets_N, kl_weight), temperature)
    return blended_chunk(kl_weight, _divergence_chunk(sparse, temperature), entropy)


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
