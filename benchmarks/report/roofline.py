"""The roofline: rates of decoding and of reading a prompt, under the limits of the machine's memory and arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flops import forward_flops_per_token, matmul_parameters
from benchmarks.labels import is_number
from benchmarks.report.charts import Chart, Plot, chart, color, line, log_axis, marks, placeholder_chart
from benchmarks.report.inputs import StageSummary, bench_command
from benchmarks.report.text import get_nested
from sportsllm.errors import SportsLLMError
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig

Rate = tuple[float, float, str]  # operations per byte, GOP/s, and the point's label


def roofline_chart(stages: Sequence[StageSummary], bench: Mapping[str, Any] | None) -> Chart:
    """Rate against operations per byte, under the roofs in the result (Williams et al., CACM 52(4), 2009)."""
    rates: list[list[Rate]] = []
    missing = "Nothing was measured."
    if bench is not None and bench.get("roofs") is None:
        missing = "The result has no bandwidth or peak rates: measure again."
    elif bench is not None:
        missing = "The result has no bytes per token, or no speeds."
        try:
            rates = [*measured_rates(bench, load_config(Path(str(bench["directory"]))))]
        except (SportsLLMError, OSError) as error:
            missing = f"It needs the model's shape: {error}."
    if bench is None or not any(rates):
        return placeholder_chart("roofline", "Roofline", missing, bench_command(stages))
    places = [place for place, *_ in itertools.chain(*rates)]
    hover = "%{text}: %{x:.3g} operations a byte, %{y:.3g} GOP/s<extra></extra>"
    looks = (("decode", color(0), "circle"), ("prompt", color(1), "square"))
    points = [marks(kind, *look, hover) for kind, look in zip(rates, looks, strict=True)]
    data = _roof_lines(bench, min(places), max(places)) + [trace for trace in points if trace["x"]]
    xs, ys = ([value for trace in data for value in trace[axis]] for axis in "xy")
    x_axis, y_axis = log_axis("operations per byte", min(xs), max(xs)), log_axis("GOP/s", min(ys), max(ys))
    return chart("roofline", "Roofline", _caption(bench["roofs"]), data, x_axis, y_axis)


def measured_rates(bench: Mapping[str, Any], config: ModelConfig) -> tuple[list[Rate], list[Rate]]:
    """Rates of decoding and of reading a prompt.

    Operations of a step after t tokens are 2 N + 4 L H E (t + 1), those of a prompt of T tokens the sum of its steps'
    less the head's for all tokens but the last. Bytes are the least there can be: every weight once and the keys and
    values of all tokens once.
    """
    weights = get_nested(bench, "memory_floor", "weight_bytes")
    cache = get_nested(bench, "memory_floor", "kv_bytes_per_token")
    if not is_number(weights) or not is_number(cache):
        return [], []
    attention = 4 * config.num_hidden_layers * config.query_size
    decode = []
    for depth, times in (bench.get("tpot_ms") or {}).items():
        operations = 2 * matmul_parameters(config) + attention * (int(depth) + 1)
        decode.append(_rate(f"decode after {depth}", operations, weights + cache * int(depth), times["p50"]))
    prefill = []
    for prompt, milliseconds in (bench.get("ttft_ms") or {}).items():
        length = int(prompt)
        head = 2 * config.vocab_size * config.hidden_size * (length - 1)
        operations = length * forward_flops_per_token(config, length) - head
        prefill.append(_rate(f"prompt of {prompt}", operations, weights + cache * length, milliseconds))
    return decode, prefill


def _rate(label: str, operations: float, size: float, milliseconds: float) -> Rate:
    return operations / size, operations / milliseconds / 1e6, label


def _roof_lines(bench: Mapping[str, Any], low: float, high: float) -> list[Plot]:
    """A roof for each known peak rate, the bandwidth alone without any; `low` and `high` are the points' places."""
    roofs, measured = bench["roofs"], get_nested(bench, "memory_floor", "bandwidth_bytes_per_s")
    bandwidth = roofs["bandwidth_gb_s"]
    known = {"8-bit peak": roofs["int8_gops"], "32-bit peak": roofs["fp32_gflops"]}
    peaks = {label: peak for label, peak in known.items() if peak is not None}
    low, high = min(0.5, low), 4 * max([high, *(peak / bandwidth for peak in peaks.values())])
    if not peaks:
        return [line([low, high], [low * bandwidth, high * bandwidth], "bandwidth", "theme:ink", mode="lines")]
    top, shades = max(peaks.values()), ("theme:ink", "theme:quiet")
    lines = [
        line([low, peak / bandwidth, high], [low * bandwidth, peak, peak], label, shade, mode="lines")
        for (label, peak), shade in zip(peaks.items(), shades, strict=True)
    ]
    if is_number(measured):
        ends = [low, top / (measured / 1e9)]
        lines.append(line(ends, [low * measured / 1e9, top], "measured GB/s", color(2), "dot", mode="lines"))
    return lines


def _caption(roofs: Mapping[str, Any]) -> str:
    bandwidth = f"{roofs['bandwidth_gb_s']:.3g} GB/s"
    if roofs["int8_gops"] is None:
        under = f"the memory bandwidth measured beside them ({bandwidth}); this machine's peak rates are not known"
    else:
        under = f"the memory bandwidth ({bandwidth}) and the peak rates in the device file of {roofs['source']}"
    return (
        f"Operations a second against operations per byte, as measured, under {under}. Bytes are the least possible: "
        "each weight and each key and value once. Points above the slope were served by the processor's own caches."
    )
