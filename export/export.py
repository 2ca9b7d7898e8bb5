"""The verb `export`: a checkpoint as an ONNX graph or a GGUF file, published only if it computes the same."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import GateError, ResourceError, UsageError
from sportsllm.results import StageResult
from sportsllm.settings import EXPORT, parse_settings

if TYPE_CHECKING:
    from export.graph.decoder import WrittenGraph
    from export.parity.comparison import ParityReport

FORMATS = ("onnx", "web", "standard", "gguf")
DTYPES = ("fp32", "fp16", "fp16-weights")
CACHES = ("fp32", "fp16", "int8")
_REPORTED = ("max_abs_logit_error", "kl", "greedy_match", "passed", "input_rounding", "tokenizer_changes")


@dataclass(frozen=True, kw_only=True)
class ExportResult(StageResult):
    """What `export` wrote.

    Attributes:
        format: one of `FORMATS`.
        precision: the narrowest that a graph's matrices are stored in: `int4`, `int8`, `fp16` or `fp32`.
        kv_cache: what a graph caches in: `fp32`, `fp16` or `int8`.
        kernels: version of this program's kernels that a graph calls; None if it calls none.
        architecture, formats: of a GGUF file: llama.cpp's name, and bytes of tensors by their format.
        build_seconds: without the parity gate.
        peak_rss_bytes: of this process.
        parity: the main figures of parity.json.
    """

    format: str = "onnx"
    precision: str | None = None
    kv_cache: str = "fp32"
    kernels: str | None = None
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
            "float16 and compute in float32.",
            show_default="fp32",
        ),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            "--kv-cache",
            help="fp32; fp16: half the memory, the default with --dtype fp16; int8: a quarter, scales come from "
            "calibration text.",
        ),
    ] = "fp32",
    calibration: options.Calibration = None,
    rope_scaling: options.RopeScaling = None,
    max_ram: Annotated[
        int | None,
        typer.Option("--max-ram", min=1, help="Upper bound on memory (MB); the graph is then checked layer by layer."),
    ] = None,
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
        ResourceError: `max_ram` is not enough.
    """
    from sportsllm.files import require_directory
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.model_directory import checkpoint_with
    from sportsllm.models.rope import with_rope_scaling

    require_directory(checkpoint, "a checkpoint directory")
    texts = tuple(calibration or ())
    plan = _Plan(
        checkpoint,
        format,
        dtype,
        kv_cache,
        texts,
        rope_scaling,
        max_ram,
        provider,
        threads,
        bool(parse_settings(settings, EXPORT).get("inline")),
    )
    _refuse(plan)
    stage = Stage("export", plan.settings(), [checkpoint, *texts])
    _check_memory(plan)
    config = load_config(checkpoint)
    if rope_scaling is not None:
        config = with_rope_scaling(config, rope_scaling)

    def make(directory: Path) -> dict[str, Any]:
        with checkpoint_with(checkpoint, config) as source:
            return _make_gguf(plan, source, directory) if format == "gguf" else _make_graph(plan, source, directory)

    result = ExportResult.of(run_stage(out, stage, make))
    _print(plan, result)
    return result


@dataclass(frozen=True)
class _Plan:
    """The parameters of `export`."""

    checkpoint: Path
    format: str
    dtype: str | None
    kv_cache: str
    calibration: tuple[Path, ...]
    rope_scaling: str | None
    max_ram: int | None
    provider: str
    threads: int | None
    inline: bool

    @property
    def half(self) -> bool:
        """Whether dense matrices are stored in float16."""
        return self.dtype in ("fp16", "fp16-weights")

    @property
    def in_half(self) -> bool:
        """Whether the graph computes in float16."""
        return self.dtype == "fp16" and self.format != "gguf"

    @property
    def cache(self) -> str:
        """What the graph caches in."""
        return "fp16" if self.in_half and self.kv_cache == "fp32" else self.kv_cache

    def settings(self) -> dict[str, Any]:
        """What decides the content, for the manifest."""
        from sportsllm.formats.safetensors import quantization_config

        dense = "fp16" if self.half else "fp32"
        given = {
            "computed_in": "fp16" if self.in_half else None,
            "inline": self.inline,
            "calibration": [str(path) for path in self.calibration],
            "rope_scaling": self.rope_scaling,
        }
        return {
            "format": self.format,
            "dtype": "packed" if quantization_config(self.checkpoint) is not None else dense,
            "kv_cache": self.cache,
            **{name: value for name, value in given.items() if value},
        }


