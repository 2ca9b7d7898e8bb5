"""The report's charts: quality against size and time per token in the budget's box, and the curves of trainings."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.labels import bits, is_number
from benchmarks.reporting.charts import COLORS, Chart, Plot, chart
from benchmarks.reporting.inputs import Inputs, Record, StageSummary
from benchmarks.reporting.measured import Scored

_AXES = {"file_mb": ("Quality and size", "MB"), "tpot_p50_ms": ("Quality and speed", "ms per token")}
_STATES = {True: ("inside", "theme:good"), False: ("outside", "theme:bad"), None: ("undecided", "theme:quiet")}
_OUTLIER = 1.25  # a model this much worse than the best is only in the caption, so that the others stay apart
_FAR = 2.0  # a limit this many times the largest figure is only in the caption
_MOST_POINTS = 400  # of a curve


@dataclass(frozen=True)
class Point:
    """A model in the charts. `label` is its number in the tables, `figures` go by the limits' names.

    `inside` says whether it keeps to the budget, `predicted` lists figures that were not measured.
    """

    label: str
    name: str
    figures: dict[str, float]
    bits_per_byte: float
    inside: bool | None
    scored: Scored
    predicted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Box:
    """A budget: limits by name, and the bits per byte of `scored` that its quality limit comes to, if known."""

    target: str | None = None
    limits: dict[str, float] = field(default_factory=dict)
    scored: Scored | None = None
    most_bits: float | None = None


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is at least as good as in both coordinates, sorted; lower is better."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def commonest(scored: Iterable[Scored | None]) -> Scored | None:
    """The text of most qualities; that of two or more by `bench`, which reads the whole text, has precedence."""
    counts = Counter(one for one in scored if one is not None)
    return max(counts, key=lambda one: (counts[one] > 1 and one[0] == "bench", counts[one]), default=None)


def trade_off_charts(inputs: Inputs) -> list[Chart]:
    """Quality over size and over time per token, each with budget and front; none for fewer than two points.

    Shown are the models that were scored on one text, see `commonest`.
    """
    box, points, charts = _box(inputs), trade_off_points(inputs), []
    for axis in _AXES:
        placed = [point for point in points if point.figures.get(axis, 0) > 0]
        text = commonest(point.scored for point in placed)
        shown = [point for point in placed if point.scored == text]
        if len(shown) > 1:
            own = box if box.scored == text else replace(box, most_bits=None)
            charts.append(_chart(shown, axis, own, len(shown) < len(placed)))
    return charts


def _box(inputs: Inputs) -> Box:
    """The budget of the verdict, or of the last search if nothing was judged."""
    bench = inputs.bench
    if bench is not None and bench.budget is not None:
        limits = {limit.name: limit.limit for limit in bench.budget.limits}
        teacher, loss = bench.teacher_bits_per_byte, limits.get("quality_loss_percent")
        most = None if teacher is None or loss is None else teacher * (1 + loss / 100)
        return Box(bench.budget.target, limits, bench.scored, most)
    return Box(inputs.fits[-1].target, inputs.fits[-1].limits) if inputs.fits else Box()


def trade_off_points(inputs: Inputs) -> list[Point]:
    """Stages, then candidates of searches, numbered as in the tables; those without a measured quality are left out."""
    box, points = _box(inputs), []
    for place, stage in enumerate(inputs.stages, start=1):
        figures, inside = stage.figures(), {"pass": True, "fail": False}.get(stage.verdict or "")
        # One missed limit is enough, and these two hold on every machine.
        facts = {"file_mb": box.limits.get("file_mb"), "bits_per_byte": box.most_bits}
        facts |= {} if stage.scored == box.scored else {"bits_per_byte": None}
        if inside is None and any(limit is not None and figures.get(name, 0) > limit for name, limit in facts.items()):
            inside = False
        if stage.bits_per_byte is not None and stage.scored is not None:
            points.append(Point(str(place), stage.name, figures, stage.bits_per_byte, inside, stage.scored))
    candidates = [(fit.target, one) for fit in inputs.fits for one in fit.shown]
    for place, (target, one) in enumerate(candidates, start=len(inputs.stages) + 1):
        known = {name: one.figure(name) for name in _AXES}
        figures = {name: value for name, (value, _) in known.items() if value is not None}
        predicted = frozenset(name for name, (_, measured) in known.items() if not measured)
        if (quality := one.bits_per_byte) is not None:
            label, scored = f"{one.name} ({target})", ("fit", target)
            points.append(Point(str(place), label, figures, quality, one.within, scored, predicted))
    return points


def _chart(points: Sequence[Point], axis: str, box: Box, others: bool) -> Chart:
    title, unit = _AXES[axis]
    limit, most = box.limits.get(axis), box.most_bits
    best = min([point.bits_per_byte for point in points] + ([most] if most else []))
    near = [point for point in points if point.bits_per_byte <= best * _OUTLIER]
    near = near if len(near) > 1 else list(points)  # what remains must be worth a chart
    heights, edges = [point.bits_per_byte for point in near], [point.figures[axis] for point in points]
    caption = [f"Bits per byte as scored by {points[0].scored[0]}; lower left is better."]
    if limit and limit > _FAR * max(edges):
        caption.append(f"The limit of {limit:,g} {unit} lies to the right of the plot.")
    elif limit:
        edges.append(limit)
    if most and most - min(heights) > _FAR * (max(heights) - min(heights)) > 0:
        caption.append(f"The limit of {bits(most)} bits per byte lies above the plot.")
    elif most:
        heights.append(most)
    margin = (max(heights) - min(heights)) * 0.15 or max(heights) * 0.01
    front = pareto_front((point.figures[axis], point.bits_per_byte) for point in points)
    # Steps: between two points the one to the left is the best that is known to fit.
    steps = {
        "type": "scatter",
        "name": "front",
        "mode": "lines",
        "hoverinfo": "skip",
        "x": [x for x, _ in front],
        "y": [y for _, y in front],
        "line": {"color": "theme:quiet", "width": 1.5, "dash": "dot", "shape": "hv"},
    }
    across, up = log_axis(unit, min(edges), max(edges)), [min(heights) - margin, max(heights) + 1.4 * margin]
    traces = [_points_trace([point for point in points if point.inside is state], axis, state) for state in _STATES]
    caption += ["Models scored on other text are left out."] if others else []
    caption += ["Numbers are those of the tables."]
    caption += ["Nothing shown beats the points on the dotted front."] if len(front) > 1 else []
    caption += ["Hollow points are predicted."] if any(axis in point.predicted for point in points) else []
    if axis in box.limits:
        caption.append(f"The box is the budget of {box.target}; inside and outside mean all of its limits.")
    if above := [point for point in points if point not in near]:
        lowest, which = min(point.bits_per_byte for point in above), ", ".join(point.label for point in above)
        caption.append(f"Above the plot: {which}, at {bits(lowest)} or more.")
    return chart(
        axis.replace("_", "-"),
        title,
        " ".join(caption),
        [trace for trace in ([steps] if len(front) > 1 else []) + traces if trace["x"]],
        across,
        {"title": "bits per byte", "range": up},
        shapes=_rectangle(limit, box.most_bits),
        showlegend=len(front) > 1 or bool(box.limits),
    )


def _points_trace(points: Sequence[Point], axis: str, state: bool | None) -> Plot:
    """Discs with the models' numbers in them."""
    name, shade = _STATES[state]
    hollow = [axis in point.predicted for point in points]
    return {
        "type": "scatter",
        "name": name,
        "mode": "markers+text",
        "x": [point.figures[axis] for point in points],
        "y": [point.bits_per_byte for point in points],
        "text": [point.label for point in points],
        "textfont": {"size": 11, "color": ["theme:ink" if each else "theme:page" for each in hollow]},
        "customdata": [html.escape(point.name) for point in points],
        "marker": {
            "color": shade,
            "size": 18,
            "symbol": ["circle-open" if each else "circle" for each in hollow],
            "line": {"color": shade, "width": 1.5},
        },
        "hovertemplate": f"%{{text}} %{{customdata}}: %{{x:.3r}} {_AXES[axis][1]}, %{{y:.4f}} bits/byte<extra></extra>",
    }


