"""Measure a model directory on this machine and hold it to a device's budget.

Every figure is measured in `ROUNDS` or more fresh processes, one after the other, with the bandwidth probe in
between; the figure is the median of the rounds and the noise is the interval they cover. Prompt and decode figures
leave tokenizing and sampling out, as llama-bench does.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.devices.limits import check_on_device, judge_budget
from benchmarks.devices.load import load_device
from benchmarks.devices.recognise import processor_name
from benchmarks.measure.cpus import choose_cpus
from benchmarks.measure.floor import budget_depth, floor_bytes, memory_floor
from benchmarks.measure.process import DEFAULT_TIMEOUT_S, child_command
from benchmarks.measure.roofs import machine_roofs
from benchmarks.measure.rounds import Payloads, Turn, looks, take_turn, take_turns
from benchmarks.measure.summary import BATCH, is_steady, summarise
from benchmarks.measure.sustained import summarise_sustained
from benchmarks.runtimes.compare import Peer, measure_against, turn_depths
from sportsllm import console
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.storage.artifact import directory_bytes

ROUNDS = 5  # the fewest whose interval holds the median with 90% (benchmarks.spread.rank)
MOST_ROUNDS = 11
MEMORY_ROUNDS = 2
COLD_ROUNDS = 3
PROMPTS = (128, 512)
DEPTHS = (32, 512)
WARM_UP_STEPS = 20
STEPS = 128  # as llama-bench's tg128
REPEATS = 4  # at least 12 prompts over the rounds
SECONDS_PER_FIGURE = 0.25
MEMORY_CONTEXT_TOKENS = 1024
MEMORY_STEPS = 16
BATCH_PROMPT = 128
LARGEST_WORKING_SET_BYTES = 512 * 2**20  # beyond every cache; more would only cost memory


def prompts_that_fit(context: int, asked: Sequence[int] = ()) -> list[int]:
    """Prompt lengths, in tokens, that time to first token is measured at: 128, 512 and those asked for.

    Raises:
        UsageError: one that was asked for is longer than the context.
    """
    for prompt in asked:
        if not 0 < prompt <= context:
            raise UsageError(f"--prompt-lengths {prompt}: must be from 1 to the context of {context} tokens")
    return sorted({*asked, *(prompt for prompt in PROMPTS if prompt <= context)})


def depths_that_fit(context: int) -> list[int]:
    """Depths, in tokens, that decoding is measured at: 32, 512 and the last one with room for every step."""
    deepest = context - WARM_UP_STEPS - STEPS
    return sorted({depth for depth in (*DEPTHS, deepest) if 1 <= depth <= deepest})


def ragged_lengths(rows: int, context: int) -> list[int]:
    """Prompt lengths of a batch, in tokens: evenly from 128, or what fits, down to half of that.

    Raises:
        UsageError: the context has no room for a prompt and the steps after it.
    """
    longest = min(BATCH_PROMPT, context - WARM_UP_STEPS - STEPS)
    if longest < 2:
        raise UsageError(f"--batch-size: a context of {context} tokens has no room for {STEPS} steps after a prompt")
    return [longest - (longest // 2) * row // max(1, rows - 1) for row in range(rows)]


def whole_numbers(flag: str, text: str | None) -> list[int]:
    """The numbers of a flag like `1,4`, each once and ascending; none where the flag was not given.

    Raises:
        UsageError: something else stands there.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} {text}: give whole numbers from 1 with commas between them, for example 1,4")
    return sorted({int(word) for word in words})


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
    most_rounds: int = MOST_ROUNDS,
    prompt_lengths: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    minutes: float = 0.0,
    peers: Sequence[Peer] = (),
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
        most_rounds: up to so many while the rounds do not agree.
        prompt_lengths: tokens of further prompts, beside 128 and 512.
        batch_sizes: rows that are decoded together.
        minutes: length of a sustained run; none at 0.
        peers: other runtimes to measure in turns with this one.

    Returns:
        Times in ms, sizes in bytes, rates in tokens per second: `summarise`'s keys, `file_bytes` (graph and
        weights), `directory_bytes`, `memory_floor`'s keys, `roofs` (see `machine_roofs`), `quality_loss_percent`,
        `budget` (see `judge_budget`), `machine`, `settings`, under `raw` every sample of every round, and where they
        were asked for `sustained` (see `summarise_sustained`), `against` and `against_ratios` (see `measure_against`).

    Raises:
        ArtifactError: the directory is missing or damaged.
        UsageError: no such device, or `on_device` for one that is no CPU; a prompt or batch that does not fit.
        ChildFailure: a measuring process crashed, hung or was killed; nothing is reported then.
    """
    budget = load_device(device)
    check_on_device(budget, on_device)
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; give a checkpoint or an export")
    config = load_config(directory)
    context = config.max_position_embeddings
    depths = depths_that_fit(context)
    if minutes and not depths:
        raise UsageError(f"--minutes: a context of {context} tokens has no room for {STEPS} steps after a prompt")
    if peers:
        turn_depths(context)  # refused now rather than after minutes
    batches = {f"{BATCH}{rows}": ragged_lengths(rows, context) for rows in batch_sizes}
    floor = floor_bytes(directory, config)
    specification = _specification(directory, config, threads or default_threads(), rounds)
    specification["prompts"] = prompts_that_fit(context, prompt_lengths)
    per_token = floor["weight_bytes"] + floor["kv_bytes_per_token"] * budget_depth(depths)
    specification["working_set_bytes"] = min(per_token, LARGEST_WORKING_SET_BYTES)
    raw = _measure_rounds(specification, batches, looks(rounds, most_rounds), timeout_s)
    result: dict[str, Any] = {
        "directory": str(directory),
        "runtime": raw["speed"][0]["runtime"],
        "parameters": config.parameters,
        "context_length": context,
        "threads": specification["threads"],
        **summarise(raw),
        "file_bytes": directory_bytes(directory),
        "directory_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
    }
    result |= memory_floor(floor, raw["bandwidth"], depths)
    result["roofs"] = machine_roofs(budget, result["memory_floor"]["bandwidth_bytes_per_s"], on_device)
    if minutes:
        result["sustained"] = _measure_sustained(specification, budget_depth(depths), minutes, timeout_s)
    if peers:
        result |= measure_against(directory, config, peers, specification, looks(rounds, most_rounds), timeout_s)
        result["clean"] = result["clean"] and _peers_steady(result["against"])
    result |= {"bits_per_byte": bits_per_byte, "teacher_bits_per_byte": teacher_bits_per_byte}
    result["quality_loss_percent"] = (
        100 * (bits_per_byte / teacher_bits_per_byte - 1) if bits_per_byte and teacher_bits_per_byte else None
    )
    result["budget"] = judge_budget(budget, result, config, directory, on_device)
    result |= {"machine": machine(), "settings": specification, "raw": raw}
    return result


def _peers_steady(against: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(one["steady"] for one in against.values() if one["status"] == "measured")


def _specification(directory: Path, config: ModelConfig, threads: int, rounds: int) -> dict[str, Any]:
    """What every child of this run is told."""
    depths = depths_that_fit(config.max_position_embeddings)
    return {
        "directory": str(directory.resolve()),
        "threads": threads,
        "cpus": choose_cpus(threads),
        "seed": 0,
        "depths": depths,
        "energy_depth": budget_depth(depths),
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repeats": max(REPEATS, -(-12 // rounds)),
        "seconds_per_figure": SECONDS_PER_FIGURE,
        "context_tokens": min(MEMORY_CONTEXT_TOKENS, config.max_position_embeddings),
        "memory_steps": MEMORY_STEPS,
    }


def _measure_rounds(
    specification: Mapping[str, Any], batches: Mapping[str, Sequence[int]], look_after: Sequence[int], timeout_s: float
) -> Payloads:
    """Every child's result by mode; speeds and bandwidth take turns so that all see the same machine."""
    title = f"bench {Path(specification['directory']).name}"
    timed = [_turn(specification, "speed"), _turn(specification, "bandwidth")]
    timed += [_turn({**specification, "lengths": lengths}, "batch", name) for name, lengths in batches.items()]
    raw = take_turns(title, timed, look_after, is_steady, timeout_s)
    raw |= take_turns(title, [_turn(specification, "memory")], [MEMORY_ROUNDS], lambda _: True, timeout_s)
    return raw | take_turns(title, [_turn(specification, "cold")], [COLD_ROUNDS], lambda _: True, timeout_s)


