"""The graphs that `calibrate` times, and the process that times one.

`python -m benchmarks.predict.probes '{"mode": "time", ...}'` prints one JSON object, as `benchmarks.measure.worker`
does. Operators are those that `export` writes, run by sessions with `export.runtime.session`'s options. Numbers are
drawn at random, since the
time of these kernels does not depend on them.
Shape suffixes: M rows, K columns and N rows of a matrix.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure.worker import main
from benchmarks.predict.calibrate_figures import BLOCK, LAYER_DEPTH, LAYER_HEAD_DIM, LAYER_KV_HEADS
from benchmarks.predict.small_models import MS, Array, ProbeGraph
from benchmarks.spread import percentile
from sportsllm.process_memory import peak_rss_bytes
from sportsllm.storage.packed_weights import pack

WARM_UP_RUNS = 3
LEAST_RUNS, MOST_RUNS = 7, 2_000
_DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(int32)": np.int32}


def add_product(graph: ProbeGraph, form: str, x: str, name: str, rows: int, width: int) -> str:
    """Add x W^T, x being (M, K) and W (N, K), stored in one of `benchmarks.predict.coefficients.CPU_FORMS`.

    Args:
        graph: gets node and weights.
        form: how the matrix is stored; blocks have `BLOCK` numbers.
        x: name of the input.
        name: of the output, and beginning of the weights' names.
        rows: N.
        width: K, a multiple of `BLOCK`.
    """
    # The runtime keeps equal matrices once, so no two may be equal.
    random, size = np.random.default_rng([rows, width, *name.encode()]), width**-0.5
    if form == "fp32":
        matrix_NK = np.float32(3.4 * size) * (random.random((rows, width), dtype=np.float32) - np.float32(0.5))
        return graph.node("FusedMatMul", [x, graph.weight(f"{name}.weight", matrix_NK)], [name], MS, {"transB": 1})
    if form == "int8_rows":
        rows_KN = random.integers(-63, 64, (width, rows), dtype=np.int8)
        scale_N = np.full(rows, size / 37, np.float32)
        inputs = [x, graph.weight(f"{name}.weight", rows_KN), graph.weight(f"{name}.scale", scale_N)]
        return graph.node("DynamicQuantizeMatMul", inputs, [name], MS)
    bits, groups = (4 if form == "int4" else 8), width // BLOCK
    quants = random.integers(0, 2**bits, (rows, groups, BLOCK), dtype=np.uint8)
    scales = np.full((rows, groups), 3.5 * size / 2**bits, np.float32)
    inputs = [x, graph.weight(f"{name}.weight", pack(quants, bits)), graph.weight(f"{name}.scale", scales)]
    sizes: dict[str, int | str] = {"N": rows, "K": width, "block_size": BLOCK, "bits": bits, "accuracy_level": 4}
    return graph.node("MatMulNBits", inputs, [name], MS, sizes)


def product(form: str, new: int, rows: int, width: int) -> ProbeGraph:
    """One product of (M, K) with (N, K)."""
    graph = ProbeGraph()
    graph.input("x", "float32", (new, width))
    graph.output(add_product(graph, form, "x", "y", rows, width), "float32", (new, rows))
    return graph


def chain(form: str, width: int, count: int) -> ProbeGraph:
    """`count` square products of one row, each reading what the last one made."""
    graph, x = ProbeGraph(), "x"
    graph.input(x, "float32", (1, width))
    for index in range(count):
        x = add_product(graph, form, x, f"y{index}", width, width)
    graph.output(x, "float32", (1, width))
    return graph


def attention(cache: str, new: int, end: int, heads: int, kv_heads: int, size: int) -> ProbeGraph:
    """GroupQueryAttention of `new` tokens, the last of `end`, as `export.graph.ort_layer` writes it, without
    rotation."""
    graph = ProbeGraph()
    query = graph.input("query", "float32", (1, new, heads * size))
    graph.output("attended", "float32", (1, new, heads * size))
    _add_attention(graph, "", query, _add_lengths(graph), cache, (new, end, heads, kv_heads, size))
    return graph


def layers(width: int, count: int) -> ProbeGraph:
    """`count` layers for one token: of one of `export.graph.ort_layer` a single product, in float32, and all that is
    none.

    Each has norm, product, attention, norm, silu and product of numbers, and keys and values of its own.
    """
    graph, heads = ProbeGraph(), width // LAYER_HEAD_DIM
    x = residual = graph.input("x", "float32", (1, 1, width))
    graph.output(f"gated{count - 1}", "float32", (1, 1, width))
    lengths, gamma = _add_lengths(graph), np.ones(width, np.float32)

    def norm(name: str, x: str, residual: str) -> tuple[str, str]:
        outputs = [name, "", "", f"{name}.sum"]
        graph.node(
            "SkipSimplifiedLayerNormalization", [x, residual, graph.weight(f"{name}.weight", gamma)], outputs, MS
        )
        return name, outputs[-1]

    for index in range(count):
        x, residual = norm(f"norm{index}", x, residual)
        x = add_product(graph, "fp32", x, f"y{index}", width, width)
        x = _add_attention(
            graph, f"{index}", x, lengths, "fp32", (1, LAYER_DEPTH, heads, LAYER_KV_HEADS, LAYER_HEAD_DIM)
        )
        x, residual = norm(f"second_norm{index}", x, residual)
        silu = graph.node("QuickGelu", [x], [f"silu{index}"], MS)
        x = graph.node("Mul", [silu, x], [f"gated{index}"])
    return graph


def _add_lengths(graph: ProbeGraph) -> list[str]:
    return [graph.input("seqlens_k", "int32", (1,)), graph.input("total", "int32", ())]


def _add_attention(
    graph: ProbeGraph, name: str, query: str, lengths: list[str], cache: str, sizes: tuple[int, int, int, int, int]
) -> str:
    """Add attention with keys, values and caches of its own.

    Args:
        graph: gets it.
        name: end of all its names.
        query: (1, new, heads * size).
        lengths: names of `_add_lengths`.
        cache: precision of keys and values.
        sizes: new tokens, all so far, heads, key/value heads, numbers of a head.
    """
    new, end, heads, kv_heads, size = sizes
    shape, dtype = (1, kv_heads, end, size), "int8" if cache == "int8" else "float32"
    inputs = [query, *(graph.input(f"{part}{name}", "float32", (1, new, kv_heads * size)) for part in ("key", "value"))]
    inputs += [graph.input(f"past_{part}{name}", dtype, shape) for part in ("key", "value")]
    inputs += lengths
    attributes: dict[str, int | str] = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 0}
    if cache == "int8":
        scale = np.full((1, kv_heads, 1, size), 0.02, np.float32)
        inputs += [""] * 5 + [graph.weight(f"{part}_scale{name}", scale) for part in "kv"]
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    outputs = [f"attended{name}", f"present_key{name}", f"present_value{name}"]
    graph.node("GroupQueryAttention", inputs, outputs, MS, attributes)
    for present in outputs[1:]:
        graph.output(present, dtype, shape)
    return outputs[0]


def gated(new: int, inner: int, count: int) -> ProbeGraph:
    """`count` times silu(x) * x of (M, inner): 5 reads and writes of each number."""
    graph, x = ProbeGraph(), "x"
    graph.input(x, "float32", (new, inner))
    for index in range(count):
        silu = graph.node("QuickGelu", [x], [f"silu{index}"], MS)
        x = graph.node("Mul", [silu, x], [f"y{index}"])
    graph.output(x, "float32", (new, inner))
    return graph


def time_graph(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of one run of the graph at `graph`; a graph with a cache writes it in place, `end` tokens full.

    The 10th percentile: other programs only ever add time to runs as short as these.
    """
    session = _session(specification)
    binding, feeds = session.io_binding(), {}
    for argument in session.get_inputs():
        feeds[argument.name] = _feed(argument, int(specification.get("end", 0)))
        _bind(binding.bind_input, argument.name, feeds[argument.name])
    for argument in session.get_outputs():
        array = feeds.get(argument.name.replace("present", "past"))
        if array is None:
            array = feeds[f"to {argument.name}"] = np.empty(argument.shape, _DTYPES[argument.type])
        _bind(binding.bind_output, argument.name, array)
    samples: list[float] = []
    started = 0.0
    for run in range(WARM_UP_RUNS + MOST_RUNS):
        if run == WARM_UP_RUNS:
            started = time.perf_counter()
        begin = time.perf_counter_ns()
        session.run_with_iobinding(binding)
        samples.append((time.perf_counter_ns() - begin) / 1e9)
        timed = run + 1 - WARM_UP_RUNS
        if timed >= LEAST_RUNS and time.perf_counter() - started > float(specification["seconds_per_figure"]):
            break
    return {"seconds": percentile(samples[WARM_UP_RUNS:], 10), "runs": len(samples) - WARM_UP_RUNS}


def measure_footprint(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Peak memory of a process that has the runtime loaded, and the graph at `graph`, run once."""
    import export.runtime.decoder  # noqa: F401 - what a process that runs a model has loaded

    session = _session(specification)
    session.run(None, {argument.name: _feed(argument, 0) for argument in session.get_inputs()})
    return {"peak_rss_bytes": peak_rss_bytes()}


def _session(specification: Mapping[str, Any]) -> Any:
    import onnxruntime as ort

    from export.runtime.session import session_options

    options = session_options(int(specification["threads"]))
    return ort.InferenceSession(str(Path(specification["graph"])), options, providers=["CPUExecutionProvider"])


def _feed(argument: Any, end: int) -> Array:
    random = np.random.default_rng(0)
    if argument.name == "seqlens_k":
        return np.array([end - 1], np.int32)
    if argument.name == "total":
        return np.array(end, np.int32)
    if argument.type == "tensor(int8)":
        whole: Array = random.integers(-100, 101, argument.shape, dtype=np.int8)
        return whole
    numbers: Array = random.random(argument.shape, dtype=np.float32) - np.float32(0.5)
    return numbers


def _bind(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {"time": time_graph, "footprint": measure_footprint}))
