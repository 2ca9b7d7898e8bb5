"""What `fit` prints for people: what each limit cut away, what was tried, and why the winner won."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks.labels import LIMIT_LABELS, MISSING, number
from benchmarks.measure.tables import table, verdict_line
from benchmarks.search.candidates import EQUAL_PERCENT

_SHOWN = 12
_FIGURES = ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms")


def print_fit(console: Console, result: Mapping[str, Any]) -> None:
    """The search, the finalists and the verdict."""
    console.print(
        f"{result['device']}: {result['inside']:,} of {result['considered']:,} candidates inside the budget "
        f"(decided by {result['decided_by']})",
        markup=False,
    )
    cuts = [
        (LIMIT_LABELS[name], f"{count['misses']:,}", f"{count['alone']:,}")
        for name, count in result["cut_by_limit"].items()
        if count["misses"]
    ]
    if cuts:
        console.print(table(("limit", "cuts away by prediction", "of them it alone"), cuts, (0,)))
    headers = ("candidate", "parameters", "est. loss %", "bits/byte", *_columns(), "inside")
    rows = [_row(one, one["name"] == result["chosen"]) for one in _interesting(result)]
    console.print(table(headers, rows, (0, len(headers) - 1)))
    console.print(_reason(result), markup=False)
    bench = result.get("bench")
    if bench:
        console.print(verdict_line(bench["budget"]), markup=False, style="bold")
        console.print(f"{result['out']}: made by {result['line']}", markup=False)


def _interesting(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that were tried first, by quality; then the best of the rest."""
    tried = [one for one in result["candidates"] if one["measured"] or one["bits_per_byte"] is not None]
    tried.sort(key=lambda one: (one["bits_per_byte"] is None, one["bits_per_byte"] or 0.0))
    others = [one for one in result["candidates"] if one not in tried]
    return [*tried, *others][:_SHOWN]


def _columns() -> list[str]:
    units = {"file_mb": "MB", "peak_memory_mb": "MB", "ttft_ms": "ms", "tpot_p50_ms": "ms"}
    short = {"file_mb": "file", "peak_memory_mb": "memory", "ttft_ms": "TTFT", "tpot_p50_ms": "TPOT"}
    return [f"{short[name]} {units[name]}" for name in _FIGURES]


def _row(one: Mapping[str, Any], chosen: bool) -> list[str]:
    quality = MISSING if one["bits_per_byte"] is None else f"{one['bits_per_byte']:.4f}"
    cells = [one["name"], f"{one['parameters']:,}", number(one["estimated_loss_percent"])]
    cells.append(quality)
    for name in _FIGURES:
        predicted, measured = one["predicted"].get(name), (one["measured"] or {}).get(name)
        known = predicted if measured is None else measured
        cells.append(MISSING if known is None else f"{number(known)} {'p' if measured is None else 'm'}")
    return [*cells, "chosen" if chosen else "yes" if one["within"] else "no"]


def _reason(result: Mapping[str, Any]) -> str:
    """Why the winner won, in a sentence. p is predicted for the device, m measured on this machine."""
    if result["chosen"] is None:
        return "Nothing fits."
    compared = [one for one in result["candidates"] if one["bits_per_byte"] is not None]
    legend = "p: predicted for the device, m: measured on this machine with random weights."
    if result.get("dry_run"):
        return f"{result['chosen']} would be tried first: the least estimated loss inside the budget. {legend}"
    whole = " The whole teacher fits: nothing is cut." if result["whole_teacher"] else ""
    if len(compared) < 2:
        return f"{result['chosen']} was the only finalist inside the budget.{whole} {legend}"
    best = min(compared, key=lambda one: one["bits_per_byte"])
    if others := ", ".join(result.get("gave_up") or ()):
        if result["bench"]["budget"]["passed"]:
            why = f"is the best finalist that keeps to the budget once finished ({others} did not)"
        else:
            why = f"misses the budget once finished, as {others} did"
    elif best["name"] == result["chosen"]:
        why = f"had the best quality of {len(compared)} finalists after a brief recovery"
    else:
        where = "as measured" if result["decided_by"] == "measurement" else "as predicted for the device"
        why = (
            f"is as good as the best of {len(compared)} finalists after a brief recovery ({best['name']}, "
            f"within {EQUAL_PERCENT:g}%), and the fastest of those {where}"
        )
    return f"{result['chosen']} {why}.{whole} {legend}"
