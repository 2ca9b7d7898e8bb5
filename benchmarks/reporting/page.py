"""The report's sections, and the report as one HTML page, as Markdown and as comma-separated values."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.labels import LIMITS, MISSING, Table, bits, count, csv_text, escaped, number, with_unit
from benchmarks.reporting.bench_tables import bench_tables, budget_table, describe, verdict_lines
from benchmarks.reporting.charts import Chart, render_page
from benchmarks.reporting.fits import fit_tables
from benchmarks.reporting.inputs import Inputs, StageSummary
from benchmarks.reporting.measured import Scored
from benchmarks.reporting.plots import trade_off_charts, training_charts

_HEADERS = ("#", "stage", "command", "parameters", "tokens", "FLOPs", "size", "bits/byte", "first token", "per token",
            "memory", "budget")  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Tables and charts under a heading."""

    title: str
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()


def sections(inputs: Inputs) -> list[Section]:
    """All sections but the verdict and the samples, without empty ones."""
    bench, stages = inputs.bench, inputs.stages
    found = [
        Section("Budget", [] if bench is None or bench.budget is None else [budget_table(bench.budget)]),
        Section("Stages", [stage_table(stages)] if stages else []),
        Section("Trade-offs", fit_tables(inputs.fits, len(stages) + 1), trade_off_charts(inputs)),
        Section("Measurement", [] if bench is None else bench_tables(bench)),
        Section("Training", [], training_charts(stages)),
    ]
    return [section for section in found if section.tables or section.charts]


def _headline(inputs: Inputs) -> list[str]:
    """The verdict, the quality, the measured model, and what the last stage saves."""
    bench, saved = inputs.bench, savings_line(inputs.stages)
    lines = [] if bench is None else [*verdict_lines(bench), describe(bench)]
    if bench is None or bench.budget is None:
        place = shlex.quote(next((one.directory for one in reversed(inputs.stages) if one.parameters), "EXPORT"))
        command = f"bench {place} --target NAME --text HELD-OUT --teacher TEACHER --out bench.json"
        lines[:0] = ["No verdict: no budget was given", f"To get one: sportsllm-compress {command}"]
    return lines + ([] if saved is None else [f"{saved}."])


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
    """Which rows of the stages' table can be compared in quality; empty if all can."""
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
    return f"Compare bits per byte only between stages scored on the same text ({'; '.join(parts)})."


def savings_line(stages: Sequence[StageSummary]) -> str | None:
    """What the last measured model saves against the first; None unless two were measured.

    Figures that one of them lacks and qualities of different texts are left out. So are speeds, since two runs of
    `bench` at different times give no ratio; `bench --against` gives one, with an interval.
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
    budget = None if last.bench is None else last.bench.budget
    verdict = "" if budget is None else f"; budget of {budget.target}: {budget.verdict}"
    return f"{last.name} against {first.name}: {', '.join(parts)}{verdict}" if parts else None


def html_page(title: str, inputs: Inputs) -> str:
    """One page that works offline."""
    shown, bench = sections(inputs), inputs.bench
    return render_page(
        "report.html",
        [chart for section in shown for chart in section.charts],
        title=title,
        verdict=None if bench is None or bench.budget is None else bench.budget.verdict,
        lines=_headline(inputs),
        machine=None if bench is None else bench.machine,
        stages=inputs.stages,
        sections=shown,
        samples=inputs.samples,
        skipped=inputs.skipped,
    )


def markdown(title: str, inputs: Inputs) -> str:
    """Heading, verdict, tables and samples; no charts, no HTML."""
    verdict, *more = _headline(inputs)
    lines = [f"## {escaped(title)}", "", f"**{escaped(verdict)}**", ""]
    for line in more:
        lines += [escaped(line), ""]
    for section in sections(inputs):
        for table in section.tables:
            lines += table.markdown()
    for sample in inputs.samples:
        lines += [f"### {escaped(sample.heading)}", ""]
        lines += [f"    {line}" for line in (sample.prompt + sample.text).splitlines()] + [""]
    lines += [f"- {escaped(line)}" for line in inputs.skipped]
    return "\n".join(lines).rstrip() + "\n"


def stages_csv(inputs: Inputs) -> str:
    """One row a stage with unrounded numbers; a cell without a figure is empty."""
    own = ("command", "directory", "parameters", "tokens", "flops", "verdict")
    rows = []
    for place, stage in enumerate(inputs.stages, start=1):
        row = {"number": place, "stage": stage.name, **{name: getattr(stage, name) for name in own}}
        rows.append(row | {"scored_by": stage.scored and stage.scored[0]} | stage.figures())
    return csv_text(["number", "stage", *own, "scored_by", "bits_per_byte", *LIMITS], rows)
