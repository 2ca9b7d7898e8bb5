"""Grouped-query attention to a few chosen blocks of tokens; an indexer of low rank chooses them, as DeepSeek-V3.2's
lightning indexer does (https://arxiv.org/abs/2512.02556), by blocks and by shares of attention.

    share_j(t, s) = softmax over s up to t of q_tj . k_s * scale               J index heads, one key k_s a token
    share(t, b)   = mean over j of the sum over s in block b of share_j(t, s)
    chosen        = the first block, the newest ones and the others of the largest shares, `blocks` in all
    y             = grouped-query attention to the tokens of the chosen blocks up to t

The index key has some parts, each with the slowest of a head's rotary pairs, or all.

Blocks lie side by side from token 0 on. A query that sees no more than `tokens` tokens attends to all of them. Beside
keys and values the index key is cached. The choice passes no gradient: the indexer learns from attention itself, see
`sportsllm.models.selection.index_loss`.
Shape suffixes: B sequences, T new tokens, D hidden_size, H query heads, K key/value heads, E head_dim, J index heads,
I their size, P rotary pairs (E / 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sportsllm.errors import UsageError
from sportsllm.models.grouped_query import GroupedQuery, read_heads
from sportsllm.models.parts import HIDDEN, Activation, Matrix, Processor, State, Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sportsllm.models.attention import KVCache
    from sportsllm.models.config import ModelConfig
    from sportsllm.models.selection import Document

INDEX = ("index_q_proj", "index_k_proj")
"""The indexer's matrices: queries of all heads, and the key."""
STATES = ("selected_key", "selected_value", "selected_index")
_NEWEST_SHARE = 4  # of the chosen blocks, one in so many is among the newest
_LEAST_BLOCKS = 4  # the first, two of the newest, and one that the indexer chooses


