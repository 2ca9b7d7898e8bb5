"""Feed-forward in the graph, and a mixture of experts; see `sportsllm.models.layers`.

Each expert is a branch that runs if some token is sent to it, on these tokens alone, and adds to what the experts
before it have made: the weights of an expert that nobody chose are not read.
Shape suffixes: B sequences, T new tokens, X = B * T, D hidden_size, N experts, K active ones, G groups, O open ones,
C tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import Array
from export.graph.calls import Operand
from export.graph.layer import HalfBuilder
from sportsllm.models.parts import HIDDEN, ROUTER, SHARED, Matrix, routed_names


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


FLOAT = ir.DataType.FLOAT


class MixtureOfExperts(HalfBuilder):
    """The router in float32 and a branch for each expert."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, name, experts = self.graph, self.name(layer), self.config.chosen_experts
        chosen_BTK, weights_BTK = past
        flat = graph.constant("experts/flat", np.array([-1, self.config.hidden_size], np.int64))
        x_XD = graph.node(f"{name}/tokens", "Reshape", [x_BTD, flat])
        rows = graph.constant(f"experts/rows_{experts.active}", np.array([-1, experts.active], np.int64))
        chosen_XK = graph.node(f"{name}/chosen", "Reshape", [chosen_BTK, rows])
        weights_XK = graph.node(f"{name}/weights", "Reshape", [weights_BTK, rows])
        weights_XN = self._dense(name, x_XD, chosen_XK, weights_XK)
        marks_XN = self._dense(f"{name}/marks", x_XD, chosen_XK, None)
        most_N = graph.node(f"{name}/most", "ReduceMax", [marks_XN, graph.axis(0)], keepdims=0)
        used_N = graph.node(f"{name}/used", "Cast", [most_N], to=ir.DataType.BOOL.value)
        names = [f"{name}.{expert}/is_used" for expert in routed_names(experts)]
        is_used = graph.split(f"{name}/used_each", used_N, [1] * experts.count, names)
        zero = graph.constant("experts/zero", np.array(0.0, np.float32))
        y_XD = graph.node(f"{name}/nothing", "Mul", [x_XD, zero])
        for number, used in enumerate(is_used):
            y_XD = self._branch(layer, number, used, x_XD, y_XD, weights_XN, marks_XN)
        if experts.shared:
            y_XD = graph.node(f"{name}/with_shared", "Add", [y_XD, self._expert(layer, SHARED, x_XD)])
        shape = graph.node(f"{name}/shape", "Shape", [x_BTD])
        return graph.node(f"{name}/output", "Reshape", [y_XD, shape]), ()

    def output(self, layer: int, x: ir.Value) -> ir.Value:
        return x  # every expert has its own matrix for it

    def route(self, layer: int, x_BTD: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The chosen experts, (B, T, K) int64, and their weights."""
        graph, name, experts = self.graph, f"{self.name(layer)}.{ROUTER}", self.config.chosen_experts
        (router,) = (matrix for matrix in self._matrices if matrix.name == ROUTER)

        def read() -> Array:
            return np.ascontiguousarray(self.layers.matmul.dequantized(name, (router.rows, router.columns)).T)

        # In float32: a choice that rounding turns is another model.
        table_DN = graph.weight(f"{name}.columns", FLOAT, (router.columns, router.rows), read)
        logits_BTN = graph.node(f"{name}/logits", "MatMul", [x_BTD, table_DN])
        softmax, weighted = experts.router == "softmax", experts.weights
        as_scored = not experts.choice_bias and experts.groups == 1
        if as_scored and softmax and weighted == "sum":
            # The chosen of a softmax over their sum are a softmax of the chosen.
            scores_BTN, weighted = logits_BTN, "softmax"
        else:
            scores_BTN = graph.node(f"{name}/scores", "Softmax" if softmax else "Sigmoid", [logits_BTN])
        ranked_BTN = scores_BTN
        if experts.choice_bias:
            bias = self.layers.matmul.vector(f"{name}.bias", experts.count)
            ranked_BTN = graph.node(f"{name}/ranked", "Add", [scores_BTN, bias])
        if experts.groups > 1:
            ranked_BTN = self._open_groups(name, ranked_BTN)
        count = graph.constant(f"experts/active_{experts.active}", np.array([experts.active], np.int64))
        outputs = [f"{name}/best", f"{name}/chosen"]
        weights_BTK, chosen_BTK = graph.node_with_outputs(f"{name}/top", "TopK", [ranked_BTN, count], outputs, axis=-1)
        if not as_scored:
            weights_BTK = graph.node(f"{name}/chosen_scores", "GatherElements", [scores_BTN, chosen_BTK], axis=-1)
        if weighted == "softmax":
            weights_BTK = graph.node(f"{name}/weights", "Softmax", [weights_BTK], axis=-1)
        elif weighted == "sum":
            total = graph.node(f"{name}/total", "ReduceSum", [weights_BTK, graph.axis(-1)], keepdims=1)
            weights_BTK = graph.node(f"{name}/weights", "Div", [weights_BTK, total])
        if experts.scale != 1.0:
            scale = graph.constant("experts/scale", np.array(experts.scale, np.float32))
            weights_BTK = graph.node(f"{name}/scaled", "Mul", [weights_BTK, scale])
        return chosen_BTK, weights_BTK

    def _open_groups(self, name: str, ranked_BTN: ir.Value) -> ir.Value:
        """The ranks with minus infinity for experts of groups that are not among the best."""
        graph, experts = self.graph, self.config.chosen_experts
        apart = graph.constant("experts/by_group", np.array([0, 0, experts.groups, -1], np.int64))
        by_group = graph.node(f"{name}/by_group", "Reshape", [ranked_BTN, apart])
        two = graph.constant("experts/two", np.array([2], np.int64))
        best_BTG2, _ = graph.node_with_outputs(
            f"{name}/best_two", "TopK", [by_group, two], [f"{name}/two", f"{name}/two_at"], axis=-1
        )
        sums_BTG = graph.node(f"{name}/group_scores", "ReduceSum", [best_BTG2, graph.axis(-1)], keepdims=0)
        count = graph.constant("experts/open_groups", np.array([experts.active_groups], np.int64))
        _, open_BTO = graph.node_with_outputs(
            f"{name}/open", "TopK", [sums_BTG, count], [f"{name}/open_scores", f"{name}/open_at"], axis=-1
        )
        zero = graph.constant("experts/zero", np.array(0.0, np.float32))
        none_BTG = graph.node(f"{name}/closed", "Mul", [sums_BTG, zero])
        ones_BTO = self._ones(f"{name}/opened", open_BTO)
        open_BTG = graph.node(f"{name}/is_open", "ScatterElements", [none_BTG, open_BTO, ones_BTO], axis=2)
        open_BTG1 = graph.node(f"{name}/is_open_column", "Unsqueeze", [open_BTG, graph.axis(3)])
        closed_BTG1 = graph.node(f"{name}/closed_ranks", "Log", [open_BTG1])  # 0 or minus infinity
        masked = graph.node(f"{name}/open_ranks", "Add", [by_group, closed_BTG1])
        together = graph.constant("experts/together", np.array([0, 0, -1], np.int64))
        return graph.node(f"{name}/open_ranks_flat", "Reshape", [masked, together])

    def _ones(self, name: str, like: ir.Value) -> ir.Value:
        """Float ones in the shape of a tensor."""
        one = ir.tensor(np.array([1.0], np.float32))
        shape = self.graph.node(f"{name}/shape", "Shape", [like])
        return self.graph.node(f"{name}/ones", "ConstantOfShape", [shape], value=ir.AttrTensor("value", one))

    def _dense(self, name: str, x_XD: ir.Value, chosen_XK: ir.Value, weights_XK: ir.Value | None) -> ir.Value:
        """(X, N) the chosen experts' weights in their places, 0 elsewhere; ones without weights."""
        graph, experts = self.graph, self.config.chosen_experts
        weights_XK = self._ones(f"{name}/marks", chosen_XK) if weights_XK is None else weights_XK
        rows = graph.node(f"{name}/rows", "Shape", [x_XD], start=0, end=1)
        width = graph.constant("experts/count", np.array([experts.count], np.int64))
        shape = graph.node(f"{name}/table", "Concat", [rows, width], axis=0)
        nothing = ir.AttrTensor("value", ir.tensor(np.array([0.0], np.float32)))
        empty_XN = graph.node(f"{name}/empty", "ConstantOfShape", [shape], value=nothing)
        return graph.node(f"{name}/placed", "ScatterElements", [empty_XN, chosen_XK, weights_XK], axis=1)

    def _branch(
        self,
        layer: int,
        number: int,
        is_used: ir.Value,
        x_XD: ir.Value,
        y_XD: ir.Value,
        weights_XN: ir.Value,
        marks_XN: ir.Value,
    ) -> ir.Value:
        """The sum so far with one expert's part, if any token is sent to it."""
        graph, expert = self.graph, routed_names(self.config.chosen_experts)[number]
        name = f"{self.name(layer)}.{expert}"
        place = graph.constant(f"experts/number_{number}", np.array(number, np.int64))

        def run() -> Sequence[ir.Value]:
            sent_X = graph.node(f"{name}/sent", "Gather", [marks_XN, place], axis=1)
            rows_1C = graph.node(f"{name}/rows", "NonZero", [sent_X])
            rows_C1 = graph.node(f"{name}/row_column", "Transpose", [rows_1C], perm=[1, 0])
            x_CD = graph.node(f"{name}/own_tokens", "GatherND", [x_XD, rows_C1])
            weight_X = graph.node(f"{name}/own_weight", "Gather", [weights_XN, place], axis=1)
            weight_C = graph.node(f"{name}/weight_rows", "GatherND", [weight_X, rows_C1])
            weight_C1 = graph.node(f"{name}/weight_column", "Unsqueeze", [weight_C, graph.axis(1)])
            made_CD = graph.node(f"{name}/weighted", "Mul", [self._expert(layer, expert, x_CD), weight_C1])
            return [graph.node(f"{name}/added", "ScatterND", [y_XD, rows_C1, made_CD], reduction="add")]

        def skip() -> Sequence[ir.Value]:
            return [graph.node(f"{name}/skipped", "Identity", [y_XD])]

        branches = {"then_branch": run, "else_branch": skip}
        return graph.if_else(f"{name}/either", is_used, branches, {f"{name}/sum": FLOAT})[0]

    def operands(self, layer: int, module: str) -> tuple[Operand | str, Operand | str]:
        matmul, (up, down) = self.layers.matmul, self._expert_matrices(layer, module)
        return matmul.operand("up", *up), matmul.operand("down", *down)

    def _expert_matrices(self, layer: int, expert: str) -> tuple[tuple[str, list[Matrix]], tuple[str, list[Matrix]]]:
        """Names of an expert's two products, and their matrices."""
        name = f"{self.name(layer)}.{expert}"
        found = {matrix.name.removeprefix(f"{expert}."): matrix for matrix in self._matrices}
        parts = ("gate_proj", "up_proj") if self.config.chosen_experts.gated else ("up_proj",)
        up, down = ([found[part]._replace(name=f"{name}.{part}") for part in each] for each in (parts, ("down_proj",)))
        return (f"{name}.{'gate_up_proj' if len(up) > 1 else 'up_proj'}", up), (f"{name}.down_proj", down)

    def _expert(self, layer: int, expert: str, x_CD: ir.Value) -> ir.Value:
        """One expert's output for some tokens."""
        graph, name, matmul = self.graph, f"{self.name(layer)}.{expert}", self.layers.matmul
        (up_name, matrices), (down_name, down) = self._expert_matrices(layer, expert)
        gate, *up = matmul.products(up_name, x_CD, matrices)
        if up:
            inner = graph.node(f"{name}/inner", "Mul", [self.layers.silu(f"{name}/silu", gate), up[0]])
        else:
            inner = self.layers.silu(f"{name}/inner", gate)
        return matmul.product(down_name, inner, down)
