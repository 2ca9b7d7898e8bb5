"""The report without pictures: Markdown for a pull request, and comma-separated values for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from benchmarks.labels import (
    ENERGY,
    MEMORY_PARTS,
    MISSING,
    Places,
    Table,
    bench_tables,
    first_number,
    listed,
    part,
    verdict,
    with_unit,
)
from benchmarks.report.changes import change_table, changes
from benchmarks.report.inputs import Inputs, StageSummary, figures, outcome
from benchmarks.report.search_results import fit_tables

STAGE_HEADERS = (
    "#", "stage", "command", "parameters", "size", "bits per byte", "first token", "per token", "peak memory", "budget",
)  # fmt: skip


def stage_row(stage: StageSummary) -> dict[str, Any]:
    """One line of the stage table, as texts."""
    found = figures(stage)
    manifest = stage.manifest
    return {
        "name": stage.name,
        "command": stage.command,
        "directory": stage.directory,
        "parameters": MISSING if stage.parameters is None else f"{stage.parameters:,}",
        "size": with_unit(found["file_mb"], "MB"),
        "quality": MISSING if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}",
        "ttft": with_unit(found["ttft_ms"], "ms"),
        "tpot": with_unit(found["tpot_p50_ms"], "ms"),
        "memory": with_unit(found["peak_memory_mb"], "MB"),
        "budget": outcome(stage) or MISSING,
        "created": manifest.get("created", ""),
        "settings": manifest.get("settings", {}),
        "seed": manifest.get("seed"),
        "versions": manifest.get("versions", {}),
        "parents": manifest.get("parents", []),
        "files": manifest.get("files", {}),
    }


def stage_table(stages: Sequence[StageSummary]) -> Table:
    """The stages under `STAGE_HEADERS`, numbered as in the plots."""
    keys = ("name", "command", "parameters", "size", "quality", "ttft", "tpot", "memory", "budget")
    rows = [(str(index), *(str(stage_row(stage)[key]) for key in keys)) for index, stage in enumerate(stages, start=1)]
    return Table("Stages", STAGE_HEADERS, rows, texts=(1, 2, 9))


def verdict_words(judged: dict[str, Any]) -> tuple[str, str]:
    """The verdict in a few words, and in a sentence."""
    unknown = f"Not measured: {listed(judged['unknown']).lower()}." if judged["unknown"] else ""
    if judged["outcome"] == "missed":
        return f"Does not fit {judged['device']}", f"Missed: {listed(judged['missed']).lower()}. {unknown}".strip()
    if judged["outcome"] == "passed":
        return f"Fits {judged['device']}", "Every limit of the budget is kept."
    return f"Nothing missed on {judged['device']}, but not everything is known", unknown


def markdown(title: str, inputs: Inputs) -> str:
    """Heading, verdict, stages, changes and searches as plain tables; no HTML in it."""
    lines = [f"## {escaped(title)}", ""]
    judged = verdict(inputs.deciding)
    if judged is None:
        lines += ["No verdict: nothing was measured against a budget (`sportsllm-compress bench`).", ""]
    else:
        words, sentence = verdict_words(judged)
        lines += [f"**{escaped(words)}.** {escaped(sentence)}", ""]
        rows = [
            (row["label"], row["value"], row["limit"], row["outcome"], row["source"] or MISSING)
            for row in judged["rows"]
        ]
        lines += markdown_table(Table("", ("limit", "value", "allowed", "outcome", "from"), rows, texts=(0, 3, 4)))
        if judged["noisy"]:
            lines += ["The measurement was disturbed: repeat it on a quiet machine.", ""]
    tables = [stage_table(inputs.stages)] if inputs.stages else []
    change = change_table(changes(inputs))
    tables += [change] if change is not None else []
    tables += fit_tables(inputs.fits, len(inputs.stages) + 1) + bench_tables(inputs.deciding)
    for table in tables:
        heading = "What each stage changed" if table is change else table.title
        lines += [f"### {escaped(heading)}", "", *markdown_table(table)]
        lines += [escaped(table.caption), ""] if table.caption else []
    for sample in inputs.samples:
        lines += [f"### {escaped(sample.heading)}", ""]
        lines += [f"    {line}" for line in (sample.prompt + sample.text).splitlines()] + [""]
    lines += [f"- {escaped(line)}" for line in inputs.skipped]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> list[str]:
    """A table's lines and an empty one after them."""
    rule = [" --- " if index in table.texts else " ---: " for index in range(len(table.headers))]
    lines = [_row(table.headers), "|" + "|".join(rule) + "|"]
    return [*lines, *(_row([escaped(cell) for cell in row]) for row in table.rows), ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is; names come from directories and may hold anything."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + letter if letter in "\\`*_|[]#~" else letter for letter in text)


# Column and where its number lies in a bench result.
_BENCH_COLUMNS: tuple[tuple[str, Places], ...] = (
    *MEMORY_PARTS.items(),
    ("joules_per_token", ENERGY),
    ("ttft_128_ms", (("ttft_ms", "128"),)),
    ("ttft_512_ms", (("ttft_ms", "512"),)),
    ("tpot_32_p50_ms", (("tpot_ms", "32", "p50"),)),
    ("tpot_512_p50_ms", (("tpot_ms", "512", "p50"),)),
    ("tpot_512_p95_ms", (("tpot_ms", "512", "p95"),)),
    ("tpot_512_p99_ms", (("tpot_ms", "512", "p99"),)),
    ("decode_512_tokens_per_s", (("decode_tokens_per_s", "512"),)),
    ("prefill_tokens_per_s", (("prefill_tokens_per_s",),)),
    ("memory_floor_tpot_ms", (("memory_floor_tpot_ms",),)),
    ("load_s", (("load_s",),)),
    ("peak_rss_bytes", (("peak_rss_bytes",),)),
    ("teacher_bits_per_byte", (("teacher_bits_per_byte",),)),
    ("quality_loss_percent", (("quality_loss_percent",),)),
    ("threads", (("threads",),)),
)


def csv_text(inputs: Inputs) -> str:
    """One row a stage with unrounded numbers, units in the header; a cell without a figure is empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    plain = ("number", "stage", "command", "directory", "parameters", "size_bytes", "bits_per_byte", "scored_by")
    last = ("device", "budget", "runtime", "seed", "created")
    writer.writerow([*plain, *(name for name, _ in _BENCH_COLUMNS), *last])
    for index, stage in enumerate(inputs.stages, start=1):
        scored = None if stage.bits_per_byte is None else "bench" if stage.scored_by_bench else "training"
        values = [first_number(stage.bench, places) for _, places in _BENCH_COLUMNS]
        writer.writerow(
            [
                *(index, stage.name, stage.command, stage.directory, stage.parameters, stage.size_bytes),
                *(stage.bits_per_byte, scored),
                *values,
                *(part(stage.bench, "budget", "device"), outcome(stage), part(stage.bench, "runtime")),
                *(stage.manifest.get("seed"), stage.manifest.get("created")),
            ]
        )
    return stream.getvalue()
