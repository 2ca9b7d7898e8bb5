"""What runs experts fastest on a CPU: ONNX Runtime's QMoE or this program's kernel, beside a dense layer.

    python -m benchmarks.studies.expert_operators --threads 2 --rounds 9

Some feed-forward layers, each with its own experts, so that weights come from memory as in a whole model; INT4 in
blocks of 128, SwiGLU, random weights and choices. Median milliseconds a layer, one token and a prompt, in turns:

    dense      one SwiGLU of as many neurons as the chosen experts have together, by the kernel
    kernels    DecoderFeedForward, which reads the chosen experts alone
    qmoe       com.microsoft.QMoE, activations in float32
    qmoe-int8  the same with activations rounded to 8 bits, as the kernel does it (accuracy_level 4)
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from rich.table import Table

from benchmarks.studies.processes import add_integers, flag_parser, run_study
from export.graph.builder import MS
from export.kernels.library import VERSION, library_of
from export.runtime.session import session_options
from sportsllm.console import table
from sportsllm.errors import UsageError

BLOCK, BITS, ACTIVE = 128, 4, 2
_STEPS = 8  # of one token, in each round
VARIANTS = ("dense", "kernels", "qmoe", "qmoe-int8")


class Layers:
    """Feed-forward layers of one variant beside each other, opened."""

    def __init__(self, variant: str, settings: dict[str, int], library: Path) -> None:
        self.settings, self.variant = settings, variant
        self._rng = np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        outputs = [self._layer(layer, "x") for layer in range(settings["layers"])]
        self._nodes.append(helper.make_node("Sum", outputs, ["sum"]))
        options = session_options(settings["threads"], library=library)
        self._session = ort.InferenceSession(self._model("sum").SerializeToString(), options)

    def run(self, tokens: int, seed: int) -> float:
        """Milliseconds a layer of one run with fresh choices."""
        rng, experts = np.random.default_rng(seed), self.settings["experts"]
        scores = rng.normal(size=(tokens, experts)).astype(np.float32)
        chosen = np.argsort(-scores, axis=1)[:, :ACTIVE].astype(np.int64)
        known = {
            "x": rng.normal(size=(1, tokens, self.settings["hidden"])).astype(np.float32),
            "scores": scores,
            "chosen": chosen[None],
            "weights": np.full((1, tokens, ACTIVE), 1 / ACTIVE, np.float32),
        }
        fed = {one.name: known[one.name] for one in self._session.get_inputs()}
        started = time.perf_counter()
        self._session.run(None, fed)
        return (time.perf_counter() - started) * 1_000 / self.settings["layers"]

    def _layer(self, layer: int, x: str) -> str:
        out, inner, hidden = f"y{layer}", self.settings["inner"], self.settings["hidden"]
        if self.variant.startswith("qmoe"):
            inputs = [x, "scores"]
            for key, rows, columns in (("fc1", 2 * inner, hidden), ("fc2", hidden, inner)):
                inputs += self._packed(f"{layer}.{key}", (self.settings["experts"], rows, columns), flat=True)
            names = [*inputs[:4], "", *inputs[4:]]  # no biases
            sizes: dict[str, Any] = {
                "k": ACTIVE,
                "expert_weight_bits": BITS,
                "block_size": BLOCK,
                "normalize_routing_weights": 1,
            }
            sizes |= {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}
            sizes |= {"normalize_routing_weights": 1, "accuracy_level": 4 if self.variant == "qmoe-int8" else 0}
            self._nodes.append(helper.make_node("QMoE", names, [out], domain=MS, **sizes))
            return out
        experts = 0 if self.variant == "dense" else self.settings["experts"]
        inner *= ACTIVE if self.variant == "dense" else 1
        kind = "expert" if experts else "shared"
        inputs = [x, "chosen", "weights"] if experts else [x, "", ""]
        attributes: dict[str, Any] = {"hidden_size": hidden, "gated": 1, "experts": experts, "shared": int(not experts)}
        attributes |= {"active_experts": ACTIVE if experts else 0, f"{kind}_size": inner}
        for number in range(max(experts, 1)):
            for key, rows, columns in (("up", 2 * inner, hidden), ("down", hidden, inner)):
                inputs += self._packed(f"{layer}.{number}.{key}", (rows, columns))
                attributes |= {f"{kind}_{key}_bits": BITS, f"{kind}_{key}_block_size": BLOCK}
                attributes |= {f"{kind}_{key}_zero_points": 0, f"{kind}_{key}_biases": 0}
        self._nodes.append(helper.make_node("DecoderFeedForward", inputs, [out], domain="sportsllm", **attributes))
        return out

    def _packed(self, name: str, shape: tuple[int, ...], flat: bool = False) -> list[str]:
        """Random 4-bit numbers, and scales that keep products about as large as what they read."""
        *outer, columns = shape
        packed: np.ndarray[Any, Any] = self._rng.integers(
            0, 256, (*outer, columns // BLOCK, BLOCK // 2), dtype=np.uint8
        )
        scale = np.full((*outer, columns // BLOCK), 0.2 * columns**-0.5, np.float32)
        if flat:
            packed = packed.reshape(*outer, columns // 2)
        arrays: dict[str, np.ndarray[Any, Any]] = {f"{name}.packed": packed, f"{name}.scale": scale}
        self._weights += [numpy_helper.from_array(array, key) for key, array in arrays.items()]
        return list(arrays)

    def _model(self, last: str) -> onnx.ModelProto:
        read = {name for node in self._nodes for name in node.input}
        kinds = {"x": (TensorProto.FLOAT, 3), "scores": (TensorProto.FLOAT, 2)}
        kinds |= {"chosen": (TensorProto.INT64, 3), "weights": (TensorProto.FLOAT, 3)}
        inputs = [
            helper.make_tensor_value_info(name, kind, [None] * rank)
            for name, (kind, rank) in kinds.items()
            if name in read
        ]
        out = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
        graph = helper.make_graph(self._nodes, "layers", inputs, [out], self._weights)
        opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 21), (MS, 1), ("sportsllm", 1))]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Median milliseconds a layer, by variant and number of tokens."""
    library = library_of(VERSION)
    if library is None:
        raise UsageError("the kernels are not built; run `python -m export.kernels.build`")
    opened = {variant: Layers(variant, settings, library) for variant in VARIANTS}
    found: dict[str, dict[int, float]] = {variant: {} for variant in VARIANTS}
    for tokens in (1, settings["prompt"]):
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(settings["rounds"] + 1):
            for variant, layers in opened.items():
                runs = [layers.run(tokens, seed) for seed in range(_STEPS if tokens == 1 else 1)]
                times[variant] += runs if number else []  # the first round warms up
        for variant, each in times.items():
            found[variant][tokens] = statistics.median(each)
    return [{"variant": variant, "ms_a_layer": each} for variant, each in found.items()]


def _table(results: list[dict[str, Any]]) -> Table:
    headers = ("variant", *(f"{tokens} tokens, ms a layer" for tokens in results[0]["ms_a_layer"]))
    rows = [(one["variant"], *(f"{each:.3f}" for each in one["ms_a_layer"].values())) for one in results]
    return table(headers, rows, title=f"INT4 in blocks of {BLOCK}, {ACTIVE} experts a token")


def main() -> None:
    """Measure and print."""
    parser = flag_parser(__doc__)
    sizes = {"layers": (12, "Layers."), "hidden": (768, "Hidden size."), "inner": (1_024, "Neurons of an expert.")}
    sizes |= {"experts": (8, "Experts of a layer."), "prompt": (512, "Tokens of a prompt.")}
    add_integers(parser, **sizes, rounds=(9, "Timed rounds."), threads=(2, "CPU threads."))
    run_study(parser, {}, measure, _table, "operators")


if __name__ == "__main__":
    main()
