"""The result of a search, for fit.json and for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks.devices.verdict import known
from benchmarks.labels import LIMITS, MISSING, Table, band, number
from benchmarks.predict.latency import limit_band
from benchmarks.reporting.bench_tables import verdict_line
from benchmarks.reporting.measured import as_budget
from benchmarks.search.candidates import WHOLE, Candidate
from benchmarks.search.rounds import EQUAL_PERCENT, Search

_SHOWN = 8
_FIGURES = ("file_mb", "tpot_p50_ms")


def summary(search: Search, chosen: Candidate, teacher_bits_per_byte: float | None = None) -> dict[str, Any]:
    """The search's part of the result: every candidate, the tried ones first.

    If measurements decide, predictions are corrected by them. Losses are percent of the teacher's bits per byte, on
    the selection split.
    """
    considered = {one.name: one for one in [*search.ranking(), chosen, *search.found.values()]}
    too_large = search.tried.keys() - search.small_enough().keys()
    records = []
    for candidate in considered.values():
        timed, tried = search.timed.get(candidate.name), search.tried.get(candidate.name)
        expected = candidate.predicted if timed else known(search.figures(candidate))  # as it was held to the limits
        bits = teacher_bits_per_byte * (1 + tried.losses.rounded / 100) if tried and teacher_bits_per_byte else None
        records.append(
            replace(candidate, predicted=expected).record()
            | {
                "tried_tokens": tried and tried.tokens,
                "recovered_loss_percent": tried and round(tried.losses.recovered, 3),
                "rounded_loss_percent": tried and round(tried.losses.rounded, 3),
                "expected_loss_percent": tried and round(search.expected(candidate), 3),
                "interval_percent": tried and tried.losses.interval,
                "measured": timed,
                "busy": candidate.name in search.busy,
                "bits_per_byte": bits,
                "within": candidate.name not in too_large and not search.missed(candidate, sure=False),
                "sure": not search.missed(candidate, sure=True),
            }
        )
    return {
        "target": search.device.name,
        "decided_by": "measurement" if search.decides else "prediction",
        "limits": search.device.limits.given(),
        "candidates": records,
        "band": limit_band(search.device),
        "uncertain": bool(search.missed(chosen, sure=True)),
        "chosen": chosen.name,
        "whole_teacher": chosen.way == WHOLE,
    }


def print_fit(console: Console, result: Mapping[str, Any]) -> None:
    """Print the best candidates, or all in a dry run, the choice, and the finished model's loss and verdict."""
    chosen = next(one for one in result["candidates"] if one["name"] == result["chosen"])
    others = [one for one in result["candidates"] if one is not chosen]
    titles = [LIMITS[name].title for name in _FIGURES]
    headers = ("candidate", "cut", "weights", *titles, "tried", "at the end", "")
    rows = [_cells(one, result) for one in [chosen, *others][: None if result.get("dry_run") else _SHOWN]]
    title = f"{result['target']}: {len(result['candidates'])} candidates, decided by {result['decided_by']}"
    Table(title, headers, rows, (0, 1, len(headers) - 1)).print(console)
    if more := len(others) + 1 - len(rows):
        console.print(f"{more} more in fit.json")
    console.print(_choice(result, chosen))
    if bench := result.get("bench"):
        console.print(_foretold(chosen, bench, result))
        console.print(verdict_line(as_budget(bench["budget"])), style="bold")
        console.print(f"{result['out']}: made by {result['line']}")


def _cells(one: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    cells = [one["name"], one["way"], f"{one['parameters']:,}"]
    for name in _FIGURES:
        predicted, measured = one["predicted"].get(name), (one["measured"] or {}).get(name)
        if measured is not None:
            cells.append(number(measured))
        elif predicted is not None:
            factor = result["band"].get(name, 1.0)
            cells.append(band(predicted / factor, predicted * factor))
        else:
            cells.append(MISSING)
    loss, expected, interval = (one[f"{name}_percent"] for name in ("rounded_loss", "expected_loss", "interval"))
    half = f" ±{max(loss - interval[0], interval[1] - loss):.1f}" if interval else ""
    cells.append(MISSING if loss is None else f"{loss:+.1f}%{half}")
    cells.append(MISSING if expected is None else f"{expected:+.1f}%")
    notes = [
        "chosen" if one["name"] == result["chosen"] and not result.get("dry_run") else "",
        "outside" if not one["within"] else "" if one["sure"] else "uncertain",
        "busy machine" if one["busy"] else "",
        f"not {', '.join(one['closed_to'])}" if one["closed_to"] else "",
    ]
    return [*cells, ", ".join(note for note in notes if note)]


def _choice(result: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Why the winner was chosen, and not the next best by the search's ranking."""
    name, others = chosen["name"], result["candidates"][result["candidates"].index(chosen) + 1 :]
    if result.get("dry_run"):
        return f"Nothing was tried. A search would try {'all of them' if others else 'it'}, {name} first."
    cut = "; nothing is cut" if result["whole_teacher"] else ""
    bound = f"; a larger one misses {', '.join(chosen['bound_by'])}" if chosen["bound_by"] else ""
    rivals = [one for one in others if one["tried_tokens"] == chosen["tried_tokens"] and one["within"]]
    if gave_up := result.get("gave_up"):
        missed = "; ".join(f"{other} missed {', '.join(limits)}" for other, limits in gave_up.items())
        failed = result["bench"]["budget"]["verdict"] == "fail"
        why = "it misses the budget by least" if failed else "the best finished model within the budget"
        return f"Chosen: {name}{cut}: {why} ({missed})."
    if not rivals:
        return f"Chosen: {name}{cut}{bound}: nothing else within the budget was tried as long."
    best = rivals[0]
    behind = best["expected_loss_percent"] - chosen["expected_loss_percent"]
    if behind > EQUAL_PERCENT:
        why = f"expected to lose {behind:.1f} points more"
    else:
        opened = f", and opens in {', '.join(best['closed_to'])} too" if best["closed_to"] else ""
        why = f"equal within {EQUAL_PERCENT:g} points; the chosen one is faster or smaller{opened}"
    return f"Chosen: {name}{cut}{bound}. Next best: {best['name']}, {why}."


def _foretold(chosen: Mapping[str, Any], bench: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The winner's loss after its trials and as finished, each with its interval."""
    loss, documents = bench["quality_loss_percent"], result["documents"]
    found = "not measured" if loss is None else f"measured {loss:+.1f}%{_interval(bench['quality_interval_percent'])}"
    tried = ""
    if chosen["expected_loss_percent"] is not None:
        tried = (
            f"{chosen['rounded_loss_percent']:+.1f}%{_interval(chosen['interval_percent'])} after trials on "
            f"{documents['trials']} documents, from which {chosen['expected_loss_percent']:+.1f}% is expected; "
        )
    return (
        f"Loss of bits per byte against the teacher: {tried}{found} on {documents['final']} others that no choice used"
    )


def _interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return " (too few documents for an interval)"
    return f" ({interval[0]:+.1f} to {interval[1]:+.1f}%)"
