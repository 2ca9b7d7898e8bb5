"""The report about a lineage of stages: a self-contained HTML page, Markdown, or comma-separated values.

The page loads nothing: plotly's script is inside it, and its content security policy forbids the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.report.changes import change_table
from benchmarks.report.charts import Chart, placeholder_chart
from benchmarks.report.inputs import Inputs, bench_command
from benchmarks.report.markdown import STAGE_HEADERS, csv_text, markdown, stage_cells
from benchmarks.report.page import render_page
from benchmarks.report.roofline import roofline_chart
from benchmarks.report.scores import text_note
from benchmarks.report.search_results import fit_tables
from benchmarks.report.speed_memory import memory_chart, speed_chart
from benchmarks.report.text import Table, measurement_tables, summarize_budget
from benchmarks.report.trade_off import trade_off_charts
from benchmarks.report.training import training_charts
from sportsllm.errors import UsageError
from sportsllm.files import atomic_write_text

_SUFFIXES = {"html": (".html", ".htm"), "md": (".md", ".markdown"), "csv": (".csv",)}


def targets(out: Path, formats: str | None = None) -> dict[str, Path]:
    """Which files to write, by format: that of `out`'s suffix, or `formats`, names with commas between.

    Raises:
        UsageError: an unknown format or suffix.
    """
    own = next((name for name, suffixes in _SUFFIXES.items() if out.suffix.lower() in suffixes), None)
    if formats is None:
        if own is None:
            raise UsageError(f"--out {out}: the suffix names no format; end it in .html, .md or .csv, or give --format")
        return {own: out}
    names = [name.strip().lower() for name in formats.split(",") if name.strip()]
    unknown = ", ".join(sorted(set(names) - set(_SUFFIXES)))
    if unknown or not names:
        known = ", ".join(_SUFFIXES)
        raise UsageError(f"--format {formats!r}: unknown format {unknown or '(none)'}; choose from {known}")
    stem = out.with_suffix("") if own else out
    return {name: out if name == own else stem.with_name(stem.name + _SUFFIXES[name][0]) for name in names}


def write_report(files: Mapping[str, Path], title: str, inputs: Inputs) -> None:
    """Render the report in each format, then replace the files, each in one move.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed, and HTML was asked for.
    """
    render = {
        "html": lambda: html_page(title, inputs),
        "md": lambda: markdown(title, inputs),
        "csv": lambda: csv_text(inputs),
    }
    texts = {path: render[name]() for name, path in files.items()}
    for path, text in texts.items():
        atomic_write_text(path, text)


class Section(NamedTuple):
    """One heading of the page."""

    identifier: str
    title: str
    charts: list[Chart]
    tables: list[Table]


def page_sections(inputs: Inputs) -> list[Section]:
    """The sections between the stages' table and the samples."""
    stages, bench, changes = inputs.stages, inputs.deciding, change_table(inputs)
    candidates = fit_tables(inputs.fits, len(stages) + 1)
    speed = [speed_chart(stages, bench), roofline_chart(stages, bench)]
    missing = "No two of the given stages coordinate_descent from one another, or the stages between them have moved."
    unknown = placeholder_chart("changes-none", "", missing, "report TEACHER PRUNED QUANTIZED EXPORT BENCH.json")
    return [
        Section("trade-off", "Quality, size and speed", trade_off_charts(inputs), candidates),
        Section("changes", "What each stage changed", [] if changes else [unknown], [changes] if changes else []),
        Section("speed", "Speed", speed, measurement_tables(bench)),
        Section("memory", "Memory", [memory_chart(stages, bench)], []),
        Section("training", "Training", training_charts(stages), []),
    ]


def html_page(title: str, inputs: Inputs) -> str:
    """The page."""
    sections = page_sections(inputs)
    return render_page(
        "report.html",
        [chart for section in sections for chart in section.charts],
        title=title,
        budget=summarize_budget(inputs.deciding),
        bench=inputs.deciding,
        bench_command=bench_command(inputs.stages),
        stages=inputs.stages,
        stage_headers=STAGE_HEADERS[3:],
        stage_cells=stage_cells,
        text_note=text_note(inputs.stages),
        sections=sections,
        samples=inputs.samples,
        skipped=inputs.skipped,
    )
