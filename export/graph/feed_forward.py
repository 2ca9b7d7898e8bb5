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

from export.graph.builder import BOOL, FLOAT, Array
from export.graph.calls import Operand
from export.graph.layer import SublayerBuilder
from sportsllm.models.kinds import ROUTER, SHARED, routed_names
from sportsllm.models.sublayer import HIDDEN, Matrix


class Gated(SublayerBuilder):
    """f(gate(x)) * up(x), f being silu or gelu."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        gate, up = self.products(layer, HIDDEN, x_BTD)
        silu = self.config.mlp_kind == "swiglu"
        activation = self.layers.silu if silu else self.layers.gelu
        bent = activation(f"{self.name(layer)}/{'silu' if silu else 'gelu'}", gate)
        return self.graph.node(f"{self.name(layer)}/inner", "Mul", bent, up), ()


class Plain(SublayerBuilder):
    """f(up(x)), f being gelu or relu."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        (up,) = self.products(layer, HIDDEN, x_BTD)
        name = f"{self.name(layer)}/inner"
        if self.config.mlp_kind == "gelu_erf":
            return self.graph.node(name, "Gelu", up), ()
        return self.graph.node(name, "Relu", up) if self.config.mlp_kind == "relu" else self.layers.gelu(name, up), ()


class MixtureOfExperts(SublayerBuilder):
    """The router in float32 and a branch for each expert."""

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, name, experts = self.graph, self.name(layer), self.config.chosen_experts
        at, (chosen_BTK, weights_BTK) = graph.at(f"{name}/"), past
        x_XD = at("tokens", "Reshape", x_BTD, graph.ints("experts/flat", [-1, self.config.hidden_size]))
        rows = graph.ints(f"experts/rows_{experts.active}", [-1, experts.active])
        chosen_XK, weights_XK = at("chosen", "Reshape", chosen_BTK, rows), at("weights", "Reshape", weights_BTK, rows)
        weights_XN = self._dense(name, x_XD, chosen_XK, weights_XK)
        marks_XN = self._dense(f"{name}/marks", x_XD, chosen_XK, None)
        used_N = at("used", "Cast", at("most", "ReduceMax", marks_XN, 0, keepdims=0), to=BOOL.value)
        names = routed_names(experts)
        is_used = graph.split(f"{name}/used_each", used_N, [1] * experts.count, [f"{name}.{n}/is_used" for n in names])
        y_XD = at("nothing", "Mul", x_XD, graph.real("experts/zero", 0.0))
        for number, used in enumerate(is_used):
            y_XD = self._branch(layer, number, used, x_XD, y_XD, weights_XN, marks_XN)
        if experts.shared:
            y_XD = at("with_shared", "Add", y_XD, self._expert(layer, SHARED, x_XD))
        return at("output", "Reshape", y_XD, at("shape", "Shape", x_BTD)), ()

    def output(self, layer: int, x: ir.Value) -> ir.Value:
        return x  # every expert has its own matrix for it

    def route(self, layer: int, x_BTD: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The chosen experts, (B, T, K) int64, and their weights."""
        graph, name, experts = self.graph, f"{self.name(layer)}.{ROUTER}", self.config.chosen_experts
        at = graph.at(f"{name}/")
        (router,) = (matrix for matrix in self._matrices if matrix.name == ROUTER)

        def read() -> Array:
            return np.ascontiguousarray(self.layers.matmul.dequantized(name, (router.rows, router.columns)).T)

        # In float32: a choice that rounding turns is another model.
        table_DN = graph.weight(f"{name}.columns", FLOAT, (router.columns, router.rows), read)
        logits_BTN = at("logits", "MatMul", x_BTD, table_DN)
        softmax, weighted = experts.router == "softmax", experts.weights
        as_scored = not experts.choice_bias and experts.groups == 1
        if as_scored and softmax and weighted == "sum":
            # The chosen of a softmax over their sum are a softmax of the chosen.
            scores_BTN, weighted = logits_BTN, "softmax"
        else:
            scores_BTN = at("scores", "Softmax" if softmax else "Sigmoid", logits_BTN)
        ranked_BTN = scores_BTN
        if experts.choice_bias:
            ranked_BTN = at("ranked", "Add", scores_BTN, self.layers.matmul.vector(f"{name}.bias", experts.count))
        if experts.groups > 1:
            ranked_BTN = self._open_groups(name, ranked_BTN)
        constant, names = f"experts/active_{experts.active}", ("top", "best", "chosen")
        weights_BTK, chosen_BTK = self._top(name, ranked_BTN, constant, experts.active, names)
        if not as_scored:
            weights_BTK = at("chosen_scores", "GatherElements", scores_BTN, chosen_BTK, axis=-1)
        if weighted == "softmax":
            weights_BTK = at("weights", "Softmax", weights_BTK, axis=-1)
        elif weighted == "sum":
            weights_BTK = at("weights", "Div", weights_BTK, at("total", "ReduceSum", weights_BTK, -1, keepdims=1))
        if experts.scale != 1.0:
            weights_BTK = at("scaled", "Mul", weights_BTK, graph.real("experts/scale", experts.scale))
        return chosen_BTK, weights_BTK

    def _open_groups(self, name: str, ranked_BTN: ir.Value) -> ir.Value:
        """The ranks with minus infinity for experts of groups that are not among the best."""
        graph, at, experts = self.graph, self.graph.at(f"{name}/"), self.config.chosen_experts
        by_group = at("by_group", "Reshape", ranked_BTN, graph.ints("experts/by_group", [0, 0, experts.groups, -1]))
        best_BTG2, _ = self._top(name, by_group, "experts/two", 2, ("best_two", "two", "two_at"))
        sums_BTG = at("group_scores", "ReduceSum", best_BTG2, -1, keepdims=0)
        names = ("open", "open_scores", "open_at")
        _, open_BTO = self._top(name, sums_BTG, "experts/open_groups", experts.active_groups, names)
        none_BTG = at("closed", "Mul", sums_BTG, graph.real("experts/zero", 0.0))
        ones_BTO = self._ones(f"{name}/opened", open_BTO)
        open_BTG = at("is_open", "ScatterElements", none_BTG, open_BTO, ones_BTO, axis=2)
        closed_BTG1 = at("closed_ranks", "Log", at("is_open_column", "Unsqueeze", open_BTG, 3))  # 0 or minus infinity
        masked = at("open_ranks", "Add", by_group, closed_BTG1)
        return at("open_ranks_flat", "Reshape", masked, graph.ints("experts/together", [0, 0, -1]))

    def _top(self, name: str, x: ir.Value, constant: str, count: int, names: Sequence[str]) -> list[ir.Value]:
        """The largest along the last axis, and where they are."""
        node, *outputs = (f"{name}/{each}" for each in names)
        return self.graph.nodes_of(node, "TopK", [x, self.graph.ints(constant, [count])], outputs, axis=-1)

    def _ones(self, name: str, like: ir.Value) -> ir.Value:
        shape = self.graph.node(f"{name}/shape", "Shape", like)
        one = ir.tensor(np.array([1.0], np.float32))
        return self.graph.node(f"{name}/ones", "ConstantOfShape", shape, value=ir.AttrTensor("value", one))

    def _dense(self, name: str, x_XD: ir.Value, chosen_XK: ir.Value, weights_XK: ir.Value | None) -> ir.Value:
        """(X, N) the chosen experts' weights in their places, 0 elsewhere; ones without weights."""
        graph, at = self.graph, self.graph.at(f"{name}/")
        weights_XK = self._ones(f"{name}/marks", chosen_XK) if weights_XK is None else weights_XK
        rows = graph.size(f"{name}/rows", x_XD, 0)
        width = graph.ints("experts/count", [self.config.chosen_experts.count])
        nothing = ir.AttrTensor("value", ir.tensor(np.array([0.0], np.float32)))
        empty_XN = at("empty", "ConstantOfShape", at("table", "Concat", rows, width, axis=0), value=nothing)
        return at("placed", "ScatterElements", empty_XN, chosen_XK, weights_XK, axis=1)

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
        at, place = graph.at(f"{name}/"), graph.ints(f"experts/number_{number}", number)

        def run() -> Sequence[ir.Value]:
            rows_1C = at("rows", "NonZero", at("sent", "Gather", marks_XN, place, axis=1))
            rows_C1 = at("row_column", "Transpose", rows_1C, perm=[1, 0])
            x_CD = at("own_tokens", "GatherND", x_XD, rows_C1)
            weight_X = at("own_weight", "Gather", weights_XN, place, axis=1)
            weight_C1 = at("weight_column", "Unsqueeze", at("weight_rows", "GatherND", weight_X, rows_C1), 1)
            made_CD = at("weighted", "Mul", self._expert(layer, expert, x_CD), weight_C1)
            return [at("added", "ScatterND", y_XD, rows_C1, made_CD, reduction="add")]

        def skip() -> Sequence[ir.Value]:
            return [at("skipped", "Identity", y_XD)]

        return graph.if_else(f"{name}/either", is_used, run, skip, {f"{name}/sum": FLOAT})[0]

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
        name, matmul, silu = f"{self.name(layer)}.{expert}", self.layers.matmul, self.layers.silu
        (up_name, matrices), (down_name, down) = self._expert_matrices(layer, expert)
        gate, *up = matmul.products(up_name, x_CD, matrices)
        if not up:
            return matmul.product(down_name, silu(f"{name}/inner", gate), down)
        inner = self.graph.node(f"{name}/inner", "Mul", silu(f"{name}/silu", gate), up[0])
        return matmul.product(down_name, inner, down)
