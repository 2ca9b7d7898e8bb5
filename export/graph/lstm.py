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

from export.graph.layer import HalfBuilder, LayerBuilder
from export.graph.positions import new_columns, position_ids, sequence_lengths
from sportsllm.models.parts import GATES, HIDDEN, READ

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


class LSTM(HalfBuilder):
    """Both states as inputs and outputs of the graph, (B, H); tokens of padding leave them as they are."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        self._real_BT1 = self._real()

    def _real(self) -> ir.Value:
        """1 for each new token and 0 for padding, (B, T, 1) float32, as attention tells them apart."""
        graph, tokens_BT, mask_BS = self.graph, self.layers.sequences.tokens_BT, self.layers.sequences.mask_BS
        if self.layers.standard:  # wherever the padding is
            real_BT = graph.node("lstm/new_mask", "Slice", [mask_BS, *new_columns(graph, tokens_BT), graph.axis(1)])
        else:  # on the right: a token that stands behind its sequence's last one
            last_B, _ = sequence_lengths(graph, mask_BS)
            places_BT = position_ids(graph, "lstm", last_B, tokens_BT)
            wide_B = graph.node("lstm/last", "Cast", [last_B], to=INT64.value)
            last_B1 = graph.node("lstm/last_column", "Unsqueeze", [wide_B, graph.axis(1)])
            real_BT = graph.node("lstm/inside", "LessOrEqual", [places_BT, last_B1])
        numbers_BT = graph.node("lstm/real", "Cast", [real_BT], to=FLOAT.value)
        return graph.node("lstm/real_column", "Unsqueeze", [numbers_BT, graph.axis(2)])

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, name = self.graph, self.name(layer)
        inputs_BTG = self._gates(layer, HIDDEN, x_BTD)
        outputs = [f"{name}/last_hidden", f"{name}/last_cell", f"{name}/hidden"]
        step = partial(self._read, layer, name)
        *states, h_BTH = graph.scan(f"{name}/scan", past, [inputs_BTG, self._real_BT1], step, outputs)
        return h_BTH, states

    def _gates(self, layer: int, read: str, x: ir.Value) -> ir.Value:
        """The products of all gates side by side, also where they are stored in unlike formats."""
        found = self.products(layer, read, x, split=False)
        if len(found) == 1:
            return found[0]
        return self.graph.node(f"{self.name(layer)}/{read}_gates", "Concat", found, axis=-1)

    def _read(
        self, layer: int, name: str, states: Sequence[ir.Value], read: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], ir.Value]:
        """Both states after one token, whose gates (B, G) and `_real` (B, 1) are given; and h, to be collected."""
        inputs_BG, real_B1 = read
        new = self._step(layer, name, inputs_BG, states)
        is_real = self.graph.node(f"{name}/is_real", "Cast", [real_B1], to=ir.DataType.BOOL.value)
        kept = [
            self.graph.node(f"{name}/kept_{part}", "Where", [is_real, *both])
            for part, both in zip(("hidden", "cell"), zip(new, states, strict=True), strict=True)
        ]
        collected = self.graph.node(f"{name}/collected", "Identity", [kept[0]])
        for value in (*kept, collected):
            value.type, value.shape = ir.TensorType(FLOAT), ir.Shape(["batch_size", self.config.cells])
        return kept, collected

    def _step(
        self, layer: int, name: str, inputs_BG: ir.Value, states: Sequence[ir.Value]
    ) -> tuple[ir.Value, ir.Value]:
        """The states (B, H) after one token more; gates in the order of `GATES`."""
        graph, (h_BH, c_BH) = self.graph, states
        product_BG = self._gates(layer, READ, h_BH)
        gates_BG = graph.node(f"{name}/gates", "Add", [inputs_BG, product_BG])
        sizes, parts = [self.config.cells] * len(GATES), [f"{name}/{gate}" for gate in GATES]
        i, f, g, o = graph.split(f"{name}/split", gates_BG, sizes, parts)
        i, f, o = (graph.node(f"{gate.name}_open", "Sigmoid", [gate]) for gate in (i, f, o))
        g = graph.node(f"{name}/candidate", "Tanh", [g])
        forgotten = graph.node(f"{name}/forgotten", "Mul", [f, c_BH])
        added = graph.node(f"{name}/added", "Mul", [i, g])
        cell_BH = graph.node(f"{name}/cell", "Add", [forgotten, added])
        bent = graph.node(f"{name}/bent", "Tanh", [cell_BH])
        return graph.node(f"{name}/new_hidden", "Mul", [o, bent]), cell_BH
