"""Checkpoint directory in, export directory out, with the parity gate between."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.cache_scales import PRECISIONS as CACHE_PRECISIONS
from export.cache_scales import SAMPLES, cache_scales
from export.graph.decoder import WrittenGraph, write_graph
from export.graph.kinds import check_kinds
from export.graph.prefill_graph import write_prompt_graph
from export.loader_files import write_loader_files
from export.loaders import not_opened_by
from export.parity.by_layer import check_parity_by_layer
from export.parity.check import check_parity
from export.paths import web_precision
from export.runtime.providers import find_provider
from sportsllm.console import log
from sportsllm.errors import GateError, ResourceError, UsageError
from sportsllm.files import require_directory
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.changed_config import checkpoint_with
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.json_files import write_json
from sportsllm.formats.safetensors_files import REOPEN_BYTES, bitsandbytes_kind, quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_state, matrix_shapes
from sportsllm.models.rope import with_rope_scaling
from sportsllm.process_memory import peak_rss_bytes
from sportsllm.training.calibration_text import SAMPLE_TOKENS, CalibrationText

DTYPES = ("fp32", "fp16", "fp16-weights")
PROFILES = ("memory", "latency")
_REPORTED = (
    "max_abs_logit_error",
    "kl",
    "greedy_match",
    "passed",
    "input_rounding",
    "tokenizer_changes",
)  # of parity.json


@dataclass(frozen=True)
class ExportOptions:
    """How to export."""

    # `fp32` (if None); `fp16`: computed, cached and, but for packed matrices, stored in float16, for GPUs;
    # `fp16-weights`: an unpacked checkpoint's matrices are stored in float16 and computed in float32.
    dtype: str | None = None
    threads: int | None = None  # CPU threads of the gate
    kv_cache: str = "fp32"  # as computed; `fp16`: half the memory; `int8`: a quarter, scales from calibration text
    calibration: Sequence[Path] = ()  # text for `int8`; see `CalibrationText` if empty
    profile: str = "memory"  # or `latency`: a second graph that reads prompts faster, see `export.graph.prefill_graph`
    standard_ops: bool = False  # standard ONNX operators alone, for runtimes that do not have ONNX Runtime's own
    web: bool = False  # write the files that transformers.js looks for in a browser
    inline: bool = False  # write no functions for the kernels, for readers that know none
    max_ram_mb: int | None = None  # the most memory (MB, 10^6 bytes) of this process; the gate then goes layer by layer
    rope_scaling: str | None = None  # lengthens the context, see `sportsllm.models.rope.with_rope_scaling`
    provider: str = "cpu"  # runs the files once more in the gate, if it is not the CPU's

    @property
    def in_half(self) -> bool:
        """Whether the graph computes in float16."""
        return self.dtype == "fp16"

    @property
    def cache(self) -> str:
        """The cache's numbers: `fp32`, `fp16` or `int8`."""
        return "fp16" if self.in_half and self.kv_cache == "fp32" else self.kv_cache

    def settings(self, checkpoint: Path) -> dict[str, Any]:
        """What decides the content of the export, for its manifest; defaults that came later are left out."""
        stored = (self.dtype or "fp32").removesuffix("-weights")
        stored = "packed" if quantization_config(checkpoint) is not None else stored
        later = {
            "computed_in": "fp16" if self.in_half else None,
            "profile": self.profile if self.profile != "memory" else None,
            "standard_ops": self.standard_ops,
            "web": self.web,
            "inline": self.inline,
            "calibration": [str(path) for path in self.calibration],
            "rope_scaling": self.rope_scaling,
        }
        given = {name: value for name, value in later.items() if value}
        return {"dtype": stored, "kv_cache": self.cache, **given}