def _refuse(plan: _Plan) -> None:
    """Refuse parameters that are unknown, exclude each other or do not fit the checkpoint."""
    for flag, value, known in (
        ("--format", plan.format, FORMATS),
        ("--dtype", plan.dtype or "fp32", DTYPES),
        ("--kv-cache", plan.kv_cache, CACHES),
    ):
        if value not in known:
            raise UsageError(f"{flag} {value!r}: choose {', '.join(known[:-1])} or {known[-1]}")
    reason = next((reason for reason, found in (*_excluded(plan), *_unfit(plan)) if found), None)
    if reason is not None:
        raise UsageError(reason)


def _excluded(plan: _Plan) -> Iterator[tuple[str, bool]]:
    """Parameters that exclude each other: what to say, and whether they are given."""
    from export.runtime.providers import find_provider
    from sportsllm.training.calibration_text import CalibrationText

    kind, cache, bounded = plan.format, plan.kv_cache, plan.max_ram is not None
    elsewhere = not find_provider(plan.provider).is_cpu
    yield "--calibration is for --kv-cache int8; leave it out, or add that", bool(plan.calibration) and cache != "int8"
    of_graphs = {"--kv-cache": cache != "fp32", "--max-ram": bounded, "--provider": elsewhere, "--set": plan.inline}
    for flag, given in of_graphs.items():
        yield f"{flag} is for ONNX graphs; leave it out, or --format gguf", given and kind == "gguf"
    yield (
        f"--format standard with --kv-cache {cache}: no standard operator reads such a cache; leave one of them out",
        kind == "standard" and cache != "fp32",
    )
    yield (
        "--format web with --kv-cache fp16: browsers cache in float16 if they compute in it; use --dtype fp16, or "
        "--kv-cache int8",
        kind == "web" and cache == "fp16" and not plan.in_half,
    )
    half = {"--kv-cache int8": cache == "int8", "--format standard": kind == "standard", "--max-ram": bounded}
    for flag, given in half.items():
        yield f"--dtype fp16 with {flag}: that is for CPUs; leave one of them out", plan.in_half and given
    yield (
        f"--provider {plan.provider} with --max-ram: the gate by layer runs on the CPU; leave one out; "
        "`verify --provider` checks the export afterwards",
        bounded and elsewhere,
    )
    yield (
        f"--kv-cache int8 with --max-ram needs calibration text: {plan.checkpoint} names none, and to write some it "
        "would have to be in memory whole; give --calibration FILE",
        bounded and cache == "int8" and not CalibrationText(plan.calibration).found(plan.checkpoint).files,
    )


def _unfit(plan: _Plan) -> Iterator[tuple[str, bool]]:
    """What the checkpoint has no form for: what to say, and whether it is asked for."""
    from export.graph.kinds import check_kinds, computes_in_half
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.safetensors import quantization_config

    model, kind, dtype = plan.checkpoint, plan.format, plan.dtype
    packed, config = quantization_config(model) or {}, load_config(model)
    per_row, dense = bool(packed.get("per_row")), not packed
    advice = "use --dtype fp16-weights, or leave --dtype out" if dense else "leave --dtype out"
    yield (
        f"--dtype fp16: {model}: this kind of model has no graph in float16; {advice}",
        plan.in_half and not computes_in_half(config),
    )
    yield (
        f"--dtype fp16: {model} has INT8 per row, which only CPUs multiply; quantize it in blocks",
        plan.in_half and per_row,
    )
    yield (
        f"--dtype fp16 with --format web: transformers.js opens 4-bit matrices there, not those of {model}",
        plan.in_half and kind == "web" and not dense and packed.get("bits") != 4,
    )
    yield (
        f"--dtype {dtype}: {model} is packed already and is exported as it is; leave --dtype out"
        + (", or use --dtype fp16 to compute in float16" if kind != "gguf" and plan.kv_cache != "int8" else ""),
        dtype is not None and not dense and not plan.in_half,
    )
    if kind == "gguf":
        return
    check_kinds(config, "fp32" if plan.in_half else plan.kv_cache)
    latent, lstm, selected = (config.attention_kind == name for name in ("latent", "lstm", "selected"))
    experts = config.experts is not None
    for flag, reason, found in (
        ("--format standard", "INT8 per row has no standard operators; quantize in blocks", per_row),
        ("--format standard", "joining the cache at each step takes longer than selection saves", selected),
        ("--format standard", "ONNX Runtime loads no packed LSTM in them", lstm and not dense),
        ("--format standard", "packed experts have no standard operators", experts and not dense),
        ("--format web", "selected attention writes into a cache with room, which browsers do not give", selected),
        ("--format web", "browsers give a latent cache no room to write into", latent),
        ("--format web", "browsers pass on keys and values, not the states of an LSTM", lstm),
        ("--max-ram", "the gate by layer does not bound what another choice of tokens changes", selected),
    ):
        asked = plan.max_ram is not None if flag == "--max-ram" else flag == f"--format {kind}"
        yield f"{flag}: {model}: {reason}; leave it out", asked and found
    yield f"{model}: INT8 per row is not for experts; quantize in blocks", experts and per_row


