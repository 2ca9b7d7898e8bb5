"""Norms and activations, which layers of every kind are made of, in two operator sets; and the base of all halves of
layers.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, D hidden_size.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS, Builder, GraphForm
from export.graph.calls import KernelCalls, Operand
from export.graph.matmul import FLOAT, Matmul
from export.graph.positions import places_by_mask, position_ids, sequence_lengths
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import EMBEDDING, POSITIONS, sublayers
from sportsllm.models.parts import HIDDEN, Matrix


@dataclass(frozen=True)
class Sequences:
    """What a graph reads: ids of the new tokens and the attention mask; and how it is written."""

    tokens_BT: ir.Value
    mask_BS: ir.Value
    form: GraphForm


class LayerBuilder(ABC):
    """Adds the parts of layers to a graph."""

    standard: ClassVar[bool]  # whether all operators are ONNX's own

    def __init__(
        self, graph: Builder, config: ModelConfig, matmul: Matmul, sequences: Sequences, calls: KernelCalls
    ) -> None:
        self.graph, self.config, self.matmul, self.sequences, self.calls = graph, config, matmul, sequences, calls
        self._epsilon = float(np.float32(config.rms_norm_eps))

    def with_config(self, config: ModelConfig) -> Self:
        """The same builder for layers of another config; itself for its own."""
        if config is self.config:
            return self
        other = copy.copy(self)
        other.config = config
        return other

    def norm(self, name: str, x: ir.Value, residual: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """The model's norm of x + residual; returns the normed values and the sum."""
        gamma, beta = self.matmul.vector(f"{name}.weight", self.config.hidden_size), None
        if self.config.norm_kind == "layer":
            beta = self.matmul.vector(f"{name}.bias", self.config.hidden_size)
        if residual is not None:
            return self._add_and_norm(name, x, residual, gamma, beta)
        return self.rms_norm(name, x, gamma) if beta is None else self.layer_norm(name, x, gamma, beta), x

    def layer_norm(self, name: str, x: ir.Value, gamma: ir.Value, beta: ir.Value) -> ir.Value:
        """(x - mean(x)) / sqrt(var(x) + eps) * gamma + beta."""
        return self.graph.node(name, "LayerNormalization", [x, gamma, beta], epsilon=self._epsilon)

    def gelu(self, name: str, x: ir.Value) -> ir.Value:
        """x * Phi(x), Phi by its tanh form."""
        return self.graph.node(name, "Gelu", [x], approximate="tanh")

    def embedding(self) -> ir.Value:
        """What the first layer reads, (B, T, D); see `sportsllm.models.language_model.embed`."""
        config, graph, tokens_BT = self.config, self.graph, self.sequences.tokens_BT
        table = Matrix(EMBEDDING, config.vocab_size, config.hidden_size, "token", HIDDEN, HIDDEN)
        x_BTD = self.matmul.embedding(tokens_BT, table)
        if config.embedding_scale != 1.0:
            scale = graph.constant("embed/scale", np.array(config.embedding_scale, np.float32))
            x_BTD = graph.node("embed/scaled", "Mul", [x_BTD, scale])
        if not config.positions:
            return x_BTD
        positions = self.matmul.table(f"{POSITIONS}.weight", (config.positions, config.hidden_size))
        rows_BTD = graph.node("embed/positions", "Gather", [positions, self.places()])
        return graph.node("embed/placed", "Add", [x_BTD, rows_BTD])

    @abstractmethod
    def places(self) -> ir.Value:
        """Where each new token stands, (B, T)."""

    def rms_norm(self, name: str, x: ir.Value, gamma: ir.Value, eps: float | None = None) -> ir.Value:
        """x / sqrt(mean(x ** 2) + eps) * gamma in standard operators, which ONNX Runtime fuses into one.

        Its fused operator claims the standard domain, where `onnx.checker` does not know it. Squares are float32's.
        """
        graph, real = self.graph, self.matmul.real
        if real != FLOAT:
            x = graph.node(f"{name}/wide", "Cast", [x], to=FLOAT.value)
        two = graph.constant("norm/two", np.array(2.0, np.float32))
        constant = "norm/epsilon" if eps is None else f"norm/epsilon_{eps:g}"
        epsilon = graph.constant(constant, np.array(self._epsilon if eps is None else eps, np.float32))
        squared = graph.node(f"{name}/squared", "Pow", [x, two])
        mean = graph.node(f"{name}/mean", "ReduceMean", [squared, graph.axis(-1)], keepdims=1)
        root = graph.node(f"{name}/root", "Sqrt", [graph.node(f"{name}/shifted", "Add", [mean, epsilon])])
        scaled = graph.node(f"{name}/scaled", "Div", [x, root])
        if real != FLOAT:
            scaled = graph.node(f"{name}/narrow", "Cast", [scaled], to=real.value)
        return graph.node(name, "Mul", [scaled, gamma])

    def silu(self, name: str, x: ir.Value) -> ir.Value:
        """x * sigmoid(x)."""
        return self.graph.node(name, "Mul", [x, self.graph.node(f"{name}/sigmoid", "Sigmoid", [x])])

    @abstractmethod
    def _add_and_norm(
        self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value, beta: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """See `norm`; with beta it is LayerNorm."""


class OrtLayerBuilder(LayerBuilder):
    """ONNX Runtime's own operators where it has faster ones."""

    standard = False

    def silu(self, name: str, x: ir.Value) -> ir.Value:
        if self.matmul.real != FLOAT:  # OpenVINO has no QuickGelu of float16
            return super().silu(name, x)
        return self.graph.node(name, "QuickGelu", [x], MS, alpha=1.0)  # x * sigmoid(1.0 * x)

    def places(self) -> ir.Value:
        last_B, _ = sequence_lengths(self.graph, self.sequences.mask_BS)
        return position_ids(self.graph, "embed", last_B, self.sequences.tokens_BT)

    def _add_and_norm(
        self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value, beta: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        op = "SkipSimplifiedLayerNormalization" if beta is None else "SkipLayerNormalization"
        inputs = [x, residual, gamma] if beta is None else [x, residual, gamma, beta]
        outputs = (name, "", "", f"{name}/sum")
        normed, _, _, total = self.graph.node_with_outputs(name, op, inputs, outputs, MS, epsilon=self._epsilon)
        return normed, total


class StandardLayerBuilder(LayerBuilder):
    """Standard ONNX operators alone (opset 21), for runtimes that have no others."""

    standard = True

    def places(self) -> ir.Value:
        return places_by_mask(self.graph, self.sequences.tokens_BT, self.sequences.mask_BS)

    def _add_and_norm(
        self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value, beta: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        total = self.graph.node(f"{name}/sum", "Add", [x, residual])
        normed = self.rms_norm(name, total, gamma) if beta is None else self.layer_norm(name, total, gamma, beta)
        return normed, total


class HalfBuilder(ABC):
    """Adds one half of every layer to a graph; made once, before the layers, for nodes that all of them share."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        """Read from the kind of `half`, the module `self_attn` or `mlp`, which matrices it has and what it caches."""
        self.layers, self.graph, self.config, self.half = layers, layers.graph, layers.config, half
        kind = sublayers(self.config)[half]
        self._matrices, self._vectors = kind.matrices, kind.vectors
        self.states = kind.state

    @abstractmethod
    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        """Add the half of one layer up to the matrix that writes to the residual stream, which `output` adds.

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
        """The half's module in one layer."""
        return f"model.layers.{layer}.{self.half}"

    def products(self, layer: int, read: str, x: ir.Value, split: bool = True) -> list[ir.Value]:
        """`Matmul.products` of a layer's matrices whose `Matrix.input` is `read`, the name of x."""
        name, matrices = self._reading(layer, read)
        return self.layers.matmul.products(name, x, matrices, split)

    def operand(self, key: str, layer: int, read: str) -> Operand | str:
        """`Matmul.operand` of the matrices of `products`."""
        name, matrices = self._reading(layer, read)
        return self.layers.matmul.operand(key, name, matrices)

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

    def output(self, layer: int, x: ir.Value) -> ir.Value:
        """The product with the matrix that writes to the residual stream, (B, T, D)."""
        matrix = self._writing(layer)
        return self.layers.matmul.product(matrix.name, x, [matrix])


def _joined(names: Sequence[str]) -> str:
    """The name of several matrices as one: `qkv_proj` of q_proj, k_proj and v_proj; `gate_up_proj`."""
    stems = [name.removesuffix("_proj") for name in names]
    return ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + "_proj"
