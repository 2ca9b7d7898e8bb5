"""Figures as text: rounding, units, bands and limits; and tables for console, Markdown and HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from rich.console import Console

BUDGET_DEPTH = 512
"""Tokens before the one whose time a budget limits."""
MISSING = "\u2013"


@dataclass(frozen=True)
class Limit:
    """One limit of a budget.

    Attributes:
        unit: of its values.
        label: its name in a sentence or a row.
        title: its name with unit in the head of a column.
        note: conditions of the measurement.
    """

    unit: str
    label: str
    title: str
    note: str


LIMITS = {
    "file_mb": Limit("MB", "File size", "file MB", "graph and weights"),
    "peak_memory_mb": Limit("MB", "Peak memory", "memory MB", "of the process, 1,024 tokens of context"),
    "ttft_ms": Limit("ms", "Time to first token", "TTFT ms", "prompt of 512 tokens"),
    "tpot_p50_ms": Limit("ms", "Median time per token", "TPOT p50 ms", f"after {BUDGET_DEPTH} tokens"),
    "tpot_p95_ms": Limit("ms", "95th-percentile time per token", "TPOT p95 ms", f"after {BUDGET_DEPTH} tokens"),
    "quality_loss_percent": Limit("%", "Quality loss", "loss %", "bits per byte over the fp32 teacher's"),
    "accuracy_loss_points": Limit("points", "Accuracy loss", "accuracy loss", "of tasks, below the fp32 teacher's"),
    "kl_nats": Limit("nats", "Mean KL", "KL nats", "from the fp32 teacher, per token"),
    "top1_changed_percent": Limit("%", "Changed top tokens", "top-1 changed %", "against the fp32 teacher's"),
}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a record holds a finite number; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float | None, scale: float = 1.0) -> str:
    """`value` / `scale` in three digits, or all before the point: 0.0123, 1.23, 12,345; a dash without a number."""
    if not is_number(value):
        return MISSING
    value /= scale
    if abs(value) < 1e-6:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def with_unit(value: float | None, unit: str, scale: float = 1.0) -> str:
    """`number` and its unit."""
    text = number(value, scale)
    return text if text == MISSING else f"{text} {unit}"


def megabytes(count: float | None) -> str:
    """Bytes in MB (10^6)."""
    return number(count, 1e6)


def count(value: int | None) -> str:
    """A whole number with separators, or a dash."""
    return MISSING if value is None else f"{value:,}"


def bits(value: float | None) -> str:
    """Bits per byte with four decimals: models scored on the same text differ little."""
    return f"{value:.4f}" if is_number(value) else MISSING


def interval(low: float | None, high: float | None, scale: float = 1.0) -> str:
    """The ends of an interval; empty without one."""
    return "" if low is None or high is None else f"{number(low, scale)} to {number(high, scale)}"


def band(low: float, high: float) -> str:
    """The two ends of a prediction, such as 0.41-0.62; one number if they are equal."""
    ends = [f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


def reliability_line(efficiency: Mapping[str, Any]) -> str:
    """What the bands mean, from `benchmarks.predict.latency.reliability`, in one or two sentences."""
    factors = efficiency["band"]
    words = {"tpot": "time per token", "ttft": "first token", "memory": "memory"}
    parts = ", ".join(f"{factors[name]:g} ({meaning})" for name, meaning in words.items())
    meaning = "hold 90% of measured figures" if factors["measured"] else "are estimates"
    advice = "" if efficiency["own"] else " `devices calibrate` measures those of a machine."
    return (
        f"Bands {meaning}: a factor, either way, of {parts}; {factors['source']}. "
        f"Coefficients: {efficiency['source']}, {efficiency['date']}, {efficiency['kind']}.{advice}"
    )


@dataclass(frozen=True)
class Table:
    """Rows of text under headers; columns in `texts` are words, others numbers. templates/table.html renders it too."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = (0,)
    caption: str = ""

    def print(self, console: Console) -> None:
        """Render on the console."""
        from sportsllm.console import table

        if self.title:
            console.print(f"\n{self.title}", style="bold")
        if self.rows:
            console.print(table(self.headers, self.rows, self.texts))
        if self.caption:
            console.print(self.caption, soft_wrap=False)  # as wide as the table

    def markdown(self) -> list[str]:
        """Render as lines of Markdown under a heading, with an empty line at the end."""
        rule = [" --- " if index in self.texts else " ---: " for index in range(len(self.headers))]
        rows = [[escaped(cell) for cell in row] for row in (self.headers, *self.rows)]
        head, *body = (f"| {' | '.join(cells)} |" for cells in rows)
        lines = [f"### {escaped(self.title)}", "", head, f"|{'|'.join(rule)}|", *body, ""]
        return [*lines, escaped(self.caption), ""] if self.caption else lines


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Rows as comma-separated values below the names of the columns; a cell without a value is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file of comma-separated values; none if there is no file."""
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))) if path.exists() else []


def escaped(text: str) -> str:
    """Text that Markdown shows as it is; names come from directories and may hold anything."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + letter if letter in "\\`*_|[]#~" else letter for letter in text)
