"""The verb `bench`: measure a model, alone and in turns with other runtimes, and hold it to a device's budget."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import GateError, UsageError
from sportsllm.files import require_new
from sportsllm.results import Result
from sportsllm.settings import BENCH, LIMITS, TASKS, TEXT, parse_settings

if TYPE_CHECKING:
    from benchmarks.reporting.measured import Bench, Budget

BOTH = "both"  # of --kernels: measure the native ones alone and in turns with the portable ones


@dataclass(frozen=True, kw_only=True)
class BenchResult(Result):
    """Figures of a model on this machine.

    Attributes:
        measured: times in ms, memory in bytes, speed in tokens per second, quality, and the verdict on `--target`.
        figures: the same figures with every sample of every round, as `--json` prints them.
    """

    measured: Bench
    figures: dict[str, Any] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The figures."""
        return self.figures


def bench(
    directory: options.Directory,
    *,
    target: options.Target = None,
    limit: options.Limit = None,
    on_device: options.OnDevice = False,
    text: options.Text = None,
    teacher: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Unquantized teacher to compare quality with.", show_default="none"),
        options.BY_NAME,
    ] = None,
    tasks: options.Tasks = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="New file for the result.", show_default="none")
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0, help="Also decode for so many minutes: does the speed last?", rich_help_panel="Measuring"),
    ] = 0.0,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=DIR][,python=PATH]",
            help="Runtime to measure in turns: genai, openvino, llama.cpp, ik_llama.cpp, optimum, or "
            "other=DIR for a second export; may be repeated. NAME+LABEL adds a runtime again, ,KEY=VALUE sets its "
            "options, ,bench=PATH names a llama-bench to run.",
            show_default="none",
            rich_help_panel="Measuring",
        ),
    ] = None,
    kernels: Annotated[
        str,
        typer.Option(
            help="Kernels for exports: native (this program's), portable (ONNX Runtime's), auto, or both in turn.",
            rich_help_panel="Runtime",
        ),
    ] = "auto",
    provider: options.Provider = "cpu",
    threads: options.Threads = None,
    settings: options.Settings = None,
) -> BenchResult:
    """Measure latency, memory and size in fresh processes; with --target, judge a device's budget.

    Raises:
        UsageError: no such device, `on_device` for another processor than the measured one, settings that the context
            has no room for.
        ChildFailure: a measuring process crashed, hung or was killed; nothing is reported then.
    """
    from benchmarks.devices.load import load_target
    from benchmarks.devices.verdict import DISTANCES, check_on_device, depths_that_fit
    from benchmarks.measure.bench import STEPS, prompts_that_fit, round_checks, run_bench
    from benchmarks.measure.process import DEFAULT_TIMEOUT_S
    from benchmarks.predict.latency import predict_directory
    from benchmarks.quality import Model, task_quality, text_quality
    from benchmarks.reporting.bench_tables import print_bench, verdict_line
    from benchmarks.reporting.measured import as_bench, judge_bench
    from benchmarks.runtimes.compare import measure_against, parse_runtimes, portable_too, turn_depths
    from export.runtime.providers import find_provider
    from export.runtime.session import kernels_of_directory
    from sportsllm.console import log, output
    from sportsllm.files import atomic_write_text, require_directory
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.manifest import source_gguf
    from sportsllm.inference.decoder import is_onnx_directory
    from sportsllm.text.documents import take_reading

    found, limits = parse_settings(settings, BENCH, TEXT, TASKS), parse_settings(limit, LIMITS, option="--limit")
    _check(out, [*(text or []), *(tasks or [])], teacher, target, on_device, against, provider)
    require_directory(directory, "a checkpoint or an export")
    checks = round_checks(found.get("rounds"), found.get("most_rounds"))
    timeout_s = found.get("timeout", DEFAULT_TIMEOUT_S)
    runtimes = parse_runtimes(against, directory) + ([portable_too(directory)] if kernels == BOTH else [])
    kernels = "native" if kernels == BOTH else kernels
    placed, config = find_provider(provider), load_config(directory)
    device = load_target(target, limits) if target or limits else None
    if device is not None:
        check_on_device(device, on_device, placed.processor)
    context = config.max_position_embeddings  # what it has no room for is refused now rather than after minutes
    prompts = prompts_that_fit(context, found.get("prompt_lengths"))
    if minutes and not depths_that_fit(context):
        raise UsageError(f"--minutes: a context of {context} tokens has no room for {STEPS} steps after a prompt")
    if runtimes:
        turn_depths(context)
    if (gguf := source_gguf(directory)) is not None:
        log(
            "speed and memory are those of its float32 checkpoint in PyTorch, by which no budget is judged; to measure "
            f"the GGUF file itself: bench EXPORT --against llama.cpp={gguf}"
        )
    if is_onnx_directory(directory):
        log(str(kernels_of_directory(directory, kernels, placed)))
    reading = take_reading(found, directory, teacher)
    own = Model(directory, reading, threads, kernels, provider)
    reference = None if teacher is None else Model(teacher, reading, threads)
    distance = device is not None and not DISTANCES.isdisjoint(device.limits.given())
    quality = text_quality(own, reference, text or [], distance)
    quality |= task_quality(own, reference, tasks, found) if tasks else {}
    result = run_bench(directory, checks, prompts, timeout_s, minutes, threads, kernels, provider)
    result |= quality
    if runtimes:
        result |= measure_against(directory, config, runtimes, result["settings"], checks, timeout_s)
        if unsteady := [name for name, one in result["against"].items() if one.get("steady") is False]:
            result["clean"] = False
            result["noise_reasons"].append(f"the turns of {', '.join(unsteady)} do not agree or are too few")
    if gguf is not None:
        result |= {"directory": str(gguf), "file_bytes": gguf.stat().st_size}
    predict = partial(predict_directory, config=config, directory=directory) if gguf is None else None
    measured = as_bench(result)
    budget = None if device is None else judge_bench(device, measured, config, on_device, predict)
    measured, result["budget"] = replace(measured, budget=budget), budget and asdict(budget)
    try:
        print_bench(output(), measured)
    finally:  # also if nobody reads the table to its end
        if out is not None:
            atomic_write_text(out, json.dumps(result, indent=1) + "\n")
    if budget is None or budget.verdict == "pass":
        return BenchResult(measured=measured, figures=result)
    complaint = f"{measured.directory}: {verdict_line(budget, short=True)}; {advice(budget, measured.clean)}"
    return BenchResult(measured=measured, figures=result, exit_code=GateError.exit_code, complaint=complaint)


