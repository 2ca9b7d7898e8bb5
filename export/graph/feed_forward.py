"""Feed-forward in the graph; see `sportsllm.models.layers`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from export.graph.half import HalfBuilder
from sportsllm.models.parts import HIDDEN


class Gated(HalfBuilder):
    """f(gate(x)) * up(x), f being silu or gelu."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        gate, up = self.products(layer, HIDDEN, x_BTD)
        silu = self.config.mlp_kind == "swiglu"
        activation = self.layers.silu if silu else self.layers.gelu
        bent = activation(f"{self.name(layer)}/{'silu' if silu else 'gelu'}", gate)
        return self.graph.node(f"{self.name(layer)}/inner", "Mul", [bent, up]), ()


class Gelu(HalfBuilder):
    """gelu(up(x))."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        (up,) = self.products(layer, HIDDEN, x_BTD)
        return self.layers.gelu(f"{self.name(layer)}/inner", up), ()