def _rectangle(x: float | None, y: float | None) -> list[Plot]:
    """The part of the plane that a budget allows, open at the sides it does not limit."""
    if x is None and y is None:
        return []
    sides = {"xref": "paper", "x0": 0, "x1": 1} if x is None else {"xref": "x", "x0": 1e-9, "x1": x}
    sides |= {"yref": "paper", "y0": 0, "y1": 1} if y is None else {"yref": "y", "y0": 0, "y1": y}
    look = {"fillcolor": "theme:box", "line": {"color": "theme:good", "width": 1.5, "dash": "dash"}}
    return [{"type": "rect", "layer": "below", **sides, **look}]


def log_axis(title: str, low: float, high: float) -> Plot:
    """A logarithmic axis around the values from `low` to `high`, ticks written out: plotly's are bare digits."""
    factors = (1,) if high / low > 2_000 else (1, 2, 5) if high / low > 10 else (1, 1.5, 2, 3, 5, 7)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    margin = max(0.12, 0.04 * math.log10(high / low))
    return {
        "title": f"{title} (log)",
        "type": "log",
        "tickmode": "array",
        "range": [math.log10(low) - margin, math.log10(high) + margin],
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" for tick in ticks],
    }


def training_charts(stages: Sequence[StageSummary]) -> list[Chart]:
    """A chart for each figure that a stage has logged twice or more, with a line for each stage."""
    plans = {
        "loss": (
            "Training loss",
            "nats per token",
            "Mean loss of the logged steps. Losses on text and against a teacher cannot be compared.",
            lambda record: record.get("loss"),
        ),
        "valid-bits-per-byte": (
            "Held-out quality while training",
            "bits per byte",
            "Bits per byte of held-out text; lower is better.",
            lambda record: record.get("valid_bits_per_byte"),
        ),
        "busiest-expert": (
            "Load of the busiest expert",
            "multiples of an even load",
            "The expert that most tokens of its layer were sent to, in the layer where that is most; 1 is even.",
            _busiest,
        ),
    }
    charts = []
    for identifier, (title, unit, caption, value) in plans.items():
        data, drawn = [], set[str]()
        for index, stage in enumerate(stages):
            points = _curve(stage.metrics, value)
            if len(points) < 2 or stage.directory in drawn:  # a directory measured twice was trained once
                continue
            drawn.add(stage.directory)
            xs, ys = zip(*points, strict=True)
            data.append(
                {
                    "type": "scatter",
                    "name": html.escape(stage.name),
                    "x": list(xs),
                    "y": list(ys),
                    "mode": "lines+markers" if len(points) < 30 else "lines",
                    "marker": {"size": 5},
                    "line": {"color": f"theme:c{index % len(COLORS)}", "width": 2},
                    "hovertemplate": "%{x:,} tokens: %{y:.4f}",
                }
            )
        if data:
            axes = {"title": "tokens"}, {"title": unit}
            charts.append(chart(identifier, title, caption, data, *axes, showlegend=True))
    return charts


def _curve(records: Sequence[Record], value: Callable[[Record], object]) -> list[tuple[float, float]]:
    """(tokens, value) of the records that have it: at most about `_MOST_POINTS`, the last one among them."""
    pairs = [(record.get("tokens"), value(record)) for record in records]
    points = [(tokens, each) for tokens, each in pairs if is_number(tokens) and is_number(each)]
    step = max(1, -(-len(points) // _MOST_POINTS))
    return points[:-1:step] + points[-1:]


def _busiest(record: Record) -> float | None:
    """The largest share of a layer's tokens times the number of its experts; None if that was not logged."""
    layers = record.get("expert_shares")
    if not isinstance(layers, list) or not all(isinstance(x, list) and x and all(map(is_number, x)) for x in layers):
        return None
    return max((len(layer) * max(layer) for layer in layers), default=None)
