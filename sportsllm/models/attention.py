"""Attention over heads and the cache that it extends, for the kinds of attention to use.

Shape suffixes: B sequences, T tokens, H query heads, K key/value heads, G heads of a group, E head_dim,
L cache length.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_state, cached_shape

_GROWTH = 64  # tokens


class KVCache:
    """Keys and values, or other states, of the tokens read so far; grows with them, up to a limit.

    One tensor a `State` of the attention's kind, in its order: (layers, B, ..., L, E), the tokens before the last
    axis of the shape that a single token has. L is at most `_GROWTH` above what is filled: half-filled rows are read
    at a third of the speed. Of a `State` that is not kept for each token: (layers, B, ...), zeros before the first.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.room, self.length = length, 0
        first = min(length, _GROWTH)
        rows, self.tensors = (config.num_hidden_layers, batch), list[Tensor]()
        for state in block_state(config):
            make = torch.empty if state.per_token else torch.zeros
            self.tensors.append(make((*rows, *cached_shape(state, first)), dtype=dtype, device=device))

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Write one layer's new states, tokens on the last axis but one, after the `length` old ones; returns all."""
        end = self.length + new[0].shape[-2]
        if end > self.room:
            raise ValueError(f"cache holds {self.room} tokens, {end} are needed")
        if end > self.tensors[0].shape[-2]:
            self._grow(min(self.room, -(-end // _GROWTH) * _GROWTH))
        for tensor, state in zip(self.tensors, new, strict=True):
            tensor[layer][..., self.length : end, :] = state
        return tuple(tensor[layer][..., :end, :] for tensor in self.tensors)

    def read(self, layer: int) -> tuple[Tensor, ...]:
        """One layer's states that are not kept for each token, (B, ...) each."""
        return tuple(tensor[layer] for tensor in self.tensors)

    def replace(self, layer: int, *new: Tensor) -> None:
        """Put others in their place."""
        for tensor, state in zip(self.tensors, new, strict=True):
            tensor[layer] = state

    def keep(self, rows_B: Tensor) -> None:
        """Drop all sequences but these, in this order; copies those that change their place."""
        places_B = torch.arange(len(rows_B), device=rows_B.device)
        moved_B = rows_B != places_B
        for tensor in self.tensors:
            tensor[:, places_B[moved_B]] = tensor[:, rows_B[moved_B]]
        self.tensors = [tensor[:, : len(rows_B)] for tensor in self.tensors]

    def _grow(self, length: int) -> None:
        for place, old in enumerate(self.tensors):
            self.tensors[place] = old.new_empty((*old.shape[:-2], length, old.shape[-1]))
            self.tensors[place][..., : self.length, :] = old[..., : self.length, :]


class Scores(NamedTuple):
    """How scores are made: their scale, head_dim ** -0.5 if None, and how many tokens count, the newest included."""

    scale: float | None = None
    window: int | None = None


_PLAIN = Scores()


def attend_cached(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, layer: int, cache: KVCache | None, scores: Scores = _PLAIN
) -> Tensor:
    """Causal attention of new tokens to this layer's cache and to themselves; (B, T, H, E)."""
    q, k, v = (t.transpose(1, 2) for t in (q_BTHE, k_BTKE, v_BTKE))
    past = 0
    if cache is not None:
        past = cache.length
        k, v = cache.append(layer, k, v)
        if q.shape[2] == 1:
            return attend_last(q, k, v, scores).transpose(1, 2)
    return attend(q, k, v, past, scores).transpose(1, 2)


def attend_last(q_BH1E: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, scores: Scores = _PLAIN) -> Tensor:
    """Attention of one token a sequence to all L, (B, H, 1, E); a group's heads are multiplied in one piece."""
    batch, heads, _, size = q_BH1E.shape
    if scores.window is not None:
        k_BKLE, v_BKLE = k_BKLE[:, :, -scores.window :], v_BKLE[:, :, -scores.window :]
    scale = size**-0.5 if scores.scale is None else scores.scale
    q_BKGE = q_BH1E.float().reshape(batch, k_BKLE.shape[1], -1, size) * scale
    weights_BKGL = torch.softmax(q_BKGE @ k_BKLE.float().transpose(2, 3), dim=-1)
    return (weights_BKGL @ v_BKLE.float()).view(batch, heads, 1, -1).to(v_BKLE.dtype)


def attend(
    q_BHTE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    past: int = 0,
    scores: Scores = _PLAIN,
    seen_B1TL: Tensor | None = None,
) -> Tensor:
    """Causal scaled dot-product attention with grouped heads, (B, H, T, E), in v's type; `past` tokens come before.

    `seen_B1TL`, where given, says which tokens each query attends to, instead of all up to its own.

    On a CPU it computes in float32: the kernel's bfloat16 backward is slower (62 against 49 ms with head_dim 32), and
    for every new document length it keeps compiled code, tens of MB a training step.
    """
    dtype, device, (new, length) = v_BKLE.dtype, q_BHTE.device.type, (q_BHTE.shape[2], k_BKLE.shape[2])
    mask = seen_B1TL
    if mask is None and (
        past or (scores.window is not None and length > scores.window)
    ):  # row t sees the past and itself
        mask = torch.ones(new, length, dtype=torch.bool, device=q_BHTE.device).tril(past)
        if scores.window is not None:
            mask = mask.triu(past - scores.window + 1)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=True
        )

    if device != "cpu":
        return attended(q_BHTE, k_BKLE, v_BKLE)
    with torch.autocast(device, enabled=False):
        return attended(q_BHTE.float(), k_BKLE.float(), v_BKLE.float()).to(dtype)


def attend_documents(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, documents: Sequence[int], scores: Scores = _PLAIN
) -> Tensor:
    """Causal attention inside each document of a packed batch, never across; (B, T, H, E); see `in_documents`."""

    def attend_one(*rows: Tensor) -> Tensor:
        q, k, v = (row.transpose(0, 1)[None] for row in rows)
        return attend(q, k, v, scores=scores)[0].transpose(0, 1)

    return in_documents(documents, attend_one, q_BTHE, k_BTKE, v_BTKE)


def in_documents(documents: Sequence[int], attend_one: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """A function of each document of a packed batch, joined to (B, T, H, E).

    One call a document: no mask of (T, T) exists, and the work is that of the documents alone, not of the whole row.

    Args:
        documents: their ends in the batch read as one row of B * T tokens, rising, the last B * T.
        attend_one: gets the document's (n, ...) of each part and returns (n, H, E).
        parts: (B, T, ...) each.
    """
    # `split`, not slices: the backward of n slices fills n tensors of the whole batch's size.
    lengths = [end - start for start, end in zip((0, *documents), documents, strict=False)]
    rows = zip(*(torch.split(part.flatten(0, 1), lengths) for part in parts), strict=True)
    joined = torch.cat([attend_one(*document) for document in rows])
    return joined.view(*parts[0].shape[:2], *joined.shape[1:])
