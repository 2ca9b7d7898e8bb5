"""A packed embedding in standard operators: its rows are gathered as bytes and dequantized.

The standard's Gather takes no 4-bit numbers, and ONNX Runtime's GatherBlockQuantized is missing in browsers.
Shape suffixes: B sequences, T tokens, G blocks a row, X anything.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.graph.matmul import FLOAT, Matrices
from export.graph.weights import Packing


class StandardEmbedding(Matrices):
    """The same products, and an embedding that any runtime reads; the bytes are the same."""

    def _packed_rows(self, module: str, tokens: ir.Value, rows: int, width: int, packing: Packing) -> ir.Value:
        """(q - zero_point) * scale of the tokens' rows, (B, T, width)."""
        graph, block, groups = self._graph, packing.block_size, -(-width // packing.block_size)
        packed, scales, zero_points = self._packed(module, [module], rows, width, packing)
        flat = graph.constant("embed/flat_shape", np.array([0, 0, -1], np.int64))
        apart = graph.constant("embed/block_shape", np.array([0, 0, groups, block], np.int64))
        numbers = self._numbers("embed/numbers", packed, tokens, packing.bits)
        if zero_points:
            all_zeros = self._numbers("embed/zero_points", zero_points[0], tokens, packing.bits)
            zeros = self._cut("embed/zero_points", all_zeros, groups)
            middle = graph.node("embed/zero_points/column", "Unsqueeze", [zeros, graph.axis(-1)])
        else:
            middle = graph.constant("embed/middle", np.array(2.0 ** (packing.bits - 1), np.float32))
        scale = graph.node("embed/scale", "Gather", [scales, tokens])
        column = graph.node("embed/scale/column", "Unsqueeze", [scale, graph.axis(-1)])
        centred = graph.node("embed/centred", "Sub", [graph.node("embed/blocks", "Reshape", [numbers, apart]), middle])
        scaled = graph.node("embed/scaled", "Mul", [centred, column])
        return self._cut("embed/found", graph.node("embed/padded", "Reshape", [scaled, flat]), width)

    def _numbers(self, name: str, table: ir.Value, tokens: ir.Value, bits: int) -> ir.Value:
        """The packed numbers of the tokens' rows, padding included, (B, T, count) float32."""
        graph = self._graph
        flat = graph.constant("embed/flat_shape", np.array([0, 0, -1], np.int64))
        found = graph.node(f"{name}/packed", "Gather", [table, tokens])
        if bits == 4:
            low_bits, shift = (graph.constant(f"embed/{n}", np.array(n, np.uint8)) for n in (15, 4))
            low = graph.node(f"{name}/low", "BitwiseAnd", [found, low_bits])
            high = graph.node(f"{name}/high", "BitShift", [found, shift], direction="RIGHT")
            pair = [graph.node(f"{half.name}/column", "Unsqueeze", [half, graph.axis(-1)]) for half in (low, high)]
            found = graph.node(f"{name}/pairs", "Concat", pair, axis=-1)
        return graph.node(name, "Cast", [graph.node(f"{name}/flat", "Reshape", [found, flat])], to=FLOAT.value)

    def _cut(self, name: str, x_BTX: ir.Value, count: int) -> ir.Value:
        """The first `count` of each row; what a whole last block or byte holds beyond them is padding."""
        start, end = (self._graph.constant(f"to_{i}", np.array([i], np.int64)) for i in (0, count))
        return self._graph.node(f"{name}/unpadded", "Slice", [x_BTX, start, end, self._graph.axis(2)])
