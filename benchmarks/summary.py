"""From the rounds' raw samples to figures: the median of the rounds, and the interval they cover."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.process import QUIET_CORES
from benchmarks.stats import percentiles, spread


def round_figures(one: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one round by dotted name, from what the child's speed mode printed."""
    figures = {name: float(one[name]) for name in ("import_s", "load_s", "first_prefill_ms")}
    for prompt, samples in one["ttft_ms"].items():
        figures[f"ttft_ms.{prompt}"] = statistics.median(samples)
    for depth, sweeps in one["step_ms"].items():
        steps = [sample for sweep in sweeps for sample in sweep]
        figures |= {f"tpot_ms.{depth}.{name}": value for name, value in percentiles(steps).items()}
        figures[f"decode_tokens_per_s.{depth}"] = 1000 / statistics.fmean(steps)
    return figures


def summarise(raw: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Figures of all rounds.

    Args:
        raw: the children's results by mode, `speed` and `memory`.

    Returns:
        The figures (ms, s, bytes, tokens per second); under `noise` the interval of each by dotted name; under
        `noisy` the names whose interval is wider than 5%; `clean`, whether first tokens and median steps agree
        within 5% and other programs were quiet.
    """
    speed, memory = raw["speed"], raw["memory"]
    rounds = [round_figures(one) for one in speed]
    by_name = {name: [one[name] for one in rounds] for name in rounds[0]}
    middle = {name: statistics.median(values) for name, values in by_name.items()}
    by_name["peak_rss_bytes"] = [float(one["peak_rss_bytes"]) for one in memory]
    noise = {name: asdict(spread(values)) for name, values in by_name.items()}
    noisy = [name for name, interval in noise.items() if interval["noisy"]]
    others = max(one["other_cpu_cores"] for one in speed)
    steady = not any(name.startswith("ttft_ms") or name.endswith("p50") for name in noisy)
    prompts, depths = list(speed[0]["ttft_ms"]), list(speed[0]["step_ms"])
    return {
        "ttft_ms": {prompt: middle[f"ttft_ms.{prompt}"] for prompt in prompts},
        "tpot_ms": {
            depth: {name: middle[f"tpot_ms.{depth}.{name}"] for name in ("p50", "p90", "p95", "p99")}
            for depth in depths
        },
        "decode_tokens_per_s": {depth: middle[f"decode_tokens_per_s.{depth}"] for depth in depths},
        "prefill_tokens_per_s": 1000 * int(prompts[-1]) / middle[f"ttft_ms.{prompts[-1]}"] if prompts else None,
        "first_prefill_ms": middle["first_prefill_ms"],
        "import_s": middle["import_s"],
        "load_s": middle["load_s"],
        "peak_rss_bytes": int(max(by_name["peak_rss_bytes"])),
        "peak_rss_context_tokens": memory[0]["context_tokens"],
        "rounds": len(rounds),
        "noise": noise,
        "noisy": noisy,
        "other_cpu_cores": others,
        "clean": steady and others <= QUIET_CORES,
    }
