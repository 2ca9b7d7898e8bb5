"""What each stage changed, from parent to child: a waterfall for each metric, and a table."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.labels import MISSING, number
from benchmarks.report.charts import Chart, Plot, chart, placeholder_chart
from benchmarks.report.inputs import Inputs, StageSummary, bench_command, too_short
from benchmarks.report.lineage import longest_lineage, parent_of
from benchmarks.report.text import Table

_QUALITY = "bits_per_byte"
_LONGEST_LABEL = 20


@dataclass(frozen=True)
class Changes:
    """A lineage of stages with, for each, the stage that was measured in its place, and the values of each metric.

    A value is None where a stage has none. `notes` say which stage is measured as which.
    """

    lineage: list[StageSummary]
    measured: list[StageSummary]
    values: dict[str, list[float | None]]
    notes: list[str]


@dataclass(frozen=True)
class _Metric:
    name: str
    title: str
    unit: str

    def shown(self, value: float) -> str:
        return f"{value:.4f}" if self.name == _QUALITY else number(value)


_METRICS = (
    _Metric("file_mb", "Size", "MB"),
    _Metric(_QUALITY, "Quality", "bits per byte"),
    _Metric("tpot_p50_ms", "Time per token", "ms"),
    _Metric("peak_memory_mb", "Peak memory", "MB"),
)


def find_changes(inputs: Inputs) -> Changes | None:
    """The metrics along `longest_lineage`; None where no two stages descend from one another.

    A stage that was not measured is represented by a measured export of it, where one was given. Qualities are all of
    one kind: `bench`'s where two stages have that, else those that trainings logged.
    """
    stages = longest_lineage(inputs)
    if not stages:
        return None
    measured = [_measured(stage, inputs.stages, stages) for stage in stages]
    values = {name: [stage.limit_metrics()[name] for stage in measured] for name in ("tpot_p50_ms", "peak_memory_mb")}
    values["file_mb"] = [stage.limit_metrics()["file_mb"] for stage in stages]
    scored = [stage.bits_per_byte if stage.scored_by_bench else None for stage in measured]
    logged = [None if stage.scored_by_bench else stage.bits_per_byte for stage in stages]
    by_bench = sum(value is not None for value in scored) > 1
    values[_QUALITY] = scored if by_bench else logged
    pairs = zip(stages, measured, strict=True)
    notes = [f"{own.name} is measured as {its.name}." for own, its in pairs if own is not its]
    if any(scored) and any(logged):
        source = "bench" if by_bench else "the trainings' logs"
        notes.append(f"Quality is from {source}; other scores are of other text and left out.")
    return Changes(stages, measured, values, notes)


def _measured(stage: StageSummary, stages: Sequence[StageSummary], lineage: Sequence[StageSummary]) -> StageSummary:
    """`stage` itself, or a measured export made from it where it was not measured."""
    if stage.bench is not None:
        return stage
    directories = {one.directory for one in lineage}
    exports = [
        one for one in stages if one.bench is not None and one.command == "export" and one.directory not in directories
    ]
    own = (one for one in exports if parent_of(one, [other for other in stages if other is not one]) is stage)
    return next(own, stage)


def change_charts(changes: Changes | None) -> list[Chart]:
    """One waterfall a metric, or a placeholder where fewer than two stages have it."""
    if changes is None:
        missing = "No two of the given stages descend from one another, or the stages between them have moved."
        command = "report TEACHER PRUNED QUANTIZED EXPORT BENCH.json"
        return [placeholder_chart("changes-plot", "Waterfall", missing, command)]
    return [_waterfall_chart(changes, metric) for metric in _METRICS]


def _waterfall_chart(changes: Changes, metric: _Metric) -> Chart:
    pairs = list(zip(changes.lineage, changes.values[metric.name], strict=True))
    known = [(stage, value) for stage, value in pairs if value is not None]
    without = [stage for stage, value in pairs if value is None]
    identifier = f"change-{metric.name.replace('_', '-')}"
    if len(known) < 2:
        if metric.name == "tpot_p50_ms" and too_short(changes.measured):
            missing = "A measured model's context is too short for a time per token."
            return placeholder_chart(identifier, metric.title, missing)
        missing = f"Only {known[0][0].name} has this figure" if known else "No stage has this figure"
        command = bench_command(without, "--text HELD-OUT" if metric.name == _QUALITY else "--device host")
        return placeholder_chart(identifier, metric.title, f"{missing}; two are needed.", command)
    values = [value for _, value in known]
    from_zero = metric.name != _QUALITY
    caption = "Lower is better." + ("" if from_zero else " The axis does not begin at zero.")
    if without:
        caption += f" Without this figure: {', '.join(stage.name for stage in without)}."
    names = [*(html.escape(_short(stage.name)) for stage, _ in known), "<b>in all</b>"]
    rows = list(range(len(names)))  # names may repeat
    return chart(
        identifier,
        metric.title,
        caption,
        _waterfall(values, metric),
        {"title": metric.unit, "range": _x_range(values, from_zero)},
        {"title": "", "autorange": "reversed", "tickvals": rows, "ticktext": names, "showgrid": False},
        height=110 + 34 * len(rows),
        showlegend=False,
    )


def _waterfall(values: Sequence[float], metric: _Metric) -> list[Plot]:
    """The bars, and their labels: always to the right, plotly's own cover the names where a bar shrinks."""
    steps = [after - before for before, after in itertools.pairwise(values)]
    changes = [_percent(step, before) for step, before in zip(steps, values, strict=False)]
    words = [metric.shown(values[0]), *changes, metric.shown(values[-1])]
    rows = list(range(len(words)))
    bars = {
        "type": "waterfall",
        "orientation": "h",
        "y": rows,
        "x": [round(step, 6) for step in (values[0], *steps, values[-1])],
        "measure": ["absolute", *["relative"] * len(steps), "total"],
        "text": words,
        "textposition": "none",
        "connector": {"line": {"color": "theme:quiet", "width": 1, "dash": "dot"}},
        "decreasing": {"marker": {"color": "theme:good"}},
        "increasing": {"marker": {"color": "theme:bad"}},
        "totals": {"marker": {"color": "theme:c0"}},
        "hovertemplate": "%{text} " + metric.unit + "<extra></extra>",
    }
    labels = {
        "type": "scatter",
        "mode": "text",
        "x": [values[0], *(max(pair) for pair in itertools.pairwise(values)), values[-1]],
        "y": rows,
        "text": [f"\u00a0{word}" for word in words],
        "textposition": "middle right",
        "textfont": {"size": 11, "color": "theme:ink"},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }
    return [bars, labels]


