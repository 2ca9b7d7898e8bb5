"""Quality against size and against time per token, with the budget's box and the points nothing else beats."""

from __future__ import annotations

import html
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.pareto import pareto_front
from benchmarks.report.charts import Chart, Plot, chart, line, log_axis, marks, placeholder_chart
from benchmarks.report.inputs import Inputs, StageSummary, bench_command
from benchmarks.report.scores import Scored, commonest
from benchmarks.report.search_results import Candidate, Fit
from benchmarks.report.text import get_nested

_STATES = {True: ("inside", "theme:good"), False: ("outside", "theme:bad"), None: ("not all known", "theme:quiet")}
_SYMBOLS = {"bench": "circle", "training": "diamond", "fit": "square", "predicted": "square-open"}
_MEANINGS = {
    "bench": "circles: scored by bench",
    "training": "diamonds: scored by their training, on half of its held-out text, at most 65,536 tokens",
    "fit": "squares: measured candidates of fit",
    "predicted": "hollow squares: candidates with a predicted x, or with an estimated quality (left out of the front)",
}
_MOST_NAMED = 3
_OUTLIER = 1.25  # a model this much worse than the best is left to the caption, so that the others stay apart


class _Axis(NamedTuple):
    """What lies along x: a limit's name."""

    metric: str
    identifier: str
    title: str
    unit: str
    lacks: str


_AXES = (
    _Axis("file_mb", "quality-size", "Quality and size", "MB", "a size"),
    _Axis("tpot_p50_ms", "quality-speed", "Quality and speed", "ms per token", "a time per token"),
)


@dataclass(frozen=True)
class Point:
    """A model in the charts. `label` is its number in the tables, `metrics` go by the limits' names.

    `inside` says whether it keeps to the budget, `kind` names its score (see `_MEANINGS`), `predicted` lists metrics
    that were not measured, and `estimated` says that its quality was not.
    """

    label: str
    name: str
    metrics: Mapping[str, float]
    bits_per_byte: float
    inside: bool | None
    kind: str
    predicted: Collection[str] = ()
    estimated: bool = False
    scored: Scored | None = None

    def evidence(self, metric: str) -> str:
        """What its place in a chart rests on."""
        return "predicted" if self.estimated or metric in self.predicted else self.kind


class Budget(NamedTuple):
    """A device's limits by name, and the bits per byte that its quality limit comes to (None without a teacher)."""

    device: str | None
    limits: Mapping[str, float]
    most_bits_per_byte: float | None


def budget_of(inputs: Inputs) -> Budget:
    """The budget of the verdict, or of the last search where nothing was measured."""
    records = get_nested(inputs.deciding, "budget", "limits") or []
    limits = {record["name"]: float(record["limit"]) for record in records}
    device = get_nested(inputs.deciding, "budget", "target")
    if not limits and inputs.fits:
        device, limits = inputs.fits[-1].target, inputs.fits[-1].limits
    teacher, loss = get_nested(inputs.deciding, "teacher_bits_per_byte"), limits.get("quality_loss_percent")
    return Budget(device, limits, None if teacher is None or loss is None else teacher * (1 + loss / 100))


def trade_off_points(inputs: Inputs) -> list[Point]:
    """Stages, then candidates of searches, numbered from 1 as in the tables; those without any quality are left out."""
    budget, teacher = budget_of(inputs), get_nested(inputs.deciding, "teacher_bits_per_byte")
    points = [_stage_point(str(number), stage, budget) for number, stage in enumerate(inputs.stages, start=1)]
    labels = itertools.count(len(inputs.stages) + 1)
    points += [_candidate_point(str(next(labels)), fit, one, teacher) for fit in inputs.fits for one in fit.shown]
    return [point for point in points if point is not None]


def _stage_point(label: str, stage: StageSummary, budget: Budget) -> Point | None:
    if stage.bits_per_byte is None:
        return None
    metrics = {name: value for name, value in stage.limit_metrics().items() if value is not None}
    inside = {"pass": True, "fail": False}.get(stage.outcome or "")
    # One missed limit is enough, and these two hold on every machine.
    facts = {"file_mb": budget.limits.get("file_mb"), "bits_per_byte": budget.most_bits_per_byte}
    if inside is None and any(limit is not None and metrics.get(name, 0) > limit for name, limit in facts.items()):
        inside = False
    kind = "bench" if stage.scored_by_bench else "training"
    return Point(label, stage.name, metrics, stage.bits_per_byte, inside, kind, scored=Scored.of(stage))


def _candidate_point(label: str, fit: Fit, candidate: Candidate, teacher: float | None) -> Point | None:
    """`teacher`, in bits per byte, makes a quality of a loss that was only estimated."""
    bits, estimated = candidate.bits_per_byte, candidate.bits_per_byte is None
    if bits is None and teacher is not None:
        bits = teacher * (1 + candidate.loss_percent / 100)
    if bits is None:
        return None
    name, predicted = f"{candidate.name} ({fit.target})", candidate.metrics.keys() - candidate.measured
    scored = Scored("fit", (fit.target,))
    return Point(label, name, candidate.metrics, bits, candidate.within, "fit", predicted, estimated, scored)


def trade_off_charts(inputs: Inputs) -> list[Chart]:
    """Quality over size and quality over time per token, each with budget and front."""
    points, budget = trade_off_points(inputs), budget_of(inputs)
    charts = []
    for axis in _AXES:
        shown = [point for point in points if point.metrics.get(axis.metric, 0) > 0]
        charts.append(_trade_off_chart(shown, axis, budget) if len(shown) > 1 else _placeholder(inputs.stages, axis))
    return charts


