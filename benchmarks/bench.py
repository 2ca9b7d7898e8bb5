"""`bench` from start to end: measure a model, alone and beside other runtimes, and hold it to a device's budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices.limits import check_on_device, judge_budget
from benchmarks.devices.load import load_device
from benchmarks.measure.bench import BenchRequest, BenchResult, run_bench
from benchmarks.measure.process import ChildFailure
from benchmarks.measure.roofs import machine_roofs
from benchmarks.predict.latency import predict_directory
from benchmarks.runtimes.compare import measure_against, turn_depths
from benchmarks.runtimes.options import Runtime
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.manifest import digest
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.scoring import score_documents
from sportsllm.text.documents import read_documents
from sportsllm.text.provenance import warn_if_trained_on
from sportsllm.text.tokenizer import load_tokenizer


def bench_model(
    request: BenchRequest,
    device_name: str,
    on_device: bool = False,
    text: Sequence[Path] = (),
    teacher: Path | None = None,
    runtimes: Sequence[Runtime] = (),
) -> BenchResult:
    """Measure a model, alone and in turns with other `runtimes`, and judge it by a device's budget.

    Args:
        request: what is measured.
        device_name: a shipped device's name, or the path of a device file.
        on_device: this machine is the device, so the measurement decides even where that cannot be recognised.
        text: held-out text that is scored, for the quality limit.
        teacher: the fp32 teacher that quality is compared with.
        runtimes: see `RuntimeFlags.runtimes`.

    Raises:
        UsageError: no such device, `on_device` for another processor than the measured one, settings that the context
            has no room for.
        ChildFailure: a measuring process crashed, hung or was killed; nothing is reported then.
    """
    if teacher is not None and not text:
        raise UsageError("--teacher needs --text: quality is compared on held-out text")
    device = load_device(device_name)
    processor = processor_of(request.provider)
    check_on_device(device, on_device, processor)
    if runtimes:
        turn_depths(load_config(request.directory).max_position_embeddings)  # refused now rather than after minutes
    runs_on = request.kernels, request.provider
    digests = [digest(path) for path in text]
    own = bits_per_byte(request.directory, text, request.threads, *runs_on) if text else None
    reference = bits_per_byte(teacher, text, request.threads) if text and teacher else None
    try:
        result = run_bench(request)
    except ChildFailure as failure:
        raise failure.advising("--timeout") from None
    figures = result.figures
    figures["roofs"] = machine_roofs(device, figures["memory_floor"]["bandwidth_bytes_per_s"], on_device, processor)
    if runtimes:
        figures |= measure_against(
            request.directory, result.config, runtimes, result.settings, request.checks, request.timeout_s
        )
        figures["clean"] &= all(one["steady"] for one in figures["against"].values() if one["status"] == "measured")
    figures["bits_per_byte"], figures["teacher_bits_per_byte"] = own, reference
    figures["text_digests"] = digests
    figures["text"], figures["teacher"] = [str(path) for path in text], None if teacher is None else str(teacher)
    figures["quality_loss_percent"] = 100 * (own / reference - 1) if own and reference else None
    figures["budget"] = judge_budget(device, figures, result.config, request.directory, on_device, predict_directory)
    return result


def processor_of(provider: str) -> str:
    """What a provider runs on: `cpu`, `gpu` or `npu`.

    Raises:
        UsageError, ResourceError: see `export.runtime.providers.find_provider`.
    """
    if provider == "cpu":
        return "cpu"
    from export.runtime.providers import find_provider

    return find_provider(provider).processor


def bits_per_byte(
    directory: Path,
    text: Sequence[Path],
    threads: int | None = None,
    kernels: str = "auto",
    provider: str = "cpu",
) -> float:
    """Bits per byte of `directory` on the documents of `text`, as `eval` computes it."""
    decoder = open_decoder(directory, threads, kernels, provider)
    tokenizer = load_tokenizer(directory, decoder.config)
    documents = list(read_documents(text))
    warn_if_trained_on(directory, documents)
    return score_documents(decoder, tokenizer, documents, description=f"score {directory.name}").bits_per_byte


def advice(result: Mapping[str, Any]) -> str:
    """What to do about a missed budget."""
    times = {"ttft_ms", "tpot_p50_ms", "tpot_p95_ms"}
    missed = {limit["name"] for limit in result["budget"]["limits"] if limit["passed"] is False}
    if missed == {"quality_loss_percent"}:
        return "train or distil it longer, or cut less"
    if missed <= times and not result["clean"]:
        return "the run was noisy: repeat it on a quiet machine"
    if result["runtime"].startswith("torch") and missed <= {*times, "peak_memory_mb"}:
        return "PyTorch ran this checkpoint: `export` it and measure the export"
    return "compress it further"
