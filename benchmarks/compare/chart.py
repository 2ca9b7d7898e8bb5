"""The comparison's chart as a plotly figure in plain JSON: quality against tokens and against FLOPs.

Colour tells the size, marker and dash the method, so that it reads in grey and with any colour vision.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.runs import Run, best_for_cost
from benchmarks.report.charts import COLOURS

BAND = 0.02  # above the teacher: the loss that device budgets commonly allow
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down", "pentagon", "hexagram")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_PANEL = 300  # pixels of one panel's height
_AXIS = 56  # of ticks and title under the lower one
_ENTRY = 23  # of one line of the legend
_GREY = "#444444"

Plot = dict[str, Any]


@dataclass(frozen=True)
class _Panel:
    """One of the two charts: what lies along x, and the axes it has."""

    title: str
    axis: str  # "" for the first, "2" for the second
    cost: Callable[[Run, int], float]  # of a run after so many tokens of its own


PANELS = (
    _Panel("training tokens", "", lambda run, tokens: run.before + tokens),
    _Panel("training FLOPs", "2", lambda run, tokens: run.cost.at(tokens)),
)


def figure(rows: Sequence[Plot], runs: Sequence[Run], teacher: Run) -> Plot:
    """Two panels, one above the other, with one legend under them.

    Args:
        rows: the comparison's rows, which give order and names.
        runs: the same runs.
        teacher: drawn as a line with a band of 2% above it.

    Returns:
        {"data", "layout"}, JSON without NaN.
    """
    by_directory = {str(run.directory): run for run in runs}
    ordered = [by_directory[row["directory"]] for row in rows]
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in ordered:
        groups.setdefault((run.config.parameters, run.method), []).append(run)
    sizes = list(dict.fromkeys(size for size, _ in groups))
    methods = sorted({run.method for run in runs}, key=lambda name: (not _is_scratch(name, runs), name))
    groups = dict(sorted(groups.items(), key=lambda item: (sizes.index(item[0][0]), methods.index(item[0][1]))))
    low, high = _quality_range(runs, teacher)
    data: list[Plot] = []
    layout = _layout(len(groups), len(sizes), low, high)
    for panel in PANELS:
        zero = _zero(panel, runs)
        costs = []
        for number, ((size, method), members) in enumerate(groups.items()):
            first = number == [group[0] for group in groups].index(size)
            trace = _trace(members, panel, zero, COLOURS[sizes.index(size) % 6], methods.index(method))
            trace |= {"name": html.escape(method), "legendgroup": f"{size} {method}", "showlegend": not panel.axis}
            if first and not panel.axis:
                share = members[0].config.block_parameters / teacher.config.block_parameters
                trace["legendgrouptitle"] = {"text": f"{share:.0%} of the teacher's blocks, {size:,} parameters"}
            if members[0].from_scratch:
                data.append(_envelope(members, panel, trace))
            data.append(trace)
            costs += [cost for cost in trace["x"] if cost is not None]
        layout[f"xaxis{panel.axis}"] |= _log_axis(min(costs), max(costs), zero if zero in costs else None)
        layout["shapes"] += _teacher_shapes(panel, teacher)
        layout["annotations"].append(_teacher_label(panel, teacher))
    return {"data": data, "layout": layout}


def _is_scratch(method: str, runs: Sequence[Run]) -> bool:
    return any(run.from_scratch for run in runs if run.method == method)


def _trace(members: Sequence[Run], panel: _Panel, zero: float, colour: str, method: int) -> Plot:
    """Runs of one size and method: thin lines through what was logged in mid-run, a large mark where each ended."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    sizes: list[int] = []
    words: list[str] = []
    for run in members:
        points = [(0, run.unrecovered, "before training")] if run.unrecovered else []
        points += [(tokens, bits, "in mid-run") for tokens, bits in run.points if tokens < run.trained]
        points.append((run.trained, run.bits_per_byte, "finished"))
        for tokens, bits, state in points:
            xs.append(panel.cost(run, tokens) or zero)
            ys.append(bits)
            sizes.append(11 if state == "finished" else 0)
            words.append(f"{html.escape(run.name)}, {state}")
        xs.append(None)  # a gap before the next run
        ys.append(None)
        sizes.append(0)
        words.append("")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": xs,
        "y": ys,
        "text": words,
        "connectgaps": False,
        "line": {"color": colour, "width": 1.5, "dash": DASHES[method % len(DASHES)]},
        "marker": {
            "color": colour,
            "size": sizes,
            "symbol": SYMBOLS[method % len(SYMBOLS)],
            "opacity": 1,
            "line": {"color": "#fff", "width": 1},
        },
        "hovertemplate": "%{text}<br>%{y:.4f} bits per byte<br>%{x:.3s} " + panel.title + "<extra></extra>",
        "xaxis": f"x{panel.axis}",
        "yaxis": f"y{panel.axis}",
    }


