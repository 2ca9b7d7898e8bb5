"""Norms and activations, which layers of every kind are made of, in two operator sets.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, D hidden_size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from export.cache_scales import CacheScales
from export.graph.builder import MS, Builder
from export.graph.matmul import FLOAT, Matmul
from sportsllm.models.config import ModelConfig


@dataclass(frozen=True)
class Sequences:
    """What a graph reads: ids of the new tokens, and the attention mask."""

    tokens_BT: ir.Value
    mask_BS: ir.Value
    scales: CacheScales | None = None  # of an INT8 cache
    separate_prefill_branch: bool = True  # read long prompts into that as `export.graph.int8_cache_prefill` does


class LayerBuilder(ABC):
    """Adds the parts of layers to a graph."""

    standard: ClassVar[bool]  # whether all operators are ONNX's own

    def __init__(self, graph: Builder, config: ModelConfig, matmul: Matmul, sequences: Sequences) -> None:
        self.graph, self.config, self.matmul, self.sequences = graph, config, matmul, sequences
        self._epsilon = float(np.float32(config.rms_norm_eps))

    def norm(self, name: str, x: ir.Value, residual: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """RMSNorm of x + residual; returns the normed values and the sum."""
        gamma = self.matmul.vector(f"{name}.weight", self.config.hidden_size)
        if residual is None:
            return self.rms_norm(name, x, gamma), x
        return self._add_and_norm(name, x, residual, gamma)

    def rms_norm(self, name: str, x: ir.Value, gamma: ir.Value) -> ir.Value:
        """x / sqrt(mean(x ** 2) + eps) * gamma in standard operators, which ONNX Runtime fuses into one.

        Its fused operator claims the standard domain, where `onnx.checker` does not know it. Squares are float32's.
        """
        graph, real = self.graph, self.matmul.real
        if real != FLOAT:
            x = graph.node(f"{name}/wide", "Cast", [x], to=FLOAT.value)
        two = graph.constant("norm/two", np.array(2.0, np.float32))
        epsilon = graph.constant("norm/epsilon", np.array(self._epsilon, np.float32))
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
    def _add_and_norm(self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value) -> tuple[ir.Value, ir.Value]:
        """See `norm`."""


class OrtLayerBuilder(LayerBuilder):
    """ONNX Runtime's own operators where it has faster ones."""

    standard = False

    def silu(self, name: str, x: ir.Value) -> ir.Value:
        if self.matmul.real != FLOAT:  # OpenVINO has no QuickGelu of float16
            return super().silu(name, x)
        return self.graph.node(name, "QuickGelu", [x], MS, alpha=1.0)  # x * sigmoid(1.0 * x)

    def _add_and_norm(self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value) -> tuple[ir.Value, ir.Value]:
        op, outputs = "SkipSimplifiedLayerNormalization", (name, "", "", f"{name}/sum")
        normed, _, _, total = self.graph.node_with_outputs(
            name, op, [x, residual, gamma], outputs, MS, epsilon=self._epsilon
        )
        return normed, total


class StandardLayerBuilder(LayerBuilder):
    """Standard ONNX operators alone (opset 21), for runtimes that have no others."""

    standard = True

    def _add_and_norm(self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value) -> tuple[ir.Value, ir.Value]:
        total = self.graph.node(f"{name}/sum", "Add", [x, residual])
        return self.rms_norm(name, total, gamma), total
