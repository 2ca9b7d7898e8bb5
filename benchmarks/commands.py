"""The commands `plan`, `devices`, `calibrate`, `bench`, `report` and `compare`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.search.command import fit
from sportsllm.cli import flags as options
from sportsllm.errors import UsageError

__all__ = ["bench", "compare", "devices", "fit", "plan", "report"]


def plan(
    model: Annotated[str, typer.Option(help="A preset's name, or a checkpoint or export directory.")] = "small",
    device: Annotated[str | None, typer.Option(help="Predict speed and memory on this device.")] = None,
    batch: Annotated[
        int, typer.Option("--batch-size", "--batch", min=1, help="Sequences in memory at once, in training.")
    ] = 4,
    length: Annotated[
        int | None,
        typer.Option("--sequence", "--length", min=1, help="Tokens of one training sequence; 512 if not given."),
    ] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Every tensor along the way, with its shape.")] = False,
    block_size: Annotated[int, typer.Option(help="Numbers of a quantized matrix that share a scale.")] = 32,
    head_bits: Annotated[int, typer.Option(help="Bits of embedding and head at int8 and int4.")] = 8,
    kv_cache: Annotated[
        str | None, typer.Option(help="Cache to predict with: fp32, fp16 or int8; the device's own if not given.")
    ] = None,
    optimizer: options.Optimizer = None,
    precision: options.Precision = None,
) -> dict[str, Any]:
    """Parameters, memory by precision, KV cache and predicted speed. Runs nothing."""
    from benchmarks.console_tables import print_plan
    from benchmarks.predict.plan import plan_model
    from sportsllm.console import output

    result = plan_model(
        model,
        device=device,
        batch=batch,
        length=length,
        shapes=shapes,
        block_size=block_size,
        head_bits=head_bits,
        kv_cache=kv_cache,
        optimizer=optimizer or "adamw",
        precision="bf16" if precision in (None, "auto") else str(precision),
    )
    print_plan(output(), result)
    return result


def devices(
    action: Annotated[str | None, typer.Argument(help="`show` explains one device.", show_default=False)] = None,
    name: Annotated[str | None, typer.Argument(help="Name or file of the device.", show_default=False)] = None,
) -> dict[str, Any]:
    """List the device budgets, or explain one with the source of every figure."""
    from benchmarks.console_tables import print_device, print_devices
    from benchmarks.devices.load import LIMIT_UNITS, is_this_machine, list_devices, load_device
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
                "limits": {limit: getattr(each.limits, limit) for limit in LIMIT_UNITS},
                "this_machine": is_this_machine(each),
            }
            for each in found
        ]
    }


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="New device file, .toml.")],
    name: Annotated[str | None, typer.Option("--name", help="The device's name; the file's if not given.")] = None,
    threads: options.Threads = None,
    limits_from: Annotated[
        str, typer.Option("--limits-from", help="Device whose limits it gets: a name from `devices`, or a file.")
    ] = "host",
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", min=1, help="Through all that is timed; the lower quartile counts. More where it is noisy."
        ),
    ] = 3,
) -> dict[str, Any]:
    """Measure this machine, in one to three minutes, and write it as a device file."""
    from benchmarks.console_tables import print_calibration
    from benchmarks.predict.calibrate import run_calibrate
    from sportsllm.console import output

    result = run_calibrate(out, name, threads, limits_from, rounds)
    print_calibration(output(), result)
    return result


def bench(
    directory: options.Directory,
    device: Annotated[str, typer.Option(help="Budget to hold it to: a name from `devices`, or a file.")] = "host",
    on_device: Annotated[
        bool, typer.Option("--on-device", help="This machine is the device: what is measured decides.")
    ] = False,
    threads: options.Threads = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="Held-out text that is scored, for the quality limit.")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="The fp32 teacher that quality is compared with.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New file for the result, JSON.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds after which a measuring process counts as hung.")
    ] = 900.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Fresh processes of every figure, at least.")] = 5,
    most_rounds: Annotated[
        int, typer.Option("--most-rounds", min=1, help="And at most, while they do not agree within 5%.")
    ] = 11,
    prompt_lengths: Annotated[
        str | None, typer.Option("--prompt-lengths", help="Further prompts for the first token, for example 64,1024.")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option("--batch-size", help="Rows decoded together, for example 1,4.")
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0, help="Decode for so long and compare the last seconds with the first.")
    ] = 0.0,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Runtimes: genai, openvino, llama.cpp, optimum; other: a second export."),
    ] = None,
    peer_directory: Annotated[
        list[str] | None, typer.Option("--peer-directory", help="NAME=DIR: what a runtime's own tool made of it.")
    ] = None,
    peer_python: Annotated[
        list[str] | None, typer.Option("--peer-python", help="NAME=PYTHON: the interpreter that has a runtime.")
    ] = None,
    peer_option: Annotated[
        list[str] | None,
        typer.Option("--peer-option", help="NAME=KEY=VALUE: a setting of openvino or llama.cpp, in its terms."),
    ] = None,
) -> dict[str, Any]:
    """Latency, memory and size, measured in fresh processes and held to a device's budget."""
    import json

    from benchmarks.devices.limits import check_on_device
    from benchmarks.devices.load import load_device
    from benchmarks.files import write_whole
    from benchmarks.measure.bench import run_bench, whole_numbers
    from benchmarks.measure.quality import bits_per_byte
    from benchmarks.measure.tables import print_bench, verdict_line
    from benchmarks.runtimes.compare import parse_peers
    from sportsllm.console import output
    from sportsllm.errors import ConflictError, GateError

    if teacher is not None and not text:
        raise UsageError("--teacher needs --text: quality is compared on held-out text")
    if out is not None and out.exists():
        raise ConflictError(f"{out}: exists already; choose another --out or move it away")
    check_on_device(load_device(device), on_device)  # before minutes of scoring
    peers = parse_peers(against, peer_directory, peer_python, directory, peer_option)
    asked = {
        "prompt_lengths": whole_numbers("--prompt-lengths", prompt_lengths),
        "batch_sizes": whole_numbers("--batch-size", batch_size),
    }
    own = bits_per_byte(directory, text, threads) if text else None
    reference = bits_per_byte(teacher, text, threads) if text and teacher else None
    result = run_bench(
        directory, device, on_device, threads, reference, own, rounds, timeout, most_rounds,
        minutes=minutes, peers=peers, **asked,
    )  # fmt: skip
    if out is not None:
        write_whole(out, json.dumps(result, indent=1) + "\n")
    print_bench(output(), result)
    if not result["budget"]["passed"]:
        missed = {limit["name"] for limit in result["budget"]["limits"] if limit["passed"] is False}
        advice = "compress it further"
        if missed == {"quality_loss_percent"}:
            advice = "train or distil it longer, or cut less"
        elif missed & {"ttft_ms", "tpot_p50_ms", "tpot_p95_ms"} and not result["clean"]:
            advice = "the run was noisy: repeat it on a quiet machine"
        result["complaint"] = f"{directory}: {verdict_line(result['budget'])}; {advice}"
        result["exit_code"] = GateError.exit_code
    return result


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            help="Stage directories, directories of `fit`, bench results (.json) and sample texts (.txt).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="File to write; .html, .md or .csv chooses the format.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "sportsllm-compress report",
    format: Annotated[
        str | None, typer.Option("--format", help="Several at once, beside one another: html,md,csv.")
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option("--sample", help="Text that the first and the last stage go on from, as before and after."),
    ] = None,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """One HTML page that works offline: verdict, trade-offs, stages, speed, memory, samples, provenance."""
    import dataclasses

    from benchmarks.measure.tables import table
    from benchmarks.report.inputs import collect
    from benchmarks.report.markdown import stage_table
    from benchmarks.report.report import targets, write_report
    from benchmarks.report.samples import before_and_after
    from sportsllm.console import output

    files = targets(out, format)
    inputs = collect(directories)
    if sample:
        texts, skipped = before_and_after(inputs.stages, sample, threads)
        inputs = dataclasses.replace(inputs, samples=[*inputs.samples, *texts], skipped=skipped)
    write_report(files, title, inputs)
    stages = stage_table(inputs.stages)
    output().print(table(stages.headers, stages.rows, stages.texts))
    for path in files.values():
        size = path.stat().st_size
        shown = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
        output().print(f"{path}: {len(inputs.stages)} stages, {shown}", markup=False)
    written = list(files.values())
    return {
        "out": str(written[0]),
        "files": {name: str(path) for name, path in files.items()},
        "stages": [stage.name for stage in inputs.stages],
        "candidates": sum(len(fit.candidates) for fit in inputs.fits),
        "bytes": written[0].stat().st_size,
    }


def compare(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Finished trainings: outputs of train, distill, prune --recover.", show_default=False),
    ],
    teacher: Annotated[Path, typer.Option("--teacher", help="The training they are compared with.")],
    out: options.Out,
    title: Annotated[str, typer.Option("--title", help="Heading of table and page.")] = "Compression at equal cost",
) -> dict[str, Any]:
    """Methods at equal cost: one table and one plot of quality against tokens and FLOPs."""
    from benchmarks.compare.compare import compare as run_compare
    from benchmarks.compare.page import COLUMNS, ON_SCREEN, table_rows
    from benchmarks.measure.tables import table
    from sportsllm.console import output

    result = run_compare(directories, teacher, out, title)
    shown = [COLUMNS.index(name) for name in ON_SCREEN]
    output().print(table(ON_SCREEN, [[cells[place] for place in shown] for cells in table_rows(result)], (0, 1)))
    for note in result["notes"]:
        output().print(f"- {note}", markup=False)
    output().print(f"{out}: comparison.html, .md, .csv and .json", markup=False)
    return result
