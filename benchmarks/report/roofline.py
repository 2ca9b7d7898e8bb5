"""The roofline: what decoding and reading a prompt reach, under what the device's memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.flops import forward_flops_per_token, matmul_parameters
from benchmarks.devices.load import load_device
from benchmarks.devices.schema import Device
from benchmarks.labels import is_number, part
from benchmarks.predict.model_size import prompt_graph_bytes
from benchmarks.report.charts import Plot, absent, bench_command, chart, colour, line, log_axis
from benchmarks.report.inputs import StageSummary
from sportsllm.errors import SportsLLMError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config

Rate = tuple[str, float, float]


def roofline(stages: Sequence[StageSummary], bench: Mapping[str, Any] | None) -> Plot:
    """Rate against operations per byte, under the roofs of the budget's device (Williams et al., CACM 52(4), 2009)."""
    identifier, title, command = "roofline", "Roofline", bench_command(stages)
    if bench is None:
        return absent(identifier, title, "Nothing was measured.", command)
    try:
        device = load_device(str(part(bench, "budget", "device")))
        config = load_config(Path(str(bench["directory"])))
    except (SportsLLMError, OSError, KeyError) as error:
        return absent(identifier, title, f"It needs the model's shape and the device's figures: {error}.", command)
    decode, prefill = measured_points(bench, config)
    if not decode and not prefill:
        return absent(identifier, title, "The result has no bytes per token, or no speeds.", command)
    return _roofline(identifier, title, bench, device, decode, prefill)


def measured_points(bench: Mapping[str, Any], config: ModelConfig) -> tuple[list[Rate], list[Rate]]:
    """What decoding and reading a prompt reach: (label, operations per byte, GOP/s).

    Operations of a step after t tokens are 2 N + 4 L H E (t + 1), those of a prompt of T tokens the sum of its steps'
    less the head's for all tokens but the last. Bytes are the least there can be: every weight once and the keys and
    values of all tokens once.

    Args:
        bench: a result of `bench`.
        config: the shape of the model it measured.
    """
    weights, cache = part(bench, "memory_floor", "weight_bytes"), part(bench, "memory_floor", "kv_bytes_per_token")
    if not is_number(weights) or not is_number(cache):
        return [], []
    attention = 4 * config.num_hidden_layers * config.query_size
    decode = []
    for depth, times in (bench.get("tpot_ms") or {}).items():
        operations = 2 * matmul_parameters(config) + attention * (int(depth) + 1)
        decode.append(_rate(f"decode after {depth}", operations, weights + cache * int(depth), times["p50"]))
    read = prompt_graph_bytes(Path(str(bench.get("directory", "")))) or weights  # the latency profile's own graph
    prefill = []
    for prompt, milliseconds in (bench.get("ttft_ms") or {}).items():
        length = int(prompt)
        spared = 2 * config.vocab_size * config.hidden_size * (length - 1)
        operations = length * forward_flops_per_token(config, length) - spared
        prefill.append(_rate(f"prompt of {prompt}", operations, read + cache * length, milliseconds))
    return decode, prefill


def _rate(label: str, operations: float, size: float, milliseconds: float) -> Rate:
    return label, operations / size, operations / milliseconds / 1e6


def _roofline(
    identifier: str, title: str, bench: Mapping[str, Any], device: Device, decode: list[Rate], prefill: list[Rate]
) -> Plot:
    hardware = device.hardware
    bandwidth = hardware.memory_bandwidth.value
    peaks = [("8-bit peak", hardware.int8_matmul_rate.value), ("32-bit peak", hardware.fp32_matmul_rate.value)]
    places = [place for _, place, _ in decode + prefill]
    low, high = min(0.5, *places), 4 * max(*places, *(peak / bandwidth for _, peak in peaks))
    data = [
        line([low, peak / bandwidth, high], [low * bandwidth, peak, peak], label, paint, mode="lines")
        for (label, peak), paint in zip(peaks, ("theme:ink", "theme:quiet"), strict=True)
    ]
    seen = part(bench, "memory_floor", "bandwidth_bytes_per_s")
    if is_number(seen):
        top = max(peak for _, peak in peaks)
        ends = [low, top / (seen / 1e9)]
        data.append(line(ends, [x * seen / 1e9 for x in ends], "measured GB/s", colour(2), "dot", mode="lines"))
    for points, name, paint, symbol in (
        (decode, "decode", colour(0), "circle"),
        (prefill, "prompt", colour(1), "square"),
    ):
        trace = line([x for _, x, _ in points], [y for _, _, y in points], name, paint, mode="markers")
        trace |= {"marker": {"size": 10, "symbol": symbol, "color": paint}, "text": [label for label, _, _ in points]}
        data.append(trace | {"hovertemplate": "%{text}: %{x:.3g} operations a byte, %{y:.3g} GOP/s<extra></extra>"})
    rates = [rate for trace in data for rate in trace["y"]]
    caption = (
        f"Operations a second against operations per byte, as measured, under the memory bandwidth ({bandwidth:g} "
        f"GB/s) and the peak rates of {device.name}'s device file. Bytes are the least possible: each weight and each "
        "key and value once. Points above the slope were served by the processor's own caches."
    )
    if part(bench, "budget", "decided_by") == "prediction":
        caption += f" Measured on another machine than {device.name}: the points are not under these roofs."
    return chart(
        identifier,
        title,
        caption,
        [trace for trace in data if trace["x"]],
        log_axis("operations per byte", low, high),
        log_axis("GOP/s", min(rates), max(rates)),
    )
