"""The report without charts: Markdown for a pull request, and comma-separated values for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.labels import MISSING, is_number, with_unit
from benchmarks.report.changes import change_table
from benchmarks.report.inputs import Inputs, StageSummary
from benchmarks.report.scores import text_note
from benchmarks.report.search_results import fit_tables
from benchmarks.report.text import Table, get_nested, measurement_tables, summarize_budget

STAGE_HEADERS = (
    "#", "stage", "command", "parameters", "size", "bits per byte", "first token", "per token", "peak memory", "budget",
)  # fmt: skip


def stage_cells(stage: StageSummary) -> tuple[str, ...]:
    """A stage's texts under `STAGE_HEADERS`, from `parameters` on."""
    metrics = stage.limit_metrics()
    return (
        MISSING if stage.parameters is None else f"{stage.parameters:,}",
        with_unit(metrics["file_mb"], "MB"),
        MISSING if metrics["bits_per_byte"] is None else f"{metrics['bits_per_byte']:.4f}",
        with_unit(metrics["ttft_ms"], "ms"),
        with_unit(metrics["tpot_p50_ms"], "ms"),
        with_unit(metrics["peak_memory_mb"], "MB"),
        stage.outcome or MISSING,
    )


def stage_table(stages: Sequence[StageSummary]) -> Table:
    """The stages under `STAGE_HEADERS`, numbered as in the charts."""
    rows = [(str(n), stage.name, stage.command, *stage_cells(stage)) for n, stage in enumerate(stages, start=1)]
    return Table("Stages", STAGE_HEADERS, rows, texts=(1, 2, 9), caption=text_note(stages) or "")


def markdown(title: str, inputs: Inputs) -> str:
    """Heading, verdict, stages, changes and searches as plain tables; no HTML in it."""
    lines = [f"## {escaped(title)}", ""]
    budget = summarize_budget(inputs.deciding)
    if budget is None:
        lines += ["No verdict: nothing was measured against a budget (`sportsllm-compress bench`).", ""]
    else:
        lines += [f"**{escaped(budget.heading)}.** {escaped(budget.sentence)}", ""]
        rows = [(row.label, row.value, row.limit, row.outcome, row.source or MISSING) for row in budget.rows]
        lines += markdown_table(Table("", ("limit", "value", "allowed", "outcome", "from"), rows, texts=(0, 3, 4)))
        if budget.noisy:
            lines += ["The measurement was disturbed: repeat it on a quiet machine.", ""]
    tables = [stage_table(inputs.stages) if inputs.stages else None, change_table(inputs)]
    tables += [*fit_tables(inputs.fits, len(inputs.stages) + 1), *measurement_tables(inputs.deciding)]
    for table in filter(None, tables):
        lines += [f"### {escaped(table.title)}", "", *markdown_table(table)]
        lines += [escaped(table.caption), ""] if table.caption else []
    for sample in inputs.samples:
        lines += [f"### {escaped(sample.heading)}", ""]
        lines += [f"    {line}" for line in (sample.prompt + sample.text).splitlines()] + [""]
    lines += [f"- {escaped(line)}" for line in inputs.skipped]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table, bold_first: bool = False) -> list[str]:
    """A table's lines and an empty one after them; `bold_first` sets the first row in bold."""
    rule = [" --- " if index in table.texts else " ---: " for index in range(len(table.headers))]
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    if bold_first:
        rows[0] = [f"**{cell}**" for cell in rows[0]]
    head, *body = (f"| {' | '.join(cells)} |" for cells in (table.headers, *rows))
    return [head, f"|{'|'.join(rule)}|", *body, ""]


def escaped(text: str) -> str:
    """Text that Markdown shows as it is; names come from directories and may hold anything."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + letter if letter in "\\`*_|[]#~" else letter for letter in text)


# Columns from a bench result, and the keys of each.
_BENCH_COLUMNS: dict[str, tuple[str, ...]] = {
    "pss_bytes": ("memory_split", "pss_bytes"),
    "uss_bytes": ("memory_split", "uss_bytes"),
    "anonymous_bytes": ("memory_split", "anonymous_bytes"),
    "file_backed_bytes": ("memory_split", "file_bytes"),
    "joules_per_token": ("joules_per_token",),
    "ttft_128_ms": ("ttft_ms", "128"),
    "ttft_512_ms": ("ttft_ms", "512"),
    "tpot_32_p50_ms": ("tpot_ms", "32", "p50"),
    "tpot_512_p50_ms": ("tpot_ms", "512", "p50"),
    "tpot_512_p95_ms": ("tpot_ms", "512", "p95"),
    "tpot_512_p99_ms": ("tpot_ms", "512", "p99"),
    "decode_512_tokens_per_s": ("decode_tokens_per_s", "512"),
    **{
        key: (key,)
        for key in (
            *("prefill_tokens_per_s", "memory_floor_tpot_ms", "load_s", "peak_rss_bytes"),
            *("teacher_bits_per_byte", "quality_loss_percent", "threads", "kernels"),
        )
    },
}


def csv_text(inputs: Inputs) -> str:
    """One row a stage with unrounded numbers, units in the header; a cell without a figure is empty."""
    rows = [_csv_row(number, stage) for number, stage in enumerate(inputs.stages, start=1)]
    return csv_table(list(_csv_row(0, StageSummary("", "", ""))), rows)


def csv_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Comma-separated values with a header line."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _csv_row(number: int, stage: StageSummary) -> dict[str, Any]:
    measured = {column: get_nested(stage.bench, *keys) for column, keys in _BENCH_COLUMNS.items()}
    own = ("command", "directory", "parameters", "size_bytes", "bits_per_byte")
    return {
        **{"number": number, "stage": stage.name, **{key: getattr(stage, key) for key in own}},
        "scored_by": None if stage.bits_per_byte is None else "bench" if stage.scored_by_bench else "training",
        **{column: value if is_number(value) else None for column, value in measured.items()},
        "target": get_nested(stage.bench, "budget", "target"),
        "budget": stage.outcome,
        "runtime": get_nested(stage.bench, "runtime"),
        "seed": stage.manifest.seed,
        "created": stage.manifest.created or None,
    }
