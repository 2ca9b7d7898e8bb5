"""A few token ids and codes of probabilities in place of a teacher's whole distribution over the next token.

Ids with p >= tau are kept with their own probability. Of the rest, of mass m, n = floor(m / tau) ids are drawn without
replacement, id v with probability n * p[v] / m, and each of them weighs m / n. This is threshold sampling
(https://arxiv.org/abs/cs/0502040) by a systematic draw: no other unbiased choice of n ids has a smaller expected
squared error. One tau serves a whole piece of text, so that unsure tokens get the ids that sure ones do not need.
Probabilities are stored in 8 bits on a logarithmic scale and rounded up or down at random, so that the mean of what is
stored is the probability itself: the expected target is p.
Shape suffixes: N tokens of a piece, V vocabulary, K most probable ids, J draws, M ids kept of all tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CODE_BITS = 8
# Code 0 is 0, codes 1 to 255 are 2^-16 to 1 in steps of 4.5%.
CODES: npt.NDArray[np.float64] = np.concatenate([[0.0], np.logspace(-16, 0, 255, base=2.0)])
_NEGLIGIBLE = 2.0**-20  # a tail below this is left out: a float32 sum of probabilities is no nearer to 1
_BISECTIONS = 20


@dataclass(frozen=True)
class BitBudget:
    """What a token may take on average: `bits` for its ids and codes, an id counting `id_bits`."""

    bits: int
    id_bits: int

    @property
    def coded_ids(self) -> int:
        """Ids with a code each that fit beside one more code."""
        return max((self.bits - CODE_BITS) // (self.id_bits + CODE_BITS), 1)


@dataclass(frozen=True)
class SparseProbabilities:
    """What is stored of N tokens, in the tokens' order.

    Attributes:
        id_counts: (N,) ids of each token.
        code_counts: (N,) codes of each token.
        ids: (M,) token ids; of one token first those that have a code of their own.
        codes: uint8; of one token first those of its ids, then one for the mass of all other ids.
    """

    id_counts: npt.NDArray[np.int64]
    code_counts: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]

    def weights(self) -> npt.NDArray[np.float64]:
        """(M,) the target of each id."""
        tokens = np.arange(len(self.id_counts))
        token_M = np.repeat(tokens, self.id_counts)
        values = CODES[self.codes]
        some = self.code_counts > 0
        last = (np.cumsum(self.code_counts) - 1)[some]
        tail_N = np.zeros(len(tokens))
        tail_N[some] = values[last]
        heads_N = self.code_counts - some
        place_M = np.arange(len(token_M)) - (np.cumsum(self.id_counts) - self.id_counts)[token_M]
        result: npt.NDArray[np.float64] = (tail_N / np.maximum(self.id_counts - heads_N, 1))[token_M]
        result[place_M < heads_N[token_M]] = np.delete(values, last)
        return result


def concatenate(parts: Sequence[SparseProbabilities]) -> SparseProbabilities:
    """Several pieces, one after the other."""
    names = [field.name for field in dataclasses.fields(SparseProbabilities)]
    return SparseProbabilities(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def sample_sparse(p_NV: Tensor, scored_N: Tensor, budget: BitBudget, rng: np.random.Generator) -> SparseProbabilities:
    """Choose and encode ids; on average over the piece a token takes no more than its budget.

    Args:
        p_NV: float32 probabilities; overwritten.
        scored_N: False where nothing is to be stored.
        budget: an id that was drawn needs no code, so that more ids fit than `coded_ids`.
        rng: of this row alone, so that no other row changes the result.
    """
    count, vocabulary = p_NV.shape
    top = p_NV.topk(min(4 * budget.coded_ids, vocabulary), dim=-1)
    everything = budget.coded_ids >= vocabulary
    scored_top = top.values[scored_N]
    tau = 0.0 if everything or not len(scored_top) else threshold(scored_top, budget)
    head_NK = (top.values >= tau) & scored_N[:, None]
    heads_N = head_NK.sum(-1)
    tail_N = _tail_mass(top.values).gather(1, heads_N[:, None])[:, 0] * scored_N
    if everything:
        tail_N.zero_()
    drawn_N = _draws(tail_N, max(tau, _NEGLIGIBLE))
    p_NV.scatter_(1, top.indices, top.values.masked_fill(head_NK, 0.0))
    drawn_NJ = _systematic(p_NV, drawn_N, torch.from_numpy(rng.random((count, 1))).to(p_NV.device))
    ids = torch.cat([top.indices, drawn_NJ], dim=-1)
    kept = torch.cat([head_NK, _first(drawn_N, drawn_NJ.shape[1])], dim=-1)
    codes_N = (heads_N + 1) * scored_N  # those of the heads, and then the tail's
    values = torch.cat([top.values.double(), tail_N[:, None]], dim=-1).scatter_(1, heads_N[:, None], tail_N[:, None])
    flat = values[_first(codes_N, values.shape[1])].cpu().numpy()
    return SparseProbabilities(
        kept.sum(-1).cpu().numpy(), codes_N.cpu().numpy(), ids[kept].cpu().numpy(), encode(flat, rng)
    )


def encode(values: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Codes of probabilities in [0, 1]; CODES[code] is a neighbour of the value, and the value on average."""
    low = np.searchsorted(CODES, values, side="right") - 1
    high = np.minimum(low + 1, len(CODES) - 1)
    gap = np.where(high > low, CODES[high] - CODES[low], 1.0)
    return (low + (rng.random(values.shape) < (values - CODES[low]) / gap)).astype(np.uint8)


