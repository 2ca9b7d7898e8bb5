"""What layers of every kind are made of, in two operator sets: norms, activations, embedding, lengths, places and
rotary tables; and the base of all sublayers.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, D hidden_size, E head_dim, X = E / 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph.builder import BOOL, FLOAT, INT32, INT64, Builder, GraphForm
from export.graph.calls import KernelCalls, Operand
from export.graph.weights import Matmul
from export.layout import ROPE_CACHES, ROPE_FREQUENCIES
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, POSITIONS, sublayers
from sportsllm.models.rope import rope_constants, rope_tables
from sportsllm.models.sublayer import HIDDEN, Matrix


@dataclass(frozen=True)
class LayerBuilder:
    """Adds the parts of layers to a graph: in ONNX Runtime's own operators if it has faster ones, or in standard
    ONNX operators alone (opset 21).

    Attributes:
        graph, config, matmul, calls: get the nodes; the layers' shape; products; calls of kernels.
        tokens_BT, mask_BS: ids of the new tokens and the attention mask.
        form: how the graph is written.
    """

    graph: Builder
    config: ModelConfig
    matmul: Matmul
    tokens_BT: ir.Value
    mask_BS: ir.Value
    form: GraphForm
    calls: KernelCalls

    @property
    def epsilon(self) -> float:
        """Epsilon of norms, as float32 has it."""
        return float(np.float32(self.config.rms_norm_eps))

    def norm(self, name: str, x: ir.Value, residual: ir.Value | None, given: bool = True) -> tuple[ir.Value, ir.Value]:
        """The model's norm of x + residual, if it is `given`; returns the normed values and the sum."""
        if not given:
            total = x if residual is None else self.graph.node(f"{name}/sum", "Add", x, residual)
            return total, total
        affine = [self.matmul.vector(f"{name}.weight", self.config.hidden_size)]
        if self.config.norm_kind == "layer":
            affine.append(self.matmul.vector(f"{name}.bias", self.config.hidden_size))
        if residual is not None and not self.form.standard:
            op = "SkipSimplifiedLayerNormalization" if len(affine) == 1 else "SkipLayerNormalization"
            inputs, outputs = [x, residual, *affine], (name, "", "", f"{name}/sum")
            normed, _, _, total = self.graph.nodes_of(name, op, inputs, outputs, epsilon=self.epsilon)
            return normed, total
        if residual is not None:
            x = self.graph.node(f"{name}/sum", "Add", x, residual)
        if len(affine) == 1:
            return self.rms_norm(name, x, *affine), x
        return self.graph.node(name, "LayerNormalization", x, *affine, epsilon=self.epsilon), x

    def softcapped(self, name: str, x: ir.Value, cap: float | None) -> ir.Value:
        """cap * tanh(x / cap), or x without a cap."""
        if cap is None:
            return x
        at, limit = self.graph.at(f"{name}/"), self.graph.real(f"cap_{cap:g}", cap)
        return at("capped", "Mul", at("bent", "Tanh", at("share", "Div", x, limit)), limit)

    def rms_norm(self, name: str, x: ir.Value, gamma: ir.Value, eps: float | None = None) -> ir.Value:
        """x / sqrt(mean(x ** 2) + eps) * gamma in standard operators, which ONNX Runtime fuses into one.

        Its fused operator claims the standard domain, where `onnx.checker` does not know it. Squares are float32's.
        """
        graph, at, real = self.graph, self.graph.at(f"{name}/"), self.matmul.real
        if real != FLOAT:
            x = at("wide", "Cast", x, to=FLOAT.value)
        two = graph.real("norm/two", 2.0)
        constant = "norm/epsilon" if eps is None else f"norm/epsilon_{eps:g}"
        epsilon = graph.real(constant, self.epsilon if eps is None else eps)
        mean = at("mean", "ReduceMean", at("squared", "Pow", x, two), -1, keepdims=1)
        scaled = at("scaled", "Div", x, at("root", "Sqrt", at("shifted", "Add", mean, epsilon)))
        if real != FLOAT:
            scaled = at("narrow", "Cast", scaled, to=real.value)
        return graph.node(name, "Mul", scaled, gamma)

    def silu(self, name: str, x: ir.Value) -> ir.Value:
        """x * sigmoid(x); OpenVINO has no QuickGelu of float16."""
        if self.form.standard or self.matmul.real != FLOAT:
            return self.graph.node(name, "Mul", x, self.graph.node(f"{name}/sigmoid", "Sigmoid", x))
        return self.graph.node(name, "QuickGelu", x, alpha=1.0)  # x * sigmoid(1.0 * x)

    def gelu(self, name: str, x: ir.Value) -> ir.Value:
        """x * Phi(x), Phi by its tanh form."""
        return self.graph.node(name, "Gelu", x, approximate="tanh")

    def embedding(self) -> ir.Value:
        """What the first layer reads, (B, T, D); see `sportsllm.models.language_model.embed`."""
        config, graph = self.config, self.graph
        table = Matrix(EMBEDDING, config.vocab_size, config.hidden_size, "token", HIDDEN, HIDDEN)
        x_BTD = self.matmul.embedding(self.tokens_BT, table)
        if config.embedding_scale != 1.0:
            x_BTD = graph.node("embed/scaled", "Mul", x_BTD, graph.real("embed/scale", config.embedding_scale))
        if not config.positions:
            return x_BTD
        positions = self.matmul.table(f"{POSITIONS}.weight", (config.positions, config.hidden_size))
        rows_BTD = graph.node("embed/positions", "Gather", positions, self.places("embed"))
        return graph.node("embed/placed", "Add", x_BTD, rows_BTD)

    def lengths(self) -> tuple[ir.Value, ir.Value]:
        """Each sequence's tokens so far less 1, (B,), and S, both int32; the same values each time it is asked."""
        graph, at = self.graph, self.graph.at("positions/")
        last, total = graph.made("positions/seqlens_k"), graph.made("positions/total")
        if last is not None and total is not None:
            return last, total
        lengths_B = at("lengths", "ReduceSum", self.mask_BS, 1, keepdims=0)
        last_B = at("last", "Sub", lengths_B, graph.one)
        width = at("mask_scalar", "Squeeze", graph.size("positions/mask_width", self.mask_BS, 1))
        return at("seqlens_k", "Cast", last_B, to=INT32.value), at("total", "Cast", width, to=INT32.value)

    def places(self, name: str, last_B: ir.Value | None = None) -> ir.Value:
        """Where each new token stands, (B, T); `last_B` is the first of `lengths`, which a body gets as an input.

        As GroupQueryAttention counts, token t stands at max(length - T, 0) + t; in standard operators it is the number
        of ones before it in the mask, wherever the padding is.
        """
        graph, at = self.graph, self.graph.at(f"{name}/positions/")
        if self.form.standard:
            return self._places_by_mask()
        last_B = at("last", "Cast", self.lengths()[0] if last_B is None else last_B, to=INT64.value)
        lengths_B = at("lengths", "Add", last_B, graph.one)
        width_T = graph.size(f"{name}/positions/new_width", self.tokens_BT, 1)
        first_B = at("first", "Max", at("before", "Sub", lengths_B, width_T), graph.zero)
        first_B1 = at("first_column", "Unsqueeze", first_B, 1)
        steps_T = at("steps", "Range", graph.zero, at("new_scalar", "Squeeze", width_T), graph.one)
        return at("ids", "Add", first_B1, steps_T)

    def _places_by_mask(self) -> ir.Value:
        graph, at = self.graph, self.graph.at("places/")
        if (known := graph.made("places/new")) is not None:
            return known
        start, end = self.new_columns()
        counted_BS = at("counted", "CumSum", self.mask_BS, graph.one)
        # Padding before the first token has no position; 0 will do.
        all_BS = at("all", "Max", at("before", "Sub", counted_BS, graph.one), graph.zero)
        return at("new", "Slice", all_BS, start, end, 1)

    def new_columns(self) -> tuple[ir.Value, ir.Value]:
        """Start and end, (1,), of the new tokens among all columns: they are the last T."""
        graph, end = self.graph, self.graph.ints("end", [np.iinfo(np.int64).max])
        if (known := graph.made("places/start")) is not None:
            return known, end
        return graph.node("places/start", "Neg", graph.size("places/new_width", self.tokens_BT, 1)), end

    def rows_and_places(self, name: str, places_BT: ir.Value, places_BT1: ir.Value) -> ir.Value:
        """Where new tokens go in a cache of (B, L, ...), (B, T, 2): sequence and place, given in two shapes."""
        graph, at = self.graph, self.graph.at(f"{name}/")
        count = at("count", "Squeeze", graph.size(f"{name}/batch", places_BT, 0))
        rows_B = at("rows", "Range", graph.zero, count, graph.one)
        rows_B11 = at("row_column", "Reshape", rows_B, graph.ints(f"{name}/as_column", [-1, 1, 1]))
        none_BT1 = at("nothing", "Sub", places_BT1, places_BT1)
        return at("where", "Concat", at("row_of_each", "Add", none_BT1, rows_B11), places_BT1, axis=2)

    def _turns_locally(self, layer: int) -> bool:
        return self.config.rope_local_theta is not None and self.config.window(layer) is not None

    def rotary_frequencies(self, layer: int) -> tuple[ir.Value, float]:
        """A layer's angles per position, (E / 2,), and what cosine and sine are multiplied by."""
        local = self._turns_locally(layer)
        frequencies, factor = rope_constants(self.config, local)
        return self.graph.constant(ROPE_FREQUENCIES[local], frequencies), float(factor)

    def new_rotary_caches(self, name: str, layer: int, last_B: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """What RotaryEmbedding reads without stored tables: rows of the new tokens, (B, T), in tables of their cosines
        and sines, (B T, E / 2).

        Nothing in it depends on the layer, so that the runtime computes it once for all that are alike.
        """
        graph, at, (frequencies, factor) = self.graph, self.graph.at(f"{name}/rotary/"), self.rotary_frequencies(layer)
        places_BT = self.places(name, last_B)
        positions_BT1 = at("positions", "Cast", at("column", "Unsqueeze", places_BT, 2), to=FLOAT.value)
        angles = at("angles", "Flatten", at("angles_of_tokens", "Mul", positions_BT1, frequencies), axis=2)
        found = [at("cos", "Cos", angles), at("sin", "Sin", angles)]
        if factor != 1:
            scale = graph.real(f"rotary_factor_{factor:g}", factor)
            found = [at(f"scaled{n}", "Mul", table, scale) for n, table in enumerate(found)]
        if self.form.real != FLOAT:
            found = [at(f"narrow{n}", "Cast", table, to=self.form.real.value) for n, table in enumerate(found)]
        rows = at("rows", "Range", graph.zero, at("count", "Size", places_BT), graph.one)
        return at("rows_of_tokens", "Reshape", rows, at("shape", "Shape", places_BT)), found[0], found[1]

    def rotary_caches(self, layer: int) -> tuple[ir.Value, ir.Value]:
        """A layer's cosine and sine tables, (context, E / 2), in the compute dtype."""
        config, local = self.config, self._turns_locally(layer)
        tables = zip(ROPE_CACHES[2 * local :], rope_tables(config, local), strict=False)
        cos, sin = (self.graph.constant(name, table.astype(self.form.real.numpy())) for name, table in tables)
        return cos, sin

    def rotary_rows(self, layer: int, places_BT: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The new tokens' rows of `rotary_caches`, (B, T, 1, X); those of layers alike are the same."""
        at, found = self.graph.at("places/"), []
        for table in self.rotary_caches(layer):
            part = str(table.name).removesuffix("_cache")
            rows = self.graph.made(f"places/{part}")
            found.append(
                at(part, "Unsqueeze", at(f"{part}_rows", "Gather", table, places_BT), 2) if rows is None else rows
            )
        return found[0], found[1]

    def seen_columns(self, window: int | None) -> ir.Value:
        """Whether new token t attends to column s, (B, 1, T, S); the same value for layers alike."""
        graph, name = self.graph, "places/seen" if window is None else f"places/seen_{window}"
        if (known := graph.made(name)) is not None:
            return known
        at, (start, end) = graph.at(f"{name}/"), self.new_columns()
        total = at("total", "Squeeze", graph.size(f"{name}/mask_width", self.mask_BS, 1))
        columns_S = at("columns", "Range", graph.zero, total, graph.one)
        own_T1 = at("own_column", "Unsqueeze", at("own_columns", "Slice", columns_S, start, end, 0), 1)
        near_TS = at("earlier", "LessOrEqual", columns_S, own_T1)
        real_BS = at("real", "Cast", self.mask_BS, to=BOOL.value)
        real_B11S = at("real_row", "Unsqueeze", real_BS, graph.ints("axes_1_2", [1, 2]))
        if window is None:
            return graph.node(name, "And", near_TS, real_B11S)
        # Columns of padding do not count: the window goes by places, the number of ones before a column.
        counted_BS = at("counted", "CumSum", self.mask_BS, graph.one)
        counted_B1S = at("counted_row", "Unsqueeze", counted_BS, 1)
        own_BT1 = at("own_counted_column", "Unsqueeze", at("own_counted", "Slice", counted_BS, start, end, 1), 2)
        first_BT1 = at("first", "Sub", own_BT1, graph.ints(f"window_{window}", window))
        inside_B1TS = at("inside_heads", "Unsqueeze", at("inside", "Greater", counted_B1S, first_BT1), 1)
        return graph.node(name, "And", at("causal", "And", near_TS, real_B11S), inside_B1TS)

    def rotated(self, name: str, x_BTHE: ir.Value, tables: tuple[ir.Value, ir.Value] | None) -> ir.Value:
        """Each pair of channels, half a head apart, turned by the angle of its place; nothing without tables."""
        if tables is None:
            return x_BTHE
        graph, at, (cos, sin) = self.graph, self.graph.at(f"{name}/"), tables
        sizes, rest = [self.config.rotary_size, self.config.head_dim - self.config.rotary_size], list[ir.Value]()
        if sizes[1]:
            x_BTHE, *rest = graph.split(f"{name}/parts", x_BTHE, sizes, [f"{name}/rotated", f"{name}/unrotated"])
        outputs = [f"{name}/first", f"{name}/second"]
        first, second = graph.nodes_of(f"{name}/halves", "Split", [x_BTHE], outputs, axis=-1, num_outputs=2)
        first_cos, second_sin = at("first_cos", "Mul", first, cos), at("second_sin", "Mul", second, sin)
        turned_first = at("turned_first", "Sub", first_cos, second_sin)
        second_cos, first_sin = at("second_cos", "Mul", second, cos), at("first_sin", "Mul", first, sin)
        turned_second = at("turned_second", "Add", second_cos, first_sin)
        return at("turned", "Concat", turned_first, turned_second, *rest, axis=-1)


class SublayerBuilder(ABC):
    """Adds attention or the feed-forward of layers to a graph; made once, before the layers, for nodes that all of them
    share."""

    def __init__(self, layers: LayerBuilder, part: str) -> None:
        """Read from the kind of `part`, the module `self_attn` or `mlp`, which matrices it has and what it caches."""
        self.layers, self.graph, self.config, self.part = layers, layers.graph, layers.config, part
        kind = sublayers(self.config)[part]
        self._matrices, self._vectors, self.states = kind.matrices, kind.vectors, kind.state

    @abstractmethod
    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        """Add the sublayer of one layer up to the matrix that writes to the residual stream, which `output` adds.

        Args:
            layer: its number.
            x_BTD: the output of the norm before.
            past: what the kind's `state` says is cached.

        Returns:
            What that matrix reads; and what is to be cached, in the order of `past`.
        """

    def route(self, layer: int, x_BTD: ir.Value) -> Sequence[ir.Value]:
        """What `emit` reads as `past` of a kind that caches nothing: a router's choice, outside of kernels."""
        return ()

    def name(self, layer: int) -> str:
        """The module in one layer."""
        return f"model.layers.{layer}.{self.part}"

    def products(self, layer: int, read: str, x: ir.Value, split: bool = True) -> list[ir.Value]:
        """`Matmul.products` of a layer's matrices whose `Matrix.input` is `read`, the name of x."""
        name, matrices = self._reading(layer, read)
        return self.layers.matmul.products(name, x, matrices, split)

    def output(self, layer: int, x: ir.Value) -> ir.Value:
        """The product with the matrix that writes to the residual stream, (B, T, D)."""
        matrix = self._writing(layer)
        return self.layers.matmul.product(matrix.name, x, [matrix])

    def operand(self, key: str, layer: int, read: str) -> Operand | str:
        """`Matmul.operand` of the matrices of `products`."""
        return self.layers.matmul.operand(key, *self._reading(layer, read))

    def output_operand(self, key: str, layer: int) -> Operand | str:
        """`Matmul.operand` of the matrix of `output`."""
        matrix = self._writing(layer)
        return self.layers.matmul.operand(key, matrix.name, [matrix])

    def operands(self, layer: int, module: str) -> tuple[Operand | str, Operand | str]:
        """What reads the input and what writes the output, of a feed-forward or of one of its experts."""
        return self.operand("up", layer, HIDDEN), self.output_operand("down", layer)

    def _reading(self, layer: int, read: str) -> tuple[str, list[Matrix]]:
        name, found = self.name(layer), [matrix for matrix in self._matrices if matrix.input == read]
        joined = f"{name}.{_joined([matrix.name for matrix in found])}"
        return joined, [matrix._replace(name=f"{name}.{matrix.name}") for matrix in found]

    def _writing(self, layer: int) -> Matrix:
        (matrix,) = (matrix for matrix in self._matrices if matrix.writes_residual)
        return matrix._replace(name=f"{self.name(layer)}.{matrix.name}")


def _joined(names: Sequence[str]) -> str:
    """The name of several matrices as one: `qkv_proj` of q_proj, k_proj and v_proj; `gate_up_proj`."""
    stems = [name.removesuffix("_proj") for name in names]
    return ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + "_proj"