def _turn(specification: Mapping[str, Any], mode: str, name: str | None = None) -> Turn:
    variables = {"OMP_NUM_THREADS": str(specification["threads"])}
    if mode == "bandwidth":
        variables["OPENBLAS_NUM_THREADS"] = "1"  # the probe has threads of its own
    name = name or mode
    what = f"bench {Path(specification['directory']).name} ({name})"
    return Turn(name, child_command({**specification, "mode": mode}), what, variables)


def _measure_sustained(
    specification: Mapping[str, Any], depth: int, minutes: float, timeout_s: float
) -> dict[str, Any]:
    """One long run, with a bar that shows its time."""
    turn = _turn({**specification, "minutes": minutes, "depth": depth}, "sustained")
    with console.progress_bar(turn.what, 60 * minutes) as progress:
        shown = 0.0

        def waiting(seconds: float) -> None:
            nonlocal shown
            progress.advance(seconds - shown)
            shown = seconds

        payload = take_turn(turn, timeout_s + 60 * minutes, waiting)
    return summarise_sustained(payload, minutes) | {"other_cpu_cores": payload["other_cpu_cores"]}


def machine() -> dict[str, Any]:
    """What the measurement ran on: processor, cores, memory in bytes, system, clock in MHz where readable, time."""
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "processor": processor_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "clock_mhz": round(frequency.current) if frequency else None,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
