"""The comparison for people: one table, and the Markdown and HTML pages that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.chart import comparison_chart
from benchmarks.compare.runs import Run
from benchmarks.labels import MISSING
from benchmarks.report.markdown import escaped, markdown_table
from benchmarks.report.page import render_page
from benchmarks.report.text import Table

COLUMNS = (
    *("run", "method", "parameters (blocks)", "tokens", "per parameter", "epochs", "FLOPs", "bits/byte before"),
    *("bits/byte", "to teacher", "scratch needs tokens", "scratch needs FLOPs", "seconds"),
)
ON_SCREEN = ("run", "method", "parameters (blocks)", "tokens", "bits/byte", "to teacher", "scratch needs tokens")
LEGEND = (
    "Percentages in parentheses are of the teacher's: non-embedding parameters, tokens and training FLOPs. `per "
    "parameter` is tokens per parameter, `before` the quality after the cut and before any training."
)


def table_rows(comparison: Mapping[str, Any]) -> list[list[str]]:
    """The teacher's line and one for each row of comparison.json, as texts under `COLUMNS`."""
    return [_cells(comparison["teacher"], teacher=True), *(_cells(row, teacher=False) for row in comparison["rows"])]


def _cells(row: Mapping[str, Any], teacher: bool) -> list[str]:
    before = row["bits_per_byte_before_recovery"]

    def of_teacher(shown: str, share: float) -> str:
        return shown if teacher else f"{shown} ({percent(share)})"

    return [
        row["name"],
        "teacher" if teacher else row["method"],
        of_teacher(f"{row['parameters']:,}", row["share_of_teacher_block_parameters"]),
        of_teacher(short(row["tokens"]), row["share_of_teacher_tokens"]),
        f"{row['tokens_per_parameter']:.2f}",
        f"{row['epochs']:.2f}",
        of_teacher(f"{row['training_flops']:.2e}", row["share_of_teacher_flops"]),
        MISSING if before is None or teacher else f"{before:.4f}",
        f"{row['bits_per_byte']:.4f}",
        MISSING if teacher else f"{row['over_teacher_percent']:+.2f}%",
        _factor(row["scratch_tokens"]),
        _factor(row["scratch_flops"]),
        f"{row['seconds']:,.0f}",
    ]


def percent(share: float) -> str:
    """A share as a percentage, with a decimal below 10%: 66%, 4.3%."""
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def short(count: float) -> str:
    """A count in three digits: 950, 12.3k, 1.50M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:  # 999,999 is 1.00M
            value = count / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{letter}"
    return f"{count:,.0f}"


def _factor(cost: Mapping[str, Any] | None) -> str:
    if cost is None:
        return MISSING
    relation = "" if cost["relation"] == "=" else cost["relation"] + " "
    value = cost["factor"]
    return f"{relation}{value:.{1 if value >= 0.95 else 2}f}\u00d7"


def markdown(comparison: Mapping[str, Any]) -> str:
    """A heading, the table and its notes, for a README or a pull request."""
    table = Table("", COLUMNS, table_rows(comparison), texts=(0, 1))
    notes = [f"- {escaped(note)}" for note in comparison["notes"]]
    lines = [f"## {escaped(comparison['title'])}", "", *markdown_table(table, bold_first=True), LEGEND, "", *notes]
    return "\n".join(lines) + "\n"


def html_page(comparison: Mapping[str, Any], runs: Sequence[Run], teacher: Run) -> str:
    """One HTML page that loads nothing: the chart, the table and the notes."""
    return render_page(
        "compare.html",
        [comparison_chart(runs, teacher)],
        title=comparison["title"],
        columns=COLUMNS,
        rows=table_rows(comparison),
        missing=MISSING,
        legend=LEGEND.replace("`", ""),
        notes=comparison["notes"],
    )
