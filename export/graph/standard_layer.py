"""The parts of a layer in standard ONNX operators alone (opset 21), for runtimes that have no others.

Shape suffixes as in `export.graph.decoder`, and: G blocks a row, N rows (outputs) and K columns (inputs) of a matrix
where
the key/value heads play no part.

The cache grows: present keys and values are past and new ones, one after the other. A token's place is the number
of ones before it in `attention_mask`, so that sequences may be padded on the left, and in the cache anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from export.graph.builder import Array, Builder
from export.graph.layer import LayerBuilder
from export.graph.matmul import FLOAT, Matrices
from export.graph.standard_matmul import StandardEmbedding
from export.graph.weights import Packing
from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import rope_tables
from sportsllm.storage.packed_weights import unpack

# A block around zero needs no zero points as signed numbers, which more runtimes take.
_BLOCK_TYPES = {
    (4, False): ir.DataType.INT4,
    (4, True): ir.DataType.UINT4,
    (8, False): ir.DataType.INT8,
    (8, True): ir.DataType.UINT8,
}


class StandardMatrices(StandardEmbedding):
    """MatMul with dense matrices, or with DequantizeLinear of packed ones.

    Packed matrices lie by columns, (K, N), for ONNX Runtime runs DequantizeLinear and MatMul as one MatMulNBits
    only so: 0.2 instead of 12 ms for N = 4,096, K = 768 at 4 bits. The embedding has rows; a packed tied matrix is
    therefore stored both ways.
    """

    def _dense_product(self, name: str, x: ir.Value, matrix_NK: ir.Value) -> ir.Value:
        columns = self._graph.node(f"{name}/columns", "Transpose", [matrix_NK], perm=[1, 0])
        return self._graph.node(f"{name}/product", "MatMul", [x, columns])

    def _packed_product(
        self, name: str, stored: str, x: ir.Value, modules: Sequence[str], rows: int, width: int, packing: Packing
    ) -> ir.Value:
        graph, groups = self._graph, -(-width // packing.block_size)
        dtype = _BLOCK_TYPES[packing.bits, packing.asymmetric]

        def columns(part: str, count: int) -> ir.Value:
            read = partial(self._columns, modules, part, packing, count)
            return graph.weight(f"{stored}.weight_{part}_columns", dtype, (count, rows), read)

        inputs = [columns("packed", width), self._scale_columns(stored, modules, rows, groups)]
        if packing.asymmetric:
            inputs.append(columns("zero_point", groups))
        matrix_KN = graph.node(f"{name}/matrix", "DequantizeLinear", inputs, axis=0, block_size=packing.block_size)
        return graph.node(f"{name}/product", "MatMul", [x, matrix_KN])

    def _scale_columns(self, stored: str, modules: Sequence[str], rows: int, groups: int) -> ir.Value:
        def read() -> Array:
            return np.ascontiguousarray(self._weights.read_packed(modules, "scale").T)

        return self._graph.weight(f"{stored}.weight_scale_columns", FLOAT, (groups, rows), read)

    def _columns(self, modules: Sequence[str], part: str, packing: Packing, count: int) -> Array:
        """Packed numbers by columns, (count, N), without the padding at the end of each row."""
        bytes_N = self._weights.read_packed(modules, part)
        numbers_NK = unpack(bytes_N.reshape(len(bytes_N), -1), packing.bits)[:, :count]
        if not packing.asymmetric:
            numbers_NK = numbers_NK.astype(np.int16) - 2 ** (packing.bits - 1)
        dtype = _BLOCK_TYPES[packing.bits, packing.asymmetric]
        return np.ascontiguousarray(numbers_NK.T).astype(dtype.numpy())


@dataclass(frozen=True)
class _Places:
    """Where the new tokens stand and what they may look at.

    Attributes:
        cos_BT1X, sin_BT1X: their rows of the rotary tables, X = E / 2.
        seen_B1TS: whether new token t may look at column s.
    """

    cos_BT1X: ir.Value
    sin_BT1X: ir.Value
    seen_B1TS: ir.Value


def _places(graph: Builder, config: ModelConfig, tokens_BT: ir.Value, mask_BS: ir.Value) -> _Places:
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    scalar = graph.constant("scalar_shape", np.array([], np.int64))
    end = graph.constant("end", np.array([np.iinfo(np.int64).max], np.int64))
    # The new tokens are the last T columns.
    width_T = graph.node("places/new_width", "Shape", [tokens_BT], start=1, end=2)
    start = graph.node("places/start", "Neg", [width_T])
    counted_BS = graph.node("places/counted", "CumSum", [mask_BS, one])
    before_BS = graph.node("places/before", "Sub", [counted_BS, one])
    all_BS = graph.node("places/all", "Max", [before_BS, zero])  # padding before the first token has none: any will do
    places_BT = graph.node("places/new", "Slice", [all_BS, start, end, graph.axis(1)])
    tables = []
    for part, table in zip(("cos", "sin"), rope_tables(config, config.max_position_embeddings), strict=True):
        rows_BTX = graph.node(f"places/{part}_rows", "Gather", [graph.constant(f"{part}_cache", table), places_BT])
        tables.append(graph.node(f"places/{part}", "Unsqueeze", [rows_BTX, graph.axis(2)]))

    width_S = graph.node("places/mask_width", "Shape", [mask_BS], start=1, end=2)
    total = graph.node("places/total", "Reshape", [width_S, scalar])
    columns_S = graph.node("places/columns", "Range", [zero, total, one])
    own_T = graph.node("places/own_columns", "Slice", [columns_S, start, end, graph.axis(0)])
    own_T1 = graph.node("places/own_column", "Unsqueeze", [own_T, graph.axis(1)])
    earlier_TS = graph.node("places/earlier", "LessOrEqual", [columns_S, own_T1])
    real_BS = graph.node("places/real", "Cast", [mask_BS], to=ir.DataType.BOOL.value)
    middle_axes = graph.constant("axes_1_2", np.array([1, 2], np.int64))
    real_B11S = graph.node("places/real_row", "Unsqueeze", [real_BS, middle_axes])
    cos, sin = tables
    return _Places(cos, sin, graph.node("places/seen", "And", [earlier_TS, real_B11S]))


class StandardLayerBuilder(LayerBuilder):
    """Attention as MatMul, Softmax, MatMul, with rotation by Mul, Sub and Add."""

    def __init__(
        self, graph: Builder, config: ModelConfig, matrices: Matrices, tokens_BT: ir.Value, mask_BS: ir.Value
    ) -> None:
        super().__init__(graph, config, matrices)
        self._places = _places(graph, config, tokens_BT, mask_BS)

    def _add_and_norm(self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value) -> tuple[ir.Value, ir.Value]:
        total = self._graph.node(f"{name}/sum", "Add", [x, residual])
        return self._rms_norm(name, total, gamma), total

    def _silu(self, name: str, x: ir.Value) -> ir.Value:
        return self._graph.node(name, "Mul", [x, self._graph.node(f"{name}/sigmoid", "Sigmoid", [x])])

    def _attend(
        self, layer: int, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value]
    ) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config = self._graph, self._config
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, key, value = parts
        query_BTHE = self._rotated(f"{name}.q", self._heads(f"{name}.q", query, heads))
        key_BTKE = self._rotated(f"{name}.k", self._heads(f"{name}.k", key, shared))
        scale = graph.constant("attention_scale", np.array(size**-0.5, np.float32))
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
        # The least number instead of minus infinity: a padding token that may look at nothing stays a number.
        least = graph.constant("attention_least", np.array(np.finfo(np.float32).min, np.float32))
        scores_BHTS = shaped("scores_by_head", scores, heads, 0)
        masked = graph.node(f"{name}/masked", "Where", [self._places.seen_B1TS, scores_BHTS, least])
        weights = graph.node(f"{name}/weights", "Softmax", [masked], axis=-1)
        mixed = graph.node(f"{name}/mixed", "MatMul", [shaped("weights_shared", weights, shared, 0), values])
        mixed_BTHE = graph.node(
            f"{name}/by_token", "Transpose", [shaped("mixed_by_head", mixed, heads, size)], perm=[0, 2, 1, 3]
        )
        flat = graph.constant("attention_flat", np.array([0, 0, heads * size], np.int64))
        return graph.node(f"{name}/attended", "Reshape", [mixed_BTHE, flat]), present

    def _heads(self, name: str, x: ir.Value, heads: int, normed: bool = True) -> ir.Value:
        """(B, T, heads * E) as (B, T, heads, E), each head normed where the model does that (Qwen3)."""
        size = self._config.head_dim
        shape = self._graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
        x = self._graph.node(f"{name}/heads", "Reshape", [x, shape])
        if not (self._config.qk_norm and normed):
            return x
        return self._rms_norm(f"{name}_norm", x, self.matrices.vector(f"{name}_norm.weight", size))

    def _rotated(self, name: str, x_BTHE: ir.Value) -> ir.Value:
        """Each pair of channels, half a head apart, turned by the angle of the token's place."""
        graph, cos, sin = self._graph, self._places.cos_BT1X, self._places.sin_BT1X
        outputs = [f"{name}/first", f"{name}/second"]
        first, second = graph.node_with_outputs(f"{name}/halves", "Split", [x_BTHE], outputs, axis=-1, num_outputs=2)

        def product(half: ir.Value, table: str, factor: ir.Value) -> ir.Value:
            return graph.node(f"{half.name}_{table}", "Mul", [half, factor])

        turned = [
            graph.node(f"{name}/turned_first", "Sub", [product(first, "cos", cos), product(second, "sin", sin)]),
            graph.node(f"{name}/turned_second", "Add", [product(second, "cos", cos), product(first, "sin", sin)]),
        ]
        return graph.node(f"{name}/turned", "Concat", turned, axis=-1)
