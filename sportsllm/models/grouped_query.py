"""Causal attention whose query heads share key/value heads in groups (https://arxiv.org/abs/2305.13245).

Shape suffixes: B sequences, T tokens, D hidden_size, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, State, Unit, Vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sportsllm.models.attention import KVCache
    from sportsllm.models.config import ModelConfig


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

    def activation_bytes(self, config: ModelConfig, mixed: bool) -> int:
        """q, k, v and the output in float32, in which attention computes on a CPU, and a log-sum for each head.

        In plain float32 that output is also the next matrix's input and counts once. No (T, T) scores are kept.
        Per-head norms of q and k (Qwen3) keep twice their width and one number a head, in float32.
        """
        queries, keys = config.query_size, config.key_value_size
        total = 4 * (2 * queries + 2 * keys) + 4 * config.num_attention_heads
        if mixed:
            total += 2 * queries
        if config.qk_norm:
            total += 2 * 4 * (queries + keys) + 4 * (config.num_attention_heads + config.num_key_value_heads)
        return total

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        heads, size = config.num_attention_heads, config.head_dim
        q_proj, k_proj, v_proj, o_proj = self.matrices(config)
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

    def forward(
        self,
        half: Any,
        x_BTD: Tensor,
        rope: Sequence[Tensor],
        documents: Sequence[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        from sportsllm.models.attention import Scores, attend_cached, attend_documents, rotate

        config, layer = half.config, half.layer

        def heads(y_BTD: Tensor) -> Tensor:
            return y_BTD.view(*y_BTD.shape[:2], -1, config.head_dim)

        q_BTHE, k_BTKE, v_BTKE = heads(half.q_proj(x_BTD)), heads(half.k_proj(x_BTD)), heads(half.v_proj(x_BTD))
        if config.qk_norm:
            q_BTHE, k_BTKE = half.q_norm(q_BTHE), half.k_norm(k_BTKE)
        scores = Scores(config.attention_scale, config.window(layer))
        if config.rotates(layer):
            tables = rope[-2:] if scores.window is not None else rope[:2]
            q_BTHE, k_BTKE = rotate(q_BTHE, tables), rotate(k_BTKE, tables)
        if documents is not None:
            y_BTHE = attend_documents(q_BTHE, k_BTKE, v_BTKE, documents, scores)
        else:
            y_BTHE = attend_cached(q_BTHE, k_BTKE, v_BTKE, layer, cache, scores)
        return cast("Tensor", half.o_proj(y_BTHE.flatten(2)))
