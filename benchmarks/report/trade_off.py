"""Quality against size and against time per token, with the budget's box and the points nothing else beats."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.labels import is_number, part
from benchmarks.report.charts import Plot, absent, bench_command, chart, log_axis
from benchmarks.report.inputs import Inputs, StageSummary, figures, outcome, too_short
from benchmarks.report.search_results import Candidate, Fit
from benchmarks.search.candidates import pareto

_PLACES = {True: "inside", False: "outside", None: "not all known"}
_PAINT = {True: "theme:good", False: "theme:bad", None: "theme:quiet"}
_SYMBOLS = {"bench": "circle", "training": "diamond", "fit": "square", "predicted": "square-open"}
_MEANINGS = {
    "bench": "circles: scored by bench",
    "training": "diamonds: scored by their training, on the first 65,536 tokens or so of its held-out text",
    "fit": "squares: measured candidates of fit",
    "predicted": "hollow squares: candidates with a predicted x, or with an estimated quality (left out of the front)",
}
_AXES = (
    ("file_mb", "quality-size", "Quality and size", "MB"),
    ("tpot_p50_ms", "quality-speed", "Quality and speed", "ms per token"),
)

_SIDES = {"top center": (0, 0.07), "bottom center": (0, -0.07), "middle right": (0.06, 0), "middle left": (-0.06, 0)}
_CLOSE = (0.06, 0.06)
_NAMED = 3
_FAR = 1.25
"""A model this much worse than the best one is left to the caption, so that the others stay apart."""


@dataclass(frozen=True)
class Point:
    """A model in the plots. `label` is its number in the tables, `values` its figures by the limits' names.

    `estimated` says that its quality was not measured."""

    label: str
    name: str
    values: Mapping[str, float]
    bits_per_byte: float | None
    inside: bool | None
    evidence: Mapping[str, str]
    estimated: bool = False


def front(points: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The points that no other dominates, sorted; equal ones count once."""
    rows = [{str(place): value for place, value in enumerate(point)} for point in points]
    return sorted({point for point, best in zip(points, pareto(rows), strict=True) if best})


def budget_limits(inputs: Inputs) -> tuple[str | None, dict[str, float], float | None]:
    """Device, its limits by name, and the bits per byte that its quality limit comes to (None without a teacher)."""
    bench = inputs.deciding
    fit = inputs.fits[-1] if inputs.fits else None
    device: str | None = part(bench, "budget", "device")
    records = part(bench, "budget", "limits") or []
    limits = {str(part(r, "name")): float(part(r, "limit")) for r in records if is_number(part(r, "limit"))}
    teacher = part(bench, "teacher_bits_per_byte")
    if not limits and fit is not None:
        device, limits = fit.device, fit.limits
    loss = limits.get("quality_loss_percent")
    worst = teacher * (1 + loss / 100) if is_number(teacher) and loss is not None else None
    return device, limits, worst


def pareto_points(inputs: Inputs) -> list[Point]:
    """Stages, then candidates of searches, numbered from 1 as in the tables."""
    _, limits, worst = budget_limits(inputs)
    points = [_of_stage(str(n), stage, limits, worst) for n, stage in enumerate(inputs.stages, start=1)]
    candidates = [(fit, candidate) for fit in inputs.fits for candidate in fit.shown]
    points += [
        _of_candidate(str(n), fit, candidate, part(inputs.deciding, "teacher_bits_per_byte"))
        for n, (fit, candidate) in enumerate(candidates, start=len(inputs.stages) + 1)
    ]
    return points


def _of_stage(label: str, stage: StageSummary, limits: Mapping[str, float], worst: float | None) -> Point:
    values = {name: value for name, value in figures(stage).items() if value is not None and name != "bits_per_byte"}
    inside = {"passed": True, "missed": False}.get(outcome(stage) or "")
    facts = [("file_mb", limits.get("file_mb")), ("bits_per_byte", worst)]
    if inside is None and any(
        limit is not None and (value := figures(stage)[name]) is not None and value > limit for name, limit in facts
    ):
        inside = False  # one limit is enough, and these two hold on every machine
    evidence = "bench" if stage.scored_by_bench else "training"
    return Point(label, stage.name, values, stage.bits_per_byte, inside, {name: evidence for name, *_ in _AXES})