def export_checkpoint(checkpoint: Path, out: Path, options: ExportOptions) -> dict[str, Any]:
    """Write an ONNX export of a checkpoint, published only if it passes the parity gate.

    Args:
        checkpoint: what `train`, `distill`, `prune` or `quantize` wrote, or a Hugging Face checkpoint.
        out: the directory to make; if it is there already, made from the same checkpoint, it is kept.
        options: how to export.

    Returns:
        `out`, `cached` and `size_bytes`; `parameters`, and `precision`, the narrowest that matrices are stored in;
        `kv_cache`, the cache's numbers, and `profile`; `kernels`, the version of those that the graph calls, or None;
        `build_seconds` without the gate and `seconds` with it;
        `peak_rss_bytes` of this process; and the main figures of `parity.json` as `parity`.

    Raises:
        UsageError: an unknown dtype or profile, one that does not fit the checkpoint, options that exclude each
            other, or a kind of attention or feed-forward that has no graph.
        ArtifactError: the checkpoint is missing or damaged.
        GateError: the graph does not compute what the model computes; nothing is left behind.
        ConflictError: `out` holds something else.
        ResourceError: `max_ram_mb` is not enough.
    """
    require_directory(checkpoint, "a checkpoint directory")
    _check_options(checkpoint, options)
    stage = Stage("export", options.settings(checkpoint), [checkpoint, *options.calibration])
    _check_memory(checkpoint, options)
    config = load_config(checkpoint)
    if options.rope_scaling is not None:
        config = with_rope_scaling(config, options.rope_scaling)

    def make(directory: Path) -> dict[str, Any]:
        with checkpoint_with(checkpoint, config) as source:
            return _make(source, directory, options)

    return run_stage(out, stage, make)


