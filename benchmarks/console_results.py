"""Tables for people: what `bench` prints. The results themselves are plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks.console_tables import reliability_line
from benchmarks.labels import LIMITS, MISSING, RATIOS, number, short_depth, with_unit
from benchmarks.measure.summary import noise_reasons
from benchmarks.report.text import CACHE_HEADERS, cache_rows
from benchmarks.spread import CONFIDENCE
from sportsllm.console import table


def print_bench(console: Console, result: Mapping[str, Any]) -> None:
    """Figures with their noise, the decode table, what was asked for besides, what is absent, and the budget."""
    cpus, rounds = result["cpus"], result["rounds"]
    kernels = f", {result['kernels']} kernels" if result.get("kernels") else ""
    pinned = "not pinned" if cpus is None else f"pinned to {', '.join(map(str, cpus))}"
    console.print(
        f"{result['directory']}: {result['parameters']:,} parameters, {number(result['file_bytes'] / 1e6)} MB, "
        f"{result['runtime']}{kernels}, {result['threads']} threads ({pinned}), {rounds} fresh processes",
        markup=False,
    )
    if result.get("placement"):
        console.print(result["placement"]["line"], markup=False)
    interval = f"{CONFIDENCE:.0%} interval of {rounds} rounds" if rounds > 1 else "one round, no interval"
    console.print(table(("figure", "median", "unit", interval), _figures(result), (0, 2)))
    if result["tpot_ms"]:
        headers = ("after tokens", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "tokens/s", "memory floor ms")
        console.print(table(headers, _depths(result), ()))
        console.print(table(CACHE_HEADERS, cache_rows(result), ()))
    else:
        console.print(f"No decoding depth fits the context of {result['context_length']} tokens.")
    _print_batches(console, result["batches"])
    _print_sustained(console, result.get("sustained"))
    _print_against(console, result)
    for name, reason in result["absent"].items():
        console.print(f"not measured: {name} ({reason})", markup=False, style="dim")
    if not result["clean"]:
        console.print(unclean_line(result), markup=False, style="bold yellow")
    if result["quality_loss_percent"] is not None:
        console.print(quality_line(result), markup=False)
    if result["budget"] is not None:
        print_budget(console, result["budget"])


def unclean_line(result: Mapping[str, Any]) -> str:
    """Why a run does not count, in one loud line."""
    reasons = noise_reasons(result["raw"])
    if unsteady := [name for name, one in result.get("against", {}).items() if one.get("steady") is False]:
        reasons.append(f"the turns of {', '.join(unsteady)} do not agree or are too few")
    return f"NOISY, not a clean result: {'; '.join(reasons)}; repeat it on a quiet machine"


def _print_batches(console: Console, batches: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        (
            size,
            ", ".join(map(str, one["prompt_tokens"])),
            number(one["decode_tokens_per_s"]),
            number(one["step_ms"]["p50"]),
            number(one["step_ms"]["p95"]),
            number(one["peak_rss_bytes"] / 1e6),
        )
        for size, one in batches.items()
    ]
    if rows:
        headers = ("rows together", "prompt tokens", "tokens/s of all rows", "step p50 ms", "step p95 ms", "peak MB")
        console.print(table(headers, rows, ()))


def _print_sustained(console: Console, sustained: Mapping[str, Any] | None) -> None:
    """The first, the middle and the last window, and what was lost between them."""
    if sustained is None:
        return
    windows = sustained["windows"]
    rows = []
    for window in [windows[index] for index in sorted({0, len(windows) // 2, len(windows) - 1})]:
        sensors = (window["clock_mhz"], window["temperature_c"], window["joules_per_token"])
        cells = [MISSING if value is None else number(value) for value in sensors]
        rows.append((f"{window['start_s']:.0f}", number(window["tokens_per_s"]), *cells))
    headers = (f"{sustained['minutes']:g} minutes: from s", "tokens/s", "clock MHz", "degrees C", "J/token")
    console.print(table(headers, rows, ()))
    if sustained["throttling_percent"] is not None:
        word = "THROTTLED" if sustained["throttled"] else "sustained"
        lost = f"{sustained['throttling_percent']:.1f}%"
        console.print(f"{word}: the last of {len(windows)} windows is {lost} below the first")


def _print_against(console: Console, result: Mapping[str, Any]) -> None:
    """Each runtime's figures or why there are none, and ours against the best."""
    against = result.get("against", {})
    measured = {name: one for name, one in against.items() if one["status"] == "measured"}
    depths = list(next(iter(measured.values()))["ttft_ms"]) if measured else []
    rows = []
    for name, one in measured.items():
        rates = [number(one["generated_tokens_per_s"][depth]) for depth in depths]
        firsts = number(one["ttft_ms"][depths[-1]])
        label = name if one["steady"] else f"{name} (noisy)"
        rows.append((label, one["version"] or MISSING, *rates, firsts, number(one["peak_rss_bytes"] / 1e6)))
    if rows:
        speeds = [f"generated tokens/s after {depth}" for depth in depths]
        names = ("runtime", "version", *speeds, f"first token of {depths[-1]}, ms", "peak MB")
        console.print(table(names, rows, (0, 1)))
    for key, whose in RATIOS.items():
        for name, ratio in result.get(key, {}).items():
            console.print(
                f"ours / {whose}, {name}: {number(ratio['ratio'])} ({number(ratio['low'])} to {number(ratio['high'])}; "
                f"{ratio['peer']}; {ratio['better']} is better)",
                markup=False,
            )
    for name, one in against.items():
        if one["status"] != "measured":
            advice = f": {one['install']}" if "install" in one else ""
            console.print(f"{name}: {one['status']}{advice}", markup=False, style="yellow")


