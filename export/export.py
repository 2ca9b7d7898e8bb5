"""The verb `export`: a checkpoint as an ONNX graph or a GGUF file, published only if it computes the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sportsllm import options
from sportsllm.errors import GateError
from sportsllm.results import StageResult
from sportsllm.settings import EXPORT, TEXT, parse_settings

if TYPE_CHECKING:
    from export.graph.builder import GraphForm
    from export.parity.comparison import ParityReport
    from export.request import ExportRequest
    from sportsllm.formats.gguf.blocks import RoundedModel

_REPORTED = ("max_abs_logit_error", "kl", "greedy_match", "passed", "input_rounding", "tokenizer_changes")


@dataclass(frozen=True, kw_only=True)
class ExportResult(StageResult):
    """An export.

    Attributes:
        format: `onnx`, `web`, `standard` or `gguf`.
        precision: narrowest type of the graph's matrices: `int4`, `int8`, `fp16` or `fp32`.
        kv_cache: type of the graph's cache: `fp32`, `fp16` or `int8`.
        kernels: version of this program's kernels that the graph calls; None if it calls none.
        wide_inputs: modules with 16-bit instead of 8-bit inputs: the head of an INT8 model, and others if the parity
            gate requires them.
        architecture, formats: llama.cpp's name of a GGUF file's architecture, and bytes of its tensors by type.
        build_seconds: time without the parity gate.
        peak_rss_bytes: peak memory of the process.
        parity: main figures of parity.json.
    """

    format: str = "onnx"
    precision: str | None = None
    kv_cache: str = "fp32"
    kernels: str | None = None
    wide_inputs: list[str] = field(default_factory=list)
    architecture: str | None = None
    formats: dict[str, int] = field(default_factory=dict)
    build_seconds: float = 0.0
    peak_rss_bytes: int = 0
    parity: dict[str, Any] = field(default_factory=dict)


def export(
    checkpoint: options.Checkpoint,
    *,
    out: options.Out,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="onnx: for ONNX Runtime, with this program's kernels; web: for transformers.js in a browser; "
            "standard: standard ONNX operators only; gguf: for llama.cpp and Ollama.",
        ),
    ] = "onnx",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="fp32; fp16: compute and cache in float16, for GPUs; fp16-weights: store an unquantized checkpoint in "
            "float16 and compute in float32. --format gguf also takes llama.cpp's types: q4_0, q4_1, q5_0, q5_1, q8_0, "
            "q4_k_s, q4_k_m, q5_k_s, q5_k_m, q6_k, iq4_nl, iq4_xs.",
            show_default="fp32",
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help="fp32; fp16: half the memory; int8: a quarter, scales come from calibration text.",
            show_default="fp16 for INT4 and INT8 that the kernels run, and --dtype fp16; else fp32",
        ),
    ] = None,
    calibration: options.Calibration = None,
    rope_scaling: options.RopeScaling = None,
    provider: options.Provider = "cpu",
    threads: options.Threads = None,
    settings: options.Settings = None,
) -> ExportResult:
    """Write a checkpoint for devices, checked against the PyTorch model before it is published.

    Raises:
        UsageError: an unknown choice, choices that exclude each other, or a kind of model that has no such form.
        ArtifactError: the checkpoint is missing or damaged.
        GateError: the result does not compute what the model computes; nothing is left behind.
        ConflictError: `out` holds something else.
    """
    from export.request import ExportRequest, refuse
    from sportsllm.console import log
    from sportsllm.files import require_directory, write_json
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.formats.huggingface import checkpoint_with, load_config
    from sportsllm.inference.calibration import CalibrationText
    from sportsllm.models.rope import with_rope_scaling
    from sportsllm.process_memory import peak_rss_bytes
    from sportsllm.text.documents import take_reading

    require_directory(checkpoint, "a checkpoint directory")
    found = parse_settings(settings, EXPORT, TEXT)
    request = ExportRequest(
        checkpoint=checkpoint,
        format=format,
        dtype=dtype,
        kv_cache=kv_cache,
        given=CalibrationText(tuple(calibration or ()), found.get("samples"), reading=take_reading(found, checkpoint)),
        inline=bool(found.get("inline")),
        threads=threads,
        provider=provider,
    )
    refuse(request)
    stage = Stage("export", request.settings(rope_scaling), [checkpoint, *request.text.files])
    config = load_config(checkpoint)
    if rope_scaling is not None:
        config = with_rope_scaling(config, rope_scaling)
    if (trained := config.rope_scaling) and trained.rope_type == "longrope":
        context, original = config.max_position_embeddings, trained.original_max_position_embeddings
        kind = "long" if context > original else "short"
        most = f"--rope-scaling longrope:FACTOR lengthens {original:,} by at most {trained.factor:g}"
        log(f"longrope with the {kind} factors, for a context of {context:,} tokens; {most}")

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        with checkpoint_with(checkpoint, config) as source:
            form = None if format == "gguf" else _graph_form(request, source)
            if form is None:
                facts, check = _write_gguf(request, source, directory)
            else:
                facts, check = _write_graph(request, source, directory, form)
            built = time.perf_counter()
            report = check()
            if form and not report.passed and report.precision.startswith("int") and report.only_rounding_failed():
                facts, report = _widen_inputs(request, source, directory, form, facts, report)
        _require(request, report)
        parity = report.to_dict()
        write_json(directory / "parity.json", parity)
        return {
            "format": format,
            "parameters": config.parameters,
            **facts,
            "build_seconds": round(built - started, 3),
            "peak_rss_bytes": peak_rss_bytes(),
            "parity": {key: parity[key] for key in _REPORTED},
        }

    result = ExportResult.of(run_stage(out, stage, make))
    _print(result)
    return result


_Written = tuple[dict[str, Any], Callable[[], "ParityReport"]]
"""Fields of the result, and the gate of what was written."""


def _graph_form(request: ExportRequest, checkpoint: Path) -> GraphForm:
    """The form that the request asks for, with measured scales of an INT8 cache."""
    from export.cache_scales import cache_scales
    from export.graph.builder import CACHED_TYPES, FLOAT, HALF, GraphForm
    from sportsllm.console import log
    from sportsllm.formats.packed import bitsandbytes_kind

    stored_as = bitsandbytes_kind(checkpoint)
    if stored_as is not None:
        log(
            f"{checkpoint}: bitsandbytes stored its matrices as {stored_as}; they are exported dense, in "
            f"{'fp16' if request.half else 'fp32'}; quantize the checkpoint first for a small export"
        )
    if request.in_half:
        log("fp16: computes and caches in float16, for GPUs; a CPU converts to float32 and back, slower than fp32")
    return GraphForm(
        operators=request.format,
        dense=HALF if request.half else FLOAT,
        real=HALF if request.in_half else FLOAT,
        cached=CACHED_TYPES[request.cache],
        scales=cache_scales(checkpoint, request.text) if request.cache == "int8" else None,
        inline=request.inline,
    )


def _write_graph(request: ExportRequest, checkpoint: Path, directory: Path, form: GraphForm) -> _Written:
    """Write the graph, and the files that loaders read beside it."""
    from export.graph.decoder import write_graph
    from export.layout import not_opened_by, web_precision, write_loader_files
    from export.parity.check import check_parity
    from export.runtime.providers import find_provider
    from export.web_page import write_page
    from sportsllm.console import log
    from sportsllm.formats.huggingface import load_config

    written = write_graph(checkpoint, directory, form)
    log(str(written.kernels))
    web = web_precision(written.precision, request.in_half) if request.format == "web" else None
    write_loader_files(checkpoint, directory, request.format != "standard", web, request.in_half)
    if web is not None:
        write_page(directory)
    others = not_opened_by(load_config(checkpoint))
    if others is not None:
        log(others)
    facts = {
        "precision": written.precision,
        "kv_cache": request.cache,
        "kernels": written.kernels.version,
        "wide_inputs": sorted(written.wide_inputs),
    }
    return facts, lambda: check_parity(checkpoint, directory, request.threads, find_provider(request.provider))


def _widen_inputs(
    request: ExportRequest,
    checkpoint: Path,
    directory: Path,
    form: GraphForm,
    facts: dict[str, Any],
    report: ParityReport,
) -> tuple[dict[str, Any], ParityReport]:
    """Write the graph again, with 16-bit inputs for the matrices that 8-bit inputs harm most, until it passes."""
    from export.parity.wide_inputs import remedies
    from sportsllm.console import log

    log(f"8-bit inputs change this model too much ({report.failures()[0]}); measuring which matrices they harm")
    for remedy in remedies(checkpoint, report, facts["wide_inputs"]):
        facts, check = _write_graph(request, checkpoint, directory, replace(form, wide_inputs=remedy.modules))
        report = check()
        log(str(remedy))
        if report.passed:
            break
    return facts, report


def _write_gguf(request: ExportRequest, checkpoint: Path, directory: Path) -> _Written:
    """Write model.gguf and a Modelfile for Ollama."""
    from export.gguf.mixes import block_types
    from export.gguf.tokenizer import tokenizer_metadata
    from export.gguf.write import GGUF_FILE, architecture_of, check_gguf, write_gguf
    from sportsllm.commands import load_function
    from sportsllm.console import log
    from sportsllm.formats.huggingface import load_config

    config, rounded = load_config(checkpoint), None
    architecture, tokenizer = architecture_of(config), tokenizer_metadata(checkpoint, config)  # refused before the work
    if request.mix is not None:
        if not request.text.files:
            log(f"no calibration text: blocks are rounded one by one; --calibration FILE makes {request.mix} better")
        round_to_blocks = load_function("compress.quantization.block_checkpoint", "round_to_blocks")
        types = block_types(config, request.mix, bool(request.text.files))
        rounded = cast("RoundedModel", round_to_blocks(checkpoint, types, request.text))
    formats = write_gguf(checkpoint, directory / GGUF_FILE, tokenizer, request.half, rounded, request.mix)
    modelfile = f"FROM ./{GGUF_FILE}\nPARAMETER num_ctx {config.max_position_embeddings}\n"
    (directory / "Modelfile").write_text(modelfile, encoding="utf-8")
    facts = {"architecture": architecture, "formats": formats}
    return facts, lambda: check_gguf(checkpoint, directory / GGUF_FILE, request.threads, rounded)


def _require(request: ExportRequest, report: ParityReport) -> None:
    """Publish nothing that missed the gate."""
    if not (failures := report.failures()):
        return
    retry = f"; leave --dtype {request.dtype} out" if request.half else ""
    retry = "; try --kv-cache fp32" if request.cache == "fp16" and not request.in_half else retry
    if not report.only_rounding_failed():
        what, retry = "the export does not match the model", f"{retry}; please report it with this line"
    elif report.precision.startswith("int"):
        what = "rounding activations to 8 bits changes this model too much"
        retry += "; quantize it in blocks (--group-size 32) by --method balance or gptq, or export it unquantized"
    else:
        what = "float16 changes this model too much"
    raise GateError(f"{request.checkpoint}: {what} ({'; '.join(failures[:3])}); nothing was published{retry}")


def _print(result: ExportResult) -> None:
    from sportsllm.console import output

    parity, made = result.parity, f"{result.size_bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
    agree = f"KL {parity['kl']:.1e}, greedy choices agree in {parity['greedy_match']:.1%}"
    if result.format == "gguf":
        output().print(
            f"{result.out}: GGUF, {result.architecture}, {', '.join(result.formats)}, {result.parameters:,} "
            f"parameters, {made}; read back: {agree}"
        )
        return
    output().print(
        f"{result.out}: {result.precision}, {result.kv_cache} cache, {result.parameters:,} parameters, {made}; parity "
        f"passed: {agree}, largest logit error {parity['max_abs_logit_error']:.1e}"
    )
    for kernels, cost in parity["input_rounding"].items():
        output().print(
            f"cost of 8-bit inputs, {kernels} kernels: KL {cost['kl']:.1e} nats per token, {cost['greedy_match']:.1%} "
            f"of greedy choices unchanged ({cost['positions']} positions)"
        )
