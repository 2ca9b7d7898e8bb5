"""Checkpoint directory in, export directory out, with the parity gate between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from export.graph import write_graph
from export.parity import check_parity
from export.side_files import write_side_files
from sportsllm.artifacts import Stage, run_stage
from sportsllm.checkpoint import quantization_config, write_json
from sportsllm.config import load_config
from sportsllm.errors import ArtifactError, GateError, UsageError

PRECISIONS = ("fp32", "fp16")


def run_export(checkpoint: Path, out: Path, precision: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Write an ONNX export of a checkpoint, published only if it passes the parity gate.

    Args:
        checkpoint: what `train`, `distill`, `prune` or `quantize` wrote, or a Hugging Face checkpoint.
        out: the directory to make; if it is there already, made from the same checkpoint, it is kept.
        precision: `fp32` (where not given) or `fp16` storage of an unpacked checkpoint. A packed one keeps its own.
        threads: CPU threads of the gate.

    Returns:
        `out`, `cached`, `parameters`, `precision`, `size_bytes`, `seconds`, and `parity` with
        `max_abs_logit_error`, `kl`, `greedy_match`, `passed`.

    Raises:
        UsageError: an unknown precision, or one asked for a packed checkpoint.
        ArtifactError: the checkpoint is missing or damaged.
        GateError: the graph does not compute what the model computes; nothing is left behind.
        ConflictError: `out` holds something else.
    """
    if not checkpoint.is_dir():
        raise ArtifactError(f"{checkpoint}: no such directory; give a checkpoint directory")
    stage = Stage("export", {"dtype": _storage(checkpoint, precision)}, [checkpoint])

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        write_graph(checkpoint, directory, half=precision == "fp16")
        write_side_files(checkpoint, directory)
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
            "build_seconds": round(built - started, 3),
            "seconds": round(time.perf_counter() - started, 3),
            "parity": {key: parity[key] for key in keys},
        }

    return run_stage(out, stage, make)


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
