"""A checkpoint's matrices and vectors in a graph: how they are stored, and products and embeddings with them, for every
weight format and in two operator sets.

Several matrices that read the same input are stacked by rows into one, which costs one call instead of several; packed
bytes are copied as they are.
Shape suffixes: B sequences, T tokens, N rows (outputs), K columns (inputs), G blocks a row, X anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from export.graph.builder import FLOAT, HALF, INT8, UINT8, Array, Builder, GraphForm
from export.graph.calls import Operand
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import read_tensor
from sportsllm.formats.packed import unpack
from sportsllm.formats.packed_modules import read_packed
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.models.sublayer import Matrix

# MatMulNBits: 4 rounds activations to int8 block by block, the only level with fast kernels; 0 is float32.
FAST_ACCURACY = 4
_KERNEL_BLOCKS, _KERNEL_ROW = (32, 64, 128, 256), 1024  # sizes of blocks, and most blocks of a row (kernels.h)
FLAT = "_flat"  # suffix of a packed table whose rows are not divided into blocks
# A block around zero needs no zero points as signed numbers, which more runtimes take.
_BLOCK_TYPES = {4: (ir.DataType.INT4, ir.DataType.UINT4), 8: (INT8, UINT8)}  # [asymmetric]


@dataclass(frozen=True)
class Packing:
    """How a packed matrix is laid out; see `sportsllm.formats.packed`."""

    bits: int
    block_size: int
    asymmetric: bool  # whether there are zero points


class Weights:
    """Reads tensors of one checkpoint by module name, each when asked for."""

    def __init__(self, checkpoint: Path) -> None:
        self._directory = checkpoint
        self.tensors = TensorFiles(checkpoint)
        self._packings: dict[str, Packing | None] = {}

    def packing(self, module: str, shape: tuple[int, int]) -> Packing | None:
        """Layout of a module's matrix, or None if it is dense.

        Raises:
            ArtifactError: its tensors are incomplete or do not fit the (N, K) that the config asks for.
        """
        if module not in self._packings:
            found = None
            if f"{module}.weight_packed" in self.tensors:
                weight = read_packed(self.tensors, module, shape)
                found = Packing(weight.bits, weight.block_size, f"{module}.weight_zero_point" in self.tensors)
            self._packings[module] = found
        return self._packings[module]

    def read(self, name: str, shape: Sequence[int], half: bool = False) -> Array:
        """One dense tensor in float32, or rounded to float16.

        Raises:
            ArtifactError: it is missing, of another shape, not finite, or beyond float16's range.
        """
        full = read_tensor(self.tensors, name, tuple(shape)).numpy()
        if half and full.size and float(np.abs(full).max()) > float(np.finfo(np.float16).max):
            raise ArtifactError(
                f"{self._directory}: tensor {name!r} has values beyond float16's 65,504; export it as fp32"
            )
        return full.astype(np.float16) if half else full

    def read_packed(self, modules: Sequence[str], part: str) -> Array:
        """One part, `packed`, `scale` or `zero_point`, of matrices with equal packing, one under the other."""
        return _stack([self.tensors[f"{name}.weight_{part}"].numpy() for name in modules])

    def read_columns(self, modules: Sequence[str], part: str, packing: Packing, count: int) -> Array:
        """Packed values by columns, (count, N), without the padding at the end of each row."""
        bytes_N = self.read_packed(modules, part)
        numbers_NK = unpack(bytes_N.reshape(len(bytes_N), -1), packing.bits)[:, :count]
        if not packing.asymmetric:
            numbers_NK = numbers_NK.astype(np.int16) - 2 ** (packing.bits - 1)
        dtype = _BLOCK_TYPES[packing.bits][packing.asymmetric]
        return np.ascontiguousarray(numbers_NK.T).astype(dtype.numpy())


class Matmul:
    """Adds products with a checkpoint's matrices to a graph.

    Dense matrices stay in Hugging Face's (N, K) layout: FusedMatMul reads it transposed, at the same speed as a
    MatMul of a transposed copy, so that a tied embedding and head are one tensor. In float16 it is Transpose and
    MatMul, which more GPUs have; the runtime transposes once, when it loads the graph.

    Standard operators multiply packed matrices behind DequantizeLinear. They are stored by columns, (K, N): only then
    does ONNX Runtime run both as one MatMulNBits, in 0.2 instead of 12 ms for N = 4,096, K = 768 at 4 bits. The
    embedding is stored by rows, so a packed tied matrix is stored twice.
    """

    def __init__(self, graph: Builder, weights: Weights, form: GraphForm) -> None:
        """Add nothing yet."""
        self._graph, self._weights, self._form = graph, weights, form
        self._half, self.real = form.dense == HALF, form.real

    def vector(self, name: str, size: int) -> ir.Value:
        """A norm's weight or a bias, in the compute dtype."""
        return self._graph.weight(
            name, self.real, (size,), partial(self._weights.read, name, (size,), self.real == HALF)
        )

    def table(self, name: str, shape: tuple[int, int]) -> ir.Value:
        """A table that is never packed, float32."""
        return self._graph.weight(name, FLOAT, shape, partial(self._weights.read, name, shape))

    def dequantized(self, module: str, shape: tuple[int, int]) -> Array:
        """A packed matrix's values, or a dense one's as it is stored, (N, K) float32."""
        if self._weights.packing(module, shape) is None:
            return self._weights.read(f"{module}.weight", shape, self._half).astype(np.float32)
        return read_packed(self._weights.tensors, module, shape).dequantize()

    def embedding(self, tokens_BT: ir.Value, table: Matrix) -> ir.Value:
        """Rows of a table by token id, (B, T, K) in the compute dtype."""
        graph, packing = self._graph, self._packing(table)
        if packing is not None and self._form.operators != "onnx":
            return self._unpacked_rows(tokens_BT, table, packing)
        if packing is not None:
            return self._packed_rows(tokens_BT, table, packing)
        found = graph.node("embed/rows", "Gather", self._dense(table.name, [table]), tokens_BT)
        return found if self._form.dense == self.real else graph.node("embed/float", "Cast", found, to=FLOAT.value)

    def _packed_rows(self, tokens_BT: ir.Value, table: Matrix, packing: Packing) -> ir.Value:
        graph, width = self._graph, table.columns
        packed, scales, zero_points = self._packed(table.name, [table], packing)
        scales = self._real("embed/scales", scales)
        count = -(-width // packing.block_size) * packing.block_size * packing.bits // 8
        flat = graph.alias(f"{table.name}.weight_packed{FLAT}", packed, (table.rows, count))
        sizes = {"bits": packing.bits, "block_size": packing.block_size, "gather_axis": 0, "quantize_axis": 1}
        found = graph.node("embed/rows", "GatherBlockQuantized", flat, tokens_BT, scales, *zero_points, **sizes)
        if width % packing.block_size == 0:
            return found
        return graph.node(
            "embed/unpadded", "Slice", found, graph.ints("embed/start", [0]), graph.ints("embed/end", [width]), 2
        )

    def _unpacked_rows(self, tokens_BT: ir.Value, table: Matrix, packing: Packing) -> ir.Value:
        """(q - zero_point) * scale in standard operators, which browsers have too; the stored bytes are the same.

        The standard's Gather takes no 4-bit values, so packed rows are gathered as bytes.
        """
        graph, at, groups = self._graph, self._graph.at("embed/"), -(-table.columns // packing.block_size)
        packed, scales, zero_points = self._packed(table.name, [table], packing)
        numbers = self._numbers("embed/numbers", packed, tokens_BT, packing.bits)
        if zero_points:
            all_zeros = self._numbers("embed/zero_points", zero_points[0], tokens_BT, packing.bits)
            middle = at("zero_points/column", "Unsqueeze", self._cut("embed/zero_points", all_zeros, groups), -1)
        else:
            middle = graph.constant("embed/middle", np.array(2.0 ** (packing.bits - 1), self.real.numpy()))
        row_scales = at("row_scales", "Gather", self._real("embed/scales", scales), tokens_BT)
        column = at("row_scales/column", "Unsqueeze", row_scales, -1)
        apart = graph.ints("embed/block_shape", [0, 0, groups, packing.block_size])
        found = at("dequantized", "Mul", at("centred", "Sub", at("blocks", "Reshape", numbers, apart), middle), column)
        flat = at("padded", "Reshape", found, graph.ints("embed/flat_shape", [0, 0, -1]))
        return self._cut("embed/found", flat, table.columns)

    def _numbers(self, name: str, table: ir.Value, tokens_BT: ir.Value, bits: int) -> ir.Value:
        """The packed values of the tokens' rows, padding included, (B, T, count) in the compute dtype."""
        graph, at = self._graph, self._graph.at(f"{name}/")
        found = at("packed", "Gather", table, tokens_BT)
        if bits == 4:
            low_bits, shift = (graph.constant(f"embed/{n}", np.array(n, np.uint8)) for n in (15, 4))
            low = at("low", "BitwiseAnd", found, low_bits)
            high = at("high", "BitShift", found, shift, direction="RIGHT")
            pair = [at(f"{part}/column", "Unsqueeze", x, -1) for part, x in (("low", low), ("high", high))]
            found = at("pairs", "Concat", *pair, axis=-1)
        flat = at("flat", "Reshape", found, graph.ints("embed/flat_shape", [0, 0, -1]))
        return graph.node(name, "Cast", flat, to=self.real.value)

    def _cut(self, name: str, x_BTX: ir.Value, count: int) -> ir.Value:
        """The first `count` of each row; the rest pads the last block or byte."""
        start, end = (self._graph.ints(f"to_{i}", [i]) for i in (0, count))
        return self._graph.node(f"{name}/unpadded", "Slice", x_BTX, start, end, 2)

    def products(self, name: str, x: ir.Value, matrices: Sequence[Matrix], split: bool = True) -> list[ir.Value]:
        """x W^T + b for matrices that read the same input: one product, called `name`, if they are stored alike.

        Returns:
            One value for each matrix; or a single one with all rows, without `split` and if they are joined.
        """
        if len(matrices) == 1 or len({(self._packing(matrix), matrix.bias) for matrix in matrices}) > 1:
            return [self.product(matrix.name, x, [matrix]) for matrix in matrices]
        y = self.product(name, x, matrices)
        if not split:
            return [y]
        sizes, parts = [matrix.rows for matrix in matrices], [f"{matrix.name}/part" for matrix in matrices]
        return self._graph.split(f"{name}/split", y, sizes, parts)

    def product(self, name: str, x: ir.Value, matrices: Sequence[Matrix]) -> ir.Value:
        """x W^T + b, W being matrices of one format, one under the other."""
        stored, packing = name if len(matrices) > 1 else matrices[0].name, self._packing(matrices[0])
        if packing is None:
            y = self._dense_product(name, stored, x, matrices)
        elif self._is_wide(matrices):
            both = self._in_two_parts(name, x, matrices[0].columns, packing.block_size)
            y = self._sum_of_parts(name, self._packed_product(packing, name, stored, both, matrices))
        else:
            y = self._packed_product(packing, name, stored, x, matrices)
        return self._graph.node(f"{name}/biased", "Add", y, self._bias(name, matrices)) if matrices[0].bias else y

    def _bias(self, name: str, matrices: Sequence[Matrix]) -> ir.Value:
        def read() -> Array:
            half = self.real == HALF
            return _stack([self._weights.read(f"{each.name}.bias", (each.rows,), half) for each in matrices])

        return self._graph.weight(f"{name}.bias", self.real, (_shape(matrices)[0],), read)

    def _dense_product(self, name: str, stored: str, x: ir.Value, matrices: Sequence[Matrix]) -> ir.Value:
        at, matrix_NK = self._graph.at(f"{name}/"), self._dense(stored, matrices)
        if self._form.dense != self.real:
            matrix_NK = at("float", "Cast", matrix_NK, to=FLOAT.value)
        if self.real == FLOAT and not self._form.standard:
            return at("product", "FusedMatMul", x, matrix_NK, transB=1)
        return at("product", "MatMul", x, at("columns", "Transpose", matrix_NK, perm=[1, 0]))

    def _packed_product(
        self, packing: Packing, name: str, stored: str, x: ir.Value, matrices: Sequence[Matrix]
    ) -> ir.Value:
        graph, (rows, columns) = self._graph, _shape(matrices)
        if self._form.standard:
            packed, scales, *zero_points = self._packed_columns(stored, matrices, packing)
            parts = [packed, self._real(f"{name}/scale", scales), *zero_points]
            matrix = graph.node(f"{name}/matrix", "DequantizeLinear", *parts, axis=0, block_size=packing.block_size)
            return graph.node(f"{name}/product", "MatMul", x, matrix)
        packed, scales, zero_points = self._packed(stored, matrices, packing)
        scales = self._real(f"{name}/scale", scales)
        sizes = {"N": rows, "K": columns, "block_size": packing.block_size, "bits": packing.bits}
        sizes["accuracy_level"] = FAST_ACCURACY
        return graph.node(f"{name}/product", "MatMulNBits", x, packed, scales, *zero_points, **sizes)

    def _is_wide(self, matrices: Sequence[Matrix]) -> bool:
        return any(matrix.name in self._form.wide_inputs for matrix in matrices)

    def _in_two_parts(self, name: str, x: ir.Value, width: int, block: int) -> ir.Value:
        """x to 16 bits as a sum of two tensors of 8 bits, joined along the first axis.

        With s the step that the runtime rounds a block's inputs by, max|x| / 127:

            coarse = round(x / s) * s, which the runtime's rounding keeps
            fine = x - coarse, at most s / 2, which it rounds by a step of s / 254 at most
        """
        graph, at, real = self._graph, self._graph.at(f"{name}/"), self.real.numpy()
        if padding := -width % block:
            x = at("padded", "Pad", x, graph.ints(f"pad_{padding}", [0, padding]), None, graph.ints("axis_-1", [-1]))
        blocks = at("blocks", "Reshape", x, graph.ints(f"blocks_{block}", [-1, block]))
        largest = at("largest", "ReduceMax", at("sizes", "Abs", blocks), -1, keepdims=1)
        share = graph.constant("wide/step", np.array(1 / 127, real))
        least = graph.constant("wide/least_step", np.array(np.finfo(real).tiny, real))
        step = at("step", "Max", at("block_step", "Mul", largest, share), least)
        steps = at("steps", "Round", at("in_steps", "Div", blocks, step))
        coarse = at("coarse", "Reshape", at("coarse_blocks", "Mul", steps, step), at("shape", "Shape", x))
        both = at("both", "Concat", coarse, at("fine", "Sub", x, coarse), axis=0)
        if padding:
            start, end = (graph.ints(f"to_{i}", [i]) for i in (0, width))
            both = at("unpadded", "Slice", both, start, end, -1)
        return both

    def _sum_of_parts(self, name: str, y: ir.Value) -> ir.Value:
        outputs = [f"{name}/of_coarse", f"{name}/of_fine"]
        parts = self._graph.nodes_of(f"{name}/parts", "Split", [y], outputs, axis=0, num_outputs=2)
        return self._graph.node(f"{name}/wide", "Add", *parts)

    def operand(self, key: str, name: str, matrices: Sequence[Matrix]) -> Operand | str:
        """The matrix of the product `name`, which the graph has, as kernels read it; or why they do not."""
        if len({(self._packing(matrix), matrix.bias) for matrix in matrices}) > 1:
            return "matrices in unlike formats"
        stored, packing = name if len(matrices) > 1 else matrices[0].name, self._packing(matrices[0])
        if packing is None:
            return "dense matrices"
        if packing.bits not in (4, 8) or packing.block_size not in _KERNEL_BLOCKS:
            return f"{packing.bits} bits in blocks of {packing.block_size}"
        if matrices[0].columns > _KERNEL_ROW * packing.block_size:
            return f"rows of more than {_KERNEL_ROW} blocks"
        packed, scales, zero_points = self._packed(stored, matrices, packing)
        bias = self._bias(name, matrices) if matrices[0].bias else None
        inputs = {"packed": packed, "scale": scales, "zero_point": next(iter(zero_points), None), "bias": bias}
        return Operand(
            {f"{key}_{part}": value for part, value in inputs.items()},
            {f"{key}_bits": packing.bits, f"{key}_block_size": packing.block_size},
            self._is_wide(matrices),
        )

    def _packing(self, matrix: Matrix) -> Packing | None:
        return self._weights.packing(matrix.name, (matrix.rows, matrix.columns))

    def _dense(self, stored: str, matrices: Sequence[Matrix]) -> ir.Value:
        def read() -> Array:
            weights, half = self._weights, self._half
            return _stack([weights.read(f"{each.name}.weight", (each.rows, each.columns), half) for each in matrices])

        return self._graph.weight(f"{stored}.weight", self._form.dense, _shape(matrices), read)

    def _packed(
        self, stored: str, matrices: Sequence[Matrix], packing: Packing
    ) -> tuple[ir.Value, ir.Value, list[ir.Value]]:
        """Packed values (N, G, bytes), scales (N, G), and zero points if there are any, one under the other."""
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

    def _packed_columns(self, stored: str, matrices: Sequence[Matrix], packing: Packing) -> list[ir.Value]:
        """The same by columns: values (K, N), scales (G, N), and zero points (G, N) if there are any."""
        graph, modules, (rows, width) = self._graph, [matrix.name for matrix in matrices], _shape(matrices)
        groups, dtype = -(-width // packing.block_size), _BLOCK_TYPES[packing.bits][packing.asymmetric]

        def columns(part: str, count: int) -> ir.Value:
            read = partial(self._weights.read_columns, modules, part, packing, count)
            return graph.weight(f"{stored}.weight_{part}_columns", dtype, (count, rows), read)

        def read_scales() -> Array:
            return np.ascontiguousarray(self._weights.read_packed(modules, "scale").T)

        packed = columns("packed", width)
        scales = graph.weight(f"{stored}.weight_scale_columns", HALF, (groups, rows), read_scales)
        return [packed, scales, columns("zero_point", groups)] if packing.asymmetric else [packed, scales]

    def _real(self, name: str, scales: ir.Value) -> ir.Value:
        """Scales in the compute dtype; the runtime converts them once, when it loads the graph."""
        return scales if self.real == HALF else self._graph.node(name, "Cast", scales, to=self.real.value)


def _shape(matrices: Sequence[Matrix]) -> tuple[int, int]:
    """(N, K) of matrices one under the other."""
    return sum(matrix.rows for matrix in matrices), matrices[0].columns


def _stack(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
