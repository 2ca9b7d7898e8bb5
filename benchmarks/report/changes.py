"""What each stage of a lineage changed, from parent to child, in size, quality, speed and memory."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.labels import MISSING, number
from benchmarks.report.inputs import Inputs, StageSummary
from benchmarks.report.lineage import longest_lineage, parent_of
from benchmarks.report.scores import Scored, commonest
from benchmarks.report.text import Table

_QUALITY = "bits_per_byte"
_METRICS = {
    "file_mb": "size, MB",
    _QUALITY: "quality, bits per byte",
    "tpot_p50_ms": "time per token, ms",
    "peak_memory_mb": "peak memory, MB",
}


def change_table(inputs: Inputs) -> Table | None:
    """Each stage's figures and their change against the last stage that has one; None without two related stages.

    A stage that was not measured is represented by a measured export of it, where one was given. Qualities are all of
    one text, the one that most stages were scored on.
    """
    stages = longest_lineage(inputs)
    if not stages:
        return None
    measured = [_measured(stage, inputs.stages, stages) for stage in stages]
    exports = [its for own, its in zip(stages, measured, strict=True) if its is not own]
    texts = [Scored.of(one) for one in (*stages, *exports)]
    text = commonest(texts)
    rows, last = [], dict[str, float]()
    for own, its in zip(stages, measured, strict=True):
        quality = next((one.bits_per_byte for one in (its, own) if Scored.of(one) == text), None)
        values = its.limit_metrics() | {"file_mb": own.limit_metrics()["file_mb"], _QUALITY: quality}
        cells = [own.name, own.command]
        for name in _METRICS:
            value, before = values[name], last.get(name)
            if value is None:
                cells.append(MISSING)
                continue
            change = f" ({100 * (value / before - 1):+.1f}%)" if before else ""
            cells.append((f"{value:.4f}" if name == _QUALITY else number(value)) + change)
            last[name] = value
        rows.append(tuple(cells))
    notes = ["Changes are against the last stage before that has the figure."]
    pairs = zip(stages, measured, strict=True)
    notes += [f"{own.name} is measured as {its.name}." for own, its in pairs if own is not its]
    if text is not None and len(set(texts) - {None}) > 1:
        source = "bench" if text.by == "bench" else "the trainings' logs"
        notes.append(f"Quality is from {source}, on one text; scores of other text are left out.")
    headers = ("stage", "command", *_METRICS.values())
    return Table("What each stage changed", headers, rows, texts=(0, 1), caption=" ".join(notes))


def _measured(stage: StageSummary, stages: Sequence[StageSummary], lineage: Sequence[StageSummary]) -> StageSummary:
    """`stage` itself, or a measured export made from it where it was not measured."""
    directories = {one.directory for one in lineage}
    for one in stages if stage.bench is None else ():
        if one.bench is None or one.command != "export" or one.directory in directories:
            continue
        if parent_of(one, [other for other in stages if other is not one]) is stage:
            return one
    return stage
