"""A result of `bench` as tables and lines, for the console and for the report's page and Markdown."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from benchmarks.labels import (
    BUDGET_DEPTH,
    LIMITS,
    MISSING,
    Table,
    bits,
    count,
    interval,
    megabytes,
    number,
    reliability_line,
    with_unit,
)
from benchmarks.measure.process import QUIET_CORES
from benchmarks.spread import CONFIDENCE
from sportsllm.inference.scoring import LEAST_DOCUMENTS

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.devices.verdict import LimitVerdict
    from benchmarks.reporting.measured import Bench, Budget

_WINDOW = {
    "start_s": "from s",
    "tokens_per_s": "tokens/s",
    "clock_mhz": "clock MHz",
    "temperature_c": "\u00b0C",
}


def print_bench(console: Console, bench: Bench) -> None:
    """Print the measurements, whether the run is clean, quality and budget."""
    console.print(describe(bench))
    if bench.placement is not None:
        console.print(str(bench.placement.get("line", "")))
    for table in bench_tables(bench):
        table.print(console)
    if not bench.tpot_ms:
        console.print(f"No decoding depth fits the context of {count(bench.context_length)} tokens.")
    if bench.budget is not None:
        budget_table(bench.budget).print(console)
    for line in verdict_lines(bench):
        console.print(line, style="bold yellow" if line.startswith("NOISY") else "bold")
    if bench.budget is not None and bench.budget.decided_by == "prediction" and bench.budget.efficiency is not None:
        console.print(reliability_line(bench.budget.efficiency))


def describe(bench: Bench) -> str:
    """The model and how it was run, in a line."""
    kernels = f", {bench.kernels} kernels" if bench.kernels else ""
    pinned = f"pinned to {', '.join(map(str, bench.cpus))}" if bench.cpus else "not pinned"
    processes = "1 fresh process" if bench.rounds == 1 else f"{bench.rounds} fresh processes"
    return (
        f"{bench.directory}: {count(bench.parameters)} parameters, {with_unit(bench.file_bytes, 'MB', 1e6)}, "
        f"{bench.runtime}{kernels}, {count(bench.threads)} threads ({pinned}), {processes}"
    )


def verdict_lines(bench: Bench) -> list[str]:
    """The verdict on the budget, the change of quality with its interval, and a line if the run is noisy."""
    lines = [] if bench.budget is None else [verdict_line(bench.budget)]
    if (percent := bench.quality_loss_percent) is not None:
        ends, documents = bench.quality_interval_percent, f"{count(bench.quality_documents)} documents"
        between = "" if ends is None else f" (95% interval {ends[0]:+.2f} to {ends[1]:+.2f}%, {documents})"
        few = f" on {documents}, too few for an interval ({LEAST_DOCUMENTS} are needed)"
        change = f"{abs(percent):.2f}% {'worse' if percent > 0 else 'better'}"
        own, teacher = bits(bench.bits_per_byte), bits(bench.teacher_bits_per_byte)
        lines.append(f"Quality: {own} bits per byte, {change} than the teacher's {teacher}{between or few}")
    elif bench.bits_per_byte is not None:
        lines.append(f"Quality: {bench.bits_per_byte:.4f} bits per byte; --teacher compares it")
    if not bench.clean:
        lines.append("; ".join(["NOISY, not a clean result", *bench.noise_reasons, "repeat it on a quiet machine"]))
    return lines


def verdict_line(budget: Budget, short: bool = False) -> str:
    """The verdict in one line: target, failed limits, open limits and, unless `short`, the reason."""
    failed = [
        f"{LIMITS[limit.name].label.lower()} {number(limit.value)} of {number(limit.limit)} {limit.unit}"
        for limit in budget.limits
        if limit.verdict == "fail"
    ]
    unsure = [
        f"{LIMITS[limit.name].label.lower()} ({'not measured' if limit.value is None else _value(limit)})"
        for limit in budget.limits
        if limit.verdict == "uncertain"
    ]
    text = f"{budget.target}: {budget.verdict}"
    if failed:
        text += f": {', '.join(failed)}"
    if unsure:
        text += f"; open: {', '.join(unsure)}"
    if short:
        return text
    if 0 < (depth := budget.tpot_depth_tokens or 0) < BUDGET_DEPTH:
        text += f"; time per token after {depth} tokens, all that the context has room for"
    if budget.decided_by == "prediction" and budget.efficiency is not None:
        why = "this machine is not the device" if budget.of_export else "for the ONNX export, by PyTorch's files"
        text += f" (speed and memory are predicted: {why})"
    return text


def budget_table(budget: Budget) -> Table:
    """Each limit with the figure that decides it, and what was measured here."""
    rows = [
        (
            LIMITS[limit.name].label,
            _value(limit),
            with_unit(limit.limit, limit.unit),
            limit.verdict,
            limit.source or limit.reason or "not measured",
            with_unit(budget.measured_here.get(limit.name), limit.unit),
        )
        for limit in budget.limits
    ]
    headers = ("limit", "value", "allowed", "verdict", "source", "measured here")
    return Table(f"Budget of {budget.target}", headers, rows, (0, 3, 4))


def _value(limit: LimitVerdict) -> str:
    """A limit's figure with its interval or band, if there is one."""
    ends = "" if limit.low == limit.high else interval(limit.low, limit.high)
    return with_unit(limit.value, limit.unit) + (f" ({ends})" if ends else "")


