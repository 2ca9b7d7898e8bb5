"""Long prompts over an INT8 key/value cache: attention in float32 over the dequantized cache.

GroupQueryAttention reads an INT8 cache fast for one token at a time and slowly for many. So plain operators quantize
the keys and values of a long piece, store them and dequantize the cache, and attention is that of a float32 cache. The
stored numbers, and those attended to, are the same as the operator's own. Each layer has both ways in an `If`: two
sessions would hold two copies of the packed weights.
Shape suffixes: B sequences (1 in this file), T new tokens, P tokens before them, S = P + T, L room in the cache,
H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS, Builder
from sportsllm.models.config import ModelConfig

FLOAT, INT8, INT32 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT32
# Below this many new tokens the operator itself is as fast or faster, and more so with a longer past, since all of it
# is dequantized.
LONG_PIECE = 32


@dataclass(frozen=True)
class LongPrefill:
    """What the layers of a graph share.

    Attributes:
        is_long: whether this way is taken: one sequence, a long piece, and a cache with room for it. A `past` without
            room, as loaders give it that take `present` as a new tensor, goes through the operator.
        lengths_B: (B,) int64, tokens of each sequence with the new ones.
        count_T: (1,) int64, T.
        cos, sin: rotary tables, (context, E / 2).
    """

    is_long: ir.Value
    lengths_B: ir.Value
    count_T: ir.Value
    cos: ir.Value
    sin: ir.Value


def long_prefill_values(
    graph: Builder,
    tokens_BT: ir.Value,
    past: ir.Value,
    lengths_B: ir.Value,
    width_S: ir.Value,
    tables: tuple[ir.Value, ir.Value],
) -> LongPrefill:
    """Add the nodes that choose between the two ways.

    Args:
        graph: gets them.
        tokens_BT: token ids.
        past: keys or values of any layer, (B, K, L, E).
        lengths_B: see `LongPrefill`.
        width_S: (1,) int64, columns of the attention mask.
        tables: cosine and sine.
    """
    count_T = graph.node("prompt/tokens", "Shape", [tokens_BT], start=1, end=2)
    batch = graph.node("prompt/batch", "Shape", [tokens_BT], start=0, end=1)
    room_L = graph.node("prompt/room", "Shape", [past], start=2, end=3)
    least = graph.constant("prompt/least", np.array([LONG_PIECE], np.int64))
    long = graph.node("prompt/long", "GreaterOrEqual", [count_T, least])
    alone = graph.node("prompt/alone", "Equal", [batch, graph.constant("prompt/one", np.array([1], np.int64))])
    fits = graph.node("prompt/fits", "GreaterOrEqual", [room_L, width_S])
    both = graph.node("prompt/long_and_alone", "And", [long, alone])
    return LongPrefill(graph.node("prompt/is_long", "And", [both, fits]), lengths_B, count_T, *tables)


def attend_long_prefill(
    graph: Builder,
    config: ModelConfig,
    name: str,
    prefill: LongPrefill,
    parts: Sequence[ir.Value],
    past: Sequence[ir.Value],
    scales: Sequence[ir.Value],
    rotated: bool,
) -> Sequence[ir.Value]:
    """Add one layer's attention, as a branch of an `If`.

    Args:
        graph: gets it.
        config: the model's shape.
        name: begins the names of all nodes, since a branch may not use a name of the graph around it.
        prefill: what the layers share.
        parts: query, key and value, (1, T, heads * E) each, or all in one.
        past: keys and values, (1, K, L, E) INT8; present may be the same memory.
        scales: of keys and values, (1, K, 1, E).
        rotated: whether query and key are rotated.

    Returns:
        Attended values, (1, T, H * E), and the present keys and values, (1, K, L, E) INT8.
    """
    return _Branch(graph, config, name, prefill).attend(parts, past, scales, rotated)


@dataclass(frozen=True)
class _Positions:
    """Of the new tokens, from `long_prefill_positions`.

    Attributes:
        past_P: (1,) int64, P.
        seqlens_k, total: (1,) S - 1 and S as GroupQueryAttention reads them, int32.
        ids_1T: position of each new token.
        indices: (1, K, T, 3) of the new tokens in the cache: sequence 0, head, position.
    """

    past_P: ir.Value
    seqlens_k: ir.Value
    total: ir.Value
    ids_1T: ir.Value
    indices: ir.Value


@dataclass(frozen=True)
class _Branch:
    """One layer's branch; see `attend_long_prefill`."""

    graph: Builder
    config: ModelConfig
    name: str
    prefill: LongPrefill

    def attend(
        self, parts: Sequence[ir.Value], past: Sequence[ir.Value], scales: Sequence[ir.Value], rotated: bool
    ) -> Sequence[ir.Value]:
        config, positions = self.config, self._positions()
        query, key, value = parts if len(parts) == 3 else self._split(parts[0])
        if not rotated:
            query = self._rotated("q", query, config.num_attention_heads, positions.ids_1T)
            key = self._rotated("k", key, config.num_key_value_heads, positions.ids_1T)
        present, new, before = [], [], []
        for part, x, old, scale in zip(("k", "v"), (key, value), past, scales, strict=True):
            flat = self.graph.constant("cache/flat", np.array([-1], np.int64))
            flat_scale = self._node(f"{part}_scale", "Reshape", [scale, flat])  # folded when the graph is loaded
            quantized = self._quantized(part, x, flat_scale)
            new.append(self._dequantized(f"{part}_own", quantized, flat_scale))
            before.append(self._dequantized(f"{part}_before", self._before(part, old, positions.past_P), scale))
            present.append(self._stored(part, quantized, old, positions.indices))
        inputs = [query, *new, *before, positions.seqlens_k, positions.total]
        attended, _, _ = self.graph.node_with_outputs(
            f"{self.name}/attention",
            "GroupQueryAttention",
            inputs,
            [f"{self.name}/{output}" for output in ("attended", "all_keys", "all_values")],
            MS,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=0,
        )
        return [attended, *present]

    def _positions(self) -> _Positions:
        """P = max(length - T, 0) tokens are before the new ones, S = P + T in all; new token t stands at P + t.

        A right-padded first prompt has length < T; its tokens stand at 0, 1, ... all the same.
        """
        graph, prefill, heads = self.graph, self.prefill, self.config.num_key_value_heads
        one, zero = graph.constant("one", np.array(1, np.int64)), graph.constant("zero", np.array(0, np.int64))
        scalar = graph.constant("scalar_shape", np.array([], np.int64))
        # P and S
        before = self._node("before", "Sub", [prefill.lengths_B, prefill.count_T])
        past_P = self._node("past", "Max", [before, zero])
        total_S = self._node("total", "Add", [past_P, prefill.count_T])
        seqlens_k = self._node("seqlens_k", "Cast", [self._node("last", "Sub", [total_S, one])], to=INT32.value)
        total = self._node("total_scalar", "Reshape", [total_S, scalar])
        total_int32 = self._node("total_int32", "Cast", [total], to=INT32.value)
        # P + t
        first = self._node("first", "Reshape", [past_P, scalar])
        places_T = self._node("places", "Range", [first, total, one])
        ids_1T = self._node("places_row", "Unsqueeze", [places_T, graph.axis(0)])
        # (0, k, P + t) as (0, 0, 1) * (P + t) + (0, k, 0)
        heads_1K13 = np.zeros((1, heads, 1, 3), np.int64)
        heads_1K13[0, :, 0, 1] = np.arange(heads)
        column = graph.constant("cache/column", np.array([1, 1, -1, 1], np.int64))
        last_of_three = graph.constant("cache/last_of_three", np.array([0, 0, 1], np.int64))
        places_column = self._node("places_column", "Reshape", [places_T, column])
        places_only = self._node("places_only", "Mul", [places_column, last_of_three])
        indices = self._node("where", "Add", [places_only, graph.constant("cache/at_head", heads_1K13)])
        return _Positions(past_P, seqlens_k, total_int32, ids_1T, indices)

    def _node(self, name: str, op: str, inputs: Sequence[ir.Value], domain: str = "", **attributes: object) -> ir.Value:
        return self.graph.node(f"{self.name}/{name}", op, inputs, domain, **attributes)

    def _split(self, packed: ir.Value) -> Sequence[ir.Value]:
        sizes = [self.config.query_size, self.config.key_value_size, self.config.key_value_size]
        lengths = self.graph.constant("split_" + "_".join(map(str, sizes)), np.array(sizes, np.int64))
        names = [f"{self.name}/{part}" for part in "qkv"]
        return self.graph.node_with_outputs(f"{self.name}/split", "Split", [packed, lengths], names, axis=-1)

    def _rotated(self, part: str, x: ir.Value, heads: int, ids_1T: ir.Value) -> ir.Value:
        inputs = [x, ids_1T, self.prefill.cos, self.prefill.sin]
        sizes = {"num_heads": heads, "rotary_embedding_dim": self.config.head_dim}
        return self._node(f"{part}_rotary", "RotaryEmbedding", inputs, MS, **sizes)

    def _quantized(self, part: str, x: ir.Value, scale: ir.Value) -> ir.Value:
        """round(x / scale) as INT8, (1, T, K * E): halves to even, clamped to the range."""
        one = self.graph.constant("cache/step", np.array(1, np.float32))
        steps = self._node(f"{part}_steps", "Div", [x, scale])
        return self._node(f"{part}_int8", "QuantizeLinear", [steps, one], output_dtype=INT8.value)

    def _dequantized(self, name: str, numbers: ir.Value, scale: ir.Value) -> ir.Value:
        """INT8 numbers times scale, in their shape."""
        return self._node(name, "Mul", [self._node(f"{name}_numbers", "Cast", [numbers], to=FLOAT.value), scale])

    def _before(self, part: str, old_1KLE: ir.Value, past_P: ir.Value) -> ir.Value:
        """The numbers of the tokens before, (1, K, P, E)."""
        begin = self.graph.constant("cache/begin", np.array([0], np.int64))
        return self._node(f"{part}_before_int8", "Slice", [old_1KLE, begin, past_P, self.graph.axis(2)])

    def _stored(self, part: str, quantized: ir.Value, old_1KLE: ir.Value, indices: ir.Value) -> ir.Value:
        """The cache with the new numbers in it; where past and present share memory the others stay untouched."""
        shape = np.array([0, 0, self.config.num_key_value_heads, self.config.head_dim], np.int64)
        new_1TKE = self._node(f"{part}_heads", "Reshape", [quantized, self.graph.constant("cache/heads", shape)])
        new_1KTE = self._node(f"{part}_new", "Transpose", [new_1TKE], perm=[0, 2, 1, 3])
        return self._node(f"{part}_present", "ScatterND", [old_1KLE, indices, new_1KTE])
