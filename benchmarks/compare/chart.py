"""The comparison's chart: quality against tokens and against FLOPs.

Color tells the size, marker and dash the method, so that it reads in grey and with any color vision.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.compare.runs import Run
from benchmarks.pareto import pareto_front
from benchmarks.report.charts import Chart, Plot, color, log_axis

BAND = 0.02  # above the teacher: the loss that device budgets commonly allow
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down", "pentagon", "hexagram")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_PANEL_PX = 300
_AXIS_PX = 56  # ticks and title under the lower panel
_LEGEND_LINE_PX = 23


class _Panel(NamedTuple):
    """One of the two charts, one above the other: what lies along x, and the suffix and place of its axes."""

    title: str
    axis: str
    domain: list[float]
    cost: Callable[[Run, int], float]  # of a run and the runs it starts from, after some of its tokens


PANELS = (
    _Panel("training tokens", "", [0.56, 1.0], lambda run, tokens: run.before + tokens),
    _Panel("training FLOPs", "2", [0.0, 0.44], lambda run, tokens: run.flops.at(tokens)),
)


class _Group(NamedTuple):
    """The runs of one size and method, which share a line of the legend; `heading` is its size's, on the first one."""

    runs: list[Run]
    size: int
    method: int
    heading: str | None

    def on(self, panel: _Panel) -> Plot:
        """The axes and the line of the legend that this group's traces belong to."""
        key = f"{self.runs[0].config.parameters} {self.runs[0].method}"
        return {"legendgroup": key, "xaxis": f"x{panel.axis}", "yaxis": f"y{panel.axis}"}


def comparison_chart(runs: Sequence[Run], teacher: Run) -> Chart:
    """Two panels with one legend under them; the teacher is a line with a band of 2% above it."""
    groups = _groups(runs, teacher)
    legend = _LEGEND_LINE_PX * (len(groups) + sum(group.heading is not None for group in groups)) + 16
    teacher_marks = [_teacher_mark(panel, teacher.bits_per_byte) for panel in PANELS]
    layout: Plot = {
        "height": len(PANELS) * _PANEL_PX + _AXIS_PX + legend,
        "margin": {"b": _AXIS_PX + legend},
        "legend": {
            **{"orientation": "v", "x": 0, "y": 0, "yref": "container", "xanchor": "left", "yanchor": "bottom"},
            "maxheight": legend,  # else half of the figure's, and a bar to scroll by beyond it
            **{"itemsizing": "constant", "itemwidth": 50, "tracegroupgap": 4, "groupclick": "togglegroup"},
        },
        "shapes": [shape for shapes, _ in teacher_marks for shape in shapes],
        "annotations": [label for _, label in teacher_marks],
    }
    data: list[Plot] = []
    for panel in PANELS:
        zero = _zero(panel, runs)
        traces = [_trace(group, panel, zero) for group in groups]
        data += [_envelope(group, panel) for group in groups if group.runs[0].facts.from_scratch] + traces
        costs = [cost for trace in traces for cost in trace["x"] if cost is not None]
        x = log_axis(panel.title, min(costs), max(costs), zero if zero in costs else None)
        layout[f"xaxis{panel.axis}"] = {**x, "title": {"text": x["title"]}, "anchor": f"y{panel.axis}"}
        y = {"title": {"text": "bits per byte (held out)"}, "range": _quality_range(runs, teacher)}
        layout[f"yaxis{panel.axis}"] = {**y, "domain": panel.domain, "anchor": f"x{panel.axis}"}
    return Chart("comparison", "Quality at equal cost", figure={"data": data, "layout": layout})


def _groups(runs: Sequence[Run], teacher: Run) -> list[_Group]:
    """By size in the order of the runs, then by method with training from scratch first."""
    sizes = list(dict.fromkeys(run.config.parameters for run in runs))
    scratch = {run.method for run in runs if run.facts.from_scratch}
    methods = sorted({run.method for run in runs}, key=lambda name: (name not in scratch, name))
    groups = []
    for number, size in enumerate(sizes):
        alike = [run for run in runs if run.config.parameters == size]
        share = alike[0].config.block_parameters / teacher.config.block_parameters
        heading: str | None = f"{share:.0%} of the teacher's blocks, {size:,} parameters"
        for place, method in enumerate(methods):
            if members := [run for run in alike if run.method == method]:
                groups.append(_Group(members, number, place, heading))
                heading = None
    return groups


