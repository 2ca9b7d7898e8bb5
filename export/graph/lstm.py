"""LSTM layers in the graph; see `sportsllm.models.lstm`.

The input's gates are one product for all tokens. The recurrent product needs the token before, in a Scan over the new
tokens, be they one: 200 us a token of `lstm-1m` in INT8, where nodes without a Scan took 165. It stands in the graph
itself: inside a branch of an If ONNX Runtime 1.31 does not prepare packed matrices for its fast product, and a prompt
took five times as long.
Shape suffixes: B sequences, T new tokens, S columns of the mask, H cells, G = 4 H.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import onnx_ir as ir

from export.graph.builder import BOOL, FLOAT, INT64
from export.graph.layer import LayerBuilder, SublayerBuilder
from sportsllm.models.kinds import GATES, READ
from sportsllm.models.sublayer import HIDDEN


class LSTM(SublayerBuilder):
    """Both states as inputs and outputs of the graph, (B, H); tokens of padding leave them as they are."""

    def __init__(self, layers: LayerBuilder, part: str) -> None:
        super().__init__(layers, part)
        at = self.graph.at("lstm/")
        if layers.form.standard:  # wherever the padding is
            real_BT = at("new_mask", "Slice", layers.mask_BS, *layers.new_columns(), 1)
        else:  # on the right: a token that stands behind its sequence's last one
            last_B, places_BT = layers.lengths()[0], layers.places("lstm")
            last_B1 = at("last_column", "Unsqueeze", at("last", "Cast", last_B, to=INT64.value), 1)
            real_BT = at("inside", "LessOrEqual", places_BT, last_B1)
        # 1 for each new token and 0 for padding, (B, T, 1) float32, as attention tells them apart.
        self._real_BT1 = at("real_column", "Unsqueeze", at("real", "Cast", real_BT, to=FLOAT.value), 2)

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, name = self.graph, self.name(layer)
        inputs_BTG = self._gates(layer, HIDDEN, x_BTD)
        outputs = [f"{name}/last_hidden", f"{name}/last_cell", f"{name}/hidden"]
        step = partial(self._read, layer)
        *states, h_BTH = graph.scan(f"{name}/scan", past, [inputs_BTG, self._real_BT1], step, outputs)
        return h_BTH, states

    def _gates(self, layer: int, read: str, x: ir.Value) -> ir.Value:
        """The products of all gates side by side, even if they are stored in unlike formats."""
        found = self.products(layer, read, x, split=False)
        if len(found) == 1:
            return found[0]
        return self.graph.node(f"{self.name(layer)}/{read}_gates", "Concat", *found, axis=-1)

    def _read(
        self, layer: int, states: Sequence[ir.Value], read: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], ir.Value]:
        """Both states after one token, whose gates (B, G) and `_real` (B, 1) are given; and h, to be collected."""
        at, (inputs_BG, real_B1) = self.graph.at(f"{self.name(layer)}/"), read
        new = self._step(layer, inputs_BG, states)
        is_real = at("is_real", "Cast", real_B1, to=BOOL.value)
        parts = zip(("hidden", "cell"), new, states, strict=True)
        kept = [at(f"kept_{part}", "Where", is_real, after, before) for part, after, before in parts]
        collected = at("collected", "Identity", kept[0])
        for value in (*kept, collected):
            value.type, value.shape = ir.TensorType(FLOAT), ir.Shape(["batch_size", self.config.cells])
        return kept, collected

    def _step(self, layer: int, inputs_BG: ir.Value, states: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """The states (B, H) after one token more; gates in the order of `GATES`."""
        graph, name, (h_BH, c_BH) = self.graph, self.name(layer), states
        at, product_BG = graph.at(f"{name}/"), self._gates(layer, READ, h_BH)
        gates_BG = at("gates", "Add", inputs_BG, product_BG)
        sizes, parts = [self.config.cells] * len(GATES), [f"{name}/{gate}" for gate in GATES]
        i, f, g, o = graph.split(f"{name}/split", gates_BG, sizes, parts)
        i, f, o = (graph.node(f"{gate.name}_open", "Sigmoid", gate) for gate in (i, f, o))
        g = at("candidate", "Tanh", g)
        cell_BH = at("cell", "Add", at("forgotten", "Mul", f, c_BH), at("added", "Mul", i, g))
        return at("new_hidden", "Mul", o, at("bent", "Tanh", cell_BH)), cell_BH
