"""One half of a layer, attention or feed-forward; each kind of them has a subclass.

Shape suffixes: B sequences, T new tokens, D hidden_size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import onnx_ir as ir

from export.graph.calls import Operand
from export.graph.layer import LayerBuilder
from sportsllm.models.kinds import sublayers
from sportsllm.models.parts import HIDDEN, Matrix


class HalfBuilder(ABC):
    """Adds one half of every layer to a graph; made once, before the layers, for nodes that all of them share."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        """Read from the kind of `half`, the module `self_attn` or `mlp`, which matrices it has and what it caches."""
        self.layers, self.graph, self.config, self.half = layers, layers.graph, layers.config, half
        kind = sublayers(self.config)[half]
        self._matrices, self._vectors = kind.matrices(self.config), kind.vectors(self.config)
        self.states = kind.state(self.config)

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
