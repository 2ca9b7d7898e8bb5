"""What `bench` prints for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.report import LIMIT_LABELS, MISSING, number
from benchmarks.tables import reliability_line

OUTCOMES = {True: "passed", False: "missed", None: "not measured"}


def print_bench(console: Console, result: Mapping[str, Any]) -> None:
    """Figures with their noise, the decode table and the budget."""
    console.print(
        f"{result['directory']}: {result['parameters']:,} parameters, {number(result['file_bytes'] / 1e6)} MB, "
        f"{result['runtime']}, {result['threads']} threads, {result['rounds']} fresh processes",
        markup=False,
    )
    console.print(table(("figure", "median", "unit", "lowest to highest round"), _figures(result), (0, 2)))
    if result["tpot_ms"]:
        headers = ("after tokens", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "tokens/s", "memory floor ms")
        console.print(table(headers, _depths(result), ()))
    else:
        console.print(f"No decoding depth fits the context of {result['context_length']} tokens.")
    if not result["clean"]:
        console.print(
            "noisy: the rounds differ by more than 5% or other programs were running "
            f"(they used {result['other_cpu_cores']:.1f} cores); repeat it on a quiet machine",
            style="yellow",
        )
    print_budget(console, result["budget"])


def print_budget(console: Console, budget: Mapping[str, Any]) -> None:
    """Each limit with the figure that decides it, what was measured here, and the verdict in one line."""
    rows = []
    for limit in budget["limits"]:
        here = budget["measured_here"][limit["name"]]
        rows.append(
            (
                LIMIT_LABELS[limit["name"]],
                _value(limit["value"], limit["unit"]),
                _value(limit["limit"], limit["unit"]),
                OUTCOMES[limit["passed"]],
                limit["source"] or MISSING,
                _value(here, limit["unit"]),
            )
        )
    headers = ("budget", "value", "allowed", "outcome", "from", "measured here")
    console.print(table(headers, rows, (0, 3, 4)))
    console.print(verdict_line(budget), markup=False, style="bold")
    if budget["decided_by"] == "prediction":
        console.print(reliability_line(budget["efficiency"]), markup=False)


def verdict_line(budget: Mapping[str, Any]) -> str:
    """The verdict in one line: which device, what was missed, what is not known."""
    missed = [_words(limit) for limit in budget["limits"] if limit["passed"] is False]
    unknown = [LIMIT_LABELS[limit["name"]].lower() for limit in budget["limits"] if limit["passed"] is None]
    text = f"{budget['device']}: " + (f"misses the budget: {', '.join(missed)}" if missed else "no limit missed")
    if unknown:
        text += f"; not measured: {', '.join(unknown)}"
    if budget["decided_by"] == "prediction":
        text += " (speed and memory are predicted: this machine is not the device)"
    return text


def _words(limit: Mapping[str, Any]) -> str:
    label = LIMIT_LABELS[limit["name"]].lower()
    return f"{label} {number(limit['value'])} of {number(limit['limit'])} {limit['unit']}"


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    shown = [("load", "load_s", "s", 1.0)]
    shown += [(f"first token, prompt of {prompt}", f"ttft_ms.{prompt}", "ms", 1.0) for prompt in result["ttft_ms"]]
    shown.append((f"peak memory, {result['peak_rss_context_tokens']:,} tokens", "peak_rss_bytes", "MB", 1e6))
    rows = []
    for label, name, unit, scale in shown:
        key, _, part = name.partition(".")
        value = result[key][part] if part else result[key]
        interval = result["noise"][name]
        between = f"{number(interval['low'] / scale)} to {number(interval['high'] / scale)}"
        rows.append((label, number(value / scale), unit, between + (" (noisy)" if interval["noisy"] else "")))
    if result["prefill_tokens_per_s"] is not None:
        rows.append(("prefill", number(result["prefill_tokens_per_s"]), "tokens/s", ""))
    return rows


def _depths(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for depth, times in result["tpot_ms"].items():
        mark = " (noisy)" if f"tpot_ms.{depth}.p50" in result["noisy"] else ""
        cells = [number(times[name]) for name in ("p90", "p95", "p99")]
        floor = result["memory_floor"]["by_depth_ms"][depth]
        speed = number(result["decode_tokens_per_s"][depth])
        rows.append((depth, number(times["p50"]) + mark, *cells, speed, number(floor)))
    return rows


def _value(value: float | None, unit: str) -> str:
    return MISSING if value is None else f"{number(value)} {unit}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int]) -> Table:
    """A plain table; the columns in `texts` are text, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
