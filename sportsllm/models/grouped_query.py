"""Causal attention whose query heads share key/value heads in groups (https://arxiv.org/abs/2305.13245).

Shape suffixes: B sequences, T tokens, D hidden_size, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, State, Unit, Vector

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

    def forward(
        self,
        half: Any,
        x_BTD: Tensor,
        rope: Sequence[Tensor],
        documents: Sequence[int] | None,
        cache: KVCache | None,
    ) -> Tensor:
        from sportsllm.models.attention import Scores, attend_cached, attend_documents

        config, layer = half.config, half.layer
        q_BTHE, k_BTKE, v_BTKE = read_heads(half, x_BTD, rope)
        scores = Scores(config.attention_scale, config.window(layer))
        if documents is not None:
            y_BTHE = attend_documents(q_BTHE, k_BTKE, v_BTKE, documents, scores)
        else:
            y_BTHE = attend_cached(q_BTHE, k_BTKE, v_BTKE, layer, cache, scores)
        return cast("Tensor", half.o_proj(y_BTHE.flatten(2)))


def read_heads(half: Any, x_BTD: Tensor, rope: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, T, H, E), keys and values (B, T, K, E); queries and keys normed and rotated as the model does it."""
    from sportsllm.models.attention import rotate

    config, layer = half.config, half.layer

    def heads(y_BTD: Tensor) -> Tensor:
        return y_BTD.view(*y_BTD.shape[:2], -1, config.head_dim)

    q_BTHE, k_BTKE, v_BTKE = heads(half.q_proj(x_BTD)), heads(half.k_proj(x_BTD)), heads(half.v_proj(x_BTD))
    if config.qk_norm:
        q_BTHE, k_BTKE = half.q_norm(q_BTHE), half.k_norm(k_BTKE)
    if config.rotates(layer):
        tables = rope[-2:] if config.window(layer) is not None else rope[:2]
        q_BTHE, k_BTKE = rotate(q_BTHE, tables), rotate(k_BTKE, tables)
    return q_BTHE, k_BTKE, v_BTKE
