"""Measure a model directory on this machine, each figure in `ROUNDS` or more fresh processes.

A figure is the median of the rounds, and its noise the interval around it. Tokenizing and sampling are not timed, as in
llama-bench.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import TIMED_STEPS, depths_that_fit, limit_lengths
from benchmarks.measure.machine import choose_cpus, default_threads, machine
from benchmarks.measure.process import CHECK_EVERY, run_child, take_turns, worker_turn
from benchmarks.measure.summary import (
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
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import directory_bytes, plain_name

ROUNDS = 5
MOST_ROUNDS = 8  # one more check: at most 1.6 times the time
MEMORY_ROUNDS = 2
PROMPTS = (128, 512)
STEPS = 128  # as llama-bench's tg128
WARM_UP_STEPS = TIMED_STEPS - STEPS
REPEATS = 4  # at least 12 prompts over the rounds
SECONDS_PER_FIGURE = 0.25
SECONDS_PER_TEXT = 1.0
LONGEST_TEXT_S = 30.0  # texts are written seven times at least, in one process
MEMORY_CONTEXT_TOKENS = 1024
MEMORY_STEPS = 16
LARGEST_WORKING_SET_BYTES = 512 * 2**20  # beyond every cache; more would only cost memory
SHORT = {"steps": 48, "warm_up_steps": 8, "repeats": 5, "seconds_per_figure": 0.1, "memory_steps": 8}  # `short_bench`


def run_bench(
    directory: Path,
    check_after_rounds: Sequence[int],
    prompts: list[int],
    timeout_s: float,
    minutes: float,
    threads: int | None,
    kernels: str,
    provider: str,
) -> dict[str, Any]:
    """Measure a directory: speed, for `prompts` that fit its context, and bandwidth in turns, then memory and `minutes`
    of decoding.

    Returns:
        Figures in ms, bytes and tokens per second; `settings` of the workers; `raw`, every sample of every round; and
        the `machine`.

    Raises:
        ArtifactError: the directory is damaged.
        ChildFailure: a measuring process crashed, hung or was killed.
    """
    config = load_config(directory)
    context = config.max_position_embeddings
    depth = budget_depth(depths := depths_that_fit(context))
    read = bytes_read_per_token(directory, config)
    per_token = read["weight_bytes"] + read["kv_bytes_per_token"] * depth
    settings = {
        **_settings(directory, threads, provider, kernels),
        "prompts": prompts,
        "depths": depths,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repeats": max(REPEATS, -(-12 // check_after_rounds[0])),
        "seconds_per_figure": SECONDS_PER_FIGURE,
        "seconds_per_text": SECONDS_PER_TEXT,
        "longest_text_s": LONGEST_TEXT_S,
        "context_tokens": min(MEMORY_CONTEXT_TOKENS, context),
        "memory_steps": MEMORY_STEPS,
        "working_set_bytes": min(per_token, LARGEST_WORKING_SET_BYTES),
    }
    # Speeds and bandwidth take turns so that all see the same machine.
    title = f"bench {plain_name(directory)}"
    timed = [worker_turn(settings, "speed"), worker_turn(settings, "bandwidth")]
    raw = take_turns(title, timed, check_after_rounds, is_steady, timeout_s)
    raw |= take_turns(title, [worker_turn(settings, "memory")], [MEMORY_ROUNDS], lambda _: True, timeout_s)
    if raw["speed"][0]["exact_rows"] > 1 and (directory / "tokenizer.json").exists():
        raw |= {"texts": [run_child(worker_turn(settings, "texts"), timeout_s)]}
    figures: dict[str, Any] = {
        "directory": str(directory),
        "runtime": raw["speed"][0]["runtime"],
        "kernels": raw["speed"][0]["kernels"],
        "provider": provider,
        "placement": raw["speed"][0]["placement"],
        "parameters": config.parameters,
        "context_length": context,
        "threads": settings["threads"],
        **summarise(raw),
        "texts": raw["texts"][0]["texts"] if "texts" in raw else {},
        "file_bytes": directory_bytes(directory),
        **bandwidth_bound(read, raw["bandwidth"], depths),
    }
    if minutes:
        turn = worker_turn({**settings, "minutes": minutes, "depth": depth}, "sustained")
        with console.progress_bar(turn.what, 60 * minutes) as progress:
            payload = run_child(turn, timeout_s + 60 * minutes, progress.advance)
        figures["sustained"] = {"minutes": minutes, "depth": depth, **summarise_sustained(payload)}
    return {**figures, "machine": machine(), "settings": settings, "raw": raw}


def short_bench(
    directory: Path, device: Device, threads: int | None = None, provider: str = "cpu"
) -> tuple[dict[str, float | None], float]:
    """An export's figures by the names of `device`'s limits, and the cores that other programs used meanwhile.

    From one turn of speed and one of memory: no interval.
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
    speed, memory = (run_child(worker_turn(settings, mode)) for mode in ("speed", "memory"))
    timed = round_figures(speed)
    figures = {
        "file_mb": directory_bytes(directory) / 1e6,
        "peak_memory_mb": None if device.processor == "gpu" else memory["peak_rss_bytes"] / 1e6,
        "ttft_ms": timed.get(f"ttft_ms.{prompt}"),
        "tpot_p50_ms": timed.get(f"tpot_ms.{depth}.p50"),
        "tpot_p95_ms": timed.get(f"tpot_ms.{depth}.p95"),
        "quality_loss_percent": None,
    }
    return figures, float(speed["other_cpu_cores"])


def round_checks(rounds: int | None, most_rounds: int | None) -> list[int]:
    """After how many rounds their noise is checked: `rounds`, then every `CHECK_EVERY`, at last `most_rounds`.

    Raises:
        UsageError: more rounds at least than at most.
    """
    if rounds is not None and most_rounds is not None and rounds > most_rounds:
        raise UsageError(f"--set rounds={rounds} is more than most_rounds={most_rounds}; lower one or raise the other")
    least = rounds or min(ROUNDS, most_rounds or ROUNDS)
    most = most_rounds or max(MOST_ROUNDS, least)
    return sorted({*range(least, most, CHECK_EVERY), most})


def prompts_that_fit(context: int, asked: str | None = None) -> list[int]:
    """Prompt lengths, in tokens, that time to first token is measured at: 128, 512 and those asked for as `64,256`.

    Raises:
        UsageError: the text is something else, or a prompt is longer than the context.
    """
    words = [word.strip() for word in (asked or "").split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(
            f"--set prompt_lengths={asked}: give whole numbers from 1, separated by commas, for example 1,4"
        )
    lengths = sorted({int(word) for word in words})
    if longer := [length for length in lengths if length > context]:
        raise UsageError(f"--set prompt_lengths={longer[0]}: must be from 1 to the context of {context} tokens")
    return sorted({*lengths, *(prompt for prompt in PROMPTS if prompt <= context)})


def _settings(directory: Path, threads: int | None, provider: str, kernels: str = "auto") -> dict[str, Any]:
    threads = threads or default_threads()
    where = {"threads": threads, "cpus": choose_cpus(threads), "provider": provider}
    return {"directory": str(directory.resolve()), **where, "seed": 0, "kernels": kernels}