def print_budget(console: Console, budget: Mapping[str, Any]) -> None:
    """Each limit with the figure that decides it, what was measured here, and the verdict in one line."""
    rows = [
        (
            LIMITS[limit["name"]].label,
            value_and_interval(limit),
            with_unit(limit["limit"], limit["unit"]),
            limit["verdict"],
            limit["source"] or limit["reason"] or "not measured",
            with_unit(budget["measured_here"][limit["name"]], limit["unit"]),
        )
        for limit in budget["limits"]
    ]
    headers = (f"budget of {budget['target']}", "value", "allowed", "verdict", "source", "measured here")
    console.print(table(headers, rows, (0, 3, 4)))
    console.print(verdict_line(budget), markup=False, style="bold")
    if budget["decided_by"] == "prediction":
        console.print(reliability_line(budget["efficiency"]), markup=False)


def value_and_interval(limit: Mapping[str, Any]) -> str:
    """A limit's figure with its interval or band, if there is one."""
    if limit["low"] is None or limit["low"] == limit["high"]:
        return with_unit(limit["value"], limit["unit"])
    value, ends = with_unit(limit["value"], limit["unit"]), f"{number(limit['low'])} to {number(limit['high'])}"
    return f"{value} ({ends})"


def quality_line(result: Mapping[str, Any]) -> str:
    """The change of quality against the teacher, with its interval, in words."""
    percent, interval = result["quality_loss_percent"], result["quality_interval_percent"]
    word = "worse" if percent > 0 else "better"
    line = f"Quality: {abs(percent):.2f}% {word} than the teacher in bits per byte"
    documents = f"{result['quality_documents']} documents"
    if interval is None:
        return f"{line} on {documents}, too few for an interval (16 are needed)"
    return f"{line} (95% interval {interval[0]:+.2f} to {interval[1]:+.2f}%, {documents})"


def verdict_line(budget: Mapping[str, Any]) -> str:
    """The verdict in one line: which target, what fails, what is open and why."""
    words = {"fail": list[str](), "uncertain": list[str]()}
    for limit in budget["limits"]:
        label = LIMITS[limit["name"]].label.lower()
        if limit["verdict"] == "fail":
            words["fail"].append(f"{label} {number(limit['value'])} of {number(limit['limit'])} {limit['unit']}")
        elif limit["verdict"] == "uncertain":
            words["uncertain"].append(
                f"{label} ({'not measured' if limit['value'] is None else value_and_interval(limit)})"
            )
    text = f"{budget['target']}: {budget['verdict']}"
    if words["fail"]:
        text += f": {', '.join(words['fail'])}"
    if words["uncertain"]:
        text += f"; open: {', '.join(words['uncertain'])}"
    if depth := short_depth(budget):
        text += f"; time per token after {depth} tokens, all that the context has room for"
    if budget["decided_by"] == "prediction":
        why = (
            "this machine is not the device"
            if budget.get("of_export", True)
            else "for the ONNX export, by PyTorch's files"
        )
        text += f" (speed and memory are predicted: {why})"
    return text


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    shown = [("load", "load_s", "s", 1.0)]
    shown += [(f"first token, prompt of {prompt}", f"ttft_ms.{prompt}", "ms", 1.0) for prompt in result["ttft_ms"]]
    shown.append((f"peak memory, {result['peak_rss_context_tokens']:,} tokens", "peak_rss_bytes", "MB", 1e6))
    if result["joules_per_token"] is not None:
        shown.append((f"energy of a token after {result['energy']['depth']}", "joules_per_token", "J", 1.0))
    rows = []
    for label, name, unit, scale in shown:
        key, _, part = name.partition(".")
        value = result[key][part] if part else result[key]
        interval = result["noise"][name]
        between = f"{number(interval['low'] / scale)} to {number(interval['high'] / scale)}"
        rows.append((label, number(value / scale), unit, between + (" (noisy)" if interval["noisy"] else "")))
    split = result["memory_split"]
    if split is not None:
        names = {"anonymous": "anonymous_bytes", "files": "file_bytes", "PSS": "pss_bytes", "USS": "uss_bytes"}
        sizes = " / ".join(number(split[key] / 1e6) for key in names.values())
        rows.append(("at the most seen: " + " / ".join(names), sizes, "MB", f"{split['samples']} samples"))
    if result["cold_load_s"] is not None:
        rows.append(("load from a cold cache", number(result["cold_load_s"]), "s", ""))
    if result["prefill_tokens_per_s"] is not None:
        rows.append(("prefill", number(result["prefill_tokens_per_s"]), "tokens/s", ""))
    return rows


def _depths(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for depth, times in result["tpot_ms"].items():
        mark = " (noisy)" if f"tpot_ms.{depth}.p50" in result["noisy"] else ""
        cells = [number(times[name]) for name in ("p90", "p95", "p99")]
        bound = result["memory_floor"]["by_depth_ms"][depth]
        speed = number(result["decode_tokens_per_s"][depth])
        rows.append((depth, number(times["p50"]) + mark, *cells, speed, number(bound)))
    return rows
