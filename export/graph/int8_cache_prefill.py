"""How a graph with an INT8 key/value cache reads prompts: in float32, over what the cache's numbers stand for.

GroupQueryAttention reads an INT8 cache fast by one token at a time and slowly by many. So the keys and values of long
pieces are rounded, kept and read back by plain operators, and attention is that of a float32 cache. The numbers kept,
and those attended to, are the same as the operator's own. Both ways stand in one graph, each layer with an `If`: two
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
# Below this many new tokens the operator's own way is as fast or faster, the more so the more tokens come before, since
# all of those are read back in float32.
LONG_PIECE = 32


@dataclass(frozen=True)
class LongPrefill:
    """What the layers of a graph share.

    Attributes:
        is_long: whether this way is taken: one sequence, a long piece, and a cache with room for it; where `present` is
            a new tensor and `past` has none, as some loaders have it, it is not.
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
    """Add the nodes that choose the way.

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


class PromptAttention:
    """Adds one layer's attention over an INT8 cache, as one branch of an `If`.

    Names of nodes begin with the layer's and `long`, since a branch may not use a name of the graph around it.
    """

    def __init__(self, graph: Builder, config: ModelConfig, name: str, prompt: LongPrefill) -> None:
        self._graph, self._config, self._name, self._prompt = graph, config, f"{name}/long", prompt
        one, zero = graph.constant("one", np.array(1, np.int64)), graph.constant("zero", np.array(0, np.int64))
        scalar = graph.constant("scalar_shape", np.array([], np.int64))
        # A right-padded first prompt has fewer tokens than columns; its tokens stand at 0, 1, ... all the same.
        before = self._node("before", "Sub", [prompt.lengths_B, prompt.count_T])
        self._past_P = self._node("past", "Max", [before, zero])
        self._total_S = self._node("total", "Add", [self._past_P, prompt.count_T])
        last = self._node("last", "Sub", [self._total_S, one])
        self._seqlens_k = self._node("seqlens_k", "Cast", [last], to=INT32.value)
        total = self._node("total_scalar", "Reshape", [self._total_S, scalar])
        self._total = self._node("total_int32", "Cast", [total], to=INT32.value)
        first = self._node("first", "Reshape", [self._past_P, scalar])
        places_T = self._node("places", "Range", [first, total, one])
        self._places_1T = self._node("places_row", "Unsqueeze", [places_T, graph.axis(0)])
        # (1, K, T, 3): sequence 0, head, place.
        heads_1K13 = np.zeros((1, config.num_key_value_heads, 1, 3), np.int64)
        heads_1K13[0, :, 0, 1] = np.arange(config.num_key_value_heads)
        column = graph.constant("cache/column", np.array([1, 1, -1, 1], np.int64))
        last_of_three = graph.constant("cache/last_of_three", np.array([0, 0, 1], np.int64))
        places_column = self._node("places_column", "Reshape", [places_T, column])
        places_only = self._node("places_only", "Mul", [places_column, last_of_three])
        self._where = self._node("where", "Add", [places_only, graph.constant("cache/at_head", heads_1K13)])

    def attend(
        self, parts: Sequence[ir.Value], past: Sequence[ir.Value], scales: Sequence[ir.Value], rotated: bool
    ) -> Sequence[ir.Value]:
        """What `o_proj` reads, (1, T, H * E), and the present keys and values, (1, K, L, E) INT8.

        Args:
            parts: query, key and value, (1, T, heads * E) each, or all in one.
            past: keys and values, (1, K, L, E) INT8; present may be the same memory.
            scales: of keys and values, (1, K, 1, E).
            rotated: whether query and key are.
        """
        config = self._config
        query, key, value = parts if len(parts) == 3 else self._apart(parts[0])
        if not rotated:
            query, key = (
                self._node(
                    f"{part}_rotary",
                    "RotaryEmbedding",
                    [x, self._places_1T, self._prompt.cos, self._prompt.sin],
                    MS,
                    num_heads=heads,
                    rotary_embedding_dim=config.head_dim,
                )
                for part, x, heads in (
                    ("q", query, config.num_attention_heads),
                    ("k", key, config.num_key_value_heads),
                )
            )
        present, own, before = [], [], []
        for part, x, old, scale in zip(("k", "v"), (key, value), past, scales, strict=True):
            flat = self._graph.constant("cache/flat", np.array([-1], np.int64))
            flat_scale = self._node(f"{part}_scale", "Reshape", [scale, flat])  # folded when the graph is loaded
            rounded = self._rounded(part, x, flat_scale)
            own.append(self._restored(f"{part}_own", rounded, flat_scale))
            before.append(self._restored(f"{part}_before", self._before(part, old), scale))
            present.append(self._stored(part, rounded, old))
        inputs = [query, *own, *before, self._seqlens_k, self._total]
        attended, _, _ = self._graph.node_with_outputs(
            f"{self._name}/attention",
            "GroupQueryAttention",
            inputs,
            [f"{self._name}/{output}" for output in ("attended", "all_keys", "all_values")],
            MS,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=0,
        )
        return [attended, *present]

    def _node(self, name: str, op: str, inputs: Sequence[ir.Value], domain: str = "", **attributes: object) -> ir.Value:
        return self._graph.node(f"{self._name}/{name}", op, inputs, domain, **attributes)

    def _apart(self, packed: ir.Value) -> Sequence[ir.Value]:
        sizes = [self._config.query_size, self._config.key_value_size, self._config.key_value_size]
        lengths = self._graph.constant("split_" + "_".join(map(str, sizes)), np.array(sizes, np.int64))
        names = [f"{self._name}/{part}" for part in "qkv"]
        return self._graph.node_with_outputs(f"{self._name}/split", "Split", [packed, lengths], names, axis=-1)

    def _rounded(self, part: str, x: ir.Value, scale: ir.Value) -> ir.Value:
        """round(x / scale) as INT8, (1, T, K * E): halves to even, and beyond its range the last number."""
        one = self._graph.constant("cache/step", np.array(1, np.float32))
        steps = self._node(f"{part}_steps", "Div", [x, scale])
        return self._node(f"{part}_int8", "QuantizeLinear", [steps, one], output_dtype=INT8.value)

    def _restored(self, name: str, numbers: ir.Value, scale: ir.Value) -> ir.Value:
        """What INT8 numbers stand for, in their shape."""
        return self._node(name, "Mul", [self._node(f"{name}_numbers", "Cast", [numbers], to=FLOAT.value), scale])

    def _before(self, part: str, old_1KLE: ir.Value) -> ir.Value:
        """The numbers of the tokens before, (1, K, P, E)."""
        begin = self._graph.constant("cache/begin", np.array([0], np.int64))
        return self._node(f"{part}_before_int8", "Slice", [old_1KLE, begin, self._past_P, self._graph.axis(2)])

    def _stored(self, part: str, rounded: ir.Value, old_1KLE: ir.Value) -> ir.Value:
        """The cache with the new numbers in it; where past and present share memory the others stay untouched."""
        shape = np.array([0, 0, self._config.num_key_value_heads, self._config.head_dim], np.int64)
        new_1TKE = self._node(f"{part}_heads", "Reshape", [rounded, self._graph.constant("cache/heads", shape)])
        new_1KTE = self._node(f"{part}_new", "Transpose", [new_1TKE], perm=[0, 2, 1, 3])
        return self._node(f"{part}_present", "ScatterND", [old_1KLE, self._where, new_1KTE])
