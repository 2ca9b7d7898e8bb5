"""A few token ids a position that stand for a teacher's whole distribution over the next token.

Three ways, each for one piece of a row of text at a time:

    sampled  ids with p >= tau are kept with their own probability. Of the rest, of mass m, n = floor(m / tau) ids are
             drawn without replacement, id v with probability n * p[v] / m, and each of them weighs m / n.
    counts   a fixed number of draws with replacement, weight = share of the draws: the published baseline
             (https://arxiv.org/abs/2503.16870).
    top-k    the k most probable ids, and the mass of all others.

`sampled` is threshold sampling (https://arxiv.org/abs/cs/0502040) by a systematic draw: no other unbiased choice of so
many ids has a smaller expected squared error, and one tau for the whole piece hands the ids that sure tokens do not
need to the unsure ones. Probabilities are stored in 8 bits on a logarithmic scale and rounded up or down at random, so
that the mean of what is stored is the probability itself: the expected target of `sampled` and `counts` is p.
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

KINDS = ("sampled", "counts", "top-k")
CODE_BITS = 8
# Code 0 is 0, codes 1 to 255 are 2^-16 to 1 in steps of 4.5%.
CODES: npt.NDArray[np.float64] = np.concatenate([[0.0], np.logspace(-16, 0, 255, base=2.0)])
_NEGLIGIBLE = 2.0**-20  # a tail below this is left out: a float32 sum of probabilities is no nearer to 1
_MOST_DRAWS = 255  # a count is stored in a byte
_BISECTIONS = 20


@dataclass(frozen=True)
class Room:
    """What a token may take on average: `bits` for its ids and codes, of which an id takes `id_bits`."""

    bits: int
    id_bits: int

    @property
    def coded_ids(self) -> int:
        """Ids with a code each that fit beside one more code."""
        return max((self.bits - CODE_BITS) // (self.id_bits + CODE_BITS), 1)

    def most_ids(self, vocab_size: int) -> int:
        """No token gets more ids than this, however little its neighbours need."""
        return min(4 * self.coded_ids, vocab_size) + 1


@dataclass(frozen=True)
class Picked:
    """What is stored of N tokens, in the tokens' order.

    Attributes:
        id_counts: (N,) ids of each token.
        code_counts: (N,) codes of each token.
        ids: (M,) token ids; of one token first those that have a code of their own.
        codes: uint8. `sampled` and `top-k`: of one token first those of its ids, then one for the mass of all other
            ids; `counts`: how often each id was drawn.
    """

    id_counts: npt.NDArray[np.int64]
    code_counts: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]


def joined(parts: Sequence[Picked]) -> Picked:
    """Several pieces, one after the other."""
    fields = (np.concatenate([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Picked))
    return Picked(*fields)


def pick(kind: str, p_NV: Tensor, scored_N: Tensor, room: Room, rng: np.random.Generator) -> Picked:
    """Choose and encode ids; on average over the piece a token takes no more than its room (`counts`: is expected to).

    Args:
        kind: one of KINDS.
        p_NV: float32 probabilities; overwritten.
        scored_N: False where nothing is to be stored.
        room: for `sampled`, an id that was drawn needs no code, so that more ids fit than `coded_ids`.
        rng: of this row alone, so that no other row changes the result.
    """
    if kind == "sampled":
        return _sampled(p_NV, scored_N, room, rng)
    if kind == "counts":
        return _counts(p_NV, scored_N, room, rng)
    top = p_NV.topk(min(room.coded_ids, p_NV.shape[1]), dim=-1)
    kept = torch.ones_like(top.indices, dtype=torch.bool) & scored_N[:, None]
    return _packed(top.indices, kept, top.values, kept.sum(-1), _tail_mass(top.values)[:, -1], scored_N, rng)


def weights(kind: str, picked: Picked) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
    """The targets that a stored piece means.

    Returns:
        (M,) weight of each id, and for `top-k` the (N,) mass of all ids that are not stored.
    """
    tokens = np.arange(len(picked.id_counts))
    token_M = np.repeat(tokens, picked.id_counts)
    if kind == "counts":
        drawn = picked.codes.astype(np.float64)
        return drawn / np.bincount(token_M, drawn, len(tokens))[token_M], None
    values = CODES[picked.codes]
    some = picked.code_counts > 0
    last = (np.cumsum(picked.code_counts) - 1)[some]
    tail_N = np.zeros(len(tokens))
    tail_N[some] = values[last]
    heads_N = picked.code_counts - some
    own = np.arange(len(token_M)) - (np.cumsum(picked.id_counts) - picked.id_counts)[token_M] < heads_N[token_M]
    result = (tail_N / np.maximum(picked.id_counts - heads_N, 1))[token_M]
    result[own] = np.delete(values, last)
    return result, tail_N if kind == "top-k" else None


def encode(values: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Codes of probabilities in [0, 1]; CODES[code] is a neighbour of the value, and the value on average."""
    low = np.searchsorted(CODES, values, side="right") - 1
    high = np.minimum(low + 1, len(CODES) - 1)
    gap = np.where(high > low, CODES[high] - CODES[low], 1.0)
    return (low + (rng.random(values.shape) < (values - CODES[low]) / gap)).astype(np.uint8)


