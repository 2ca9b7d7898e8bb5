"""Measure a model directory on this machine, each figure in `ROUNDS` or more fresh processes.

A figure is the median of the rounds, its noise the interval they cover. Prompt and decode figures leave tokenizing and
sampling out, as llama-bench does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import TIMED_STEPS, depths_that_fit, limit_lengths
from benchmarks.measure.machine import choose_cpus, default_threads, machine
from benchmarks.measure.process import (
    DEFAULT_TIMEOUT_S,
    Payloads,
    run_child,
    stop_checks,
    take_turns,
    worker_turn,
)
from benchmarks.measure.summary import (
    BATCH,
    bandwidth_bound,
    budget_depth,
    bytes_read_per_token,
    is_steady,
    round_figures,
    summarise,
    summarise_sustained,
)
from sportsllm import console
from sportsllm.errors import UsageError
from sportsllm.files import require_directory
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import directory_bytes
from sportsllm.models.config import ModelConfig

ROUNDS = 5
MOST_ROUNDS = 8  # one more check: at most 1.6 times the time
MEMORY_ROUNDS = 2
COLD_ROUNDS = 3
PROMPTS = (128, 512)
STEPS = 128  # as llama-bench's tg128
WARM_UP_STEPS = TIMED_STEPS - STEPS
REPEATS = 4  # at least 12 prompts over the rounds
SECONDS_PER_FIGURE = 0.25
MEMORY_CONTEXT_TOKENS = 1024
MEMORY_STEPS = 16
BATCH_PROMPT = 128
LARGEST_WORKING_SET_BYTES = 512 * 2**20  # beyond every cache; more would only cost memory
SHORT = {"steps": 48, "warm_up_steps": 8, "repeats": 5, "seconds_per_figure": 0.1, "memory_steps": 8}  # `short_bench`


@dataclass(frozen=True)
class BenchRequest:
    """What to measure of an export (ONNX) or a checkpoint (PyTorch), and how thoroughly; see `benchmarks.bench.bench`.

    `threads` None means all physical cores; `minutes` 0 means no sustained run.
    """

    directory: Path
    threads: int | None = None
    rounds: int = ROUNDS
    most_rounds: int = MOST_ROUNDS
    timeout_s: float = DEFAULT_TIMEOUT_S
    prompt_lengths: Sequence[int] = ()
    batch_sizes: Sequence[int] = ()
    minutes: float = 0.0
    kernels: str = "auto"  # what runs an export
    provider: str = "cpu"  # what it runs on

    @property
    def checks(self) -> list[int]:
        """After how many rounds their noise is checked."""
        return stop_checks(self.rounds, self.most_rounds)


@dataclass
class Measurement:
    """Figures of one directory in ms, bytes and tokens per second.

    `settings` is what every worker was told, `raw` has every sample of every round.
    """

    config: ModelConfig
    figures: dict[str, Any]
    settings: dict[str, Any]
    raw: Payloads
    machine: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The result as `bench --json` prints it."""
        return {**self.figures, "machine": self.machine, "settings": self.settings, "raw": self.raw}


def run_bench(request: BenchRequest) -> Measurement:
    """Measure a directory: speed, bandwidth and batches in turns, then memory, cold loads and minutes of decoding.

    Raises:
        ArtifactError: the directory is missing or damaged.
        UsageError: a prompt, a batch or `minutes` that the context has no room for.
        ChildFailure: a measuring process crashed, hung or was killed; nothing is reported then.
    """
    directory = request.directory
    require_directory(directory, "a checkpoint or an export")
    config = load_config(directory)
    context = config.max_position_embeddings
    depth = budget_depth(depths := depths_that_fit(context))
    if request.minutes and not depths:
        raise UsageError(f"--minutes: a context of {context} tokens has no room for {STEPS} steps after a prompt")
    batches = {f"{BATCH}{rows}": ragged_lengths(rows, context) for rows in request.batch_sizes}
    read = bytes_read_per_token(directory, config)
    per_token = read["weight_bytes"] + read["kv_bytes_per_token"] * depth
    settings = {
        **_settings(directory, request.threads, request.provider),
        "kernels": request.kernels,
        "prompts": prompts_that_fit(context, request.prompt_lengths),
        "depths": depths,
        "energy_depth": depth,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repeats": max(REPEATS, -(-12 // request.rounds)),
        "seconds_per_figure": SECONDS_PER_FIGURE,
        "context_tokens": min(MEMORY_CONTEXT_TOKENS, context),
        "memory_steps": MEMORY_STEPS,
        "working_set_bytes": min(per_token, LARGEST_WORKING_SET_BYTES),
    }
    # Speeds and bandwidth take turns so that all see the same machine.
    title = f"bench {directory.name}"
    timed = [worker_turn(settings, "speed"), worker_turn(settings, "bandwidth")]
    timed += [worker_turn({**settings, "lengths": lengths}, "batch", name) for name, lengths in batches.items()]
    raw = take_turns(title, timed, request.checks, is_steady, request.timeout_s)
    for mode, rounds in (("memory", MEMORY_ROUNDS), ("cold", COLD_ROUNDS)):
        raw |= take_turns(title, [worker_turn(settings, mode)], [rounds], lambda _: True, request.timeout_s)
    figures: dict[str, Any] = {
        "directory": str(directory),
        "runtime": raw["speed"][0]["runtime"],
        "kernels": raw["speed"][0]["kernels"],
        "provider": request.provider,
        "placement": raw["speed"][0]["placement"],
        "parameters": config.parameters,
        "context_length": context,
        "threads": settings["threads"],
        **summarise(raw),
        "file_bytes": directory_bytes(directory),
        "directory_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        **bandwidth_bound(read, raw["bandwidth"], depths),
    }
    if request.minutes:
        figures["sustained"] = _measure_sustained(settings, depth, request)
    return Measurement(config, figures, settings, raw, machine())


