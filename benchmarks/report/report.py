"""The report about a line of stages: a self-contained HTML page, Markdown, or comma-separated values.

The page loads nothing: plotly's script is inside it, and its content security policy forbids the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole
from benchmarks.labels import LIMIT_LABELS, MISSING, bench_rows, number, verdict
from benchmarks.report.charts import COLOURS, COLOURS_ON_DARK, bench_command
from benchmarks.report.inputs import Inputs, Sample, StageSummary, collect, read_metrics
from benchmarks.report.markdown import csv_text, markdown, stage_row, stage_table, verdict_words
from benchmarks.report.sections import sections
from sportsllm.errors import UsageError

__all__ = [
    "LIMIT_LABELS",
    "MISSING",
    "Inputs",
    "Sample",
    "StageSummary",
    "collect",
    "number",
    "read_metrics",
    "render_page",
    "stage_row",
    "stage_table",
    "targets",
    "write_report",
]

SUFFIXES = {"html": (".html", ".htm"), "md": (".md", ".markdown"), "csv": (".csv",)}


def targets(out: Path, formats: str | None = None) -> dict[str, Path]:
    """Which files to write, by format.

    Args:
        out: the file; its suffix chooses the format where `formats` does not.
        formats: names with commas between, for example "html,md"; each gets its own suffix after `out`'s name.

    Raises:
        UsageError: an unknown format or suffix.
    """
    by_suffix = {suffix: name for name, suffixes in SUFFIXES.items() for suffix in suffixes}
    own = by_suffix.get(out.suffix.lower())
    known = ", ".join(SUFFIXES)
    if formats is None:
        if own is None:
            raise UsageError(f"--out {out}: the suffix names no format; end it in .html, .md or .csv, or give --format")
        return {own: out}
    names = [name.strip().lower() for name in formats.split(",") if name.strip()]
    unknown = sorted(set(names) - set(SUFFIXES))
    if unknown or not names:
        raise UsageError(f"--format {formats!r}: {', '.join(unknown) or 'nothing'} is no format; choose from {known}")
    stem = out.with_suffix("") if own else out
    return {name: out if name == own else stem.with_name(stem.name + SUFFIXES[name][0]) for name in names}


def write_report(files: Mapping[str, Path], title: str, inputs: Inputs) -> None:
    """Write the report in every format asked for; existing files are replaced, each in one move.

    Everything is rendered before anything is written.

    Args:
        files: paths by format, see `targets`.
        title: its heading.
        inputs: what `collect` read.

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
        write_whole(path, text)


def html_page(title: str, inputs: Inputs) -> str:
    """The page.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    bench = inputs.deciding
    judged = verdict(bench)
    shown = sections(inputs)
    figures = [plot for section in shown for plot in section.plots if "figure" in plot]
    return render_page(
        "report.html",
        charts=bool(figures),
        title=title,
        verdict=judged,
        verdict_words=verdict_words(judged) if judged else None,
        bench=bench,
        bench_command=bench_command(inputs.stages),
        bench_rows=bench_rows(bench),
        stages=[stage_row(stage) for stage in inputs.stages],
        sections=shown,
        figures=figures,
        samples=inputs.samples,
        skipped=inputs.skipped,
        palette=list(zip(COLOURS, COLOURS_ON_DARK, strict=True)),
    )


def render_page(template: str, *, charts: bool, **values: Any) -> str:
    """A self-contained HTML page from a template beside this file.

    Args:
        template: its file name.
        charts: whether the page needs the plotting library.
        values: what the template shows, beside `written` and `plotly`.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(get_plotlyjs() if charts else ""),
        **values,
    )