def _placeholder(stages: Sequence[StageSummary], axis: _Axis) -> Chart:
    if axis.metric == "tpot_p50_ms" and any(get_nested(stage.bench, "tpot_ms") == {} for stage in stages):
        missing = "The measured model's context is too short for a time per token."
        return placeholder_chart(axis.identifier, axis.title, missing)
    missing = f"Fewer than two stages have both {axis.lacks} and a quality."
    command = bench_command(stages, "--text HELD-OUT --teacher TEACHER")
    return placeholder_chart(axis.identifier, axis.title, missing, command)


def _trade_off_chart(points: Sequence[Point], axis: _Axis, budget: Budget) -> Chart:
    limit, most = budget.limits.get(axis.metric), budget.most_bits_per_byte
    known = [] if most is None else [most]
    best = min([point.bits_per_byte for point in points] + known)
    outliers = [point for point in points if point.bits_per_byte > best * _OUTLIER]
    if len(points) - len(outliers) < 2:  # what remains must be worth a chart
        outliers = []
    heights = [point.bits_per_byte for point in points if point not in outliers] + known
    margin = (max(heights) - min(heights)) * 0.15 or max(heights) * 0.01
    edges = [point.metrics[axis.metric] for point in points] + ([limit] if limit else [])
    traces = [_points_trace([point for point in points if point.inside is state], axis, state) for state in _STATES]
    return chart(
        axis.identifier,
        axis.title,
        " ".join([*_caption(points, axis, budget), *_describe_outliers(outliers)]),
        [trace for trace in (_front_trace(points, axis), *traces) if trace["x"]],
        log_axis(axis.unit, min(edges), max(edges)),
        {"title": "bits per byte", "range": [min(heights) - margin, max(heights) + 1.4 * margin]},
        shapes=_box(limit, most),
        showlegend=True,
    )


def _front_trace(points: Sequence[Point], axis: _Axis) -> Plot:
    front = pareto_front((point.metrics[axis.metric], point.bits_per_byte) for point in _comparable(points))
    xs, ys = zip(*front, strict=True) if len(front) > 1 else ((), ())
    # Steps: between two points the one to the left is the best that is known to fit.
    look = {"color": "theme:quiet", "width": 1.5, "dash": "dot", "shape": "hv"}
    return line(xs, ys, "front", "theme:quiet", mode="lines", hoverinfo="skip") | {"line": look}


def _comparable(points: Sequence[Point]) -> list[Point]:
    """Those whose qualities were measured on one text, the one of most of them."""
    measured = [point for point in points if not point.estimated]
    text = commonest(point.scored for point in measured)
    return [point for point in measured if point.scored == text]


def _points_trace(points: Sequence[Point], axis: _Axis, state: bool | None) -> Plot:
    return marks(
        [(point.metrics[axis.metric], point.bits_per_byte, point.label) for point in points],
        *_STATES[state],
        [_SYMBOLS[point.evidence(axis.metric)] for point in points],
        f"%{{text}} %{{customdata}}: %{{x:.3g}} {axis.unit}, %{{y:.4f}} bits per byte<extra></extra>",
        mode="markers+text",
        textposition="top center",
        textfont={"size": 11, "color": "theme:ink"},
        customdata=[html.escape(point.name) for point in points],
    )


def _box(x: float | None, y: float | None) -> list[Plot]:
    """The part of the plane that a budget allows, open at the sides it does not limit."""
    if x is None and y is None:
        return []
    sides = {"xref": "paper", "x0": 0, "x1": 1} if x is None else {"xref": "x", "x0": 1e-9, "x1": x}
    sides |= {"yref": "paper", "y0": 0, "y1": 1} if y is None else {"yref": "y", "y0": 0, "y1": y}
    look = {"fillcolor": "theme:box", "line": {"color": "theme:good", "width": 1.5, "dash": "dash"}}
    return [{"type": "rect", "layer": "below", **sides, **look}]


def _caption(points: Sequence[Point], axis: _Axis, budget: Budget) -> list[str]:
    parts = ["Lower left is better; numbers are those of the tables. Nothing beats the points on the dotted front."]
    if len({point.scored for point in points if not point.estimated}) > 1:
        among = ", ".join(point.label for point in _comparable(points))
        parts.append(f"They are scored on different texts; the front is among {among}, of one text.")
    kinds = {point.evidence(axis.metric) for point in points}
    meanings = "; ".join(meaning for kind, meaning in _MEANINGS.items() if kind in kinds)
    parts.append(meanings[0].upper() + meanings[1:] + ".")
    if axis.metric in budget.limits:
        parts.append(f"The box is the budget of {budget.device}; inside and outside mean all of its limits.")
        if budget.most_bits_per_byte is None and "quality_loss_percent" in budget.limits:
            parts.append("It is open above: without bench --teacher no quality is known to lose from.")
    complete = {
        point.label: (point.metrics["file_mb"], point.metrics["tpot_p50_ms"], point.bits_per_byte)
        for point in _comparable(points)
        if {"file_mb", "tpot_p50_ms"} <= point.metrics.keys()
    }
    if axis.metric == "tpot_p50_ms" and len(complete) > 1:
        front = pareto_front(complete.values())
        best = [label for label, values in complete.items() if values in front]
        parts.append(f"Not dominated in size, time and quality together: {', '.join(best)}.")
    return parts


def _describe_outliers(outliers: Sequence[Point]) -> list[str]:
    if len(outliers) > _MOST_NAMED:
        lowest = min(point.bits_per_byte for point in outliers)
        return [f"{len(outliers)} lie above the plot, at {lowest:.4f} or more."]
    return [f"{point.label} lies above the plot, at {point.bits_per_byte:.4f}." for point in outliers]