def _check_memory(plan: _Plan) -> None:
    """Refuse a bound that is too low: the program itself, what stays mapped of files, copies of a table or a layer.

    Measured by the command, beyond the program's own 377 MB: 270 MB for 97M parameters in float32 and 217 in INT8, 406
    with a vocabulary of 32k, 221 and 217 for 419M parameters (265 with standard operators, 337 with an INT8 cache) and
    355 for 931M: at most 5.5 tables, and 4 layers.
    """
    if plan.max_ram is None:
        return
    from export.cache_scales import SAMPLES
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.safetensors import REOPEN_BYTES
    from sportsllm.models.kinds import block_state, matrix_shapes
    from sportsllm.process_memory import peak_rss_bytes
    from sportsllm.training.calibration_text import SAMPLE_TOKENS

    config = load_config(plan.checkpoint)
    table = config.vocab_size * config.hidden_size
    layer = sum(n * k for n, k in matrix_shapes(config, layers_only=True).values()) // config.num_hidden_layers
    # Of calibration text: each sample's state, what a layer caches of all of them, and one such tensor a second time.
    cached = sum(math.prod(state.shape) for state in block_state(config))
    text = SAMPLES * SAMPLE_TOKENS * (config.hidden_size + 2 * cached) if plan.kv_cache == "int8" else 0
    needed_mb = (peak_rss_bytes() + REOPEN_BYTES + 4 * max(6 * table, 4 * layer, 3 * layer + text)) / 1e6
    if needed_mb > plan.max_ram:
        raise ResourceError(
            f"--max-ram {plan.max_ram}: exporting {plan.checkpoint} takes about {needed_mb:,.0f} MB, of which the "
            f"program itself {peak_rss_bytes() / 1e6:,.0f} MB; allow that much, or export a smaller model"
        )


