"""The parts that a layer of the exported graph is made of, whichever operators attend and multiply.

Shape suffixes as in `export.graph.decoder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import Builder
from export.graph.matmul import Matrices
from sportsllm.models.config import ModelConfig


class LayerBuilder(ABC):
    """Adds the parts of a layer to a graph.

    Attributes:
        matrices: what multiplies.
    """

    # Whether `_attend` wants query, key and value by themselves, or takes them as one where they are stored alike.
    _apart = True

    def __init__(self, graph: Builder, config: ModelConfig, matrices: Matrices) -> None:
        self._graph, self._config, self.matrices = graph, config, matrices
        self._epsilon = float(np.float32(config.rms_norm_eps))

    def norm(self, name: str, x: ir.Value, residual: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """RMSNorm of x + residual; returns the normed values and the sum."""
        gamma = self.matrices.vector(f"{name}.weight", self._config.hidden_size)
        if residual is None:
            return self._rms_norm(name, x, gamma), x
        return self._add_and_norm(name, x, residual, gamma)

    def _rms_norm(self, name: str, x: ir.Value, gamma: ir.Value) -> ir.Value:
        """x / sqrt(mean(x ** 2) + eps) * gamma in standard operators, which ONNX Runtime fuses into one.

        Its fused operator claims the standard domain, where `onnx.checker` does not know it.
        """
        graph = self._graph
        two = graph.constant("norm/two", np.array(2.0, np.float32))
        epsilon = graph.constant("norm/epsilon", np.array(self._epsilon, np.float32))
        squared = graph.node(f"{name}/squared", "Pow", [x, two])
        mean = graph.node(f"{name}/mean", "ReduceMean", [squared, graph.axis(-1)], keepdims=1)
        root = graph.node(f"{name}/root", "Sqrt", [graph.node(f"{name}/shifted", "Add", [mean, epsilon])])
        return graph.node(name, "Mul", [graph.node(f"{name}/scaled", "Div", [x, root]), gamma])

    def attention(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        """Attention up to its output matrix; returns what that reads and the present keys and values."""
        config, name = self._config, f"model.layers.{layer}.self_attn"
        modules = [f"{name}.{part}_proj" for part in "qkv"]
        sizes = [config.query_size, config.key_value_size, config.key_value_size]
        parts = self.matrices.projections(
            f"{name}.qkv_proj", x_BTD, modules, sizes, config.hidden_size, config.attention_bias, self._apart
        )
        return self._attend(layer, name, parts, past)

    def attention_output(self, layer: int, attended: ir.Value) -> ir.Value:
        """The output matrix of attention, (B, T, H * E) to (B, T, D)."""
        config, output = self._config, f"model.layers.{layer}.self_attn.o_proj"
        bias = config.attention_output_bias
        return self.matrices.product(output, attended, [output], [config.hidden_size], config.query_size, bias)

    def feed_forward(self, name: str, x_BTD: ir.Value) -> ir.Value:
        """SwiGLU: down(silu(gate(x)) * up(x))."""
        graph, config = self._graph, self._config
        modules, sizes = [f"{name}.gate_proj", f"{name}.up_proj"], [config.intermediate_size] * 2
        gate, up = self.matrices.projections(
            f"{name}.gate_up_proj", x_BTD, modules, sizes, config.hidden_size, config.mlp_bias, apart=True
        )
        inner = graph.node(f"{name}/inner", "Mul", [self._silu(f"{name}/silu", gate), up])
        down = f"{name}.down_proj"
        return self.matrices.product(
            down, inner, [down], [config.hidden_size], config.intermediate_size, config.mlp_bias
        )

    @abstractmethod
    def _add_and_norm(
        self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value
    ) -> tuple[ir.Value, ir.Value]: ...

    @abstractmethod
    def _attend(
        self, layer: int, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value]
    ) -> tuple[ir.Value, Sequence[ir.Value]]:
        """From query, key and value to what `o_proj` reads, (B, T, H * E), and the present keys and values."""

    @abstractmethod
    def _silu(self, name: str, x: ir.Value) -> ir.Value: ...
