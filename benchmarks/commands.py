"""The command `report`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm import options as flags


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Stage directories, directories of `fit`, bench results (.json) and sample texts (.txt).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File to write; .html, .md or .csv selects the format.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(metavar="TEXT", help="Heading of the page.")] = ("sportsllm-compress report"),
    format: Annotated[
        str | None,
        typer.Option(metavar="html,md,csv", help="Write several formats, one file each.", show_default="that of --out"),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Prompt that the first and the last stage continue, to compare them; may be repeated."
        ),
    ] = None,
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """One HTML page that works offline: verdict, trade-offs, stages, speed, memory, samples, provenance."""
    import dataclasses

    from benchmarks.report.inputs import collect
    from benchmarks.report.markdown import stage_table
    from benchmarks.report.report import targets, write_report
    from benchmarks.report.samples import before_and_after
    from benchmarks.report.savings import savings_line
    from sportsllm.console import output, table

    files = targets(out, format)
    inputs = collect(directories)
    if sample:
        texts, skipped = before_and_after(inputs.stages, sample, threads)
        inputs = dataclasses.replace(inputs, samples=[*inputs.samples, *texts], skipped=skipped)
    write_report(files, title, inputs)
    stages = stage_table(inputs.stages)
    output().print(table(stages.headers, stages.rows, stages.texts))
    if stages.caption:
        output().print(stages.caption, markup=False)
    for path in files.values():
        size = path.stat().st_size
        shown = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
        output().print(f"{path}: {len(inputs.stages)} stages, {shown}", markup=False)
    saved = savings_line(inputs.stages)
    if saved is not None:
        output().print(saved, markup=False)
    written = list(files.values())
    return {
        "out": str(written[0]),
        "files": {name: str(path) for name, path in files.items()},
        "stages": [stage.name for stage in inputs.stages],
        "saved": saved,
        "candidates": sum(len(fit.candidates) for fit in inputs.fits),
        "bytes": written[0].stat().st_size,
    }
