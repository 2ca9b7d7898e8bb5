"""Charts as plotly figures in plain JSON, made without plotly, and the page that shows them.

Colors are names ("theme:ink", "theme:c0"), which the page replaces by those of its light, dark or printed form.
The page loads nothing: plotly's script is inside it, and its content security policy forbids the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Okabe and Ito's colors, distinct with any color vision (https://jfly.uni-koeln.de/color/).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
COLORS_ON_DARK = ("#5AAEE6", "#FF8A3D", "#2CC79A", "#E3A0C6", "#8CCBF2", "#F5BC42", "#B5BDC5")
"""The same hues, lighter, for a dark page."""

# Tick labels are drawn inside the chart's own margins; fixed ranges leave scrolling to the page.
_AXIS = {
    "gridcolor": "theme:rule",
    "linecolor": "theme:quiet",
    "zeroline": False,
    "fixedrange": True,
    "automargin": True,
    "title": {"standoff": 6},
}
TEMPLATE = {
    "layout": {
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "theme:ink"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "paper_bgcolor": "theme:page",
        "plot_bgcolor": "theme:page",
        "hovermode": "closest",
        "dragmode": False,
    }
}
"""Plotly's template of every page (https://plotly.com/python/templates/); a figure's own layout goes first."""
_HEIGHT = 320

Plot = dict[str, Any]
"""A part of a plotly figure: a trace, an axis, a layout, or the figure itself."""


@dataclass(frozen=True)
class Chart:
    """A figure with heading and caption."""

    identifier: str
    title: str
    caption: str
    figure: Plot


def chart(identifier: str, title: str, caption: str, data: list[Plot], x: Plot, y: Plot, **layout: Any) -> Chart:
    """A chart of plotly traces. The axes have their `title` as text; `layout` is anything else of plotly's layout."""
    axes = {"xaxis": {**x, "title": {"text": x["title"]}}, "yaxis": {**y, "title": {"text": y["title"]}}}
    return Chart(identifier, title, caption, {"data": data, "layout": {**axes, "height": _HEIGHT, **layout}})


def render_page(template: str, charts: Sequence[Chart], **values: Any) -> str:
    """A self-contained HTML page from a template in benchmarks/templates, its charts and other values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    folder = FileSystemLoader(Path(__file__).parents[1] / "templates")
    environment = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(get_plotlyjs() if charts else ""),
        figures=[{"id": chart.identifier, **chart.figure} for chart in charts],
        chart_template=TEMPLATE,
        palette=list(zip(COLORS, COLORS_ON_DARK, strict=True)),
        **values,
    )