def _make(checkpoint: Path, directory: Path, options: ExportOptions) -> dict[str, Any]:
    started = time.perf_counter()
    written = _write(checkpoint, directory, options)
    built = time.perf_counter()
    if options.max_ram_mb is None:
        report = check_parity(checkpoint, directory, options.threads, find_provider(options.provider))
    else:
        report = check_parity_by_layer(checkpoint, directory, written.residual, options.threads)
    peak = peak_rss_bytes()
    if options.max_ram_mb is not None and peak > 1e6 * options.max_ram_mb:
        raise ResourceError(
            f"--max-ram {options.max_ram_mb}: exporting {checkpoint} took {peak / 1e6:,.0f} MB; nothing was "
            "published; allow at least that much"
        )
    failures = report.failures()
    if failures:
        raise GateError(
            f"{checkpoint}: the export does not match the model ({'; '.join(failures[:3])}); nothing was "
            "published, please report it with this line"
        )
    parity = report.to_dict()
    write_json(directory / "parity.json", parity)
    return {
        "parameters": load_config(checkpoint).parameters,
        "precision": report.precision,
        "kv_cache": options.cache,
        "profile": options.profile,
        "kernels": written.folded.version,
        "build_seconds": round(built - started, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_rss_bytes": peak,
        "parity": {key: parity[key] for key in _REPORTED},
    }


def _write(checkpoint: Path, directory: Path, options: ExportOptions) -> WrittenGraph:
    """The graphs, and the files that loaders read beside them."""
    stored_as, dtype = bitsandbytes_kind(checkpoint), (options.dtype or "fp32").removesuffix("-weights")
    if stored_as is not None:
        log(
            f"{checkpoint}: bitsandbytes stored its matrices as {stored_as}; they are exported dense, in {dtype}; "
            "quantize the checkpoint first for a small export"
        )
    if options.in_half:
        log("fp16: computes and caches in float16, for GPUs; a CPU converts to float32 and back, slower than fp32")
    scales = cache_scales(checkpoint, options.calibration) if options.kv_cache == "int8" else None
    form = options.standard_ops, options.web, options.inline, options.in_half
    half_cache = options.kv_cache == "fp16" and not options.in_half
    written = write_graph(checkpoint, directory, dtype == "fp16", scales, *form, half_cache)
    log(str(written.folded))
    if options.profile == "latency":
        write_prompt_graph(checkpoint, directory, written, scales, half_cache)
    web = web_precision(written.precision, options.in_half) if options.web else None
    write_loader_files(checkpoint, directory, not options.standard_ops, web, options.in_half)
    others = not_opened_by(load_config(checkpoint))
    if others is not None:
        log(others)
    return written


def _check_options(checkpoint: Path, options: ExportOptions) -> None:
    """Refuse options that are unknown, exclude each other or do not fit the checkpoint."""
    choices = (
        ("--kv-cache", options.kv_cache, CACHE_PRECISIONS),
        ("--profile", options.profile, PROFILES),
        ("--dtype", options.dtype, DTYPES),
    )
    for flag, value, known in choices:
        if value is not None and value not in known:
            raise UsageError(f"{flag} {value!r}: choose {' or '.join(known)}")
    if options.calibration and options.kv_cache != "int8":
        raise UsageError("--calibration belongs to --kv-cache int8; leave it out, or add that")
    bounded = options.max_ram_mb is not None and options.kv_cache == "int8"
    if bounded and not CalibrationText(tuple(options.calibration)).found(checkpoint).files:
        raise UsageError(
            f"--kv-cache int8 with --max-ram needs calibration text: {checkpoint} names none, and to write some it "
            "would have to be in memory whole; give --calibration FILE"
        )
    if options.standard_ops and options.kv_cache != "fp32":
        raise UsageError(
            f"--standard-ops with --kv-cache {options.kv_cache}: no standard operator reads such a cache; leave one of "
            "them out"
        )
    if options.web and options.kv_cache == "fp16" and not options.in_half:
        raise UsageError(
            "--web with --kv-cache fp16: browsers cache in float16 where they compute in it; use --dtype fp16, or "
            "--kv-cache int8"
        )
    if not find_provider(options.provider).is_cpu and options.max_ram_mb is not None:
        raise UsageError(
            f"--provider {options.provider} with --max-ram: the gate by layer runs on the CPU; leave one out; "
            "`verify --provider` checks the export afterwards"
        )
    packed = quantization_config(checkpoint)
    if options.in_half:
        _check_half(checkpoint, options, packed)
    if options.standard_ops and packed and packed.get("per_row"):
        raise UsageError(f"--standard-ops: {checkpoint} has INT8 per row, which has no standard operators; use blocks")
    if options.profile == "latency":
        _check_latency(checkpoint, options, packed)
    if options.dtype is not None and packed is not None and not options.in_half:
        raise UsageError(
            f"--dtype {options.dtype}: {checkpoint} is packed already and is exported as it is; leave --dtype out"
            + (", or use --dtype fp16 to compute in float16" if options.kv_cache != "int8" else "")
        )
    config = load_config(checkpoint)
    check_kinds(config, "fp32" if options.in_half else options.kv_cache)
    _check_new_kinds(checkpoint, config, options, packed)


def _check_half(checkpoint: Path, options: ExportOptions, packed: Mapping[str, Any] | None) -> None:
    """Refuse what has no form that computes in float16."""
    instead = "leave --dtype out" if packed else "use --dtype fp16-weights, or leave --dtype out"
    if not _has_half_graph(load_config(checkpoint)):
        raise UsageError(f"--dtype fp16: this kind of model has no graph in float16; {instead}")
    others = {
        "--kv-cache int8": options.kv_cache == "int8",
        "--profile latency": options.profile == "latency",
        "--standard-ops": options.standard_ops,
        "--max-ram": options.max_ram_mb is not None,
    }
    other = "" if packed else ", or use --dtype fp16-weights"
    for flag, given in others.items():
        if given:
            raise UsageError(f"--dtype fp16 with {flag}: that is for CPUs; leave one of them out{other}")
    if packed and packed.get("per_row"):
        raise UsageError(
            f"--dtype fp16: {checkpoint} has INT8 per row, which only CPUs multiply; quantize it in blocks"
        )
    if options.web and packed and packed.get("bits") != 4:
        raise UsageError(
            f"--dtype fp16 with --web: transformers.js knows 4-bit matrices there, not those of {checkpoint}"
        )


def _check_new_kinds(
    checkpoint: Path, config: ModelConfig, options: ExportOptions, packed: Mapping[str, Any] | None
) -> None:
    """Refuse forms that graphs of latent or selected attention, of an LSTM and of experts have not."""
    latent, experts = config.attention_kind == "latent", config.experts is not None
    lstm, selected = config.attention_kind == "lstm", config.selection is not None
    refused = {
        "--web: attention to selected tokens writes into a cache with room, which a browser's loader does not give": (
            selected and options.web
        ),
        "--profile latency: its second graph knows no selection of tokens": selected and options.profile == "latency",
        "--standard-ops: joining the cache anew in each step takes longer than selection saves": (
            selected and options.standard_ops
        ),
        "--max-ram: the gate by layer does not bound what another choice of tokens changes": (
            selected and options.max_ram_mb is not None
        ),
        "--web: a browser's loader gives a latent cache no room to write into": latent and options.web,
        "--web: a browser's loader passes on keys and values, not the states of an LSTM": lstm and options.web,
        "--profile latency: its second graph is for grouped-query attention and SwiGLU": (
            (latent or lstm or experts) and options.profile == "latency"
        ),
        "--standard-ops: ONNX Runtime loads no packed LSTM in them": (lstm and options.standard_ops and bool(packed)),
        "--standard-ops: packed experts have no standard operators": experts and options.standard_ops and bool(packed),
        "INT8 per row is not for experts; quantize in blocks": experts and bool(packed and packed.get("per_row")),
    }
    for reason, found in refused.items():
        if found:
            raise UsageError(
                f"{checkpoint}: {reason}; leave it out" if reason.startswith("--") else f"{checkpoint}: {reason}"
            )


def _has_half_graph(config: ModelConfig) -> bool:
    """Whether all parts of a model are written in float16: LLaMA's, and sliding and unrotated attention."""
    parts = (config.attention_kind, config.mlp_kind, config.norm_kind, config.output_norms, config.embedding_scale)
    return parts == ("grouped_query", "swiglu", "rms", False, 1.0)


def _check_latency(checkpoint: Path, options: ExportOptions, packed: Mapping[str, Any] | None) -> None:
    """Refuse the latency profile where the graph or the checkpoint's weights have no second form."""
    if options.standard_ops or options.web:
        raise UsageError("--profile latency is for this program's runtime; leave out --standard-ops and --web")
    if not packed:
        raise UsageError(
            f"--profile latency reads prompts in INT8, and {checkpoint} is not quantized; quantize it first, or leave "
            "the option out"
        )
    if packed.get("per_row"):
        raise UsageError(
            f"--profile latency: {checkpoint} is stored per row already, as prompts would be; leave the option out"
        )


def _check_memory(checkpoint: Path, options: ExportOptions) -> None:
    """Refuse a bound that is too low: the program itself, what stays mapped of files, copies of a table or a layer.

    Measured by the command, beyond the program's own 377 MB: 270 MB for 97M parameters in float32 and 217 in INT8, 406
    with a vocabulary of 32k, 221 and 217 for 419M parameters (265 with standard operators, 337 with an INT8 cache) and
    355 for 931M: at most 5.5 tables, and 4 layers.
    """
    if options.max_ram_mb is None:
        return
    if options.profile != "memory":
        raise UsageError(
            "--max-ram: checking the latency profile reads the model whole; leave --profile latency out, or --max-ram"
        )
    config = load_config(checkpoint)
    table = config.vocab_size * config.hidden_size
    layer = sum(n * k for n, k in matrix_shapes(config, layers_only=True).values()) // config.num_hidden_layers
    # Of calibration text: each sample's state, what a layer caches of all of them, and one such tensor a second time.
    cached = sum(math.prod(state.shape) for state in block_state(config))
    text = SAMPLES * SAMPLE_TOKENS * (config.hidden_size + 2 * cached) if options.kv_cache == "int8" else 0
    needed_mb = (peak_rss_bytes() + REOPEN_BYTES + 4 * max(6 * table, 4 * layer, 3 * layer + text)) / 1e6
    if needed_mb > options.max_ram_mb:
        raise ResourceError(
            f"--max-ram {options.max_ram_mb}: exporting {checkpoint} takes about {needed_mb:,.0f} MB, of which the "
            f"program itself {peak_rss_bytes() / 1e6:,.0f} MB; allow that much, or export a smaller model"
        )