def threshold(top_NK: Tensor, room: Room) -> float:
    """The smallest tau, no less than 1 / K, with which `sampled` keeps to its room.

    Args:
        top_NK: the K largest probabilities of each token, falling. At 1 / K no token has more than these above tau.
        room: of a token on average.
    """
    tail_NK = _tail_mass(top_NK)

    def fits(tau: float) -> bool:
        heads_N = (top_NK >= tau).sum(-1)
        ids_N = heads_N + _draws(tail_NK.gather(1, heads_N[:, None])[:, 0], tau)
        return int((room.id_bits * ids_N + CODE_BITS * (heads_N + 1)).sum()) <= room.bits * len(top_NK)

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


def _sampled(p_NV: Tensor, scored_N: Tensor, room: Room, rng: np.random.Generator) -> Picked:
    count, vocabulary = p_NV.shape
    top = p_NV.topk(min(4 * room.coded_ids, vocabulary), dim=-1)
    everything = room.coded_ids >= vocabulary
    scored_top = top.values[scored_N]
    tau = 0.0 if everything or not len(scored_top) else threshold(scored_top, room)
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
    return _packed(ids, kept, top.values, heads_N, tail_N, scored_N, rng)


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


def _counts(p_NV: Tensor, scored_N: Tensor, room: Room, rng: np.random.Generator) -> Picked:
    width = p_NV.shape[1]
    log_missed_NV = torch.log1p(-p_NV[scored_N].clamp(max=1 - _NEGLIGIBLE))
    budget = room.bits / (room.id_bits + CODE_BITS) * len(log_missed_NV)
    draws, high = 1, _MOST_DRAWS
    while draws < high:  # the most draws whose expected number of different ids fits
        middle = (draws + high + 1) // 2
        fits = float((1 - (log_missed_NV * middle).exp()).sum()) <= budget
        draws, high = (middle, high) if fits else (draws, middle - 1)
    cumulated_NV = p_NV.cumsum(-1)
    places = torch.from_numpy(rng.random((len(p_NV), draws))).to(p_NV.device).clamp(max=1 - 2.0**-23)
    places = (places * cumulated_NV[:, -1:]).float()
    drawn = torch.searchsorted(cumulated_NV, places, right=True).clamp(max=width - 1)
    drawn_NJ = drawn.sort(dim=-1).values.cpu().numpy()
    fresh = np.ones(drawn_NJ.shape, dtype=bool)
    fresh[:, 1:] = drawn_NJ[:, 1:] != drawn_NJ[:, :-1]
    lengths = np.diff(np.append(np.flatnonzero(fresh), fresh.size))  # every token's first draw is fresh
    scored = scored_N.cpu().numpy()
    id_counts = fresh.sum(-1) * scored
    stored = np.repeat(scored, fresh.sum(-1))
    return Picked(id_counts, id_counts, drawn_NJ[fresh][stored], lengths[stored].astype(np.uint8))


def _first(count_N: Tensor, width: int) -> Tensor:
    """(N, width) True in each row's first `count` places."""
    return torch.arange(width, device=count_N.device) < count_N[:, None]


def _packed(
    ids: Tensor,
    kept: Tensor,
    top_NK: Tensor,
    heads_N: Tensor,
    tail_N: Tensor,
    scored_N: Tensor,
    rng: np.random.Generator,
) -> Picked:
    """Padded rows to flat ones: the kept ids, and codes of each token's heads and then of its tail."""
    codes_N = (heads_N + 1) * scored_N
    values = torch.cat([top_NK.double(), tail_N[:, None]], dim=-1).scatter_(1, heads_N[:, None], tail_N[:, None])
    flat = values[_first(codes_N, values.shape[1])].cpu().numpy()
    return Picked(kept.sum(-1).cpu().numpy(), codes_N.cpu().numpy(), ids[kept].cpu().numpy(), encode(flat, rng))
