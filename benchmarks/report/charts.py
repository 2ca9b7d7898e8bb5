"""The report's charts as plotly figures in plain JSON: no plotly needed to describe them.

Colours are names ("theme:ink", "theme:c0"), which the page replaces by those of its light, dark or printed form.
"""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Sequence
from typing import Any

from benchmarks.labels import is_number
from benchmarks.report.inputs import StageSummary

# Okabe and Ito's colours, told apart with any colour vision (https://jfly.uni-koeln.de/color/).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
COLOURS_ON_DARK = ("#5AAEE6", "#FF8A3D", "#2CC79A", "#E3A0C6", "#8CCBF2", "#F5BC42", "#B5BDC5")
"""The same hues, lighter, for a dark page."""
_MOST_POINTS = 400

Plot = dict[str, Any]


def chart(identifier: str, title: str, caption: str, data: list[Plot], x: Plot, y: Plot, **layout: Any) -> Plot:
    """A figure with the look all of them share: {"id", "title", "caption", "figure": {"data", "layout"}}.

    Args:
        identifier: of the element on the page.
        title: its heading.
        caption: what the axes mean and what to look for.
        data: plotly traces.
        x: the axis, with its `title`.
        y: the axis, with its `title`.
        layout: anything else of plotly's layout.
    """
    # Tick labels are drawn inside the chart's own margins; fixed ranges leave scrolling to the page.
    axis = {
        "gridcolor": "theme:rule",
        "zeroline": False,
        "linecolor": "theme:quiet",
        "fixedrange": True,
        "automargin": True,
    }
    return {
        "id": identifier,
        "title": title,
        "caption": caption,
        "figure": {
            "data": data,
            "layout": {
                "xaxis": {**axis, **x, "title": {"text": x["title"], "standoff": 6}},
                "yaxis": {**axis, **y, "title": {"text": y["title"], "standoff": 6}},
                "height": 320,
                "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
                "font": {"family": "system-ui, sans-serif", "size": 12, "color": "theme:ink"},
                "paper_bgcolor": "rgba(0,0,0,0)",
                "plot_bgcolor": "rgba(0,0,0,0)",
                "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
                "showlegend": sum("name" in trace for trace in data) > 1,
                "hovermode": "closest",
                "dragmode": False,
                **layout,
            },
        },
    }


def absent(identifier: str, title: str, why: str, command: str | None) -> Plot:
    """What stands in a chart's place: what is missing, and the command that supplies it, None where no command can."""
    shown = None if command is None else f"sportsllm-compress {command}"
    return {"id": identifier, "title": title, "missing": why, "command": shown}


def bench_command(stages: Sequence[StageSummary], flags: str = "--device host") -> str:
    """The command that measures the last stage, or any where none was given."""
    last = stages[-1] if stages else None
    directory, name = (last.directory, last.name) if last else ("EXPORT", "EXPORT")
    return f"bench {shlex.quote(directory)} {flags} --out {shlex.quote(name + '.json')}"


def training_plots(stages: Sequence[StageSummary]) -> list[Plot]:
    """Loss and held-out quality over the tokens trained on, a line a stage."""
    curves = (
        (
            "loss",
            "Training loss",
            "nats per token",
            "Mean loss of the logged steps. Losses on text and against a teacher are not of one kind.",
        ),
        (
            "valid_bits_per_byte",
            "Held-out quality while training",
            "bits per byte",
            "Bits per byte of held-out text; lower is better.",
        ),
    )
    return [_curve(stages, *curve) for curve in curves]


def _curve(stages: Sequence[StageSummary], key: str, title: str, unit: str, caption: str) -> Plot:
    data: list[Plot] = []
    for index, stage in enumerate(stages):
        points = [
            (record["tokens"], record[key])
            for record in stage.metrics
            if is_number(record.get("tokens")) and is_number(record.get(key))
        ]
        if len(points) < 2:
            continue
        points = points[:: -(-len(points) // _MOST_POINTS)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) < 30 else "lines",
                "x": [tokens for tokens, _ in points],
                "y": [value for _, value in points],
                "name": html.escape(stage.name),
                "line": {"color": colour(index), "width": 2},
                "marker": {"size": 5},
                "hovertemplate": "%{x:,} tokens: %{y:.4f}",
            }
        )
    if not data:
        return absent(
            key.replace("_", "-"),
            title,
            "No given stage has logged it (metrics.jsonl); exports and measurements have no training.",
            "train --model tiny-1m --corpus CORPUS.jsonl --out runs/teacher",
        )
    return chart(key.replace("_", "-"), title, caption, data, {"title": "tokens"}, {"title": unit}, showlegend=True)


def line(xs: Sequence[float], ys: Sequence[float], name: str, paint: str, dash: str = "solid", **more: Any) -> Plot:
    """A trace of joined points. `name` may come from a user and is escaped."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(xs),
        "y": list(ys),
        "name": html.escape(name),
        "line": {"color": paint, "width": 2, "dash": dash},
        "marker": {"size": 7},
        **more,
    }


def limit_line(value: float, axis: str) -> Plot:
    """A shape: the largest value that a budget allows, across the whole plot."""
    across = "y" if axis == "x" else "x"
    ends = {f"{axis}0": value, f"{axis}1": value, f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1}
    return {"type": "line", **ends, "line": {"color": "theme:bad", "width": 1.5, "dash": "dash"}}


def log_axis(title: str, low: float, high: float) -> Plot:
    """A logarithmic axis from a little below `low` to a little above `high`, with its ticks written out.

    Plotly's own ticks on such an axis are bare digits.
    """
    factors: tuple[float, ...] = (1,) if high / low > 2_000 else (1, 2, 5) if high / low > 20 else (1, 1.5, 2, 3, 5, 7)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return {
        "title": f"{title} (log)",
        "type": "log",
        "range": [math.log10(low) - 0.12, math.log10(high) + 0.12],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:,.6g}" for tick in ticks],
    }


def colour(index: int) -> str:
    """The theme's name of a line's colour."""
    return f"theme:c{index % len(COLOURS)}"