def threshold(top_NK: Tensor, budget: BitBudget) -> float:
    """The smallest tau, no less than 1 / K, that keeps to the budget.

    Args:
        top_NK: the K largest probabilities of each token, falling. At 1 / K no token has more than these above tau.
        budget: of a token on average.
    """
    tail_NK = _tail_mass(top_NK)

    def fits(tau: float) -> bool:
        heads_N = (top_NK >= tau).sum(-1)
        ids_N = heads_N + _draws(tail_NK.gather(1, heads_N[:, None])[:, 0], tau)
        return int((budget.id_bits * ids_N + CODE_BITS * (heads_N + 1)).sum()) <= budget.bits * len(top_NK)

    low, high = 1 / top_NK.shape[1], 1.0
    if fits(low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _tail_mass(top_NK: Tensor) -> Tensor:
    """(N, K + 1) float64: the mass of all but the first 0, 1, ... K ids, 0 where it is lost in rounding."""
    kept = torch.cat([top_NK.new_zeros(len(top_NK), 1), top_NK], dim=-1).double().cumsum(-1)
    tail = 1 - kept
    return tail.masked_fill_(tail < _NEGLIGIBLE, 0.0)


def _draws(tail_N: Tensor, tau: float) -> Tensor:
    """n of each token. m / n is at least as large as every probability in the tail, so that no id is drawn twice."""
    return ((tail_N / tau).floor().clamp(min=1) * (tail_N > 0)).long()


def _systematic(weight_NV: Tensor, drawn_N: Tensor, offset_N1: Tensor) -> Tensor:
    """(N, J) ids at equal distances along the cumulated weights, the first at a random offset below one distance.

    Id v is met with probability n * weight[v] / sum(weight) (Madow, https://doi.org/10.1214/aoms/1177729988).
    """
    cumulated_NV = weight_NV.cumsum(-1)
    steps = torch.arange(max(int(drawn_N.max()), 1), device=weight_NV.device)
    places = (steps + offset_N1) / drawn_N.clamp(min=1)[:, None]
    # Below the total also after rounding to float32, so that what is found has a weight.
    places = (places.clamp(max=1 - 2.0**-23) * cumulated_NV[:, -1:]).float().contiguous()
    return torch.searchsorted(cumulated_NV, places, right=True).clamp(max=weight_NV.shape[1] - 1)


def _first(count_N: Tensor, width: int) -> Tensor:
    """(N, width) True in each row's first `count` places."""
    return torch.arange(width, device=count_N.device) < count_N[:, None]
