"""What `fit` prints: what was chosen, what it costs, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.labels import LIMITS, MISSING, band, number
from benchmarks.reporting.bench_tables import verdict_line
from benchmarks.reporting.measured import as_budget
from benchmarks.search.candidates import EQUAL_PERCENT
from sportsllm.console import table

_CANDIDATES_SHOWN = 8
_CANDIDATE_FIGURES = ("file_mb", "tpot_p50_ms")


def print_fit(console: Console, result: Mapping[str, Any]) -> None:
    """What was chosen, what it costs, what was next best and why not: at most twenty lines."""
    console.print(
        f"{result['target']}: {result['inside']:,} of {result['considered']:,} candidates inside the budget "
        f"(decided by {result['decided_by']}"
        + ("; their limits lie inside the band of predictions)" if result["uncertain"] else ")"),
        markup=False,
    )
    cuts = [
        f"{LIMITS[name].label.lower()} {count['misses']:,} ({count['alone']:,})"
        for name, count in result["cut_by_limit"].items()
        if count["misses"]
    ]
    if cuts:
        console.print(f"Predicted to miss a limit (and no other): {', '.join(cuts)}", markup=False)
    chosen = next(one for one in result["candidates"] if one["name"] == result["chosen"])
    others = [one for one in result["candidates"] if one is not chosen]
    others.sort(key=lambda one: (not one["within"], one["tried_tokens"] is None, one["expected_loss_percent"]))
    titles = [LIMITS[name].title for name in _CANDIDATE_FIGURES]
    headers = ("candidate", "weights", *titles, "estimate", "tried", "at the end", "")
    rows = [_candidate(one, result) for one in [chosen, *others][:_CANDIDATES_SHOWN]]
    console.print(table(headers, rows, (0, len(headers) - 1)))
    console.print(_choice(result, chosen, others), markup=False)
    if bench := result.get("bench"):
        console.print(_foretold(chosen, bench, result), markup=False)
        console.print(verdict_line(as_budget(bench["budget"])), markup=False, style="bold")
        console.print(f"{result['out']}: made by {result['line']}", markup=False)


def _candidate(one: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    cells = [one["name"], f"{one['parameters']:,}"]
    for name in _CANDIDATE_FIGURES:
        predicted, measured = one["predicted"].get(name), (one["measured"] or {}).get(name)
        if measured is not None:
            cells.append(number(measured))
        elif predicted is not None:
            factor = result["band"].get(name, 1.0)
            cells.append(band(predicted / factor, predicted * factor))
        else:
            cells.append(MISSING)
    rounded = one["rounded_loss_percent"]
    tried = MISSING if rounded is None else f"{rounded:+.1f}%"
    cells += [f"{one['estimated_loss_percent']:+.1f}%", tried, f"{one['expected_loss_percent']:+.1f}%"]
    notes = [
        "chosen" if one["name"] == result["chosen"] else "",
        "outside" if not one["within"] else "" if one["sure"] else "uncertain",
        "busy machine" if one["busy"] else "",
        f"not {', '.join(one['closed_to'])}" if one["closed_to"] else "",
    ]
    return [*cells, ", ".join(note for note in notes if note)]


def _choice(result: Mapping[str, Any], chosen: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Why the winner won, and what was next best and why not."""
    name = chosen["name"]
    if result.get("dry_run"):
        return f"{name} would be tried first: the least estimated loss inside the budget."
    cut = "; nothing is cut" if result["whole_teacher"] else ""
    rivals = [one for one in others if one["tried_tokens"] is not None and one["within"]]
    if gave_up := result.get("gave_up"):
        missed = "; ".join(f"{other} missed {', '.join(limits)}" for other, limits in gave_up.items())
        failed = result["bench"]["budget"]["verdict"] == "fail"
        why = "it misses the budget by least" if failed else "the best that keeps to the budget once finished"
        return f"Chosen: {name}{cut}: {why} ({missed})."
    if not rivals:
        return f"Chosen: {name}{cut}: nothing else inside the budget could be expected to be better."
    best = min(rivals, key=lambda one: one["expected_loss_percent"])
    behind = best["expected_loss_percent"] - chosen["expected_loss_percent"]
    if behind > EQUAL_PERCENT:
        why = f"expected to lose {behind:.1f} points more"
    else:
        opened = f", and opens in {', '.join(best['closed_to'])} too" if best["closed_to"] else ""
        why = f"as good within {EQUAL_PERCENT:g} points; the chosen one is faster or smaller{opened}"
    return f"Chosen: {name}{cut}. Next best: {best['name']}, {why}."


def _foretold(chosen: Mapping[str, Any], bench: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The loss as estimated before any trial of the winner and as measured at the end."""
    factor, estimate = chosen["estimate_factor"], chosen["estimated_loss_percent"]
    error = f" (a factor of {factor:.1f} either way)" if factor > 1 else ""
    loss = bench["quality_loss_percent"]
    found = "not measured" if loss is None else f"measured {loss:+.1f}%{_interval(bench['quality_interval_percent'])}"
    documents = result["documents"]
    return (
        f"Loss of bits per byte against the teacher: estimated {estimate:+.1f}%{error}, "
        f"{chosen['expected_loss_percent']:+.1f}% after trials on {documents['trials']} documents"
        f"{_interval(chosen['interval_percent'])}, {found} on {documents['final']} others that no choice looked at"
    )


def _interval(interval: Sequence[float] | None) -> str:
    """How far a loss on other text may differ."""
    if interval is None:
        return " (too few documents for an interval)"
    return f" ({interval[0]:+.1f} to {interval[1]:+.1f}%)"
