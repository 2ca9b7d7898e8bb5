"""Experimental: grouped-query attention to a few chosen blocks of tokens; an indexer of low rank chooses them, as
DeepSeek-V3.2's lightning indexer does (https://arxiv.org/abs/2512.02556), by blocks and by shares of attention.

    share_j(t, s) = softmax over s up to t of q_tj . k_s * scale               J index heads, one key k_s a token
    share(t, b)   = mean over j of the sum over s in block b of share_j(t, s)
    chosen        = the first block, the newest ones and the others of the largest shares, `blocks` in all
    y             = grouped-query attention to the tokens of the chosen blocks up to t

The index key has some parts, each with the slowest of a head's rotary pairs, or all. Blocks lie side by side from token
0 on. A query that sees no more than `tokens` tokens attends to all of them. Beside keys and values the index key is
cached. The choice passes no gradient: the indexer learns from attention itself, see `index_loss`.
Shape suffixes: B sequences, T new tokens, R of them, L tokens with the cached ones, D hidden_size, H query heads,
K key/value heads, E head_dim, J index heads, I their size, N blocks, C chosen blocks, S their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import index_pairs, index_size
from sportsllm.models.layers import GroupedQueryAttention, KVCache, Rope, attend, attend_last, in_documents, rotate

_ROWS = 256  # queries whose index scores exist at once
_LEAST_SHARE = 1e-30
LOSS_ROWS = 128
"""Queries of a document whose attention the indexer learns; all of them would take L^2 scores."""


class Document(NamedTuple):
    """What attention reads of sequences; `past` tokens come before the new ones."""

    config: ModelConfig
    q_BTHE: Tensor
    k_BLKE: Tensor
    v_BLKE: Tensor
    index_q_BTJI: Tensor
    index_k_BLI: Tensor
    past: int = 0

    @property
    def length(self) -> int:
        """L."""
        return self.k_BLKE.shape[1]

    def places(self, rows: slice | Tensor) -> Tensor:
        """Positions of some new tokens, (R,)."""
        return torch.arange(self.length - self.past, device=self.q_BTHE.device)[rows] + self.past

    def shares(self, rows: slice | Tensor, index: bool) -> Tensor:
        """Shares of the attention of some new tokens that fall on each block, mean over heads, (B, R, N) float32.

        By the indexer: share(t, b), or by full attention. The last block may be a part of one.
        """
        block, size = self.config.chosen_selection.block, self.config.head_dim
        with torch.autocast(self.q_BTHE.device.type, enabled=False):
            q_BTHE = self.index_q_BTJI if index else self.q_BTHE
            q_BHRE = q_BTHE[:, rows].float().transpose(1, 2) * self.config.score_scale
            if index:
                scores_BHRL = q_BHRE @ self.index_k_BLI.float().transpose(1, 2).unsqueeze(1)
            else:  # Y: a group's heads, R queries each
                q_BKYE = q_BHRE.reshape(len(q_BHRE), self.config.num_key_value_heads, -1, size)
                scores_BKYL = q_BKYE @ self.k_BLKE.float().permute(0, 2, 3, 1)
                scores_BHRL = scores_BKYL.view(*q_BHRE.shape[:3], self.length)
            later_RL = torch.arange(self.length, device=q_BTHE.device) > self.places(rows)[:, None]
            shares_BRL = scores_BHRL.masked_fill(later_RL, -math.inf).softmax(dim=-1).mean(dim=1)
        padded = nn.functional.pad(shares_BRL, (0, -self.length % block))
        return padded.view(*padded.shape[:-1], -1, block).sum(dim=-1)

    def chosen_blocks(self, rows: slice | Tensor) -> Tensor:
        """Numbers of the chosen blocks of some queries, (B, R, C); later ones fill up if a query sees fewer."""
        selection, shares_BRN = self.config.chosen_selection, self.shares(rows, index=True)
        blocks_N = torch.arange(shares_BRN.shape[-1], device=shares_BRN.device)
        own_R1 = (self.places(rows) // selection.block)[:, None]
        kept_RN = (blocks_N == 0) | (blocks_N > own_R1 - selection.newest)
        ranked_BRN = shares_BRN.masked_fill(kept_RN, math.inf).masked_fill(blocks_N > own_R1, -math.inf)
        return ranked_BRN.topk(selection.blocks, dim=-1).indices


def attend_selected(document: Document) -> Tensor:
    """Causal attention to the chosen tokens, (B, T, H, E); to all if there are no more than are chosen."""
    config, q, k, v, *_, past = document
    alone, long = bool(past) and q.shape[1] == 1, document.length > config.chosen_selection.tokens
    if not alone:
        return attend(q, k, v, past, config.attention_scale, seen_B1TL=seen_tokens(document) if long else None)
    if long:
        places_BS = chosen_tokens(document)[..., None, None]
        k, v = (t.gather(1, places_BS.expand(-1, -1, *t.shape[2:])) for t in (k, v))
    return attend_last(q, k, v, config.attention_scale)


@torch.no_grad()
def chosen_tokens(document: Document) -> Tensor:
    """Places of the tokens that the newest token attends to, rising, (B, S); the last of them is its own."""
    selection = document.config.chosen_selection
    blocks_BC = document.chosen_blocks(slice(-1, None))[:, 0].sort(dim=-1).values
    inside = torch.arange(selection.block, device=blocks_BC.device)
    places_BS = (blocks_BC[..., None] * selection.block + inside).flatten(1)
    return places_BS[:, : selection.tokens - (-document.length % selection.block)]


@torch.no_grad()
def seen_tokens(document: Document) -> Tensor:
    """Whether new token t attends to token s, (B, 1, T, L)."""
    block, length, new = document.config.chosen_selection.block, document.length, document.q_BTHE.shape[1]
    parts = []
    for start in range(0, new, _ROWS):
        chosen = document.chosen_blocks(slice(start, start + _ROWS))
        open_BTN = torch.zeros((*chosen.shape[:2], -(-length // block)), dtype=torch.bool, device=chosen.device)
        parts.append(open_BTN.scatter(2, chosen, True).repeat_interleave(block, dim=2)[..., :length])
    causal_TL = torch.ones(new, length, dtype=torch.bool, device=parts[0].device).tril(document.past)
    return (torch.cat(parts, dim=1) & causal_TL)[:, None]


def index_loss(document: Document) -> Tensor:
    """How far the indexer's choice is from attention: nats, the sum over all queries of whole sequences.

    With p(t, b) the share of query t's attention, the mean over its heads, that falls on block b, and c the blocks that
    are not kept in any case,

        sum over t, b in c of p(t, b) log(p'(t, b) / share'(t, b)),    p' = p / sum over c of p, share' as well

    which is what the indexer adds to the divergence of whole distributions; estimated from `LOSS_ROWS` queries at equal
    distances. Only the indexer gets a gradient.
    """
    selection = document.config.chosen_selection
    first = selection.block * (selection.newest + 1)  # the first query with a block to choose
    count = document.length - first
    if count <= 0:
        return document.index_q_BTJI.sum() * 0.0
    device = document.q_BTHE.device
    rows_R = torch.linspace(first, document.length - 1, min(count, LOSS_ROWS), device=device).round().long()
    blocks_N = torch.arange(-(-document.length // selection.block), device=device)
    free_RN = (blocks_N > 0) & (blocks_N <= (rows_R // selection.block)[:, None] - selection.newest)
    scores_BRN = document.shares(rows_R, index=True).clamp(min=_LEAST_SHARE).log().masked_fill(~free_RN, -math.inf)
    predicted_BRN = scores_BRN.log_softmax(dim=-1).masked_fill(~free_RN, 0.0)
    with torch.no_grad():
        share_BRN = document.shares(rows_R, index=False) * free_RN
    kept_BR1 = share_BRN.sum(dim=-1, keepdim=True)
    wanted_BRN = torch.where(share_BRN > 0, (share_BRN / kept_BR1).log(), 0.0)
    return (share_BRN * (wanted_BRN - predicted_BRN)).sum() * (count / len(rows_R))


class SelectedAttention(GroupedQueryAttention):
    """Grouped-query attention with an indexer, which reads the input without passing a gradient to it."""

    def add_indexer(self) -> None:
        config, size = self.config, index_size(self.config)
        self.index_q_proj = nn.Linear(config.hidden_size, config.chosen_selection.heads * size, config.attention_bias)
        self.index_k_proj = nn.Linear(config.hidden_size, size, config.attention_bias)
        self.auxiliary_loss: Tensor | None = None

    def forward(
        self, x_BTD: Tensor, rope: Rope, documents: Sequence[int] | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """As `GroupedQueryAttention.forward`. In training it leaves the indexer's loss in `auxiliary_loss`."""
        (batch, new, _), losses = x_BTD.shape, list[Tensor]()
        parts = self.parts(x_BTD, rope)

        def attend_one(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> Tensor:
            document = Document(self.config, q, k, v, index_q, index_k)
            if self.training and document.index_q_BTJI.requires_grad:
                losses.append(index_loss(document))
            return attend_selected(document)

        if cache is not None:
            past, (q, k, v, index_q, index_k) = cache.length, parts
            k, v, index_k = cache.append(self.layer, k.transpose(1, 2), v.transpose(1, 2), index_k)
            document = Document(self.config, q, k.transpose(1, 2), v.transpose(1, 2), index_q, index_k, past)
            y_BTHE = attend_selected(document)
        elif documents is None and not self.training:
            y_BTHE = attend_one(*parts)
        else:
            y_BTHE = in_documents(documents or range(new, batch * new + 1, new), attend_one, *parts)
        if losses:
            self.auxiliary_loss = sum(losses[1:], losses[0]) / (batch * new)
        y_BTD: Tensor = self.o_proj(y_BTHE.flatten(2))
        return y_BTD

    def parts(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, T, heads, E); index queries (B, T, J, I) and keys (B, T, I)."""
        (batch, new), pairs = x_BTD.shape[:2], index_pairs(self.config)
        slower = [table[..., -pairs:] for table in rope[:2]]

        def turned(y_BTI: Tensor) -> Tensor:
            return rotate(y_BTI.view(batch, new, -1, 2 * pairs), slower).flatten(2)

        read = x_BTD.detach()
        queries, key = turned(self.index_q_proj(read)), turned(self.index_k_proj(read))
        heads = self.config.chosen_selection.heads
        return (*self.heads(x_BTD, rope), queries.view(batch, new, heads, -1), key)