def bench_tables(bench: Bench) -> list[Table]:
    """Figures, times by depth, the sustained run and other runtimes, as far as they were measured."""
    tables = [table(bench) for table in (_figures, _depths, _texts, _sustained, _peers, _tasks)]
    return [table for table in tables if table.rows or table.caption]


def _tasks(bench: Bench) -> Table:
    rows = [
        (name, score.metric, str(score), str(bench.teacher_tasks.get(name, MISSING)), count(score.documents))
        for name, score in bench.tasks.items()
    ]
    caption, ends = "", bench.accuracy_interval_points
    if (points := bench.accuracy_loss_points) is not None:
        between = "" if ends is None else f" (95% interval {ends[0]:+.2f} to {ends[1]:+.2f})"
        caption = f"Accuracy: {points:+.2f} points below the teacher's{between}"
    return Table("Tasks, ± standard error", ("task", "metric", "model", "teacher", "documents"), rows, (0, 1), caption)


def _figures(bench: Bench) -> Table:
    peak = f"largest peak memory, {count(bench.peak_rss_context_tokens)} tokens"
    shown = [("load", "load_s", bench.load_s, "s", 1.0)]
    shown += [(f"first token, prompt of {n}", f"ttft_ms.{n}", ms, "ms", 1.0) for n, ms in bench.ttft_ms.items()]
    shown += [("prefill", "", bench.prefill_tokens_per_s, "tokens/s", 1.0), (peak, "", bench.peak_rss_bytes, "MB", 1e6)]
    rows = [
        (label, with_unit(value, unit, scale), _noise(bench, key, scale))
        for label, key, value, unit, scale in shown
        if value is not None
    ]
    between = f"{CONFIDENCE:.0%} interval of {bench.rounds} rounds" if bench.rounds > 1 else "one round, no interval"
    return Table("Measured", ("figure", "median", between), rows)


def _noise(bench: Bench, key: str, scale: float) -> str:
    found = bench.noise.get(key) if bench.rounds > 1 else None
    return "" if found is None else interval(found.low, found.high, scale) + (" (noisy)" if found.noisy else "")


def _depths(bench: Bench) -> Table:
    floors = bench.memory_floor.by_depth_ms
    rows = []
    for depth, times in bench.tpot_ms.items():
        noise = bench.noise.get(f"tpot_ms.{depth}.p50")
        median = number(times.p50) + (" (noisy)" if noise is not None and noise.noisy else "")
        rest = (times.p90, times.p95, times.p99, floors.get(depth), bench.decode_tokens_per_s.get(depth))
        rows.append((depth, median, *map(number, rest)))
    headers = ("after tokens", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "memory floor ms", "tokens/s")
    return Table("Time per token", headers, rows, ())


def _texts(bench: Bench) -> Table:
    rows = [
        (
            kind,
            with_unit(100 * text.accepted / text.proposed if text.proposed else None, "%"),
            *map(number, (text.tokens_per_pass, text.tokens_per_s, text.plain_tokens_per_s)),
        )
        for kind, text in bench.texts.items()
    ]
    return Table("Prompt lookup", ("text", "accepted", "tokens per pass", "tokens/s", "tokens/s without"), rows)


def _sustained(bench: Bench) -> Table:
    if (run := bench.sustained) is None:
        return Table("", (), ())
    last = len(run.windows) - 1
    shown = sorted({0, last // 2, last}) if run.windows else []
    rows = [tuple(number(run.windows[place].get(key)) for key in _WINDOW) for place in shown]
    caption, lost = "", run.throttling_percent
    if lost is not None:
        word = "THROTTLED" if run.throttled else "Sustained"
        change = f"{abs(lost):.1f}% {'below' if lost > 0 else 'above'}"
        caption = f"{word}: the last of {len(run.windows)} windows is {change} the first."
    if (busy := run.other_cpu_cores or 0.0) > QUIET_CORES:
        caption += f" NOISY: other programs used {busy:.1f} cores meanwhile."
    return Table("Sustained run", tuple(_WINDOW.values()), rows, (), caption)


def _peers(bench: Bench) -> Table:
    measured = {name: one for name, one in bench.against.items() if one.status == "measured"}
    depths = dict.fromkeys(chain.from_iterable(one.generated_tokens_per_s for one in measured.values()))
    prompts = list(dict.fromkeys(chain.from_iterable(one.ttft_ms for one in measured.values())))[-1:]
    rows = [
        (
            name + ("" if one.steady else " (noisy)"),
            one.version or MISSING,
            *(number(one.generated_tokens_per_s.get(depth)) for depth in depths),
            *(number(one.ttft_ms.get(prompt)) for prompt in prompts),
            megabytes(one.peak_rss_bytes),
        )
        for name, one in measured.items()
    ]
    speeds = [*(f"generated tokens/s after {depth}" for depth in depths), *(f"first token of {x}, ms" for x in prompts)]
    notes = [
        f"ours / best peer, {name.replace('_', ' ').replace('.', ' after ')}: {number(one.ratio)} "
        f"({interval(one.low, one.high) or 'one round, no interval'}; {one.peer}; {one.better} is better)"
        for name, one in bench.against_ratios.items()
    ]
    absent = {name: one for name, one in bench.against.items() if one.status != "measured"}
    notes += [f"{name}: {one.status}" + (f": {one.install}" if one.install else "") for name, one in absent.items()]
    return Table("Other runtimes", ("runtime", "version", *speeds, "peak MB"), rows, (0, 1), "\n".join(notes))
