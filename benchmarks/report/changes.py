"""What each stage changed, from parent to child: the line of parents, waterfalls and a table."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.labels import MISSING, Table, number
from benchmarks.report.charts import Plot, absent, bench_command, chart
from benchmarks.report.inputs import Inputs, StageSummary, figures, too_short
from sportsllm.errors import ArtifactError
from sportsllm.storage.artifact import MANIFEST, digest, read_manifest

_METRICS = (
    ("file_mb", "Size", "MB"),
    ("bits_per_byte", "Quality", "bits per byte"),
    ("tpot_p50_ms", "Time per token", "ms"),
    ("peak_memory_mb", "Peak memory", "MB"),
)
_LONGEST_LABEL = 20
_FROM = ("init", "checkpoint", "teacher")  # settings that name the model a stage starts from, the nearest first
_MOST_STEPS = 64


def line_of_parents(stages: Sequence[StageSummary], last: StageSummary) -> list[StageSummary]:
    """The given stages that `last` was made from, the first first and `last` itself at the end.

    Manifests name their parents by digest. Stages that were not given are walked through where they still lie at
    the path the manifest has, or beside the stage made from them, unchanged.
    """
    line = [last]
    while len(line) <= len(stages):
        parent = _parent(line[0], [stage for stage in stages if all(stage is not other for other in line)])
        if parent is None:
            break
        line.insert(0, parent)
    return line


def _parent(stage: StageSummary, others: Sequence[StageSummary]) -> StageSummary | None:
    by_digest = {other.digest: other for other in others if other.digest}
    by_path = {Path(other.directory).resolve(): other for other in others if not other.digest}
    manifest, directory = stage.manifest, Path(stage.directory)
    for _ in range(_MOST_STEPS):
        parents = _parents_in_order(manifest)
        for path, value in parents:
            known = by_digest.get(value) or by_path.get(Path(path).resolve())
            if known is not None:
                return known
        places = [place for path, value in parents for place in _places(path, directory) if _is(place, value)]
        if not places:
            return None
        directory = places[0]
        manifest = read_manifest(directory)
    return None


def _parents_in_order(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = manifest.get("settings", {})
    named = [str(settings[key]) for key in _FROM if settings.get(key)]
    parents = [(str(entry.get("path")), str(entry.get("sha256"))) for entry in manifest.get("parents", [])]
    return sorted(parents, key=lambda entry: named.index(entry[0]) if entry[0] in named else len(named))


def _places(path: str, child: Path) -> tuple[Path, Path]:
    return Path(path), child.parent / Path(path).name


def _is(directory: Path, value: str) -> bool:
    """Whether a finished stage with this digest lies there; one that is damaged is another."""
    if not (directory / MANIFEST).is_file():
        return False
    try:
        return digest(directory) == value
    except ArtifactError:
        return False


def longest_line(inputs: Inputs) -> list[StageSummary]:
    """The line that ends at the stage of the verdict, or where that one stands alone, the longest there is."""
    bench = inputs.deciding
    ends = [stage for stage in inputs.stages if bench is not None and stage.bench is bench]
    for candidates in (ends, inputs.stages):
        lines = [line_of_parents(inputs.stages, stage) for stage in candidates]
        best = max(lines, key=len, default=[])
        if len(best) > 1:
            return best
    return []


@dataclass(frozen=True)
class Changes:
    """A line of stages, what stands for each where measuring counts, and by metric each one's value (None without one).

    `notes` say what stands for what.
    """

    line: list[StageSummary]
    measured: list[StageSummary]
    values: dict[str, list[float | None]]
    notes: list[str]


def changes(inputs: Inputs) -> Changes | None:
    """The figures along `longest_line`; None where no two stages descend from one another.

    A stage that was not measured is represented by a measured export of it, where one was given. Qualities are all of
    one kind: `bench`'s where two stages have that, else those that trainings logged.
    """
    line = longest_line(inputs)
    if not line:
        return None
    measured = [_measured(stage, inputs.stages, line) for stage in line]
    values = {name: [figures(stage)[name] for stage in measured] for name in ("tpot_p50_ms", "peak_memory_mb")}
    values["file_mb"] = [figures(stage)["file_mb"] for stage in line]
    scored = [stage.bits_per_byte if stage.scored_by_bench else None for stage in measured]
    logged = [None if stage.scored_by_bench else stage.bits_per_byte for stage in line]
    by_bench = sum(value is not None for value in scored) > 1
    values["bits_per_byte"] = scored if by_bench else logged
    notes = [
        f"{own.name} is measured as {its.name}." for own, its in zip(line, measured, strict=True) if own is not its
    ]
    if any(scored) and any(logged):
        kept = "what bench scored" if by_bench else "what the trainings logged"
        notes.append(f"Quality is {kept}; the other kind is of other text and left out.")
    return Changes(line, measured, values, notes)


def _measured(stage: StageSummary, stages: Sequence[StageSummary], line: Sequence[StageSummary]) -> StageSummary:
    """`stage` itself, or a measured export made from it where it was not measured."""
    if stage.bench is not None:
        return stage
    on_line = {id(one) for one in line}
    exports = [one for one in stages if one.bench is not None and one.command == "export" and id(one) not in on_line]
    own = (one for one in exports if _parent(one, [other for other in stages if other is not one]) is stage)
    return next(own, stage)


def change_plots(found: Changes | None) -> list[Plot]:
    """One waterfall a metric; a metric that fewer than two stages have is said to be missing."""
    if found is None:
        return [
            absent(
                "changes-plot",
                "Waterfall",
                "No two of the given stages descend from one another, or the stages between them have moved.",
                "report TEACHER PRUNED QUANTIZED EXPORT BENCH.json",
            )
        ]
    return [_waterfall(found, *metric) for metric in _METRICS]


def _waterfall(found: Changes, name: str, title: str, unit: str) -> Plot:
    pairs = list(zip(found.line, found.values[name], strict=True))
    known = [(stage, value) for stage, value in pairs if value is not None]
    without = [stage for stage, value in pairs if value is None]
    identifier = f"change-{name.replace('_', '-')}"
    if len(known) < 2:
        command = bench_command(without, "--text HELD-OUT" if name == "bits_per_byte" else "--device host")
        if name == "tpot_p50_ms" and too_short(found.measured):
            return absent(identifier, title, "A measured model's context is too short for a time per token.", None)
        have = f"Only {known[0][0].name} has this figure" if known else "No stage of the line has this figure"
        return absent(identifier, title, f"{have}; two are needed.", command)
    values = [value for _, value in known]
    steps = [values[0], *(after - before for before, after in itertools.pairwise(values)), values[-1]]
    shown = [f"{value:.4f}" if name == "bits_per_byte" else number(value) for value in values]
    words = [shown[0], *(_share(step, before) for step, before in zip(steps[1:-1], values, strict=False))]
    places = list(range(len(known) + 1))
    x_range, from_zero = _range(values, from_zero=name != "bits_per_byte")
    caption = "Lower is better." + ("" if from_zero else " The axis does not begin at zero.")
    if without:
        caption += f" Without this figure: {', '.join(stage.name for stage in without)}."
    trace = {
        "type": "waterfall",
        "orientation": "h",
        "y": places,  # names may repeat
        "x": [round(step, 6) for step in steps],
        "measure": ["absolute", *["relative"] * (len(known) - 1), "total"],
        "text": [*words, shown[-1]],
        "textposition": "none",
        "connector": {"line": {"color": "theme:quiet", "width": 1, "dash": "dot"}},
        "decreasing": {"marker": {"color": "theme:good"}},
        "increasing": {"marker": {"color": "theme:bad"}},
        "totals": {"marker": {"color": "theme:c0"}},
        "hovertemplate": "%{text} " + unit + "<extra></extra>",
    }
    ends = [values[0], *(max(pair) for pair in itertools.pairwise(values)), values[-1]]
    labels = {
        "type": "scatter",
        "mode": "text",
        "x": ends,  # always to the right of a bar: plotly's own go to the left of one that shrinks, over the names
        "y": places,
        "text": [f"\u00a0{word}" for word in trace["text"]],
        "textposition": "middle right",
        "textfont": {"size": 11, "color": "theme:ink"},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }
    y = {"title": "", "autorange": "reversed", "tickvals": places, "showgrid": False}
    y["ticktext"] = [*(html.escape(_short(stage.name)) for stage, _ in known), "<b>in all</b>"]
    height = 110 + 34 * len(places)
    x = {"title": unit, "range": x_range}
    return chart(identifier, title, caption, [trace, labels], x, y, height=height, showlegend=False)


def _range(values: Sequence[float], from_zero: bool) -> tuple[list[float], bool]:
    """The axis with room for the words beside the bars, and whether it begins at zero."""
    low, high = min(values), max(values)
    if from_zero:
        return [0, high * 1.3], True
    margin = (high - low) or high * 0.01
    return [low - 0.6 * margin, high + 0.7 * margin], False


def _share(step: float, before: float) -> str:
    return f"{100 * step / before:+.1f}%".replace("-", "\u2212") if before else number(step)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "\u2026"


def change_table(found: Changes | None) -> Table | None:
    """The same in figures: each stage's value and its change against the last stage that has one."""
    if found is None:
        return None
    rows = []
    last: dict[str, float] = {}
    for index, stage in enumerate(found.line):
        cells = [stage.name, stage.command]
        for name, _, _ in _METRICS:
            value, before = found.values[name][index], last.get(name)
            if value is None:
                cells.append(MISSING)
                continue
            shown = f"{value:.4f}" if name == "bits_per_byte" else number(value)
            cells.append(shown if not before else f"{shown} ({100 * (value / before - 1):+.1f}%)")
            last[name] = value
        rows.append(tuple(cells))
    headers = ("stage", "command", *(f"{title.lower()}, {unit}" for _, title, unit in _METRICS))
    caption = " ".join(["Changes are against the last stage before that has the figure.", *found.notes])
    return Table("Changes in figures", headers, rows, texts=(0, 1), caption=caption)
