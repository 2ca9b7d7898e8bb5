"""The commands `fit`, `report` and `compare`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.search.options import EffortFlags
from sportsllm.cli import flags
from sportsllm.cli.flag_groups import expand_flag_groups

OnDevice = Annotated[bool, typer.Option(help="This machine is the device: its measurements decide, not predictions.")]


@expand_flag_groups
def fit(
    *,
    teacher: Annotated[Path, typer.Option(metavar="DIR", help="An unquantized checkpoint."), flags.BY_NAME],
    target: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device whose budget the model must keep.")],
    out: flags.Out = Path("runs/fit"),
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="Training text, files or folders; may be repeated.", show_default="the teacher's"
        ),
    ] = None,
    valid: flags.Valid = None,
    calibration: flags.CalibrationText = None,
    vocab_size: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="A smaller vocabulary to consider too; may be repeated."),
    ] = None,
    work: EffortFlags,
    sequence: flags.Sequence = None,
    batch_size: flags.BatchSize = None,
    accumulation: flags.Accumulation = None,
    learning_rate: flags.LearningRate = None,
    on_device: OnDevice = False,
    provider: flags.Provider = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only predict and rank; make nothing.")] = False,
    seed: flags.Seed = 0,
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Find and make the best model that fits a device's budget, and explain the choice."""
    from benchmarks.bench import processor_of
    from benchmarks.console_results import print_fit
    from benchmarks.search.run import complaint, passed, run_fit
    from benchmarks.search.stages import Source, Target
    from compress.distillation.starts import teacher_corpus
    from sportsllm.console import output
    from sportsllm.errors import GateError
    from sportsllm.files import require_directory
    from sportsllm.processors import set_threads

    set_threads(threads)
    require_directory(teacher, "a checkpoint")
    text = tuple(corpus or teacher_corpus(teacher, "corpus"))
    held_out = tuple(valid or ([] if corpus else teacher_corpus(teacher, "valid")))
    effort = work.effort(teacher)
    flags_given = {
        "sequence": sequence,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "learning_rate": learning_rate,
    }
    settings = {name: value for name, value in flags_given.items() if value is not None}
    source = Source(teacher, text, tuple(calibration or text), held_out, threads, seed, settings)
    goal = Target(target, on_device, provider, processor_of(provider))
    result = run_fit(source, goal, out, effort, vocabularies=vocab_size or [], dry_run=dry_run)
    print_fit(output(), result)
    if not dry_run and not passed(result):
        result["complaint"] = complaint(result)
        result["exit_code"] = GateError.exit_code
    return result


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
