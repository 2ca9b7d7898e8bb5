"""Grouped-query attention in standard operators: MatMul, Softmax, MatMul, and rotation by Mul, Sub and Add.

Present keys and values are the past followed by the new ones, a new tensor. A token's position is the number of ones
before it in `attention_mask`, so that sequences may be padded on the left, and in the cache anywhere.
Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, H query heads, K key/value heads,
E head_dim, X = E / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import Builder
from export.graph.half import HalfBuilder
from export.graph.layer import LayerBuilder
from export.graph.positions import new_columns, places_by_mask, rotary_caches
from sportsllm.models.config import ModelConfig
from sportsllm.models.parts import HIDDEN


def _rotary_rows(graph: Builder, config: ModelConfig, layer: int, places_BT: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The new tokens' rows of a layer's cosine and sine tables, (B, T, 1, X); those of layers alike are the same."""
    found = []
    for table in rotary_caches(graph, config, layer):
        part = str(table.name).removesuffix("_cache")
        known = [node.outputs[0] for node in graph.nodes if node.name == f"places/{part}"]
        if not known:
            rows_BTX = graph.node(f"places/{part}_rows", "Gather", [table, places_BT])
            known = [graph.node(f"places/{part}", "Unsqueeze", [rows_BTX, graph.axis(2)])]
        found.append(known[0])
    return found[0], found[1]


def _seen(graph: Builder, tokens_BT: ir.Value, mask_BS: ir.Value, window: int | None) -> ir.Value:
    """Whether new token t attends to column s, (B, 1, T, S); the same value for layers alike."""
    name = "places/seen" if window is None else f"places/seen_{window}"
    known = [node.outputs[0] for node in graph.nodes if node.name == name]
    if known:
        return known[0]
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    scalar = graph.constant("scalar_shape", np.array([], np.int64))
    start, end = new_columns(graph, tokens_BT)
    width_S = graph.node(f"{name}/mask_width", "Shape", [mask_BS], start=1, end=2)
    total = graph.node(f"{name}/total", "Reshape", [width_S, scalar])
    columns_S = graph.node(f"{name}/columns", "Range", [zero, total, one])
    own_T = graph.node(f"{name}/own_columns", "Slice", [columns_S, start, end, graph.axis(0)])
    own_T1 = graph.node(f"{name}/own_column", "Unsqueeze", [own_T, graph.axis(1)])
    near_TS = graph.node(f"{name}/earlier", "LessOrEqual", [columns_S, own_T1])
    real_BS = graph.node(f"{name}/real", "Cast", [mask_BS], to=ir.DataType.BOOL.value)
    middle_axes = graph.constant("axes_1_2", np.array([1, 2], np.int64))
    real_B11S = graph.node(f"{name}/real_row", "Unsqueeze", [real_BS, middle_axes])
    if window is None:
        return graph.node(name, "And", [near_TS, real_B11S])
    # Columns of padding do not count: the window goes by places, the number of ones before a column.
    counted_BS = graph.node(f"{name}/counted", "CumSum", [mask_BS, one])
    counted_B1S = graph.node(f"{name}/counted_row", "Unsqueeze", [counted_BS, graph.axis(1)])
    own_BT = graph.node(f"{name}/own_counted", "Slice", [counted_BS, start, end, graph.axis(1)])
    own_BT1 = graph.node(f"{name}/own_counted_column", "Unsqueeze", [own_BT, graph.axis(2)])
    size = graph.constant(f"window_{window}", np.array(window, np.int64))
    first_BT1 = graph.node(f"{name}/first", "Sub", [own_BT1, size])
    inside_BTS = graph.node(f"{name}/inside", "Greater", [counted_B1S, first_BT1])
    inside_B1TS = graph.node(f"{name}/inside_heads", "Unsqueeze", [inside_BTS, graph.axis(1)])
    causal = graph.node(f"{name}/causal", "And", [near_TS, real_B11S])
    return graph.node(name, "And", [causal, inside_B1TS])


