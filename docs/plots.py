"""Bar charts as SVG, from tables of results: inside the site's pages, and the picture of the README.

`python docs/plots.py` draws docs/smollm2.svg from benchmarks/results/quantization/smollm2_default.csv.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PICTURE, PICTURE_ROWS = DOCS / "smollm2.svg", "quantization/smollm2_default.csv"
PANELS = {
    "megabytes": "File, MB",
    "perplexity": "Perplexity",
    "decode_512_tokens_per_s": "Tokens per second",
}
_WIDTH, _ROW, _TOP, _GAP, _VALUE = 340, 40, 34, 40, 60  # of a panel, in pixels
_LETTER = 7.4  # the width of one, so that long labels are cut
_STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .value { text-anchor: end }
.bar { fill: #9aa4ad } .ours { fill: #00897b }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .bar { fill: #6e7681 } .ours { fill: #4db6ac } }
</style>"""

Row = Mapping[str, str]


def read_rows(path: str, conditions: Mapping[str, str]) -> list[Row]:
    """The rows of a file in benchmarks/results that have these values."""
    with (RESULTS / path).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[name] == value for name, value in conditions.items())]


def number(text: str) -> float | None:
    """The number that a cell begins with; None if there is none."""
    found = re.match(r"[-+]?[\d,]*\.?\d+", text)
    return None if found is None else float(found[0].replace(",", ""))


def panel(
    title: str, label: Sequence[str], column: str, rows: Sequence[Row], mark: str = "", wide: int = _WIDTH
) -> str:
    """A bar for each row that has a number, in the accent colour if its label contains `mark`; without the svg tag."""
    longest_label = int(wide / _LETTER)
    shown = [(" · ".join(filter(None, (row[name] for name in label))), row[column]) for row in rows]
    values = {name: value for name, text in shown if (value := number(text)) is not None}
    longest = max([abs(value) for value in values.values()] or [0]) or 1.0
    parts = [f'<text class="title" y="16">{escape(title)}</text>']
    for place, (name, value) in enumerate(values.items()):
        top, text = _TOP + place * _ROW, next(text for each, text in shown if each == name)
        short = name if len(name) <= longest_label else f"{name[: longest_label - 2]} …"
        parts.append(f'<text y="{top + 12}">{escape(short)}</text>')
        parts.append(f'<text class="value" x="{wide}" y="{top + 27}">{escape(text)}</text>')
        width = max(1.0, abs(value) / longest * (wide - _VALUE))
        colour = "ours" if mark in name else "bar"
        parts.append(f'<rect class="{colour}" y="{top + 18}" width="{width:.1f}" height="9" rx="3"/>')
    return "".join(parts)


def bars(path: str, *arguments: str) -> str:
    """Charts of some columns, side by side if there is room.

    Args:
        path: of a file in benchmarks/results.
        arguments: `label=COLUMN` for each part of the rows' names, `COLUMN=Title` for each chart, `COLUMN==value` to
            keep only such rows, and `mark=TEXT` to highlight the rows whose name contains it.
    """
    conditions = dict(item.split("==", 1) for item in arguments if "==" in item)
    given = [item.split("=", 1) for item in arguments if "==" not in item]
    label = [value for name, value in given if name == "label"]
    mark = next((value for name, value in given if name == "mark"), "")
    rows, charts = read_rows(path, conditions), []
    columns = [item for item in given if item[0] not in ("label", "mark")]
    wide = _WIDTH if len(columns) > 1 else 2 * _WIDTH
    for column, title in columns:
        drawn = panel(title, label, column, rows, mark, wide)
        height = _TOP + drawn.count("<rect") * _ROW
        charts.append(
            f'<svg class="plot" viewBox="0 0 {wide} {height}" role="img" aria-label="{escape(title)}">{drawn}</svg>'
        )
    return f'<div class="plots">{"".join(charts)}</div>'


def picture() -> str:
    """The README's: a real model before and after, a panel for each figure that the table has."""
    rows = read_rows(PICTURE_ROWS, {})
    panels = [(column, title) for column, title in PANELS.items() if any(row.get(column) for row in rows)]
    width = len(panels) * (_WIDTH + _GAP) - _GAP
    height = _TOP + len(rows) * _ROW
    drawn = [
        f'<g transform="translate({place * (_WIDTH + _GAP)})">{panel(title, ["format"], column, rows, "INT")}</g>'
        for place, (column, title) in enumerate(panels)
    ]
    names = "SmolLM2-135M-Instruct in float32, INT8 and INT4: " + ", ".join(title for _, title in panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{names}">'
    return "\n".join([head, _STYLE, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
