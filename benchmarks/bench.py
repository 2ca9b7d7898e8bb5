"""Measure a model directory on this machine and hold it to a device's budget.

Every figure is measured in `ROUNDS` fresh processes, one after the other, with the bandwidth probe in between;
the figure is the median of the rounds and the noise is the interval they cover. Prompt and decode figures leave
tokenizing and sampling out, as llama-bench does.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.budget import load_device
from benchmarks.floor import floor_bytes, floor_depth, memory_floor
from benchmarks.process import DEFAULT_TIMEOUT_S, ChildResult, child_command, run_child, wait_for_quiet
from benchmarks.summary import summarise
from benchmarks.verdict import check_on_device, judge_budget
from sportsllm import console
from sportsllm.artifacts import directory_bytes
from sportsllm.config import load_config
from sportsllm.errors import ArtifactError

ROUNDS = 3
MEMORY_ROUNDS = 2
PROMPTS = (128, 512)
DEPTHS = (32, 512)
WARM_UP_STEPS = 20
STEPS = 128  # as llama-bench's tg128
REPEATS = 4  # at least 12 prompts over the rounds
SECONDS_PER_FIGURE = 0.25
MEMORY_CONTEXT_TOKENS = 1024
MEMORY_STEPS = 16
LARGEST_WORKING_SET_BYTES = 512 * 2**20  # beyond every cache; more would only cost memory


def prompts_that_fit(context: int) -> list[int]:
    """Prompt lengths, in tokens, that time to first token is measured at."""
    return [prompt for prompt in PROMPTS if prompt <= context]


def depths_that_fit(context: int) -> list[int]:
    """Depths, in tokens, that decoding is measured at: 32, 512 and the last one with room for every step."""
    deepest = context - WARM_UP_STEPS - STEPS
    return sorted({depth for depth in (*DEPTHS, deepest) if 1 <= depth <= deepest})


def default_threads() -> int:
    """Physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def run_bench(
    directory: Path,
    device: str,
    on_device: bool = False,
    threads: int | None = None,
    teacher_bits_per_byte: float | None = None,
    bits_per_byte: float | None = None,
    rounds: int = ROUNDS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Measure `directory` and judge it by the budget of `device`.

    Args:
        directory: an export (ONNX), or a checkpoint (PyTorch).
        device: a shipped device's name, or the path of a device file.
        on_device: this machine is `device`, so the measurement decides even where that cannot be recognised.
        threads: CPU threads; all physical cores where not given.
        teacher_bits_per_byte: quality of the fp32 teacher on held-out text.
        bits_per_byte: quality of this model on the same text.
        rounds: fresh processes that every speed is measured in.
        timeout_s: seconds after which one of these processes counts as hung.

    Returns:
        Times in ms, sizes in bytes, rates in tokens per second: `summarise`'s keys, `file_bytes` (graph and
        weights), `directory_bytes`, `memory_floor`'s keys, `quality_loss_percent`, `budget` (see
        `judge_budget`), `machine`, `settings` and, under `raw`, every sample of every round.

    Raises:
        ArtifactError: the directory is missing or damaged.
        UsageError: no such device, or `on_device` for one that is no CPU.
        ChildFailure: a measuring process crashed, hung or was killed; nothing is reported then.
    """
    budget = load_device(device)
    check_on_device(budget, on_device)
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; give a checkpoint or an export")
    config = load_config(directory)
    threads = threads or default_threads()
    depths = depths_that_fit(config.max_position_embeddings)
    specification: dict[str, Any] = {
        "directory": str(directory.resolve()),
        "threads": threads,
        "seed": 0,
        "prompts": prompts_that_fit(config.max_position_embeddings),
        "depths": depths,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repeats": max(REPEATS, -(-12 // rounds)),
        "seconds_per_figure": SECONDS_PER_FIGURE,
        "context_tokens": min(MEMORY_CONTEXT_TOKENS, config.max_position_embeddings),
        "memory_steps": MEMORY_STEPS,
    }
    floor = floor_bytes(directory, config)
    per_token = floor["weight_bytes"] + floor["kv_bytes_per_token"] * floor_depth(depths)
    specification["working_set_bytes"] = min(per_token, LARGEST_WORKING_SET_BYTES)
    raw = _measure_rounds(specification, rounds, timeout_s)
    result: dict[str, Any] = {
        "directory": str(directory),
        "runtime": raw["speed"][0]["runtime"],
        "parameters": config.parameters,
        "context_length": config.max_position_embeddings,
        "threads": threads,
        **summarise(raw),
        "file_bytes": directory_bytes(directory),
        "directory_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
    }
    result |= memory_floor(floor, raw["bandwidth"], depths)
    result |= {"bits_per_byte": bits_per_byte, "teacher_bits_per_byte": teacher_bits_per_byte}
    result["quality_loss_percent"] = (
        100 * (bits_per_byte / teacher_bits_per_byte - 1) if bits_per_byte and teacher_bits_per_byte else None
    )
    result["budget"] = judge_budget(budget, result, config, directory, on_device)
    result |= {"machine": machine(), "settings": specification, "raw": raw}
    return result


def _measure_rounds(specification: Mapping[str, Any], rounds: int, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """Every child's result by mode; speed and bandwidth take turns so that both see the same machine."""
    order = ["speed", "bandwidth"] * rounds + ["memory"] * MEMORY_ROUNDS
    raw: dict[str, list[dict[str, Any]]] = {"speed": [], "bandwidth": [], "memory": []}
    name = Path(specification["directory"]).name
    wait_for_quiet()
    with console.progress_bar(f"bench {name}", len(order)) as progress:
        for mode in order:
            progress.advance(0, mode)
            variables = {"OMP_NUM_THREADS": str(specification["threads"])}
            if mode == "bandwidth":
                variables["OPENBLAS_NUM_THREADS"] = "1"  # the probe has threads of its own
            child = run_child(
                child_command({**specification, "mode": mode}), f"bench {name} ({mode})", timeout_s, variables
            )
            raw[mode].append(_with_surroundings(child))
            progress.advance(1)
    return raw


def _with_surroundings(child: ChildResult) -> dict[str, Any]:
    surroundings = {"seconds": round(child.seconds, 3), "other_cpu_cores": round(child.other_cpu_cores, 3)}
    return {**child.payload, **surroundings}


def machine() -> dict[str, Any]:
    """What the measurement ran on: processor, cores, memory in bytes, system, clock in MHz where readable, time."""
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "processor": _processor_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "clock_mhz": round(frequency.current) if frequency else None,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()