class ShortBench(NamedTuple):
    """Figures by the names of limits, and the cores that other programs used meanwhile."""

    figures: dict[str, float | None]
    other_cores: float


def short_bench(directory: Path, device: Device, threads: int | None = None, provider: str = "cpu") -> ShortBench:
    """An export's figures by the names of `device`'s limits, from one turn of speed and one of memory: no interval.

    A figure is None if the context is too short for it; the time per token falls back to the deepest depth that fits.
    The memory of a GPU's budget is the card's, which is not measured.
    """
    prompt, depth, memory_context = limit_lengths(device.limits, load_config(directory).max_position_embeddings)
    settings = {
        **_settings(directory, threads, provider),
        **SHORT,
        "prompts": [] if prompt is None else [prompt],
        "depths": [] if depth is None else [depth],
        "context_tokens": memory_context,
    }
    speed, memory = (run_child(worker_turn(settings, mode), DEFAULT_TIMEOUT_S) for mode in ("speed", "memory"))
    timed = round_figures(speed)
    figures = {
        "file_mb": directory_bytes(directory) / 1e6,
        "peak_memory_mb": None if device.processor == "gpu" else memory["peak_rss_bytes"] / 1e6,
        "ttft_ms": timed.get(f"ttft_ms.{prompt}"),
        "tpot_p50_ms": timed.get(f"tpot_ms.{depth}.p50"),
        "tpot_p95_ms": timed.get(f"tpot_ms.{depth}.p95"),
        "quality_loss_percent": None,
    }
    return ShortBench(figures, float(speed["other_cpu_cores"]))


def round_numbers(rounds: int | None, most_rounds: int | None) -> tuple[int, int]:
    """How often to measure at least and at most, if one of them or both were given.

    Raises:
        UsageError: more at least than at most.
    """
    if rounds is not None and most_rounds is not None and rounds > most_rounds:
        raise UsageError(f"--rounds {rounds} is more than most_rounds={most_rounds}; lower one or raise the other")
    least = rounds or min(ROUNDS, most_rounds or ROUNDS)
    return least, most_rounds or max(MOST_ROUNDS, least)


def parse_numbers(flag: str, text: str | None) -> list[int]:
    """The numbers of a flag like `1,4`, each once and ascending; none if it was not given.

    Raises:
        UsageError: the text is something else.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} {text}: give whole numbers from 1, separated by commas, for example 1,4")
    return sorted({int(word) for word in words})


def prompts_that_fit(context: int, asked: Sequence[int] = ()) -> list[int]:
    """Prompt lengths, in tokens, that time to first token is measured at: 128, 512 and those asked for."""
    for prompt in asked:
        if not 0 < prompt <= context:
            raise UsageError(f"--prompt-lengths {prompt}: must be from 1 to the context of {context} tokens")
    return sorted({*asked, *(prompt for prompt in PROMPTS if prompt <= context)})


def ragged_lengths(rows: int, context: int) -> list[int]:
    """Prompt lengths of a batch, in tokens: evenly from 128, or what fits, down to half of that."""
    longest = min(BATCH_PROMPT, context - TIMED_STEPS)
    if longest < 2:
        raise UsageError(f"--batch-size: a context of {context} tokens has no room for {STEPS} steps after a prompt")
    return [longest - (longest // 2) * row // max(1, rows - 1) for row in range(rows)]


def _settings(directory: Path, threads: int | None, provider: str) -> dict[str, Any]:
    threads = threads or default_threads()
    where = {"threads": threads, "cpus": choose_cpus(threads), "provider": provider}
    return {"directory": str(directory.resolve()), **where, "seed": 0, "kernels": "auto"}


def _measure_sustained(settings: Mapping[str, Any], depth: int, request: BenchRequest) -> dict[str, Any]:
    """One long run, with a bar that shows its time."""
    minutes = request.minutes
    turn = worker_turn({**settings, "minutes": minutes, "depth": depth}, "sustained")
    with console.progress_bar(turn.what, 60 * minutes) as progress:
        payload = run_child(turn, request.timeout_s + 60 * minutes, progress.advance)
    found = {"minutes": minutes, "depth": depth, **summarise_sustained(payload["windows"])}
    return found | {"other_cpu_cores": payload["other_cpu_cores"]}
