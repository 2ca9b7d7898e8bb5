"""The kinds of attention: their matrices, norms, units that pruning may cut, and cached tensors. Imports no torch.

The modules are in `layers.py`, `latent.py`, `selection.py` and `lstm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sportsllm.errors import UsageError
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, State, Unit, Vector

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

INDEX = ("index_q_proj", "index_k_proj")
"""The indexer's matrices: queries of all heads, and the key."""
STATES = ("selected_key", "selected_value", "selected_index")
_NEWEST_SHARE = 4  # of the chosen blocks, one in so many is among the newest
_LEAST_BLOCKS = 4  # the first, two of the newest, and one that the indexer chooses
LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the model's own is: so `transformers` has it."""
GATES = ("i", "f", "g", "o")
READ = "last_hidden"
"""What the recurrent matrices read: h of the token before."""
HIDDEN_STATE, CELL_STATE = "hidden", "cell"


class GroupedQuery(Kind):
    """Query, key, value and output matrices, rotary positions; see `sportsllm.models.parts.Kind`."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, queries, keys = config.hidden_size, config.query_size, config.key_value_size
        bias, out_bias = config.attention_bias, config.attention_output_bias
        return (
            Matrix("q_proj", queries, hidden, "query_head", HIDDEN, HIDDEN, bias=bias),
            Matrix("k_proj", keys, hidden, "kv_head", HIDDEN, HIDDEN, bias=bias),
            Matrix("v_proj", keys, hidden, "kv_head", HIDDEN, HIDDEN, bias=bias),
            Matrix("o_proj", hidden, queries, HIDDEN, "query_head", "mixed", True, out_bias, scale_source="v_proj"),
        )

    def vectors(self, config: ModelConfig) -> tuple[Vector, ...]:
        names = ("q_norm", "k_norm") if config.qk_norm else ()
        return tuple(Vector(name, config.head_dim) for name in names)

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        return (
            Unit("kv_head", "num_key_value_heads", kv_heads, size),
            Unit("query_head", "num_attention_heads", heads, size, group="kv_head"),
        )

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        shape = (config.num_key_value_heads, config.head_dim)
        return State("key", shape), State("value", shape)

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """Scores and the weighted sum of values; the mean over layers where some see fewer tokens."""
        seen = [min(depth, config.window(layer) or depth) for layer in range(config.num_hidden_layers)]
        return 2 * config.query_size * sum(seen) // len(seen)

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """q, k, v, attention's output and, a head, a log-sum in float32; and that output as o_proj reads it.

        On a CPU attention computes in float32; on a GPU, by FlashAttention (https://arxiv.org/abs/2205.14135), in the
        type of the products. The outputs of a batch's documents are joined, which makes the second copy. No (T, T)
        scores are kept. Per-head norms of q and k (Qwen3) keep their width, on a CPU twice, and one number a head, in
        float32.
        """
        queries, keys, heads = config.query_size, config.key_value_size, config.num_attention_heads
        number = 2 if mixed else 4
        total = (number if processor == "gpu" else 4) * 2 * (queries + keys) + 4 * heads + number * queries
        if config.qk_norm:
            copies = 1 if processor == "gpu" else 2
            total += copies * 4 * (queries + keys) + 4 * (heads + config.num_key_value_heads)
        return total

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        heads, size = config.num_attention_heads, config.head_dim
        q_proj, k_proj, v_proj, o_proj = GroupedQuery.matrices(self, config)
        cached = (config.num_key_value_heads, size)
        return (
            q_proj,
            k_proj,
            v_proj,
            Activation("q", (heads, size)),
            Activation("k, cached", cached, "cache"),
            Activation("v, cached", cached, "cache"),
            Activation("attention scores", (heads,), "scores", held=False),
            Activation("attention output", (heads, size)),
            o_proj,
        )


class Latent(Kind):
    """Low-rank queries if `q_lora_rank` is set, low-rank keys and values; see `sportsllm.models.parts.Kind`."""

    def check(self, config: ModelConfig) -> None:
        if config.position_kind != "rotary":
            raise UsageError(f"config: position_kind is {config.position_kind!r}; latent attention is rotary")
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            value = getattr(config, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**20
            if not whole and not (value is None and name == "q_lora_rank"):
                raise UsageError(f"config: {name} is {value!r}; latent attention needs 1 to {2**20:,}")
        for name in ("num_key_value_heads", "qk_norm", "attention_bias", "attention_output_bias", "layer_types"):
            if getattr(config, name) not in (1, False, None):
                raise UsageError(f"config: {name} is {getattr(config, name)!r}; latent attention has none")

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, heads, rank, rotated = config.hidden_size, config.num_attention_heads, config.kv_rank, config.head_dim
        queries, values = heads * (config.unrotated_dim + rotated), heads * config.value_dim
        if config.q_lora_rank is None:
            query: tuple[Matrix, ...] = (Matrix("q_proj", queries, hidden, "query_head", HIDDEN, HIDDEN),)
        else:
            query = (
                Matrix("q_a_proj", config.q_lora_rank, hidden, "query_latent", HIDDEN, HIDDEN),
                Matrix("q_b_proj", queries, config.q_lora_rank, "query_head", "query_latent", "query_latent"),
            )
        return (
            *query,
            Matrix("kv_a_proj_with_mqa", rank + rotated, hidden, "cached", HIDDEN, HIDDEN),
            Matrix("kv_b_proj", heads * config.unrotated_dim + values, rank, "query_head", "latent", "latent"),
            Matrix("o_proj", hidden, values, HIDDEN, "query_head", "mixed", True),
        )

    def vectors(self, config: ModelConfig) -> tuple[Vector, ...]:
        query = () if config.q_lora_rank is None else (Vector("q_a_layernorm", config.q_lora_rank, LATENT_EPS),)
        return (*query, Vector("kv_a_layernorm", config.kv_rank, LATENT_EPS))

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """Heads; they have rows of other sizes in other matrices. The ranks stay whole."""
        query = () if config.q_lora_rank is None else (Unit("query_latent", "q_lora_rank", config.q_lora_rank),)
        return (
            *query,
            Unit("latent", "kv_lora_rank", config.kv_rank),
            Unit("cached", "kv_lora_rank", config.kv_rank + config.head_dim),
            Unit("query_head", "num_attention_heads", config.num_attention_heads, config.value_dim),
        )

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        return (State("latent", (config.kv_rank + config.head_dim,)),)

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """Scores and the weighted sum over the latent vectors, and the absorbed matrices, which are kv_b_proj's own."""
        return config.num_attention_heads * depth * (2 * config.kv_rank + config.head_dim)

    def prompt_macs(self, config: ModelConfig, depth: int) -> int:
        """Scores and the weighted sum over keys and values that kv_b_proj makes once a token."""
        return config.num_attention_heads * depth * (config.unrotated_dim + config.head_dim + config.value_dim)

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """Latents and what their norms keep; queries, keys, values and output in float32, a log-sum for each head."""
        a, heads = (2 if mixed else 4), config.num_attention_heads
        ranks = config.kv_rank + (config.q_lora_rank or 0)
        scored = heads * (config.unrotated_dim + config.head_dim)
        total = ranks * (2 * 4 + a) + 4 * (2 * scored + 2 * heads * config.value_dim) + 4 * heads
        return total + (2 * heads * config.value_dim if mixed else 0)

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        heads, scored = config.num_attention_heads, config.unrotated_dim + config.head_dim
        *made, o_proj = self.matrices(config)
        return (
            *made,
            Activation("q", (heads, scored)),
            Activation("latent and rotated key, cached", (config.kv_rank + config.head_dim,), "cache"),
            Activation("k", (heads, scored)),
            Activation("v", (heads, config.value_dim)),
            Activation("attention scores", (heads,), "scores", held=False),
            Activation("attention output", (heads, config.value_dim)),
            o_proj,
        )


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


def index_pairs(config: ModelConfig) -> int:
    """Rotary pairs of a part of the index key, the last of P."""
    own, whole = config.chosen_selection.pairs, config.head_dim // 2
    return whole if own is None else min(own, whole)


def index_size(config: ModelConfig) -> int:
    """I, the size of an index head and of the index key."""
    return config.chosen_selection.parts * 2 * index_pairs(config)


class LSTM(Kind):
    """Four matrices from the input, four from the last state, one to the residual stream; see `Kind`."""

    def check(self, config: ModelConfig) -> None:
        one_head = ("num_attention_heads", "num_key_value_heads")
        others = ("rope_scaling", "qk_norm", "attention_bias", "attention_output_bias", "layer_types")
        for name in (*one_head, *others):
            allowed = (1,) if name in one_head else (False, None)
            if getattr(config, name) not in allowed:
                raise UsageError(f"config: {name} is {getattr(config, name)!r}; an LSTM has {allowed[-1] or 'none'}")

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, cells = config.hidden_size, config.cells
        return (
            *(Matrix(f"{gate}_proj", cells, hidden, "cell", HIDDEN, HIDDEN, bias=True) for gate in GATES),
            *(Matrix(f"h{gate}_proj", cells, cells, "cell", "cell", READ, stepwise=True) for gate in GATES),
            Matrix("out_proj", hidden, cells, HIDDEN, "cell", "mixed", True),
        )

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """Cells, which pruning leaves whole: each is read by all others at the next token."""
        return (Unit("cell", "cells", config.cells),)

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        return State(HIDDEN_STATE, (config.cells,), False), State(CELL_STATE, (config.cells,), False)

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        """The three products of gates and states, at any depth."""
        return 3 * config.cells

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """In float32: x, gates, both states, tanh(c), and h a second time in the order of tokens; 16 bits of it too."""
        return 4 * config.hidden_size + 4 * 8 * config.cells + (2 * config.cells if mixed else 0)

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        *gates, out_proj = self.matrices(config)
        cells = (config.cells,)
        return (
            *gates,
            Activation("gates", (len(GATES), config.cells)),
            Activation("hidden state, kept", cells, "state"),
            Activation("cell state, kept", cells, "state"),
            Activation("hidden states", cells),
            out_proj,
        )
