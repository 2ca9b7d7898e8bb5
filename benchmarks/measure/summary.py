"""Figures of the rounds' raw samples: medians with their intervals, and the bandwidth bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.labels import BUDGET_DEPTH
from benchmarks.measure.process import disturbed
from benchmarks.model_size import active_share, sizes, stored_format
from benchmarks.spread import NOISY_HALF_WIDTH, Spread, agree, spread
from sportsllm.models.config import ModelConfig
from sportsllm.models.memory import kv_cache_bytes_per_token, state_bytes

Raw = Mapping[str, Sequence[Mapping[str, Any]]]
THROTTLED = 0.05  # a last window slower than the first by more than this share is called throttled


def round_figures(one: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one round by dotted name, from what the worker's speed mode printed."""
    figures = {"load_s": float(one["load_s"])}
    for prompt, samples in one["ttft_ms"].items():
        figures[f"ttft_ms.{prompt}"] = statistics.median(samples)
    for depth, sweeps in one["step_ms"].items():
        steps = [sample for sweep in sweeps for sample in sweep]
        figures |= {f"tpot_ms.{depth}.p{each}": float(np.percentile(steps, each)) for each in (50, 90, 95, 99)}
        figures[f"decode_tokens_per_s.{depth}"] = 1000 / statistics.fmean(steps)
    return figures


def rounds_by_name(raw: Raw) -> dict[str, list[float]]:
    """Each figure's values, one a round."""
    rounds = [round_figures(one) for one in raw["speed"]]
    return {name: [one[name] for one in rounds] for name in rounds[0]}


def nested(figures: Mapping[str, float]) -> dict[str, Any]:
    """Figures by dotted name as a tree of dicts: {"a.b": 1} is {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for name, value in figures.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def _deciding(raw: Raw) -> dict[str, Spread]:
    """The figures that must agree if a run is to be clean: first tokens and median steps."""
    return {
        name: spread(values)
        for name, values in rounds_by_name(raw).items()
        if name.startswith("ttft_ms.") or name.endswith(".p50")
    }


def is_steady(raw: Raw) -> bool:
    """Whether the deciding figures agree."""
    return agree(_deciding(raw).values())


def noise_reasons(raw: Raw) -> list[str]:
    """Why a run is not clean."""
    deciding, speed = _deciding(raw), raw["speed"]
    reasons = []
    if len(speed) > 1 and deciding and not agree(deciding.values()):
        unsteady = sum(bool(interval.noisy) for interval in deciding.values())
        reasons.append(f"{unsteady} of {len(deciding)} times vary by more than {NOISY_HALF_WIDTH:.0%}")
    if disturbed(speed):
        most = max(float(one["other_cpu_cores"]) for one in speed)
        reasons.append(f"other programs used up to {most:.1f} cores of the measured processors, in half of the rounds")
    if len(speed) == 1:
        reasons.append("one round is too few to tell")
    if not deciding:
        reasons.append("the context is too short for every prompt and depth")
    return reasons


def summarise(raw: Raw) -> dict[str, Any]:
    """Figures (ms, s, bytes, tokens per second) of the workers' results by mode, `speed` and `memory`.

    `noise` has each figure's interval by dotted name.
    """
    speed, memory = raw["speed"], raw["memory"]
    by_name = rounds_by_name(raw)
    middle = nested({name: statistics.median(values) for name, values in by_name.items()})
    by_name["peak_rss_bytes"] = [float(one["peak_rss_bytes"]) for one in memory]
    noise = {name: asdict(spread(values)) for name, values in by_name.items()}
    ttft = middle.get("ttft_ms", {})
    longest = list(ttft)[-1] if ttft else None
    return {
        "ttft_ms": ttft,
        "tpot_ms": middle.get("tpot_ms", {}),
        "decode_tokens_per_s": middle.get("decode_tokens_per_s", {}),
        "prefill_tokens_per_s": 1000 * int(longest) / ttft[longest] if longest else None,
        "load_s": middle["load_s"],
        "peak_rss_bytes": int(max(by_name["peak_rss_bytes"])),
        "peak_rss_context_tokens": memory[0]["context_tokens"],
        "rounds": len(speed),
        "noise": noise,
        "other_cpu_cores": max(one["other_cpu_cores"] for one in speed),
        "noise_reasons": (reasons := noise_reasons(raw)),
        "clean": not reasons,
        "cpus": speed[0]["cpus"],
    }


def summarise_sustained(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The run's windows, and its last against its first; `throttling` is None if there is one window only."""
    windows: Sequence[Mapping[str, Any]] = payload["windows"]
    first, last = windows[0]["tokens_per_s"], windows[-1]["tokens_per_s"]
    lost = 1 - last / first if len(windows) > 1 else None
    return {
        "first_tokens_per_s": first,
        "last_tokens_per_s": last,
        "throttling_percent": None if lost is None else 100 * lost,
        "throttled": None if lost is None else lost > THROTTLED,
        "windows": windows,
        "other_cpu_cores": payload["other_cpu_cores"],
    }


def bytes_read_per_token(directory: Path, config: ModelConfig) -> dict[str, int]:
    """Bytes that decoding one token has to read: `weight_bytes`, and `kv_bytes_per_token` for each token before it.

    Weights are the layers' matrices, of experts those that a token is sent to, and the head; states that do not grow
    count as weights. Of an embedding that is stored separately one row is looked up.
    """
    stored = stored_format(directory)
    parts, cache = sizes(config, stored), stored.cache
    weights = active_share(config) * parts.layers.bytes + parts.head.bytes + state_bytes(config)[cache]
    return {"weight_bytes": round(weights), "kv_bytes_per_token": kv_cache_bytes_per_token(config)[cache]}


def budget_depth(depths: Sequence[int]) -> int:
    """The depth whose time per token a budget judges: 512 tokens, else the deepest measured, 0 without any."""
    return BUDGET_DEPTH if BUDGET_DEPTH in depths else max(depths, default=0)


def bandwidth_bound(
    read: Mapping[str, int], probes: Sequence[Mapping[str, Any]], depths: Sequence[int]
) -> dict[str, Any]:
    """The lower bound on a step's time: bytes read per token / bandwidth, in ms by depth.

    `read` comes from `bytes_read_per_token`, `probes` from the worker's bandwidth mode: the highest bandwidth counts,
    since a lower one was disturbed.
    """
    bandwidth = max(float(probe["bandwidth_bytes_per_s"]) for probe in probes)

    def milliseconds(depth: int) -> float:
        return 1000 * (read["weight_bytes"] + read["kv_bytes_per_token"] * depth) / bandwidth

    return {
        "memory_floor_tpot_ms": milliseconds(budget_depth(depths)),
        "memory_floor": {
            **read,
            "by_depth_ms": {str(depth): milliseconds(depth) for depth in depths},
            "bandwidth_bytes_per_s": bandwidth,
            "working_set_bytes": probes[0]["working_set_bytes"],
        },
    }