def _check(
    out: Path | None,
    scored: list[Path | str],
    teacher: Path | None,
    target: str | None,
    on_device: bool,
    against: list[str] | None,
    provider: str,
) -> None:
    """Refuse options that do not go together, before anything is opened."""
    if out is not None:
        require_new(out)
    if teacher is not None and not scored:
        raise UsageError("--teacher needs --text or --tasks: quality is compared on held-out text, or in tasks")
    if on_device and target is None:
        raise UsageError("--on-device needs --target: it says that this machine is that device")
    if against and provider.lower() != "cpu":
        raise UsageError(f"--provider {provider}: --against measures all runtimes on the CPU; leave one of them out")


def advice(budget: Budget, clean: bool) -> str:
    """What to do if the budget is not passed."""
    from benchmarks.devices.verdict import QUALITIES

    failed = {limit.name for limit in budget.limits if limit.verdict == "fail"}
    if failed and failed <= QUALITIES.keys():
        return "train or distil it longer, or prune less"
    if failed:
        noisy = failed <= {"ttft_ms", "tpot_p50_ms", "tpot_p95_ms"} and not clean
        return "the run was noisy: repeat it on a quiet machine" if noisy else "compress it further"
    if budget.decided_by == "prediction" and budget.efficiency is None:
        return "a GGUF file's speed and memory are not known here: bench the ONNX export of its checkpoint"
    if unsure := [one.value for one in budget.limits if one.name in QUALITIES and one.verdict == "uncertain"]:
        return "measure the quality: --teacher and --text, or --tasks" if None in unsure else "give more held-out text"
    if budget.decided_by == "prediction":
        return "measure it on the device (--on-device), which a prediction cannot replace"
    return "give more rounds (--set rounds=N), on a quiet machine"