def _of_candidate(label: str, fit: Fit, candidate: Candidate, teacher: Any) -> Point:
    """`teacher`, in bits per byte, makes a quality of a loss that was only estimated; None leaves that one unknown."""
    bits, estimated = candidate.bits_per_byte, False
    if bits is None and candidate.loss_percent is not None and is_number(teacher):
        bits, estimated = teacher * (1 + candidate.loss_percent / 100), True
    evidence = {name: "fit" if name in candidate.measured and not estimated else "predicted" for name, *_ in _AXES}
    name = f"{candidate.name} ({fit.device})"
    return Point(label, name, candidate.figures, bits, candidate.within, evidence, estimated)


def pareto_plots(inputs: Inputs) -> list[Plot]:
    """Quality over size and quality over time per token, each with budget and front."""
    points = pareto_points(inputs)
    device, limits, worst = budget_limits(inputs)
    return [_plot(points, axis, device, limits, worst) or _too_few(inputs.stages, *axis[:3]) for axis in _AXES]


def _too_few(stages: Sequence[StageSummary], name: str, identifier: str, title: str) -> Plot:
    if name == "tpot_p50_ms" and too_short(stages):
        return absent(identifier, title, "The measured model's context is too short for a time per token.", None)
    what = "a size" if name == "file_mb" else "a time per token"
    why = f"Fewer than two stages have both {what} and a quality."
    return absent(identifier, title, why, bench_command(stages, "--text HELD-OUT --teacher TEACHER"))


def _plot(
    points: Sequence[Point],
    axis: tuple[str, str, str, str],
    device: str | None,
    limits: Mapping[str, float],
    worst: float | None,
) -> Plot | None:
    name, identifier, title, unit = axis
    shown = [
        (point, point.values[name], point.bits_per_byte)
        for point in points
        if point.values.get(name, 0) > 0 and point.bits_per_byte is not None
    ]
    if len(shown) < 2:
        return None
    xs, ys = [x for _, x, _ in shown], [y for _, _, y in shown]
    limit = limits.get(name)
    edges = [*xs, *([limit] if limit else [])]
    low = min([*ys, *([worst] if worst else [])])
    far = [item for item in shown if item[2] > low * _FAR]
    far = far if len(shown) - len(far) > 1 else []  # what remains must be worth a plot
    high = max([*(y for y in ys if not far or y <= low * _FAR), *([worst] if worst else [])])
    margin = (high - low) * 0.15 or high * 0.01
    best = front([(x, y) for point, x, y in shown if not point.estimated])
    data = [_front_trace(best)] if len(best) > 1 else []
    left, width = math.log10(min(edges)), math.log10(max(edges) / min(edges)) or 1.0
    places = [((math.log10(x) - left) / width, (y - low) / (high - low or 1.0)) for x, y in zip(xs, ys, strict=True)]
    sides = _label_sides(places)
    for state in _PLACES:
        mine = [(item, side) for item, side in zip(shown, sides, strict=True) if item[0].inside is state]
        data.append(_points_trace([item for item, _ in mine], [side for _, side in mine], name, unit, state))
    return chart(
        identifier,
        title,
        _caption(shown, name, device, limit, worst, limits) + _above(far),
        [trace for trace in data if trace["x"]],
        log_axis(unit, min(edges), max(edges)),
        {"title": "bits per byte", "range": [low - margin, high + 1.4 * margin]},
        shapes=_box(limit, worst),
        showlegend=True,
    )


def _above(far: Sequence[tuple[Point, float, float]]) -> str:
    """What the caption says of models too far behind for the plot."""
    if len(far) > _NAMED:
        return f" {len(far)} lie above the plot, at {min(y for *_, y in far):.4f} or more."
    return "".join(f" {point.label} lies above the plot, at {y:.4f}." for point, _, y in far)


