"""Matrix products and embedding in standard ONNX operators.

`StandardEmbedding` alone serves browsers, whose ONNX Runtime has no GatherBlockQuantized. The standard's Gather takes
no 4-bit numbers, so packed rows are gathered as bytes and dequantized.
Shape suffixes: B sequences, T tokens, N rows (outputs), K columns (inputs), G blocks a row, X anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from export.graph.builder import Array
from export.graph.matmul import FLOAT, Matmul
from export.graph.weights import Packing
from sportsllm.formats.packed import unpack
from sportsllm.models.parts import Matrix

# A block around zero needs no zero points as signed numbers, which more runtimes take.
_BLOCK_TYPES = {4: (ir.DataType.INT4, ir.DataType.UINT4), 8: (ir.DataType.INT8, ir.DataType.UINT8)}  # [asymmetric]


class StandardEmbedding(Matmul):
    """`Matmul` with an embedding in standard operators; the stored bytes are the same."""

    def _packed_embedding(self, tokens: ir.Value, table: Matrix, packing: Packing) -> ir.Value:
        """(q - zero_point) * scale of the tokens' rows, (B, T, K)."""
        graph, block, groups = self._graph, packing.block_size, -(-table.columns // packing.block_size)
        packed, scales, zero_points = self._packed(table.name, [table], packing)
        flat = graph.constant("embed/flat_shape", np.array([0, 0, -1], np.int64))
        apart = graph.constant("embed/block_shape", np.array([0, 0, groups, block], np.int64))
        numbers = self._numbers("embed/numbers", packed, tokens, packing.bits)
        if zero_points:
            all_zeros = self._numbers("embed/zero_points", zero_points[0], tokens, packing.bits)
            zeros = self._cut("embed/zero_points", all_zeros, groups)
            middle = graph.node("embed/zero_points/column", "Unsqueeze", [zeros, graph.axis(-1)])
        else:
            middle = graph.constant("embed/middle", np.array(2.0 ** (packing.bits - 1), self.real.numpy()))
        scale = graph.node("embed/scale", "Gather", [scales, tokens])
        column = graph.node("embed/scale/column", "Unsqueeze", [scale, graph.axis(-1)])
        centred = graph.node("embed/centred", "Sub", [graph.node("embed/blocks", "Reshape", [numbers, apart]), middle])
        scaled = graph.node("embed/scaled", "Mul", [centred, column])
        return self._cut("embed/found", graph.node("embed/padded", "Reshape", [scaled, flat]), table.columns)

    def _numbers(self, name: str, table: ir.Value, tokens: ir.Value, bits: int) -> ir.Value:
        """The packed numbers of the tokens' rows, padding included, (B, T, count) as computed in."""
        graph = self._graph
        flat = graph.constant("embed/flat_shape", np.array([0, 0, -1], np.int64))
        found = graph.node(f"{name}/packed", "Gather", [table, tokens])
        if bits == 4:
            low_bits, shift = (graph.constant(f"embed/{n}", np.array(n, np.uint8)) for n in (15, 4))
            low = graph.node(f"{name}/low", "BitwiseAnd", [found, low_bits])
            high = graph.node(f"{name}/high", "BitShift", [found, shift], direction="RIGHT")
            pair = [graph.node(f"{half.name}/column", "Unsqueeze", [half, graph.axis(-1)]) for half in (low, high)]
            found = graph.node(f"{name}/pairs", "Concat", pair, axis=-1)
        return graph.node(name, "Cast", [graph.node(f"{name}/flat", "Reshape", [found, flat])], to=self.real.value)

    def _cut(self, name: str, x_BTX: ir.Value, count: int) -> ir.Value:
        """The first `count` of each row; the rest pads the last block or byte."""
        start, end = (self._graph.constant(f"to_{i}", np.array([i], np.int64)) for i in (0, count))
        return self._graph.node(f"{name}/unpadded", "Slice", [x_BTX, start, end, self._graph.axis(2)])


class StandardMatmul(StandardEmbedding):
    """MatMul of dense matrices, or of packed ones through DequantizeLinear.

    Packed matrices are stored by columns, (K, N): only then does ONNX Runtime run DequantizeLinear and MatMul as one
    MatMulNBits, in 0.2 instead of 12 ms for N = 4,096, K = 768 at 4 bits. The embedding is stored by rows, so a packed
    tied matrix is stored twice.
    """

    def _dense_product(self, name: str, x: ir.Value, matrix_NK: ir.Value) -> ir.Value:
        return self._transposed_product(name, x, matrix_NK)

    def _packed_product(
        self, name: str, stored: str, x: ir.Value, matrices: Sequence[Matrix], packing: Packing
    ) -> ir.Value:
        graph, modules = self._graph, [matrix.name for matrix in matrices]
        rows, width = sum(matrix.rows for matrix in matrices), matrices[0].columns
        groups, dtype = -(-width // packing.block_size), _BLOCK_TYPES[packing.bits][packing.asymmetric]

        def columns(part: str, count: int) -> ir.Value:
            read = partial(self._columns, modules, part, packing, count)
            return graph.weight(f"{stored}.weight_{part}_columns", dtype, (count, rows), read)

        def read_scales() -> Array:
            return np.ascontiguousarray(self._weights.read_packed(modules, "scale").T)

        packed = columns("packed", width)
        inputs = [packed, graph.weight(f"{stored}.weight_scale_columns", FLOAT, (groups, rows), read_scales)]
        if packing.asymmetric:
            inputs.append(columns("zero_point", groups))
        matrix_KN = graph.node(f"{name}/matrix", "DequantizeLinear", inputs, axis=0, block_size=packing.block_size)
        return graph.node(f"{name}/product", "MatMul", [x, matrix_KN])

    def _columns(self, modules: Sequence[str], part: str, packing: Packing, count: int) -> Array:
        """Packed numbers by columns, (count, N), without the padding at the end of each row."""
        bytes_N = self._weights.read_packed(modules, part)
        numbers_NK = unpack(bytes_N.reshape(len(bytes_N), -1), packing.bits)[:, :count]
        if not packing.asymmetric:
            numbers_NK = numbers_NK.astype(np.int16) - 2 ** (packing.bits - 1)
        dtype = _BLOCK_TYPES[packing.bits][packing.asymmetric]
        return np.ascontiguousarray(numbers_NK.T).astype(dtype.numpy())
