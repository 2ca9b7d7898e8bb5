"""HTML pages and notes from the templates in benchmarks/templates."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.labels import is_number, number, with_unit
from benchmarks.report.charts import COLORS, COLORS_ON_DARK, TEMPLATE, Chart
from benchmarks.report.text import get_nested

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, charts: list[Chart], **values: Any) -> str:
    """A self-contained HTML page from a template's name, its charts and other values; with charts, plotly is inside.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed.
    """
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    figures = [{"id": chart.identifier, **chart.figure} for chart in charts if chart.figure is not None]
    return _environment().get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(get_plotlyjs() if figures else ""),
        figures=figures,
        chart_template=TEMPLATE,
        palette=list(zip(COLORS, COLORS_ON_DARK, strict=True)),
        **values,
    )  # fmt: skip


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"with_unit": with_unit, "number": number, "is_number": is_number, "get_nested": get_nested}
    return environment