def _x_range(values: Sequence[float], from_zero: bool) -> list[float]:
    """The range of the axis, with room for the words beside the bars."""
    low, high = min(values), max(values)
    if from_zero:
        return [0, high * 1.3]
    margin = (high - low) or high * 0.01
    return [low - 0.6 * margin, high + 0.7 * margin]


def _percent(step: float, before: float) -> str:
    return f"{100 * step / before:+.1f}%".replace("-", "\u2212") if before else number(step)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "\u2026"


def change_table(changes: Changes | None) -> Table | None:
    """The same in figures: each stage's value and its change against the last stage that has one."""
    if changes is None:
        return None
    rows = []
    last: dict[str, float] = {}
    for index, stage in enumerate(changes.lineage):
        cells = [stage.name, stage.command]
        for metric in _METRICS:
            value, before = changes.values[metric.name][index], last.get(metric.name)
            if value is None:
                cells.append(MISSING)
                continue
            change = f" ({100 * (value / before - 1):+.1f}%)" if before else ""
            cells.append(metric.shown(value) + change)
            last[metric.name] = value
        rows.append(tuple(cells))
    headers = ("stage", "command", *(f"{metric.title.lower()}, {metric.unit}" for metric in _METRICS))
    caption = " ".join(["Changes are against the last stage before that has the figure.", *changes.notes])
    return Table("Changes in figures", headers, rows, texts=(0, 1), caption=caption)
