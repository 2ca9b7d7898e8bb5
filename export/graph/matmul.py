"""Matrix products, embedding and vectors of the graph, whatever form the checkpoint has its weights in.

Shape suffixes: B sequences, T tokens, D hidden_size, N rows (outputs), K columns (inputs), G blocks a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS, Builder
from export.graph.weights import Packing, Weights

FLOAT, HALF, INT8, UINT8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.UINT8
# MatMulNBits: 4 rounds activations to int8 block by block, the only level with fast kernels; 0 is float32.
FAST_ACCURACY = 4
# Rounds its whole input to 8 bits and multiplies whole numbers.
PER_ROW_PRODUCT = "DynamicQuantizeMatMul"
FLAT = "_flat"  # ending of the name that packed rows have in one piece each, without blocks
NF4_TYPE = 1  # of MatMulBnb4, which computes in float32


class Matrices:
    """Adds products with a checkpoint's matrices to a graph.

    Dense matrices stay in Hugging Face's (N, K) layout: FusedMatMul reads it transposed, at the same speed as a
    MatMul of a transposed copy, so that a tied embedding and head are one tensor.
    """

    def __init__(self, graph: Builder, weights: Weights, half: bool) -> None:
        self._graph, self._weights, self._half = graph, weights, half

    def vector(self, name: str, size: int) -> ir.Value:
        """A norm's weight or a bias, float32."""
        return self._graph.weight(name, FLOAT, (size,), lambda: self._weights.read(name, (size,)))

    def embedding(self, module: str, tokens: ir.Value, rows: int, width: int) -> ir.Value:
        """Rows of a table by token id, (B, T) to (B, T, width) float32."""
        graph, shape = self._graph, (rows, width)
        packing = self._weights.packing(module, shape)
        if packing is None:
            found = graph.node("embed/rows", "Gather", [self._dense(f"{module}.weight", [module], [shape]), tokens])
            return graph.node("embed/float", "Cast", [found], to=FLOAT.value) if self._half else found
        return self._packed_rows(module, tokens, rows, width, packing)

    def _packed_rows(self, module: str, tokens: ir.Value, rows: int, width: int, packing: Packing) -> ir.Value:
        graph = self._graph
        packed, scales, zero_points = self._packed(module, [module], rows, width, packing)
        count = -(-width // packing.block_size) * packing.block_size * packing.bits // 8
        flat = graph.alias(f"{module}.weight_packed{FLAT}", packed, (rows, count))
        found = graph.node(
            "embed/rows",
            "GatherBlockQuantized",
            [flat, tokens, scales, *zero_points],
            MS,
            bits=packing.bits,
            block_size=packing.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        if width % packing.block_size == 0:
            return found
        start, end = (graph.constant(f"embed/{n}", np.array([i], np.int64)) for n, i in (("start", 0), ("end", width)))
        return graph.node("embed/unpadded", "Slice", [found, start, end, graph.axis(2)])

    def projections(
        self, name: str, x: ir.Value, modules: Sequence[str], sizes: Sequence[int], width: int, bias: bool, apart: bool
    ) -> list[ir.Value]:
        """x W^T + b for several modules that read the same input, (B, T, width).

        Args:
            name: of the matrices together.
            x: the input.
            modules: their names in the checkpoint.
            sizes: rows of each.
            width: columns.
            bias: whether each has a bias.
            apart: give each module's result by itself.

        Returns:
            One value for each module; or a single one with all rows, where not `apart` and all are stored alike.
        """
        pairs = list(zip(modules, sizes, strict=True))
        packings = {self._weights.packing(module, (size, width)) for module, size in pairs}
        if len(packings) > 1 or any(packing is not None and not packing.joinable for packing in packings):
            return [self.product(m, x, [m], [size], width, bias) for m, size in pairs]
        y = self.product(name, x, modules, sizes, width, bias)
        if not apart:
            return [y]
        lengths = self._graph.constant("split_" + "_".join(map(str, sizes)), np.array(sizes, np.int64))
        parts = [f"{module}/part" for module in modules]
        return self._graph.node_with_outputs(f"{name}/split", "Split", [y, lengths], parts, axis=-1)

    def product(
        self,
        name: str,
        x: ir.Value,
        modules: Sequence[str],
        sizes: Sequence[int],
        width: int,
        bias: bool = False,
    ) -> ir.Value:
        """x W^T + b, W being the modules' matrices, stored alike, one under the other."""
        y = self._multiply(name, x, modules, [(size, width) for size in sizes])
        if not bias:
            return y
        biases = [(f"{module}.bias", (size,)) for module, size in zip(modules, sizes, strict=True)]
        vector = self._graph.weight(
            f"{name}.bias",
            FLOAT,
            (sum(sizes),),
            lambda: np.concatenate([self._weights.read(*bias) for bias in biases]),
        )
        return self._graph.node(f"{name}/biased", "Add", [y, vector])

    def _multiply(self, name: str, x: ir.Value, modules: Sequence[str], shapes: Sequence[tuple[int, int]]) -> ir.Value:
        graph, stored = self._graph, name if len(modules) > 1 else modules[0]
        packing = self._weights.packing(modules[0], shapes[0])
        if packing is None:
            matrix = self._dense(f"{stored}.weight", modules, shapes)
            if self._half:
                matrix = graph.node(f"{name}/float", "Cast", [matrix], to=FLOAT.value)
            return self._dense_product(name, x, matrix)
        rows, width = sum(count for count, _ in shapes), shapes[0][1]
        return self._packed_product(name, stored, x, modules, rows, width, packing)

    def _dense_product(self, name: str, x: ir.Value, matrix_NK: ir.Value) -> ir.Value:
        return self._graph.node(f"{name}/product", "FusedMatMul", [x, matrix_NK], MS, transB=1)

    def _packed_product(
        self, name: str, stored: str, x: ir.Value, modules: Sequence[str], rows: int, width: int, packing: Packing
    ) -> ir.Value:
        graph, weights = self._graph, self._weights
        if packing.per_row:
            matrix = graph.weight(f"{stored}.weight_rows", INT8, (width, rows), lambda: weights.read_per_row(modules))
            scale = graph.weight(
                f"{stored}.weight_rows_scale", FLOAT, (rows,), lambda: weights.read_per_row_scales(modules)
            )
            return graph.node(f"{name}/product", PER_ROW_PRODUCT, [x, matrix, scale], MS)
        packed, scales, zero_points = self._packed(stored, modules, rows, width, packing)
        sizes = {"N": rows, "K": width, "block_size": packing.block_size}
        if packing.nf4:
            return graph.node(f"{name}/product", "MatMulBnb4", [x, packed, scales], MS, **sizes, quant_type=NF4_TYPE)
        return graph.node(
            f"{name}/product",
            "MatMulNBits",
            [x, packed, scales, *zero_points],
            MS,
            **sizes,
            bits=packing.bits,
            accuracy_level=FAST_ACCURACY,
        )

    def _dense(self, name: str, modules: Sequence[str], shapes: Sequence[tuple[int, int]]) -> ir.Value:
        shape = (sum(rows for rows, _ in shapes), shapes[0][1])
        dtype = HALF if self._half else FLOAT
        return self._graph.weight(name, dtype, shape, lambda: self._weights.read_stacked(modules, shapes, self._half))

    def _packed(
        self, name: str, modules: Sequence[str], rows: int, width: int, packing: Packing
    ) -> tuple[ir.Value, ir.Value, list[ir.Value]]:
        """Packed numbers (N, G, bytes), scales (N, G), and zero points if there are any, one under the other.

        Of NF4 packed numbers and scales are flat.
        """
        groups = -(-width // packing.block_size)

        def stored(part: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
            return self._graph.weight(
                f"{name}.weight_{part}", dtype, shape, lambda: self._weights.read_packed(modules, part)
            )

        if packing.nf4:
            count = rows * width
            flat = (-(-count // 2),), (-(-count // packing.block_size),)
            return stored("packed", UINT8, flat[0]), stored("scale", FLOAT, flat[1]), []
        packed = stored("packed", UINT8, (rows, groups, packing.block_size * packing.bits // 8))
        scales = stored("scale", FLOAT, (rows, groups))
        if not packing.asymmetric:
            return packed, scales, []
        return packed, scales, [stored("zero_point", UINT8, (rows, -(-groups * packing.bits // 8)))]