def _trace(group: _Group, panel: _Panel, zero: float) -> Plot:
    """Thin lines through values logged in mid-run, a large mark where each run ended, a gap before the next one."""
    points: list[tuple[float | None, float | None, int, str]] = []
    for run in group.runs:
        name, trained = html.escape(run.name), run.facts.tokens
        logged = [(0, run.untrained, "before training")] if run.untrained else []
        logged += [(tokens, bits, "in mid-run") for tokens, bits in run.curve if tokens < trained]
        points += [(panel.cost(run, tokens) or zero, bits, 0, f"{name}, {state}") for tokens, bits, state in logged]
        points += [(panel.cost(run, trained), run.bits_per_byte, 11, f"{name}, finished"), (None, None, 0, "")]
    xs, ys, sizes, texts = (list(column) for column in zip(*points, strict=True))
    heading = {} if group.heading is None or panel.axis else {"legendgrouptitle": {"text": group.heading}}
    shade, symbol = color(group.size), SYMBOLS[group.method % len(SYMBOLS)]
    edge = {"color": "theme:page", "width": 1}
    return {
        **{"type": "scatter", "mode": "lines+markers", "name": html.escape(group.runs[0].method)},
        **{"x": xs, "y": ys, "text": texts, "connectgaps": False},
        "line": {"color": shade, "width": 1.5, "dash": DASHES[group.method % len(DASHES)]},
        "marker": {"color": shade, "size": sizes, "symbol": symbol, "opacity": 1, "line": edge},
        "hovertemplate": "%{text}<br>%{y:.4f} bits per byte<br>%{x:.3s} " + panel.title + "<extra></extra>",
        "showlegend": not panel.axis,
        **group.on(panel),
        **heading,
    }


def _envelope(group: _Group, panel: _Panel) -> Plot:
    """The broad pale line that factors are read off: the best finished runs from scratch by cost."""
    points = pareto_front((panel.cost(run, run.facts.tokens), run.bits_per_byte) for run in group.runs)
    return {
        **{"type": "scatter", "mode": "lines", "x": [cost for cost, _ in points], "y": [bits for _, bits in points]},
        **{"line": {"color": color(group.size), "width": 9}, "opacity": 0.18, "hoverinfo": "skip", "showlegend": False},
        **group.on(panel),
    }


def _quality_range(runs: Sequence[Run], teacher: Run) -> list[float]:
    """From below the best to above the worst finished model; what lies higher leaves the panel at its top."""
    finals = [*(run.bits_per_byte for run in (*runs, teacher)), teacher.bits_per_byte * (1 + BAND)]
    span = max(finals) - min(finals)
    return [min(finals) - 0.08 * span, max(finals) + 0.4 * span]


def _zero(panel: _Panel, runs: Sequence[Run]) -> float:
    """Where a cost of 0 lies on a logarithmic axis: at a third of the smallest one."""
    costs = [panel.cost(run, tokens) for run in runs for tokens in (run.facts.tokens, *(at for at, _ in run.curve))]
    starts = [panel.cost(run, 0) for run in runs if run.untrained]
    return min(cost for cost in (*costs, *starts) if cost > 0) / 3


def _teacher_mark(panel: _Panel, bits: float) -> tuple[list[Plot], Plot]:
    """The band and the line across a panel, and their label."""
    place = {"xref": f"x{panel.axis} domain", "yref": f"y{panel.axis}"}
    across = {**place, "x0": 0, "x1": 1, "y0": bits, "layer": "below"}
    band = {**across, "type": "rect", "y1": bits * (1 + BAND), "fillcolor": "theme:rule", "line": {"width": 0}}
    mark = {**across, "type": "line", "y1": bits, "line": {"color": "theme:quiet", "width": 1.5}}
    label: Plot = {"text": f"teacher {bits:.3f}, band to +{BAND:.0%}", "font": {"size": 11, "color": "theme:quiet"}}
    label |= {**place, "x": 0.01, "xanchor": "left", "y": bits, "yanchor": "top", "showarrow": False}
    return [band, mark], label
