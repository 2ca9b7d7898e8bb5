"""From the rounds' raw samples to figures: the median of the rounds, and the interval they cover."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.measure.rounds import disturbed
from benchmarks.spread import NOISY_HALF_WIDTH, Spread, agree, percentiles, spread

Raw = Mapping[str, Sequence[Mapping[str, Any]]]
BATCH = "batch-"
"""The name of a batch's turns is this and its number of rows."""


def round_figures(one: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one round by dotted name, from what the worker's speed mode printed."""
    figures = {name: float(one[name]) for name in ("import_s", "load_s", "first_prefill_ms")}
    for prompt, samples in one["ttft_ms"].items():
        figures[f"ttft_ms.{prompt}"] = statistics.median(samples)
    for depth, sweeps in one["step_ms"].items():
        steps = [sample for sweep in sweeps for sample in sweep]
        figures |= {f"tpot_ms.{depth}.{name}": value for name, value in percentiles(steps).items()}
        figures[f"decode_tokens_per_s.{depth}"] = 1000 / statistics.fmean(steps)
    for depth, samples in one["reading_ms"].items():
        figures[f"without_cache_ms.{depth}"] = statistics.median(samples)
    if "joules_per_token" in one["energy"]:
        figures["joules_per_token"] = one["energy"]["joules_per_token"]
    return figures


def batch_figures(rows: int, one: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one round of a batch: all rows' tokens a second, and the time of a step that gives each one."""
    steps = [sample for sweep in one["step_ms"] for sample in sweep]
    figures = {f"step_ms.{name}": value for name, value in percentiles(steps).items()}
    figures |= {"decode_tokens_per_s": rows * 1000 / statistics.fmean(steps), "prefill_ms": one["prefill_ms"]}
    return {f"batches.{rows}.{name}": value for name, value in figures.items()}


def rounds_by_name(raw: Raw) -> dict[str, list[float]]:
    """Each figure's values, one a round. A figure that only some rounds have is left out."""
    kinds = [[round_figures(one) for one in raw["speed"]]]
    kinds += [[batch_figures(int(rows), one) for one in raw[f"{BATCH}{rows}"]] for rows in batch_rows(raw)]
    return {
        name: [one[name] for one in rounds]
        for rounds in kinds
        for name in rounds[0]
        if all(name in one for one in rounds)
    }


def batch_rows(raw: Raw) -> list[str]:
    """The batch sizes that were measured."""
    return [mode.removeprefix(BATCH) for mode in raw if mode.startswith(BATCH)]


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
    """The figures that must be steady for a run to count as clean: first tokens, median steps, batches' rates."""
    return {
        name: spread(values)
        for name, values in rounds_by_name(raw).items()
        if name.startswith("ttft_ms.") or name.endswith((".p50", ".decode_tokens_per_s"))
    }


def is_steady(raw: Raw) -> bool:
    """Whether the deciding figures are steady together."""
    return agree(_deciding(raw).values())


def noise_reasons(raw: Raw) -> list[str]:
    """Why a run is not clean."""
    deciding, speed = _deciding(raw), raw["speed"]
    reasons = []
    if len(speed) > 1 and deciding and not agree(deciding.values()):
        unsteady = [name for name, interval in deciding.items() if interval.noisy]
        reasons.append(f"the interval of the rounds exceeds {NOISY_HALF_WIDTH:.0%} in {', '.join(unsteady)}")
    if disturbed(speed):
        most = max(float(one["other_cpu_cores"]) for one in speed)
        reasons.append(f"other programs used up to {most:.1f} of the measured cores, in half of the rounds or more")
    if len(speed) == 1:
        reasons.append("one round is too few to tell")
    if not deciding:
        reasons.append("the context is too short for every prompt and depth")
    return reasons


def summarise(raw: Raw) -> dict[str, Any]:
    """Figures (ms, s, bytes, tokens per second) of the workers' results by mode: `speed`, `memory`, and maybe `cold`
    and batches. `noise` has each figure's interval by dotted name, `noisy` the names whose interval is too wide."""
    speed, memory = raw["speed"], raw["memory"]
    by_name = rounds_by_name(raw)
    middle = nested({name: statistics.median(values) for name, values in by_name.items()})
    by_name["peak_rss_bytes"] = [float(one["peak_rss_bytes"]) for one in memory]
    noise = {name: asdict(spread(values)) for name, values in by_name.items()}
    ttft = middle.get("ttft_ms", {})
    longest = list(ttft)[-1] if ttft else None
    batches = {rows: raw[f"{BATCH}{rows}"] for rows in batch_rows(raw)}
    return {
        "ttft_ms": ttft,
        "tpot_ms": middle.get("tpot_ms", {}),
        "decode_tokens_per_s": middle.get("decode_tokens_per_s", {}),
        "without_cache": _without_cache(middle),
        "prefill_tokens_per_s": 1000 * int(longest) / ttft[longest] if longest else None,
        "first_prefill_ms": middle["first_prefill_ms"],
        "import_s": middle["import_s"],
        "load_s": middle["load_s"],
        "peak_rss_bytes": int(max(by_name["peak_rss_bytes"])),
        "peak_rss_context_tokens": memory[0]["context_tokens"],
        "batches": {
            rows: {
                "prompt_tokens": rounds[0]["lengths"],
                **{key: middle["batches"][rows][key] for key in ("decode_tokens_per_s", "step_ms", "prefill_ms")},
                "peak_rss_bytes": max(one["peak_rss_bytes"] for one in rounds),
            }
            for rows, rounds in batches.items()
        },
        "rounds": len(speed),
        "noise": noise,
        "noisy": [name for name, interval in noise.items() if interval["noisy"]],
        "other_cpu_cores": max(one["other_cpu_cores"] for one in speed),
        "noise_reasons": (reasons := noise_reasons(raw)),
        "clean": not reasons,
        **_readings(raw, middle.get("joules_per_token")),
    }


def _without_cache(middle: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By depth, what the next token costs where all tokens are read again for it, and how many times faster a step is.

    The time is that of the prompt that the steps come after, measured with them.
    """
    found = {}
    for depth, milliseconds in middle.get("without_cache_ms", {}).items():
        rate = 1000 / milliseconds
        speedup = middle["decode_tokens_per_s"][depth] / rate
        found[depth] = {"tpot_ms": milliseconds, "decode_tokens_per_s": rate, "cache_speedup": speedup}
    return found


def _readings(raw: Raw, joules: float | None) -> dict[str, Any]:
    """Figures that not every machine gives, None where it does not, and under `absent` why not."""
    absent: dict[str, str] = {}
    speed, cold = raw["speed"], raw.get("cold", ())
    if joules is None:
        absent["joules_per_token"] = next(one["energy"]["absent"] for one in speed if "absent" in one["energy"])
    split = max((one["split"] for one in raw["memory"] if one["split"]), key=lambda one: one["rss_bytes"], default=None)
    if split is None:
        absent["memory_split"] = "the system does not split up a process's memory (smaps_rollup)"
    loads = [one["load_s"] for one in cold if "load_s" in one]
    if not loads:
        absent["cold_load_s"] = next((one["absent"] for one in cold if "absent" in one), "not asked for")
    values = {name: [one[name] for one in speed if one[name] is not None] for name in ("clock_mhz", "temperature_c")}
    ranges = {name: {"low": min(found), "high": max(found)} if found else None for name, found in values.items()}
    absent |= {name: "no such sensor can be read" for name, found in ranges.items() if found is None}
    if speed[0]["cpus"] is None:
        absent["cpus"] = "this system does not pin a process to processors"
    return {
        "cold_load_s": statistics.median(loads) if loads else None,
        "memory_split": split,
        "joules_per_token": joules,
        "energy": {key: speed[0]["energy"].get(key) for key in ("source", "depth")},
        "surroundings": {**ranges, "clock_source": speed[0]["clock_source"]},
        "cpus": speed[0]["cpus"],
        "absent": absent,
    }