class StandardGroupedQuery(HalfBuilder):
    """Attention over a float32 cache that grows by concatenation."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        assert layers.sequences.scales is None, "no standard operator reads an INT8 cache"
        tokens_BT, mask_BS = layers.sequences.tokens_BT, layers.sequences.mask_BS
        graph, config, places_BT = self.graph, self.config, places_by_mask(self.graph, tokens_BT, mask_BS)
        layers_of_model = range(config.num_hidden_layers)
        self._tables = [
            _rotary_rows(graph, config, i, places_BT) if config.rotates(i) else None for i in layers_of_model
        ]
        self._seen = [_seen(graph, tokens_BT, mask_BS, config.window(i)) for i in layers_of_model]

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name = self.graph, self.config, self.name(layer)
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, key, value = self.products(layer, HIDDEN, x_BTD)
        query_BTHE = self._rotated(layer, f"{name}.q", self._heads(f"{name}.q", query, heads))
        key_BTKE = self._rotated(layer, f"{name}.k", self._heads(f"{name}.k", key, shared))
        factor = size**-0.5 if config.attention_scale is None else config.attention_scale
        scale = graph.constant("attention_scale", np.array(factor, np.float32))
        query_BTHE = graph.node(f"{name}.q/scaled", "Mul", [query_BTHE, scale])
        query_BHTE = graph.node(f"{name}.q/by_head", "Transpose", [query_BTHE], perm=[0, 2, 1, 3])
        new = (key_BTKE, self._heads(f"{name}.v", value, shared, normed=False))
        present = []
        for part, old_BKSE, new_BTKE in zip("kv", past, new, strict=True):
            new_BKTE = graph.node(f"{name}.{part}/by_head", "Transpose", [new_BTKE], perm=[0, 2, 1, 3])
            present.append(graph.node(f"{name}.{part}/present", "Concat", [old_BKSE, new_BKTE], axis=2))
        keys, values = present

        # Query heads that share a key head lie one after the other: their tokens count as rows of one matrix.
        def shaped(part: str, x: ir.Value, count: int, last: int) -> ir.Value:
            """(B, count, rows, last), last 0 for as it is."""
            shape = graph.constant(f"shape_{count}_{last}", np.array([0, count, -1, last], np.int64))
            return graph.node(f"{name}/{part}", "Reshape", [x, shape])

        keys_BKES = graph.node(f"{name}.k/columns", "Transpose", [keys], perm=[0, 1, 3, 2])
        scores = graph.node(f"{name}/scores", "MatMul", [shaped("query", query_BHTE, shared, size), keys_BKES])
        # The least number instead of minus infinity: a padding token that attends to nothing stays a number.
        least = graph.constant("attention_least", np.array(np.finfo(np.float32).min, np.float32))
        scores_BHTS = shaped("scores_by_head", scores, heads, 0)
        masked = graph.node(f"{name}/masked", "Where", [self._seen[layer], scores_BHTS, least])
        weights = graph.node(f"{name}/weights", "Softmax", [masked], axis=-1)
        mixed = graph.node(f"{name}/mixed", "MatMul", [shaped("weights_shared", weights, shared, 0), values])
        mixed_BHTE = shaped("mixed_by_head", mixed, heads, size)
        mixed_BTHE = graph.node(f"{name}/by_token", "Transpose", [mixed_BHTE], perm=[0, 2, 1, 3])
        flat = graph.constant("attention_flat", np.array([0, 0, heads * size], np.int64))
        return graph.node(f"{name}/attended", "Reshape", [mixed_BTHE, flat]), present

    def _heads(self, name: str, x: ir.Value, heads: int, normed: bool = True) -> ir.Value:
        """(B, T, heads * E) as (B, T, heads, E), each head normed where the model does that (Qwen3)."""
        size = self.config.head_dim
        shape = self.graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
        x = self.graph.node(f"{name}/heads", "Reshape", [x, shape])
        if not (self.config.qk_norm and normed):
            return x
        return self.layers.rms_norm(f"{name}_norm", x, self.layers.matmul.vector(f"{name}_norm.weight", size))

    def _rotated(self, layer: int, name: str, x_BTHE: ir.Value) -> ir.Value:
        """Each pair of channels, half a head apart, turned by the angle of the token's place, if the layer rotates."""
        tables, graph = self._tables[layer], self.graph
        if tables is None:
            return x_BTHE
        cos, sin = tables
        outputs = [f"{name}/first", f"{name}/second"]
        first, second = graph.node_with_outputs(f"{name}/halves", "Split", [x_BTHE], outputs, axis=-1, num_outputs=2)

        def turned(half: str, op: str, own: ir.Value, other: ir.Value) -> ir.Value:
            by_cos = graph.node(f"{own.name}_cos", "Mul", [own, cos])
            by_sin = graph.node(f"{other.name}_sin", "Mul", [other, sin])
            return graph.node(f"{name}/turned_{half}", op, [by_cos, by_sin])

        both = [turned("first", "Sub", first, second), turned("second", "Add", second, first)]
        return graph.node(f"{name}/turned", "Concat", both, axis=-1)
