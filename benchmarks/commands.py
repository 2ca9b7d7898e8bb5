"""The commands `devices`, `calibrate`, `bench`, `fit`, `report` and `compare`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.measure.options import BOTH, MeasuringFlags
from benchmarks.runtimes.options import RuntimeFlags, portable_too
from benchmarks.search.options import EffortFlags
from sportsllm.cli import flags
from sportsllm.cli.flag_groups import expand_flag_groups
from sportsllm.errors import UsageError

OnDevice = Annotated[bool, typer.Option(help="This machine is the device: its measurements decide, not predictions.")]


def devices(
    action: Annotated[
        str | None, typer.Argument(metavar="show", help="`show` explains one device.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="The device to explain.", show_default=False)
    ] = None,
) -> dict[str, Any]:
    """List the device budgets, or explain one with the source of every figure."""
    from benchmarks.console_tables import print_device, print_devices
    from benchmarks.devices.load import list_devices, load_device
    from benchmarks.devices.recognise import is_this_machine
    from benchmarks.labels import LIMITS
    from sportsllm.console import output

    if action not in (None, "show") or (action == "show") != (name is not None):
        raise UsageError(
            "devices lists every device; `devices show NAME` explains one, for example `devices show host`"
        )
    if name is not None:
        device = load_device(name)
        print_device(output(), device)
        return {"devices": [device.model_dump(mode="json")]}
    found = [load_device(each) for each in list_devices()]
    print_devices(output(), found, [each.name for each in found if is_this_machine(each)])
    return {
        "devices": [
            {
                "name": each.name,
                "kind": each.kind,
                "title": each.title,
                "processor": each.processor,
                "limits": {limit: getattr(each.limits, limit) for limit in LIMITS},
                "this_machine": is_this_machine(each),
            }
            for each in found
        ]
    }


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="New device file.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The device's name.", show_default="the file's")
    ] = None,
    threads: flags.Threads = None,
    limits_from: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device whose limits are copied.")] = "host",
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of rounds; the lower quartile of each timing is used. Increase on a noisy machine.",
        ),
    ] = 3,
) -> dict[str, Any]:
    """Time small models here, in about two minutes, and write this machine as a device file."""
    from benchmarks.console_tables import print_calibration
    from benchmarks.predict.calibrate import run_calibrate
    from sportsllm.console import output

    result = run_calibrate(out, name, threads, limits_from, rounds)
    print_calibration(output(), result)
    return result


@expand_flag_groups
def bench(
    directory: flags.Directory,
    *,
    device: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device whose budget the model must keep.")] = "host",
    on_device: OnDevice = False,
    threads: flags.Threads = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Held-out text to score, for the quality limit; may be repeated."),
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The fp32 teacher to compare quality with."), flags.BY_NAME
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="New file for the result.")] = None,
    measuring: MeasuringFlags,
    others: RuntimeFlags,
) -> dict[str, Any]:
    """Latency, memory and size, measured in fresh processes and held to a device's budget."""
    import json

    from benchmarks.bench import advice, bench_model
    from benchmarks.console_results import print_bench, verdict_line
    from export.runtime.kernels import kernels_of_directory
    from export.runtime.providers import find_provider
    from sportsllm.console import log, output
    from sportsllm.errors import ConflictError, GateError
    from sportsllm.files import atomic_write_text
    from sportsllm.inference.decoder import is_onnx_directory

    if out is not None and out.exists():
        raise ConflictError(f"{out}: exists already; choose another --out or move it away")
    request, runtimes = measuring.request(directory, threads), others.runtimes(directory)
    if measuring.kernels == BOTH:
        runtimes.append(portable_too(directory))
    if is_onnx_directory(directory):
        log(str(kernels_of_directory(directory, request.kernels, find_provider(request.provider))))
    result = bench_model(request, device, on_device, text or [], teacher, runtimes).to_json()
    if out is not None:
        atomic_write_text(out, json.dumps(result, indent=1) + "\n")
    print_bench(output(), result)
    if not result["budget"]["passed"]:
        result["complaint"] = f"{directory}: {verdict_line(result['budget'])}; {advice(result)}"
        result["exit_code"] = GateError.exit_code
    return result


@expand_flag_groups
def fit(
    *,
    teacher: Annotated[Path, typer.Option(metavar="DIR", help="An unquantized checkpoint."), flags.BY_NAME],
    device: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device whose budget the model must keep.")],
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
    from compress.distillation.run import teacher_corpus
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
    target = Target(device, on_device, provider, processor_of(provider))
    result = run_fit(source, target, out, effort, vocabularies=vocab_size or [], dry_run=dry_run)
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
