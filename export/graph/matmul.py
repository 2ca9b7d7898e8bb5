"""Matrix products, embedding and vectors for every weight format of a checkpoint, in two operator sets.

`StandardEmbedding` alone serves browsers, whose ONNX Runtime has no GatherBlockQuantized. The standard's Gather takes
no 4-bit numbers, so packed rows are gathered as bytes and dequantized.
Shape suffixes: B sequences, T tokens, N rows (outputs), K columns (inputs), G blocks a row, X anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from export.graph.builder import MS, Array, Builder, GraphForm
from export.graph.calls import Operand
from export.graph.weights import Packing, Weights
from sportsllm.formats.packed import unpack
from sportsllm.models.parts import Matrix

FLOAT, HALF, INT8, UINT8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.UINT8
# MatMulNBits: 4 rounds activations to int8 block by block, the only level with fast kernels; 0 is float32.
FAST_ACCURACY = 4
# Rounds its whole input to 8 bits and multiplies whole numbers.
PER_ROW_PRODUCT = "DynamicQuantizeMatMul"
_KERNEL_BLOCKS = (32, 64, 128, 256)
FLAT = "_flat"  # suffix of a packed table whose rows are not divided into blocks


class Matmul:
    """Adds products with a checkpoint's matrices to a graph.

    Dense matrices stay in Hugging Face's (N, K) layout: FusedMatMul reads it transposed, at the same speed as a
    MatMul of a transposed copy, so that a tied embedding and head are one tensor. In float16 it is Transpose and
    MatMul, which more GPUs have; the runtime transposes once, when it loads the graph.
    """

    def __init__(self, graph: Builder, weights: Weights, form: GraphForm) -> None:
        """Add nothing yet."""
        self._graph, self._weights, self._half, self.real = graph, weights, form.half or form.in_half, form.real

    def vector(self, name: str, size: int) -> ir.Value:
        """A norm's weight or a bias, in the type that is computed in."""
        return self._graph.weight(name, self.real, (size,), partial(self._read_real, name, (size,)))

    def _read_real(self, name: str, shape: Sequence[int]) -> Array:
        return self._weights.read_half(name, shape) if self.real == HALF else self._weights.read(name, shape)

    def table(self, name: str, shape: tuple[int, int]) -> ir.Value:
        """A table that is never packed, float32."""
        return self._graph.weight(name, FLOAT, shape, lambda: self._weights.read(name, shape))

    def dequantized(self, module: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """A matrix's numbers, packed or dense, rounded as dense ones are stored."""
        found = self._weights.read_dequantized(module, shape)
        return found.astype(np.float16).astype(np.float32) if self._half else found

    def embedding(self, tokens: ir.Value, table: Matrix) -> ir.Value:
        """Rows of a table by token id, (B, T) to (B, T, K) float32."""
        graph, packing = self._graph, self._packing(table)
        if packing is not None:
            return self._packed_embedding(tokens, table, packing)
        found = graph.node("embed/rows", "Gather", [self._dense(table.name, [table]), tokens])
        stored = HALF if self._half else FLOAT
        return found if stored == self.real else graph.node("embed/float", "Cast", [found], to=FLOAT.value)

    def _packed_embedding(self, tokens: ir.Value, table: Matrix, packing: Packing) -> ir.Value:
        graph, width = self._graph, table.columns
        packed, scales, zero_points = self._packed(table.name, [table], packing)
        scales = self._real("embed/scales", scales)
        count = -(-width // packing.block_size) * packing.block_size * packing.bits // 8
        flat = graph.alias(f"{table.name}.weight_packed{FLAT}", packed, (table.rows, count))
        inputs = [flat, tokens, scales, *zero_points]
        sizes = {"bits": packing.bits, "block_size": packing.block_size, "gather_axis": 0, "quantize_axis": 1}
        found = graph.node("embed/rows", "GatherBlockQuantized", inputs, MS, **sizes)
        if width % packing.block_size == 0:
            return found
        start, end = (graph.constant(f"embed/{n}", np.array([i], np.int64)) for n, i in (("start", 0), ("end", width)))
        return graph.node("embed/unpadded", "Slice", [found, start, end, graph.axis(2)])

    def products(self, name: str, x: ir.Value, matrices: Sequence[Matrix], split: bool = True) -> list[ir.Value]:
        """x W^T + b for matrices that read the same input: one product, called `name`, where they are stored alike.

        Returns:
            One value for each matrix; or a single one with all rows, without `split` and where they are joined.
        """
        formats = {(self._packing(matrix), matrix.bias) for matrix in matrices}
        if len(matrices) == 1 or len(formats) > 1:
            return [self.product(matrix.name, x, [matrix]) for matrix in matrices]
        y = self.product(name, x, matrices)
        if not split:
            return [y]
        sizes, parts = [matrix.rows for matrix in matrices], [f"{matrix.name}/part" for matrix in matrices]
        return self._graph.split(f"{name}/split", y, sizes, parts)

    def product(self, name: str, x: ir.Value, matrices: Sequence[Matrix]) -> ir.Value:
        """x W^T + b, W being matrices of one format, one under the other."""
        y = self._multiply(name, x, matrices)
        if not matrices[0].bias:
            return y
        return self._graph.node(f"{name}/biased", "Add", [y, self._bias(name, matrices)])

    def _bias(self, name: str, matrices: Sequence[Matrix]) -> ir.Value:
        biases = [(f"{matrix.name}.bias", (matrix.rows,)) for matrix in matrices]

        def read() -> Array:
            return np.concatenate([self._read_real(*bias) for bias in biases])

        return self._graph.weight(f"{name}.bias", self.real, (_shape(matrices)[0],), read)

    def _multiply(self, name: str, x: ir.Value, matrices: Sequence[Matrix]) -> ir.Value:
        stored, packing = name if len(matrices) > 1 else matrices[0].name, self._packing(matrices[0])
        if packing is not None:
            return self._packed_product(name, stored, x, matrices, packing)
        matrix = self._dense(stored, matrices)
        if self._half and self.real == FLOAT:
            matrix = self._graph.node(f"{name}/float", "Cast", [matrix], to=FLOAT.value)
        return self._dense_product(name, x, matrix)

    def _dense_product(self, name: str, x: ir.Value, matrix_NK: ir.Value) -> ir.Value:
        if self.real == HALF:
            return self._transposed_product(name, x, matrix_NK)
        return self._graph.node(f"{name}/product", "FusedMatMul", [x, matrix_NK], MS, transB=1)

    def _transposed_product(self, name: str, x: ir.Value, matrix_NK: ir.Value) -> ir.Value:
        """The product in standard operators."""
        columns = self._graph.node(f"{name}/columns", "Transpose", [matrix_NK], perm=[1, 0])
        return self._graph.node(f"{name}/product", "MatMul", [x, columns])

    def _packed_product(
        self, name: str, stored: str, x: ir.Value, matrices: Sequence[Matrix], packing: Packing
    ) -> ir.Value:
        graph, modules = self._graph, [matrix.name for matrix in matrices]
        rows, columns = _shape(matrices)
        if packing.per_row:
            read, read_scales = self._weights.read_per_row, self._weights.read_per_row_scales
            matrix = graph.weight(f"{stored}.weight_rows", INT8, (columns, rows), lambda: read(modules))
            scale = graph.weight(f"{stored}.weight_rows_scale", HALF, (rows,), lambda: read_scales(modules))
            return graph.node(f"{name}/product", PER_ROW_PRODUCT, [x, matrix, self._real(f"{name}/scale", scale)], MS)
        packed, scales, zero_points = self._packed(stored, matrices, packing)
        sizes = {"N": rows, "K": columns, "block_size": packing.block_size, "bits": packing.bits}
        inputs = [x, packed, self._real(f"{name}/scale", scales), *zero_points]
        return graph.node(f"{name}/product", "MatMulNBits", inputs, MS, **sizes, accuracy_level=FAST_ACCURACY)

    def operand(self, key: str, name: str, matrices: Sequence[Matrix]) -> Operand | str:
        """The matrix of the product `name`, which the graph has, as kernels read it; or why they do not."""
        if len({(self._packing(matrix), matrix.bias) for matrix in matrices}) > 1:
            return "matrices in unlike formats"
        stored, packing = name if len(matrices) > 1 else matrices[0].name, self._packing(matrices[0])
        if packing is None:
            return "dense matrices"
        if packing.per_row:
            return "INT8 per row"
        if packing.bits not in (4, 8) or packing.block_size not in _KERNEL_BLOCKS:
            return f"{packing.bits} bits in blocks of {packing.block_size}"
        packed, scales, zero_points = self._packed(stored, matrices, packing)
        bias = self._bias(name, matrices) if matrices[0].bias else None
        inputs = {"packed": packed, "scale": scales, "zero_point": next(iter(zero_points), None), "bias": bias}
        return Operand(
            {f"{key}_{part}": value for part, value in inputs.items()},
            {f"{key}_bits": packing.bits, f"{key}_block_size": packing.block_size},
        )

    def _packing(self, matrix: Matrix) -> Packing | None:
        return self._weights.packing(matrix.name, (matrix.rows, matrix.columns))

    def _dense(self, stored: str, matrices: Sequence[Matrix]) -> ir.Value:
        shapes = {matrix.name: (matrix.rows, matrix.columns) for matrix in matrices}
        dtype, read = HALF if self._half else FLOAT, partial(self._weights.read_stacked, shapes, self._half)
        return self._graph.weight(f"{stored}.weight", dtype, _shape(matrices), read)

    def _packed(
        self, stored: str, matrices: Sequence[Matrix], packing: Packing
    ) -> tuple[ir.Value, ir.Value, list[ir.Value]]:
        """Packed numbers (N, G, bytes), scales (N, G), and zero points if there are any, one under the other."""
        rows, columns = _shape(matrices)
        groups, modules = -(-columns // packing.block_size), [matrix.name for matrix in matrices]

        def part(name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
            read = partial(self._weights.read_packed, modules, name)
            return self._graph.weight(f"{stored}.weight_{name}", dtype, shape, read)

        packed = part("packed", UINT8, (rows, groups, packing.block_size * packing.bits // 8))
        scales = part("scale", HALF, (rows, groups))
        if not packing.asymmetric:
            return packed, scales, []
        return packed, scales, [part("zero_point", UINT8, (rows, -(-groups * packing.bits // 8)))]

    def _real(self, name: str, scales: ir.Value) -> ir.Value:
        """Scales in the type that is computed in; the runtime converts them once, when it loads the graph."""
        return scales if self.real == HALF else self._graph.node(name, "Cast", [scales], to=self.real.value)


def _shape(matrices: Sequence[Matrix]) -> tuple[int, int]:
    """(N, K) of matrices one under the other."""
    return sum(matrix.rows for matrix in matrices), matrices[0].columns


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
        scale = graph.node("embed/scale", "Gather", [self._real("embed/scales", scales), tokens])
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
        scales = graph.weight(f"{stored}.weight_scale_columns", HALF, (groups, rows), read_scales)
        inputs = [packed, self._real(f"{name}/scale", scales)]
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