def _front_trace(best: Sequence[tuple[float, ...]]) -> Plot:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in best],
        "y": [y for _, y in best],
        # Steps: between two points the one to the left is the best that is known to fit.
        "line": {"color": "theme:quiet", "width": 1.5, "dash": "dot", "shape": "hv"},
        "name": "front",
        "hoverinfo": "skip",
    }


def _label_sides(places: Sequence[tuple[float, float]]) -> list[str]:
    """Where each point's number goes so that it meets no mark and no other number, as far as four sides allow.

    Args:
        places: points in shares of the plot's width and height.
    """
    taken = list(places)
    sides = []
    for x, y in places:
        free = [
            side
            for side, (dx, dy) in _SIDES.items()
            if not any(abs(x + dx - a) < _CLOSE[0] and abs(y + dy - b) < _CLOSE[1] for a, b in taken)
        ]
        side = free[0] if free else "top center"
        taken.append((x + _SIDES[side][0], y + _SIDES[side][1]))
        sides.append(side)
    return sides


def _points_trace(
    shown: Sequence[tuple[Point, float, float]], sides: Sequence[str], name: str, unit: str, state: bool | None
) -> Plot:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [x for _, x, _ in shown],
        "y": [y for _, _, y in shown],
        "text": [point.label for point, _, _ in shown],
        "textposition": list(sides),
        "textfont": {"size": 11, "color": "theme:ink"},
        "customdata": [html.escape(point.name) for point, _, _ in shown],
        "name": _PLACES[state],
        "marker": {
            "color": _PAINT[state],
            "size": 11,
            "symbol": [_SYMBOLS[point.evidence[name]] for point, _, _ in shown],
            "line": {"color": _PAINT[state], "width": 1.5},
        },
        "hovertemplate": f"%{{customdata}}: %{{x:.3g}} {unit}, %{{y:.4f}} bits per byte<extra></extra>",
    }


def _box(limit: float | None, worst: float | None) -> list[Plot]:
    """The part of the plane that a budget allows, open at the sides it does not limit."""
    if limit is None and worst is None:
        return []
    x = {"x0": 1e-9, "x1": limit} if limit is not None else {"xref": "paper", "x0": 0, "x1": 1}
    y = {"y0": 0, "y1": worst} if worst is not None else {"yref": "paper", "y0": 0, "y1": 1}
    look: Plot = {"fillcolor": "theme:box", "line": {"color": "theme:good", "width": 1.5, "dash": "dash"}}
    return [{"type": "rect", "layer": "below", **x, **y, **look}]


def _caption(
    shown: Sequence[tuple[Point, float, float]],
    name: str,
    device: str | None,
    limit: float | None,
    worst: float | None,
    limits: Mapping[str, Any],
) -> str:
    words = ["Lower left is better; numbers are those of the tables. Nothing beats the points on the dotted front."]
    kinds = [kind for kind in _SYMBOLS if any(point.evidence[name] == kind for point, _, _ in shown)]
    meaning = "; ".join(_MEANINGS[kind] for kind in kinds)
    words.append(meaning[0].upper() + meaning[1:] + ".")
    if limit is not None:
        words.append(f"The box is the budget of {device}; inside and outside mean all of its limits.")
        if worst is None and "quality_loss_percent" in limits:
            words.append("It is open above: without bench --teacher no quality is known to lose from.")
    complete = [
        (point, (point.values["file_mb"], point.values["tpot_p50_ms"], point.bits_per_byte))
        for point, _, _ in shown
        if {"file_mb", "tpot_p50_ms"} <= point.values.keys() and point.bits_per_byte is not None and not point.estimated
    ]
    if name == "tpot_p50_ms" and len(complete) > 1:
        everything = [values for _, values in complete]
        best = [point.label for point, values in complete if values in front(everything)]
        words.append(f"Not dominated in size, time and quality together: {', '.join(best)}.")
    return " ".join(words)
