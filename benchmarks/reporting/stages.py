"""Tables of the stages, what each changed, and what the last saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.labels import MISSING, Table, bits, count, number, with_unit
from benchmarks.reporting.inputs import Inputs, StageSummary, lineage
from benchmarks.reporting.measured import Scored
from benchmarks.reporting.plots import commonest

_HEADERS = (
    *("#", "stage", "command", "parameters", "tokens", "FLOPs", "size", "bits/byte"),
    *("first token", "per token", "peak memory", "budget"),
)
_CHANGES = {
    "file_mb": "size, MB",
    "bits_per_byte": "bits per byte",
    "tpot_p50_ms": "ms per token",
    "peak_memory_mb": "peak memory, MB",
}


def stage_table(stages: Sequence[StageSummary]) -> Table:
    """The stages, numbered as in the charts; a column in which no stage has a figure is left out."""
    rows = []
    for place, stage in enumerate(stages, start=1):
        found = stage.figures()
        rows.append(
            (
                str(place),
                stage.name,
                stage.command,
                count(stage.parameters),
                count(stage.tokens),
                MISSING if stage.flops is None else f"{stage.flops:.1e}",
                with_unit(found.get("file_mb"), "MB"),
                bits(stage.bits_per_byte),
                with_unit(found.get("ttft_ms"), "ms"),
                with_unit(found.get("tpot_p50_ms"), "ms"),
                with_unit(found.get("peak_memory_mb"), "MB"),
                stage.verdict or MISSING,
            )
        )
    kept = [place for place in range(len(_HEADERS)) if any(row[place] != MISSING for row in rows)]
    texts = [new for new, old in enumerate(kept) if _HEADERS[old] in ("stage", "command", "budget")]
    shown = [[row[place] for place in kept] for row in rows]
    return Table("Stages", [_HEADERS[place] for place in kept], shown, texts, _text_note(stages))


def _text_note(stages: Sequence[StageSummary]) -> str:
    """Which rows of the stages' table compare in quality; empty if all do."""
    groups: dict[Scored, list[int]] = {}
    for place, stage in enumerate(stages, start=1):
        if stage.scored is not None:
            groups.setdefault(stage.scored, []).append(place)
    if len(groups) < 2:
        return ""
    parts = []
    for (by, *given), places in groups.items():
        bench = stages[places[0] - 1].bench
        names = (bench.text if bench is not None else None) or [] if by == "bench" else given
        text = " and ".join(Path(name).name for name in names) or "text that is not named"
        which = f"{text}, by bench" if by == "bench" else f"half of what is held out of {text}"
        parts.append(f"{', '.join(map(str, places))}: {which}")
    return f"Bits per byte are of {len(groups)} texts and compare only within one ({'; '.join(parts)})."


def change_table(inputs: Inputs) -> Table | None:
    """What each stage of a lineage changed: that of the verdict's stage, else the longest; None without two stages.

    A stage that was not measured is represented by a measured export of it, if one was given. Qualities are all of one
    text, the one that most stages were scored on.
    """
    lines = [lineage(inputs.stages, stage) for stage in inputs.stages]
    lines = [line for line in lines if len(line) > 1]
    if not lines:
        return None
    chosen = max(lines, key=lambda line: (line[-1].bench is inputs.bench, len(line)))
    exports = {
        parent.directory: export
        for *_, parent, export in reversed(lines)
        if export.command == "export" and export.bench is not None and parent.bench is None and export not in chosen
    }
    measured = [exports.get(stage.directory, stage) for stage in chosen]
    text = commonest(stage.scored for stage in [*chosen, *(its for its in measured if its not in chosen)])
    rows, before = [], dict[str, float]()
    for own, its in zip(chosen, measured, strict=True):
        found = its.figures()
        found.update({name: value for name, value in own.figures().items() if name == "file_mb"})
        found.pop("bits_per_byte", None)
        if quality := next((one.bits_per_byte for one in (its, own) if one.scored == text), None):
            found["bits_per_byte"] = quality
        cells = [own.name, own.command]
        for name in _CHANGES:
            change = (
                f" ({100 * (found[name] / before[name] - 1):+.1f}%)" if found.get(name) and before.get(name) else ""
            )
            cells.append((bits if name == "bits_per_byte" else number)(found.get(name)) + change)
        before |= found
        rows.append(cells)
    notes = ["Changes are against the last stage before that has the figure."]
    pairs = zip(chosen, measured, strict=True)
    notes += [f"{own.name} is measured as {its.name}." for own, its in pairs if own is not its]
    if len({stage.scored for stage in (*chosen, *measured)} - {None}) > 1:
        notes.append("Scores of other text than that of most stages are left out.")
    return Table("What each stage changed", ("stage", "command", *_CHANGES.values()), rows, (0, 1), " ".join(notes))


def savings_line(stages: Sequence[StageSummary]) -> str | None:
    """What the last measured model saves against the first; None unless two were measured.

    Figures that one of them lacks are left out, and so is a quality of another text, and speeds: two runs of `bench` at
    different times are no ratio. `bench --against` gives one, with an interval.
    """
    measured = [stage for stage in stages if stage.bench is not None]
    if len(measured) < 2:
        return None
    first, last = measured[0], measured[-1]
    old, new = first.figures(), last.figures()
    parts = []
    if "file_mb" in old and "file_mb" in new:
        share = f"{100 * new['file_mb'] / old['file_mb']:.0f}%"
        parts.append(f"{share} of the file ({number(new['file_mb'])} of {number(old['file_mb'])} MB)")
    if "peak_memory_mb" in old and "peak_memory_mb" in new:
        parts.append(f"{100 * new['peak_memory_mb'] / old['peak_memory_mb']:.0f}% of the peak memory")
    if first.scored is not None and first.scored == last.scored:
        before, after = old["bits_per_byte"], new["bits_per_byte"]
        change = f"{abs(100 * (after / before - 1)):.1f}% {'more' if after > before else 'fewer'}"
        parts.append(f"{change} bits per byte ({bits(after)} against {bits(before)})")
    verdict = "" if last.verdict is None else f"; verdict on its budget: {last.verdict}"
    return f"{last.name} against {first.name}: {', '.join(parts)}{verdict}" if parts else None
