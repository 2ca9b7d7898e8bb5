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
from typing import Any

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS, Builder
from sportsllm.models.config import ModelConfig

FLOAT, INT8, INT32 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT32
# Below this many new tokens the operator itself is as fast or faster, and more so with a longer past, since all of it
# is dequantized.
LONG_PIECE = 32


def group_query_attention(
    graph: Builder,
    config: ModelConfig,
    name: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[str],
    do_rotary: bool = False,
    window: int | None = None,
    **attributes: int | str,
) -> list[ir.Value]:
    """Add the operator; names of its outputs follow `name`. `window` is how many tokens count, the newest included."""
    heads = {"num_heads": config.num_attention_heads, "kv_num_heads": config.num_key_value_heads}
    given: dict[str, Any] = {**heads, "do_rotary": int(do_rotary), **attributes}
    if window is not None:
        given["local_window_size"] = window
    if config.attention_scale is not None:
        given["scale"] = float(config.attention_scale)
    names = [f"{name}/{output}" for output in outputs]
    return graph.node_with_outputs(f"{name}/attention", "GroupQueryAttention", inputs, names, MS, **given)


class LongPrefill:
    """One layer's choice between the two ways, and its branch for long pieces.

    This way is taken for one sequence, a long piece, and a cache with room for it. A `past` without room, as loaders
    give it that take `present` as a new tensor, goes through the operator. The length is asked first and alone, since
    the question costs every decode step.
    """

    def __init__(
        self,
        graph: Builder,
        config: ModelConfig,
        x_BTD: ir.Value,
        lengths: tuple[ir.Value, ir.Value],
        tables: Sequence[ir.Value] | None,
        window: int | None = None,
    ) -> None:
        """Add no nodes yet.

        Args:
            graph, config: get them; the model's shape.
            x_BTD: the layer's input, for its shape.
            lengths: what GroupQueryAttention reads of them: each sequence's less 1, (B,), and the mask's width, int32.
            tables: cosine and sine, (context, E / 2); None where query and key come rotated.
            window: how many tokens count, the newest included; all if None.
        """
        self._graph, self._config, self._x_BTD, self._tables, self._window = graph, config, x_BTD, tables, window
        self._last_B, self._total = lengths

    def is_long(self, name: str) -> ir.Value:
        """Whether the piece is long, (1,)."""
        least = self._graph.constant("prompt/least", np.array([LONG_PIECE], np.int64))
        return self._graph.node(f"{name}/long", "GreaterOrEqual", [self._width(name, 1), least])

    def has_room(self, name: str, past: ir.Value) -> ir.Value:
        """Whether there is one sequence, and room for it in `past`, (B, K, L, E); (1,)."""
        graph, one = self._graph, self._graph.constant("prompt/one", np.array([1], np.int64))
        room_L = graph.node(f"{name}/room", "Shape", [past], start=2, end=3)
        width_S = graph.node(f"{name}/width", "Cast", [self._total], to=ir.DataType.INT64.value)
        alone = graph.node(f"{name}/alone", "Equal", [self._width(name, 0), one])
        fits = graph.node(f"{name}/fits", "GreaterOrEqual", [room_L, width_S])
        return graph.node(f"{name}/alone_and_fits", "And", [alone, fits])

    def _width(self, name: str, axis: int) -> ir.Value:
        return self._graph.node(f"{name}/size_{axis}", "Shape", [self._x_BTD], start=axis, end=axis + 1)

    def attend(
        self, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value], scales: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """Add one layer's attention, as a branch of an `If`.

        Args:
            name: begins the names of all nodes, since a branch may not use a name of the graph around it.
            parts: query, key and value, (1, T, heads * E) each, or all in one.
            past: keys and values, (1, K, L, E) INT8; present may be the same memory.
            scales: of keys and values, (1, K, 1, E).

        Returns:
            Attended values, (1, T, H * E), and the present keys and values, (1, K, L, E) INT8.
        """
        graph, config = self._graph, self._config
        past_P, seqlens_k, total, ids_1T, indices = self._positions(name)
        if len(parts) == 1:
            sizes = [config.query_size, config.key_value_size, config.key_value_size]
            parts = graph.split(f"{name}/split", parts[0], sizes, [f"{name}/{part}" for part in "qkv"])
        query, key, value = parts
        if self._tables is not None:
            query = self._rotated(f"{name}/q", query, config.num_attention_heads, ids_1T)
            key = self._rotated(f"{name}/k", key, config.num_key_value_heads, ids_1T)
        present, new, before = [], [], []
        for part, x, old, scale in zip((f"{name}/k", f"{name}/v"), (key, value), past, scales, strict=True):
            flat = graph.constant("cache/flat", np.array([-1], np.int64))
            flat_scale = graph.node(f"{part}_scale", "Reshape", [scale, flat])  # folded when the graph is loaded
            quantized = self._quantized(part, x, flat_scale)
            new.append(self._dequantized(f"{part}_own", quantized, flat_scale))
            begin = graph.constant("cache/begin", np.array([0], np.int64))
            old_1KPE = graph.node(f"{part}_before_int8", "Slice", [old, begin, past_P, graph.axis(2)])
            before.append(self._dequantized(f"{part}_before", old_1KPE, scale))
            present.append(self._stored(part, quantized, old, indices))
        inputs, outputs = [query, *new, *before, seqlens_k, total], ("attended", "all_keys", "all_values")
        attended, _, _ = group_query_attention(graph, config, name, inputs, outputs, window=self._window)
        return [attended, *present]

    def _positions(self, name: str) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]:
        """P = max(length - T, 0) tokens are before the new ones, S = P + T in all; new token t stands at P + t.

        A right-padded first prompt has length < T; its tokens stand at 0, 1, ... all the same.

        Returns:
            P, (1,) int64; S - 1, (1,), and S, as GroupQueryAttention reads them, int32; the position of each new token,
            (1, T); and (1, K, T, 3) of the new tokens in the cache: sequence 0, head, position.
        """
        graph, heads = self._graph, self._config.num_key_value_heads
        one, zero = graph.constant("one", np.array(1, np.int64)), graph.constant("zero", np.array(0, np.int64))
        scalar = graph.constant("scalar_shape", np.array([], np.int64))
        # P and S
        last_B = graph.node(f"{name}/length_less_1", "Cast", [self._last_B], to=ir.DataType.INT64.value)
        lengths_B, count_T = graph.node(f"{name}/length", "Add", [last_B, one]), self._width(name, 1)
        past_P = graph.node(f"{name}/past", "Max", [graph.node(f"{name}/before", "Sub", [lengths_B, count_T]), zero])
        total_S = graph.node(f"{name}/total", "Add", [past_P, count_T])
        last = graph.node(f"{name}/last", "Sub", [total_S, one])
        seqlens_k = graph.node(f"{name}/seqlens_k", "Cast", [last], to=INT32.value)
        total = graph.node(f"{name}/total_scalar", "Reshape", [total_S, scalar])
        total_int32 = graph.node(f"{name}/total_int32", "Cast", [total], to=INT32.value)
        # P + t
        first = graph.node(f"{name}/first", "Reshape", [past_P, scalar])
        places_T = graph.node(f"{name}/places", "Range", [first, total, one])
        ids_1T = graph.node(f"{name}/places_row", "Unsqueeze", [places_T, graph.axis(0)])
        # (0, k, P + t) as (0, 0, 1) * (P + t) + (0, k, 0)
        heads_1K13 = np.zeros((1, heads, 1, 3), np.int64)
        heads_1K13[0, :, 0, 1] = np.arange(heads)
        column = graph.constant("cache/column", np.array([1, 1, -1, 1], np.int64))
        last_of_three = graph.constant("cache/last_of_three", np.array([0, 0, 1], np.int64))
        places_column = graph.node(f"{name}/places_column", "Reshape", [places_T, column])
        places_only = graph.node(f"{name}/places_only", "Mul", [places_column, last_of_three])
        indices = graph.node(f"{name}/where", "Add", [places_only, graph.constant("cache/at_head", heads_1K13)])
        return past_P, seqlens_k, total_int32, ids_1T, indices

    def _rotated(self, name: str, x: ir.Value, heads: int, ids_1T: ir.Value) -> ir.Value:
        inputs = [x, ids_1T, *(self._tables or ())]
        sizes = {"num_heads": heads, "rotary_embedding_dim": self._config.head_dim}
        return self._graph.node(f"{name}_rotary", "RotaryEmbedding", inputs, MS, **sizes)

    def _quantized(self, name: str, x: ir.Value, scale: ir.Value) -> ir.Value:
        """round(x / scale) as INT8, (1, T, K * E): halves to even, clamped to the range."""
        one = self._graph.constant("cache/step", np.array(1, np.float32))
        steps = self._graph.node(f"{name}_steps", "Div", [x, scale])
        return self._graph.node(f"{name}_int8", "QuantizeLinear", [steps, one], output_dtype=INT8.value)

    def _dequantized(self, name: str, numbers: ir.Value, scale: ir.Value) -> ir.Value:
        """INT8 numbers times scale, in their shape."""
        wide = self._graph.node(f"{name}_numbers", "Cast", [numbers], to=FLOAT.value)
        return self._graph.node(name, "Mul", [wide, scale])

    def _stored(self, name: str, quantized: ir.Value, old_1KLE: ir.Value, indices: ir.Value) -> ir.Value:
        """The cache with the new numbers in it; where past and present share memory the others stay untouched."""
        shape = np.array([0, 0, self._config.num_key_value_heads, self._config.head_dim], np.int64)
        new_1TKE = self._graph.node(f"{name}_heads", "Reshape", [quantized, self._graph.constant("cache/heads", shape)])
        new_1KTE = self._graph.node(f"{name}_new", "Transpose", [new_1TKE], perm=[0, 2, 1, 3])
        return self._graph.node(f"{name}_present", "ScatterND", [old_1KLE, indices, new_1KTE])
