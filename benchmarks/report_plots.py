"""The report's charts as plotly figures in plain JSON: no plotly needed to describe them."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.report import StageSummary

# Okabe and Ito's colours, told apart with any colour vision (https://jfly.uni-koeln.de/color/).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
_GRID = "#e3e6ea"
_LIMIT = "#a33"
_MOST_POINTS = 400

Plot = dict[str, Any]


def plots(stages: Sequence[StageSummary], bench: Mapping[str, Any] | None) -> list[Plot]:
    """Every chart that the data allows: {"id", "title", "caption", "figure": {"data", "layout"}}."""
    candidates = [
        _quality_size(stages, bench),
        _curve(stages, "loss", "Training loss", "nats per token", "Mean loss of the logged steps."),
        _curve(
            stages,
            "valid_bits_per_byte",
            "Held-out quality while training",
            "bits per byte",
            "Bits per byte of held-out text; lower is better.",
        ),
        _speed_depth(bench),
        _step_times(bench),
    ]
    return [plot for plot in candidates if plot is not None]


def _plot(name: str, title: str, caption: str, data: list[Plot], x: Plot, y: Plot, **layout: Any) -> Plot:
    # Tick labels are drawn inside the chart's own margins; fixed ranges leave scrolling to the page.
    axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": "#999", "fixedrange": True, "automargin": True}
    return {
        "id": name,
        "title": title,
        "caption": caption,
        "figure": {
            "data": data,
            "layout": {
                "xaxis": {**axis, **x, "title": {"text": x["title"], "standoff": 6}},
                "yaxis": {**axis, **y, "title": {"text": y["title"], "standoff": 6}},
                "height": 320,
                "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
                "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222"},
                "paper_bgcolor": "#fff",
                "plot_bgcolor": "#fff",
                "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
                "showlegend": sum("name" in trace for trace in data) > 1,
                "hovermode": "closest",
                "dragmode": False,
                **layout,
            },
        },
    }


def _quality_size(stages: Sequence[StageSummary], bench: Mapping[str, Any] | None) -> Plot | None:
    known = [stage for stage in stages if stage.bits_per_byte is not None and stage.size_bytes]
    if len(known) < 2:
        return None
    sizes = [(stage.size_bytes or 0) / 1e6 for stage in known]
    qualities = [stage.bits_per_byte or 0.0 for stage in known]
    data: list[Plot] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": sizes,
            "y": qualities,
            "line": {"color": "#b8c0c8", "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    for index, stage in enumerate(known):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [sizes[index]],
                "y": [qualities[index]],
                "name": html.escape(stage.name),
                "marker": {"color": _colour(index), "size": 12, "symbol": index % 7},
                "hovertemplate": "%{x:.3g} MB, %{y:.4f} bits per byte",
            }
        )
    low, high = min(qualities), max(qualities)
    margin = (high - low) * 0.15 or high * 0.01
    shapes = []
    caption = "Size of graph and weights against bits per byte on held-out text; lower left is better."
    limit = _limit(bench, "file_mb")
    if limit is not None:
        shapes = [_line({"x0": limit, "x1": limit, "yref": "paper", "y0": 0, "y1": 1}, _LIMIT)]
        caption += " The red line is the budget's largest file."
    edges = [*sizes, *([limit] if limit else [])]
    x_range = [math.log10(min(edges)) - 0.12, math.log10(max(edges)) + 0.12]
    return _plot(
        "quality-size",
        "Quality and size",
        caption,
        data,
        {"title": "MB (logarithmic)", "type": "log", "range": x_range, **_log_ticks(min(edges), max(edges))},
        {"title": "bits per byte", "range": [low - margin, high + margin]},
        shapes=shapes,
    )


def _curve(stages: Sequence[StageSummary], key: str, title: str, unit: str, caption: str) -> Plot | None:
    data: list[Plot] = []
    for index, stage in enumerate(stages):
        points = [
            (record["tokens"], record[key])
            for record in stage.metrics
            if _finite(record.get("tokens")) and _finite(record.get(key))
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
                "line": {"color": _colour(index), "width": 2},
                "marker": {"size": 5},
                "hovertemplate": "%{x:,} tokens: %{y:.4f}",
            }
        )
    if not data:
        return None
    return _plot(key, title, caption, data, {"title": "tokens"}, {"title": unit}, showlegend=True)


def _speed_depth(bench: Mapping[str, Any] | None) -> Plot | None:
    times = (bench or {}).get("tpot_ms", {})
    if bench is None or len(times) < 2:
        return None
    depths = [int(depth) for depth in times]
    data: list[Plot] = [
        _depth_line(depths, [times[str(depth)][key] for depth in depths], label, colour, "solid")
        for key, label, colour in (("p50", "median", COLOURS[0]), ("p95", "95th percentile", COLOURS[1]))
    ]
    floor = bench.get("memory_floor", {}).get("by_depth_ms", {})
    if all(str(depth) in floor for depth in depths):
        data.append(_depth_line(depths, [floor[str(d)] for d in depths], "memory floor", COLOURS[6], "dot"))
    return _plot(
        "speed-depth",
        "Speed and depth",
        "Time per token against the tokens before it. The memory floor is the time that reading weights and "
        "cache takes at the measured bandwidth.",
        data,
        {"title": "tokens in the cache", "rangemode": "tozero"},
        {"title": "ms per token", "rangemode": "tozero"},
    )


def _depth_line(depths: list[int], values: list[float], label: str, colour: str, dash: str) -> Plot:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": depths,
        "y": values,
        "name": label,
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 7},
        "hovertemplate": "%{y:.3g} ms after %{x:,} tokens",
    }


def _step_times(bench: Mapping[str, Any] | None) -> Plot | None:
    rounds = (bench or {}).get("raw", {}).get("speed", [])
    if bench is None or not rounds or not bench.get("tpot_ms"):
        return None
    data: list[Plot] = []
    for index, depth in enumerate(bench["tpot_ms"]):
        samples = sorted(
            sample for one in rounds for sweep in one.get("step_ms", {}).get(depth, []) for sample in sweep
        )
        if not samples:
            continue
        stride = -(-len(samples) // _MOST_POINTS)
        kept = range(0, len(samples), stride)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [round(samples[i], 4) for i in kept],
                "y": [round(100 * (i + 1) / len(samples), 2) for i in kept],
                "name": f"after {depth} tokens",
                "line": {"color": _colour(index), "width": 2, "shape": "hv"},
                "hovertemplate": "%{y:.0f}% of steps took at most %{x:.3g} ms",
            }
        )
    if not data:
        return None
    edges = [trace["x"][0] for trace in data] + [trace["x"][-1] for trace in data]
    return _plot(
        "step-times",
        "How even the steps are",
        "Share of single decoding steps, over all rounds, that were at least this fast.",
        data,
        {"title": "ms (logarithmic)", "type": "log", **_log_ticks(min(edges), max(edges))},
        {"title": "% of steps", "range": [0, 101]},
        showlegend=True,
    )


def _log_ticks(low: float, high: float) -> Plot:
    """Ticks at round numbers, written out; plotly's own on such an axis are bare digits."""
    factors = (1, 2, 5) if high / low > 20 else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        for factor in factors
    ]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _limit(bench: Mapping[str, Any] | None, name: str) -> float | None:
    for limit in ((bench or {}).get("budget") or {}).get("limits", []):
        if limit["name"] == name:
            return float(limit["limit"])
    return None


def _line(ends: Plot, colour: str) -> Plot:
    return {"type": "line", **ends, "line": {"color": colour, "width": 1.5, "dash": "dash"}}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