def _make_graph(plan: _Plan, checkpoint: Path, directory: Path) -> dict[str, Any]:
    """Write the graph and the files beside it, and check them."""
    from export.parity.by_layer import check_parity_by_layer
    from export.parity.check import check_parity
    from export.runtime.providers import find_provider
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.json_files import write_json
    from sportsllm.process_memory import peak_rss_bytes

    started = time.perf_counter()
    written = _write_graph(plan, checkpoint, directory)
    built = time.perf_counter()
    if plan.max_ram is None:
        report = check_parity(checkpoint, directory, plan.threads, find_provider(plan.provider))
    else:
        report = check_parity_by_layer(checkpoint, directory, written.residual, plan.threads)
    peak = peak_rss_bytes()
    if plan.max_ram is not None and peak > 1e6 * plan.max_ram:
        raise ResourceError(
            f"--max-ram {plan.max_ram}: exporting {plan.checkpoint} took {peak / 1e6:,.0f} MB; nothing was "
            "published; allow at least that much"
        )
    _require(plan.checkpoint, report)
    parity = report.to_dict()
    write_json(directory / "parity.json", parity)
    return {
        "format": plan.format,
        "parameters": load_config(checkpoint).parameters,
        "precision": report.precision,
        "kv_cache": plan.cache,
        "kernels": written.kernels.version,
        "build_seconds": round(built - started, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_rss_bytes": peak,
        "parity": {key: parity[key] for key in _REPORTED},
    }


def _write_graph(plan: _Plan, checkpoint: Path, directory: Path) -> WrittenGraph:
    """Write the graph, and the files that loaders read beside it."""
    from export.cache_scales import cache_scales
    from export.graph.builder import GraphForm
    from export.graph.decoder import write_graph
    from export.loaders import not_opened_by, write_loader_files
    from export.paths import web_precision
    from sportsllm.console import log
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.safetensors import bitsandbytes_kind

    stored_as = bitsandbytes_kind(checkpoint)
    if stored_as is not None:
        log(
            f"{checkpoint}: bitsandbytes stored its matrices as {stored_as}; they are exported dense, in "
            f"{'fp16' if plan.half else 'fp32'}; quantize the checkpoint first for a small export"
        )
    if plan.in_half:
        log("fp16: computes and caches in float16, for GPUs; a CPU converts to float32 and back, slower than fp32")
    form = GraphForm(
        operators=plan.format,
        half=plan.half,
        in_half=plan.in_half,
        half_cache=plan.kv_cache == "fp16" and not plan.in_half,
        scales=cache_scales(checkpoint, plan.calibration) if plan.kv_cache == "int8" else None,
        inline=plan.inline,
    )
    written = write_graph(checkpoint, directory, form)
    log(str(written.kernels))
    web = web_precision(written.precision, plan.in_half) if plan.format == "web" else None
    write_loader_files(checkpoint, directory, plan.format != "standard", web, plan.in_half)
    others = not_opened_by(load_config(checkpoint))
    if others is not None:
        log(others)
    return written


def _make_gguf(plan: _Plan, checkpoint: Path, directory: Path) -> dict[str, Any]:
    """Write model.gguf and a Modelfile for Ollama, and read the file back."""
    from export.gguf.write import GGUF_FILE, architecture_of, check_gguf, write_gguf
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.json_files import write_json
    from sportsllm.process_memory import peak_rss_bytes

    started = time.perf_counter()
    config = load_config(checkpoint)
    formats = write_gguf(checkpoint, directory / GGUF_FILE, plan.half)
    built = time.perf_counter()
    report = check_gguf(checkpoint, directory / GGUF_FILE, plan.threads)
    _require(plan.checkpoint, report)
    parity = report.to_dict()
    write_json(directory / "parity.json", parity)
    context = config.max_position_embeddings
    (directory / "Modelfile").write_text(f"FROM ./{GGUF_FILE}\nPARAMETER num_ctx {context}\n", encoding="utf-8")
    return {
        "format": plan.format,
        "architecture": architecture_of(config),
        "parameters": config.parameters,
        "formats": formats,
        "build_seconds": round(built - started, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_rss_bytes": peak_rss_bytes(),
        "parity": {key: parity[key] for key in ("max_abs_logit_error", "kl", "greedy_match", "passed")},
    }


def _require(checkpoint: Path, report: ParityReport) -> None:
    """Publish nothing that missed the gate."""
    failures = report.failures()
    if not failures:
        return
    found = "; ".join(failures[:3])
    if report.only_rounding_failed():
        raise GateError(
            f"{checkpoint}: rounding activations to 8 bits changes this model too much ({found}); nothing was "
            "published; quantize it with --method balance or gptq, or export it unquantized"
        )
    raise GateError(
        f"{checkpoint}: the export does not match the model ({found}); nothing was published, please report it with "
        "this line"
    )


def _print(plan: _Plan, result: ExportResult) -> None:
    from sportsllm.console import output

    parity, made = result.parity, f"{result.size_bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
    if plan.format == "gguf":
        output().print(
            f"{result.out}: GGUF, {result.architecture}, {', '.join(result.formats)}, {result.parameters:,} "
            f"parameters, {made}; read back: KL {parity['kl']:.1e}, greedy choices agree in "
            f"{parity['greedy_match']:.1%}"
        )
        return
    output().print(
        f"{result.out}: {result.precision}, {result.kv_cache} cache, {result.parameters:,} parameters, {made}; parity "
        f"passed: KL {parity['kl']:.1e}, greedy choices agree in {parity['greedy_match']:.1%}, "
        f"largest logit error {parity['max_abs_logit_error']:.1e}"
    )
    for kernels, cost in parity["input_rounding"].items():
        output().print(
            f"8-bit inputs cost, {kernels} kernels: KL {cost['kl']:.1e} nats a token, {cost['greedy_match']:.1%} of "
            f"greedy choices as in PyTorch ({cost['positions']} positions)"
        )
    if plan.max_ram is not None and not result.cached:
        output().print(f"at most {result.peak_rss_bytes / 1e6:,.0f} MB of memory, {plan.max_ram:,} allowed")