def _envelope(members: Sequence[Run], panel: _Panel, trace: Plot) -> Plot:
    """The broad pale line that factors are read off: the best that so much training from scratch has bought."""
    points = best_for_cost([(panel.cost(run, run.trained), run.bits_per_byte) for run in members])
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [cost for cost, _ in points],
        "y": [bits for _, bits in points],
        "line": {"color": trace["line"]["color"], "width": 9},
        "opacity": 0.18,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": trace["legendgroup"],
        "xaxis": trace["xaxis"],
        "yaxis": trace["yaxis"],
    }


def _quality_range(runs: Sequence[Run], teacher: Run) -> tuple[float, float]:
    """From below the best to above the worst finished model; what lies higher leaves the panel at its top."""
    finals = [run.bits_per_byte for run in runs] + [teacher.bits_per_byte, teacher.bits_per_byte * (1 + BAND)]
    span = max(finals) - min(finals)
    return min(finals) - 0.08 * span, max(finals) + 0.4 * span


def _zero(panel: _Panel, runs: Sequence[Run]) -> float:
    """Where nothing spent lies on a logarithmic axis: a third of the smallest cost."""
    costs = [panel.cost(run, tokens) for run in runs for tokens, _ in (*run.points, (run.trained, 0.0))]
    starts = [panel.cost(run, 0) for run in runs if run.unrecovered]
    return min(cost for cost in (*costs, *starts) if cost > 0) / 3


def _log_axis(low: float, high: float, zero: float | None) -> Plot:
    """Range and ticks of a logarithmic axis that may begin with a place for 0."""
    factors = (1, 2, 5) if high / low < 2_000 else (1,)
    smallest = low if zero is None else zero * 2.5
    ticks = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in factors
        if factor * 10.0**power >= smallest
    ]
    margin = max(0.15, 0.04 * math.log10(high / low))  # a single run still shows a tick or two
    return {
        "range": [math.log10(low) - margin, math.log10(high) + margin],
        "tickvals": [*([] if zero is None else [zero]), *ticks],
        "ticktext": [*([] if zero is None else ["0"]), *map(_tick, ticks)],
    }


def _tick(value: float) -> str:
    power = math.floor(math.log10(value) + 1e-9)
    if power >= 10:
        factor = round(value / 10.0**power)
        return ("" if factor == 1 else f"{factor}\u00b7") + f"10<sup>{power}</sup>"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _layout(groups: int, sizes: int, low: float, high: float) -> Plot:
    legend = _ENTRY * (groups + sizes) + 16
    axis = {"gridcolor": "#e3e6ea", "zeroline": False, "linecolor": "#999", "fixedrange": True, "automargin": True}
    y = {**axis, "title": {"text": "bits per byte (held out)", "standoff": 6}, "range": [low, high]}
    layout: Plot = {
        "height": 2 * _PANEL + _AXIS + legend,
        "margin": {"l": 8, "r": 12, "t": 12, "b": _AXIS + legend},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222"},
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "legend": {
            "x": 0,
            "y": 0,
            "yref": "container",
            "xanchor": "left",
            "yanchor": "bottom",
            "maxheight": legend,  # half of the figure's if nothing is said, and a bar to scroll by beyond it
            "itemsizing": "constant",
            "itemwidth": 50,
            "tracegroupgap": 4,
            "groupclick": "togglegroup",
        },
        "hovermode": "closest",
        "dragmode": False,
        "shapes": [],
        "annotations": [],
    }
    for panel, domain in zip(PANELS, ([0.56, 1.0], [0.0, 0.44]), strict=True):
        title = {"text": f"{panel.title} (logarithmic)", "standoff": 6}
        layout[f"xaxis{panel.axis}"] = {**axis, "type": "log", "title": title, "anchor": f"y{panel.axis}"}
        layout[f"yaxis{panel.axis}"] = {**y, "domain": domain, "anchor": f"x{panel.axis}"}
    return layout


def _teacher_shapes(panel: _Panel, teacher: Run) -> list[Plot]:
    bits = teacher.bits_per_byte
    across = {"xref": f"x{panel.axis} domain", "x0": 0, "x1": 1, "yref": f"y{panel.axis}", "layer": "below"}
    return [
        {**across, "type": "rect", "y0": bits, "y1": bits * (1 + BAND), "fillcolor": "#dddddd", "line": {"width": 0}},
        {**across, "type": "line", "y0": bits, "y1": bits, "line": {"color": _GREY, "width": 1.5}},
    ]


def _teacher_label(panel: _Panel, teacher: Run) -> Plot:
    return {
        "text": f"teacher {teacher.bits_per_byte:.3f}, band to +{BAND:.0%}",
        "xref": f"x{panel.axis} domain",
        "yref": f"y{panel.axis}",
        "x": 0.01,
        "y": teacher.bits_per_byte,
        "xanchor": "left",
        "yanchor": "top",
        "showarrow": False,
        "font": {"size": 11, "color": _GREY},
    }