@dataclass(frozen=True)
class Selection:
    """How many tokens are chosen, in blocks of what size, and by what indexer.

    Attributes:
        tokens: that a query attends to at most, itself included.
        block: consecutive tokens that are chosen as a whole.
        heads: of the indexer.
        parts: of the index key, and of each of these heads.
        pairs: rotary pairs of a part, the slowest of a head's; all if None.
    """

    tokens: int = 512
    block: int = 16
    heads: int = 4
    parts: int = 1
    pairs: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "block", "heads", "parts", "pairs"):
            value = getattr(self, name)
            if name == "pairs" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"config: selection: {name} is {value!r}; it must be a whole number of at least 1")
        if self.tokens % self.block or self.blocks < _LEAST_BLOCKS:
            raise UsageError(
                f"config: selection: {self.tokens} tokens in blocks of {self.block}; choose whole blocks, at least "
                f"{_LEAST_BLOCKS}"
            )

    @property
    def blocks(self) -> int:
        """Blocks that a query attends to at most."""
        return self.tokens // self.block

    @property
    def newest(self) -> int:
        """Newest blocks that are always kept, the query's own included."""
        return max(2, self.blocks // _NEWEST_SHARE)


class Selected(GroupedQuery):
    """`GroupedQuery` with an indexer; see `sportsllm.models.parts.Kind`."""

    def check(self, config: ModelConfig) -> None:
        for name, value, plain in (
            ("layer_types", config.layer_types, None),
            ("position_kind", config.position_kind, "rotary"),
        ):
            if value != plain:
                raise UsageError(
                    f"config: {name} is {value!r}; attention to selected tokens is for rotary layers that are all alike"
                )

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, heads, size = config.hidden_size, config.chosen_selection.heads, index_size(config)
        *read, out = super().matrices(config)
        queries, key = INDEX
        bias = config.attention_bias
        return (
            *read,
            Matrix(queries, heads * size, hidden, "index_head", HIDDEN, HIDDEN, bias=bias),
            Matrix(key, size, hidden, "index_key", HIDDEN, HIDDEN, bias=bias),
            out,
        )

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """Those of grouped-query attention; the indexer stays whole."""
        heads, size = config.chosen_selection.heads, index_size(config)
        index = Unit("index_head", "selection", heads, size), Unit("index_key", "selection", 1, size)
        return *super().units(config), *index

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        shape = (config.num_key_value_heads, config.head_dim)
        key, value, index = STATES
        return State(key, shape), State(value, shape), State(index, (index_size(config),))

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """Attention to the chosen tokens, and the indexer's scores of all."""
        selection = config.chosen_selection
        if depth <= selection.tokens:
            return super().mixing_macs(config, depth)
        return super().mixing_macs(config, selection.tokens) + self._index_macs(config, depth)

    def prompt_macs(self, config: ModelConfig, depth: int) -> int:
        """The same where the choice is a mask over scores of all tokens."""
        index = self._index_macs(config, depth) if depth > config.chosen_selection.tokens else 0
        return super().mixing_macs(config, depth) + index

    def _index_macs(self, config: ModelConfig, depth: int) -> int:
        return config.chosen_selection.heads * (index_size(config) + 1) * depth

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """Of the indexer its queries and key, and their float32 copies; see `index_loss` for scores."""
        numbers = (config.chosen_selection.heads + 1) * index_size(config)
        return super().activation_bytes(config, mixed, processor) + numbers * (4 + (2 if mixed else 4))

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        heads, size = config.chosen_selection.heads, index_size(config)
        *read, out_proj = self.matrices(config)
        *heads_read, scores, output, _ = super().tensors(config)
        return (
            *read,
            *(item for item in heads_read if isinstance(item, Activation)),
            Activation("index q", (heads, size)),
            Activation("index k, cached", (size,), "cache"),
            Activation("index scores", (heads,), "scores", held=False),
            scores,
            output,
            out_proj,
        )

    def forward(
        self,
        half: Any,
        x_BTD: Tensor,
        rope: Sequence[Tensor],
        documents: Sequence[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        from sportsllm.models.attention import in_documents
        from sportsllm.models.selection import attend_selected, index_loss

        config, layer, (batch, new, _) = half.config, half.layer, x_BTD.shape
        *heads, index_q_BTJI, index_k_BTI = parts = document_parts(half, x_BTD, rope)
        losses: list[Tensor] = []

        def attend_one(*parts: Tensor) -> Tensor:
            """(n, ...) parts of one document; (n, H, E)."""
            document = document_of(config, [part[None] for part in parts])
            if half.training and document.index_q_BTJI.requires_grad:
                losses.append(index_loss(document))
            return attend_selected(document)[0]

        if cache is not None:
            past = cache.length
            _, k, v = (part.transpose(1, 2) for part in heads)
            k, v, index_k = cache.append(layer, k, v, index_k_BTI)
            cached = heads[0], k.transpose(1, 2), v.transpose(1, 2), index_q_BTJI, index_k
            y = attend_selected(document_of(config, cached, past))
        elif documents is None and not half.training:
            y = attend_selected(document_of(config, parts))
        else:
            y = in_documents(documents or range(new, batch * new + 1, new), attend_one, *parts)
        if losses:
            half.auxiliary_loss = sum(losses) / (batch * new)
        return cast("Tensor", half.o_proj(y.flatten(2)))


def index_pairs(config: ModelConfig) -> int:
    """Rotary pairs of a part of the index key, the last of P."""
    own, whole = config.chosen_selection.pairs, config.head_dim // 2
    return whole if own is None else min(own, whole)


def index_size(config: ModelConfig) -> int:
    """I, the size of an index head and of the index key."""
    return config.chosen_selection.parts * 2 * index_pairs(config)


def document_parts(half: Any, x_BTD: Tensor, rope: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of new tokens: queries, keys and values, (B, T, heads, E); index queries (B, T, J, I) and keys (B, T, I)."""
    from sportsllm.models.attention import rotate

    (batch, new), pairs = x_BTD.shape[:2], index_pairs(half.config)
    slower = [table[..., -pairs:] for table in rope[:2]]
    queries, key = (
        rotate(half.get_submodule(name)(x_BTD.detach()).view(batch, new, -1, 2 * pairs), slower).flatten(2)
        for name in INDEX
    )
    heads = half.config.chosen_selection.heads
    return (*read_heads(half, x_BTD, rope), queries.view(batch, new, heads, -1), key)


def document_of(config: ModelConfig, parts: Sequence[Tensor], past: int = 0) -> Document:
    """Of queries, keys, values, index queries and index keys."""
    from sportsllm.models.selection import Document

    q_BTHE, k_BLKE, v_BLKE, index_q_BTJI, index_k_BLI = parts
    return Document(config, q_BTHE, k_BLKE, v_BLKE, index_q_BTJI, index_k_BLI, past)
