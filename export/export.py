"""Checkpoint directory in, export directory out, with the parity gate between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from export.graph import write_graph
from export.kv_cache import PRECISIONS as CACHE_PRECISIONS
from export.kv_cache import cache_scales
from export.parity import check_parity
from export.side_files import write_side_files
from sportsllm.artifacts import Stage, run_stage
from sportsllm.checkpoint import quantization_config, write_json
from sportsllm.config import load_config
from sportsllm.errors import ArtifactError, GateError, UsageError

PRECISIONS = ("fp32", "fp16")


def run_export(
    checkpoint: Path,
    out: Path,
    precision: str | None = None,
    threads: int | None = None,
    kv_cache: str = "fp32",
    calibration: Sequence[Path] = (),
    standard_ops: bool = False,
    web: bool = False,
) -> dict[str, Any]:
    """Write an ONNX export of a checkpoint, published only if it passes the parity gate.

    Args:
        checkpoint: what `train`, `distill`, `prune` or `quantize` wrote, or a Hugging Face checkpoint.
        out: the directory to make; if it is there already, made from the same checkpoint, it is kept.
        precision: `fp32` (where not given) or `fp16` storage of an unpacked checkpoint. A packed one keeps its own.
        threads: CPU threads of the gate.
        kv_cache: `fp32`, or `int8`: a quarter of the memory, scales measured on calibration text.
        calibration: text for `int8`; what the checkpoint was made from if not given.
        standard_ops: use standard ONNX operators alone, for runtimes that do not have ONNX Runtime's own.
        web: lay the files out for transformers.js in a browser.

    Returns:
        `out`, `cached`, `parameters`, `precision`, `size_bytes`, `seconds`, and `parity` with
        `max_abs_logit_error`, `kl`, `greedy_match`, `passed`.

    Raises:
        UsageError: an unknown precision, one asked for a packed checkpoint, or options that exclude each other.
        ArtifactError: the checkpoint is missing or damaged.
        GateError: the graph does not compute what the model computes; nothing is left behind.
        ConflictError: `out` holds something else.
    """
    if not checkpoint.is_dir():
        raise ArtifactError(f"{checkpoint}: no such directory; give a checkpoint directory")
    _check_cache(kv_cache, bool(calibration), standard_ops)
    settings: dict[str, Any] = {"dtype": _storage(checkpoint, precision), "kv_cache": kv_cache}
    if standard_ops:
        settings["standard_ops"] = True
    if web:
        settings["web"] = True
    if calibration:
        settings["calibration"] = [str(path) for path in calibration]
    named = _precision(checkpoint, precision) if web else None
    stage = Stage("export", settings, [checkpoint, *calibration])

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        scales = cache_scales(checkpoint, calibration) if kv_cache == "int8" else None
        write_graph(checkpoint, directory, half=precision == "fp16", scales=scales, standard=standard_ops, web=named)
        write_side_files(checkpoint, directory, shared_cache=not standard_ops, web=named)
        built = time.perf_counter()
        report = check_parity(checkpoint, directory, threads)
        failures = report.failures()
        if failures:
            raise GateError(
                f"{checkpoint}: the export does not match the model ({'; '.join(failures[:3])}); nothing was "
                "published, please report it with this line"
            )
        parity = report.to_dict()
        write_json(directory / "parity.json", parity)
        keys = ("max_abs_logit_error", "kl", "greedy_match", "passed")
        return {
            "parameters": load_config(checkpoint).parameters,
            "precision": report.precision,
            "kv_cache": kv_cache,
            "build_seconds": round(built - started, 3),
            "seconds": round(time.perf_counter() - started, 3),
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
    """As `export.parity.graph_precision` will find it."""
    packed = quantization_config(checkpoint)
    if packed is None:
        return precision or "fp32"
    bits = [module["bits"] for module in packed.get("modules", {}).values() if "bits" in module]
    if not bits:
        raise ArtifactError(f"{checkpoint / 'config.json'}: quantization_config names no bits; quantize it again")
    return f"int{min(bits)}"
