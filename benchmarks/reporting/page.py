"""The report's sections, and the report as one HTML page, as Markdown and as comma-separated values."""

from __future__ import annotations

import csv
import io
import shlex
from dataclasses import dataclass, field
from typing import Any

from benchmarks.labels import BUDGET_DEPTH, Table, escaped
from benchmarks.reporting.bench_tables import bench_tables, budget_table, describe, verdict_lines
from benchmarks.reporting.charts import Chart, render_page
from benchmarks.reporting.fits import fit_tables
from benchmarks.reporting.inputs import Inputs, StageSummary
from benchmarks.reporting.measured import Bench
from benchmarks.reporting.plots import trade_off_charts, training_charts
from benchmarks.reporting.stages import change_table, stage_table

_COMMAND = "sportsllm-compress"


@dataclass(frozen=True)
class Section:
    """Tables and charts under a heading; `missing` says what supplies them if there are none."""

    title: str
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    missing: str = ""

    @property
    def identifier(self) -> str:
        """Of its place on the page."""
        return self.title.lower().replace(" ", "-")


def sections(inputs: Inputs) -> list[Section]:
    """Everything but the verdict and the samples."""
    bench, stages, changes = inputs.bench, inputs.stages, change_table(inputs)
    last = stages[-1] if stages else None
    place, name = (last.directory, last.name) if last is not None else ("EXPORT", "EXPORT")
    command = (
        f"{_COMMAND} bench {shlex.quote(place)} --text HELD-OUT --teacher TEACHER --out {shlex.quote(name + '.json')}"
    )
    lost = f"{_COMMAND} report TEACHER PRUNED QUANTIZED EXPORT BENCH.json"
    budget = [] if bench is None or bench.budget is None else [budget_table(bench.budget)]
    return [
        Section("Budget", budget, [], f"{command} --target raspberry-pi-5"),
        Section("Stages", [stage_table(stages)] if stages else [], [], f"{_COMMAND} train --corpus CORPUS.jsonl"),
        Section("Trade-offs", fit_tables(inputs.fits, len(stages) + 1), trade_off_charts(inputs), command),
        Section("Changes", [changes] if changes is not None else [], [], lost),
        Section("Measurement", [] if bench is None else bench_tables(bench), [], command),
        Section("Training", [], training_charts(stages), f"{_COMMAND} train --corpus CORPUS.jsonl --out runs/teacher"),
    ]


def _headline(bench: Bench | None) -> list[str]:
    """The verdict, what it rests on, and what was measured."""
    found = [] if bench is None else [*verdict_lines(bench), describe(bench)]
    none = ["No verdict: nothing was measured against a budget (`bench --target`)."]
    return found if bench is not None and bench.budget is not None else none + found


def html_page(title: str, inputs: Inputs) -> str:
    """One page that works offline."""
    shown, bench = sections(inputs), inputs.bench
    return render_page(
        "report.html",
        [chart for section in shown for chart in section.charts],
        title=title,
        verdict=None if bench is None or bench.budget is None else bench.budget.verdict,
        lines=_headline(bench),
        machine=None if bench is None else bench.machine,
        absent={} if bench is None else bench.absent,
        stages=inputs.stages,
        sections=shown,
        samples=inputs.samples,
        skipped=inputs.skipped,
    )


def markdown(title: str, inputs: Inputs) -> str:
    """Heading, verdict, tables and samples; no charts, no HTML."""
    verdict, *more = _headline(inputs.bench)
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


def csv_text(inputs: Inputs) -> str:
    """One row a stage with unrounded numbers, units in the header; a cell without a figure is empty."""
    rows = [_csv_row(place, stage) for place, stage in enumerate(inputs.stages, start=1)]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(_csv_row(0, StageSummary("", "", ""))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _csv_row(place: int, stage: StageSummary) -> dict[str, Any]:
    bench, split = stage.bench or Bench("", {}, runtime=""), (stage.bench and stage.bench.memory_split) or {}
    times = bench.tpot_ms.get(str(BUDGET_DEPTH))
    own = ("command", "directory", "parameters", "size_bytes", "tokens", "flops", "bits_per_byte", "verdict")
    rates = ("prefill_tokens_per_s", "load_s", "peak_rss_bytes", "joules_per_token", "quality_loss_percent")
    return {
        **{"number": place, "stage": stage.name, **{key: getattr(stage, key) for key in own}},
        "scored_by": None if stage.scored is None else stage.scored[0],
        "target": None if bench.budget is None else bench.budget.target,
        **{f"ttft_{prompt}_ms": bench.ttft_ms.get(prompt) for prompt in ("128", "512")},
        **{f"tpot_512_{name}_ms": getattr(times, name, None) for name in ("p50", "p95", "p99")},
        "decode_512_tokens_per_s": bench.decode_tokens_per_s.get(str(BUDGET_DEPTH)),
        **{key: getattr(bench, key) for key in (*rates, "runtime", "threads", "kernels")},
        **{key: split.get(key) for key in ("pss_bytes", "uss_bytes", "anonymous_bytes", "file_bytes")},
        "seed": stage.manifest.seed,
        "created": stage.manifest.created,
    }
