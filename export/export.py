"""Checkpoint directory in, export directory out, with the parity gate between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from export.cache_scales import PRECISIONS as CACHE_PRECISIONS
from export.cache_scales import SAMPLE_TOKENS, SAMPLES, cache_scales
from export.graph.decoder import write_graph
from export.graph.prefill_graph import write_prompt_graph
from export.loader_files import write_side_files
from export.parity.by_layer import check_parity_by_layer
from export.parity.check import check_parity
from sportsllm.console import say
from sportsllm.errors import ArtifactError, GateError, ResourceError, UsageError
from sportsllm.models.hf_config import load_config
from sportsllm.process_memory import peak_rss_bytes
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import write_json
from sportsllm.storage.packed_weights import stored_bits
from sportsllm.storage.safetensors_files import REOPEN_BYTES, bitsandbytes_kind, quantization_config

PRECISIONS = ("fp32", "fp16")
PROFILES = ("memory", "latency")


def run_export(
    checkpoint: Path,
    out: Path,
    precision: str | None = None,
    threads: int | None = None,
    kv_cache: str = "fp32",
    calibration: Sequence[Path] = (),
    profile: str = "memory",
    standard_ops: bool = False,
    web: bool = False,
    max_ram_mb: int | None = None,
) -> dict[str, Any]:
    """Write an ONNX export of a checkpoint, published only if it passes the parity gate.

    Args:
        checkpoint: what `train`, `distill`, `prune` or `quantize` wrote, or a Hugging Face checkpoint.
        out: the directory to make; if it is there already, made from the same checkpoint, it is kept.
        precision: `fp32` (where not given) or `fp16` storage of an unpacked checkpoint. A packed one keeps its own.
        threads: CPU threads of the gate.
        kv_cache: `fp32`, or `int8`: a quarter of the memory, scales measured on calibration text.
        calibration: text for `int8`; what the checkpoint was made from if not given.
        profile: `memory`, one copy of the weights; or `latency`, a second form of a packed checkpoint's that reads
            prompts faster, see `export.graph.prefill_graph`.
        standard_ops: use standard ONNX operators alone, for runtimes that do not have ONNX Runtime's own.
        web: lay the files out for transformers.js in a browser.
        max_ram_mb: the most memory (MB, 10^6 bytes) that this process may take; the gate then goes layer by layer.

    Returns:
        `out`, `cached`, `parameters`, `precision`, `size_bytes`, `seconds`, and `parity` with
        `max_abs_logit_error`, `kl`, `greedy_match`, `passed`.

    Raises:
        UsageError: an unknown precision or profile, one that does not fit the checkpoint, or options that exclude each
            other.
        ArtifactError: the checkpoint is missing or damaged.
        GateError: the graph does not compute what the model computes; nothing is left behind.
        ConflictError: `out` holds something else.
    """
    if not checkpoint.is_dir():
        raise ArtifactError(f"{checkpoint}: no such directory; give a checkpoint directory")
    _check_cache(kv_cache, bool(calibration), standard_ops)
    _check_form(checkpoint, profile, standard_ops, web)
    settings: dict[str, Any] = {"dtype": _storage(checkpoint, precision), "kv_cache": kv_cache}
    if profile != "memory":
        settings["profile"] = profile
    if standard_ops:
        settings["standard_ops"] = True
    if web:
        settings["web"] = True
    if calibration:
        settings["calibration"] = [str(path) for path in calibration]
    named = _precision(checkpoint, precision) if web else None
    stage = Stage("export", settings, [checkpoint, *calibration])
    if max_ram_mb is not None:
        _check_memory(checkpoint, max_ram_mb, kv_cache, profile)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        packed_as = bitsandbytes_kind(checkpoint)
        if packed_as is not None:
            say(
                f"{checkpoint}: bitsandbytes stored its matrices as {packed_as}; they are exported dense, in "
                f"{settings['dtype']}; quantize the checkpoint first for a small export"
            )
        scales = cache_scales(checkpoint, calibration) if kv_cache == "int8" else None
        half = precision == "fp16"
        stored = write_graph(checkpoint, directory, half=half, scales=scales, standard=standard_ops, web=named)
        if profile == "latency":
            write_prompt_graph(checkpoint, directory, stored, scales)
        write_side_files(checkpoint, directory, shared_cache=not standard_ops, web=named)
        built = time.perf_counter()
        check = check_parity if max_ram_mb is None else check_parity_by_layer
        report = check(checkpoint, directory, threads)
        peak = peak_rss_bytes()
        if max_ram_mb is not None and peak > 1e6 * max_ram_mb:
            raise ResourceError(
                f"--max-ram {max_ram_mb}: exporting {checkpoint} took {peak / 1e6:,.0f} MB; nothing was published, "
                "allow so much"
            )
        failures = report.failures()
        if failures:
            raise GateError(
                f"{checkpoint}: the export does not match the model ({'; '.join(failures[:3])}); nothing was "
                "published, please report it with this line"
            )
        parity = report.to_dict()
        write_json(directory / "parity.json", parity)
        keys = ("max_abs_logit_error", "kl", "greedy_match", "passed", "tokenizer_changes")
        return {
            "parameters": load_config(checkpoint).parameters,
            "precision": report.precision,
            "kv_cache": kv_cache,
            "profile": profile,
            "build_seconds": round(built - started, 3),
            "seconds": round(time.perf_counter() - started, 3),
            "peak_rss_bytes": peak,
            "parity": {key: parity[key] for key in keys},
        }

    return run_stage(out, stage, make)


def _check_cache(kv_cache: str, calibrated: bool, standard_ops: bool) -> None:
    if kv_cache not in CACHE_PRECISIONS:
        raise UsageError(f"--kv-cache {kv_cache!r}: choose {' or '.join(CACHE_PRECISIONS)}")
    if calibrated and kv_cache == "fp32":
        raise UsageError("--calibration belongs to --kv-cache int8; leave it out, or add that")
    if standard_ops and kv_cache != "fp32":
        raise UsageError(
            f"--standard-ops with --kv-cache {kv_cache}: no standard operator reads such a cache; leave one of them out"
        )


def _check_form(checkpoint: Path, profile: str, standard_ops: bool, web: bool) -> None:
    """Refuse forms of the weights that the asked graphs do not have."""
    if profile not in PROFILES:
        raise UsageError(f"--profile {profile!r}: choose {' or '.join(PROFILES)}")
    packed = quantization_config(checkpoint) or {}
    rows, nf4 = bool(packed.get("per_row")), packed.get("method") == "nf4"
    if standard_ops and (rows or nf4):
        form = "INT8 rows" if rows else "NF4"
        raise UsageError(f"--standard-ops: {checkpoint} has {form}, which has no standard operators; use blocks")
    if web and nf4:
        raise UsageError(f"--web: {checkpoint} has NF4, which browsers do not run; quantize it to INT4")
    if profile == "memory":
        return
    if standard_ops or web:
        raise UsageError("--profile latency is for this program's runtime; leave out --standard-ops and --web")
    if not packed:
        raise UsageError(
            f"--profile latency reads prompts in INT8, and {checkpoint} is not quantized; quantize it first, or leave "
            "the option out"
        )
    if rows:
        raise UsageError(
            f"--profile latency: {checkpoint} has its matrices in rows, which is the form that prompts would get; "
            "leave the option out"
        )


def _check_memory(checkpoint: Path, max_ram_mb: int, kv_cache: str, profile: str) -> None:
    """Refuse a bound that is too low: the program itself, what stays mapped of files, copies of a table or a layer.

    Measured by the command, beyond the program's own 377 MB: 270 MB for 97M parameters in float32 and 217 in INT8, 406
    with a vocabulary of 32k, 221 and 217 for 419M parameters (265 with standard operators, 337 with an INT8 cache) and
    355 for 931M: at most 5.5 tables, and 4 layers.
    """
    if profile != "memory":
        raise UsageError(
            "--max-ram: checking the latency profile reads the model whole; leave --profile latency out, or --max-ram"
        )
    config = load_config(checkpoint)
    # Of calibration text: each sample's state, what a layer keeps of all, and the keys or the values side by side.
    text = SAMPLES * SAMPLE_TOKENS * (config.hidden_size + 4 * config.key_value_size) if kv_cache == "int8" else 0
    parts = config.parameters_by_component()
    table, layer = (
        config.vocab_size * config.hidden_size,
        (parts["attention"] + parts["feed_forward"]) // config.num_hidden_layers,
    )
    needed_mb = (peak_rss_bytes() + REOPEN_BYTES + 4 * max(6 * table, 4 * layer, 3 * layer + text)) / 1e6
    if needed_mb > max_ram_mb:
        raise ResourceError(
            f"--max-ram {max_ram_mb}: exporting {checkpoint} takes about {needed_mb:,.0f} MB, the program's own "
            f"{peak_rss_bytes() / 1e6:,.0f} MB counted; allow so much, or export a smaller model"
        )


def _storage(checkpoint: Path, precision: str | None) -> str:
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(f"--dtype {precision!r}: choose {' or '.join(PRECISIONS)}")
    if quantization_config(checkpoint) is None:
        return precision or "fp32"
    if precision is not None:
        raise UsageError(
            f"--dtype {precision}: {checkpoint} is packed already and is exported as it is; leave --dtype out"
        )
    return "packed"


def _precision(checkpoint: Path, precision: str | None) -> str:
    """As `export.parity.inputs.graph_precision` will find it."""
    packed = quantization_config(checkpoint)
    if packed is None:
        return precision or "fp32"
    bits = [module["bits"] for module in packed.get("modules", {}).values() if "bits" in module]
    if not bits:
        raise ArtifactError(f"{checkpoint / 'config.json'}: quantization_config names no bits; quantize it again")
    return f"int{stored_bits(min(bits))}"
