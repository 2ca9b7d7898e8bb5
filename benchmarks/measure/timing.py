"""How a decoder is timed: prompts until their times agree, then single steps after a prompt. Times in ms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sportsllm.inference.decoder import Decoder

STABLE_WITHIN = 0.10
"""Warm-up ends when the last three times agree this well."""
WARM_UP_CALLS = 8
WARM_UP_S = 1.5
LONGEST_S = 4.0
"""A slow model gets fewer repeats rather than more time than this for one figure."""
LEAST_STEPS = 16
MOST_SWEEPS = 4


def draw_tokens(decoder: Decoder, seed: int) -> list[int]:
    """A context full of token ids from a seeded generator."""
    config = decoder.config
    drawn = np.random.default_rng(seed).integers(0, config.vocab_size, config.max_position_embeddings)
    return [int(token) for token in drawn]


def milliseconds(work: Callable[[], Any]) -> float:
    """How long one call of `work` takes."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e6


def time_prompt(decoder: Decoder, tokens: Sequence[int], prompt: int, specification: Mapping[str, Any]) -> list[float]:
    """Times to read the first `prompt` tokens, with room for the steps that would follow."""
    room = min(prompt + int(specification["steps"]), len(tokens))

    def read_prompt() -> None:
        decoder.prefill([tokens[:prompt]], max_length=room)

    return _repeat(read_prompt, int(specification["repeats"]), float(specification["seconds_per_figure"]))


def _repeat(work: Callable[[], None], repeats: int, seconds: float) -> list[float]:
    """Times of `work` after a warm-up: `repeats` of them, and more while `seconds` are not used up."""
    warm: list[float] = []
    started = time.perf_counter()
    while len(warm) < WARM_UP_CALLS and not (warm and time.perf_counter() - started > WARM_UP_S):
        warm.append(milliseconds(work))
        if len(warm) >= 3 and max(warm[-3:]) <= (1 + STABLE_WITHIN) * min(warm[-3:]):
            break
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < repeats or time.perf_counter() - started < seconds:
        samples.append(milliseconds(work))
        if len(samples) > 1 and time.perf_counter() - started > LONGEST_S:
            break
    return samples


def time_steps(
    decoder: Decoder, tokens: Sequence[int], lengths: Sequence[int], specification: Mapping[str, Any]
) -> list[list[float]]:
    """Times of single steps after a prompt for each row, one list a sweep; the first steps only warm up.

    Args:
        decoder: what is timed.
        tokens: prompts are its beginnings, and the steps read what follows the longest.
        lengths: of each row's prompt, in tokens.
        specification: `warm_up_steps`, `steps`, `seconds_per_figure`.
    """
    warm_up, steps = int(specification["warm_up_steps"]), int(specification["steps"])
    seconds = float(specification["seconds_per_figure"])
    longest, rows = max(lengths), [tokens[:length] for length in lengths]
    sweeps: list[list[float]] = []
    started = time.perf_counter()
    while not sweeps or (len(sweeps) < MOST_SWEEPS and time.perf_counter() - started < seconds):
        decoder.prefill(rows, max_length=longest + warm_up + steps)
        for token in tokens[longest : longest + warm_up]:
            decoder.step([token] * len(rows))
        samples: list[float] = []
        sweep_started = time.perf_counter()
        for token in tokens[longest + warm_up : longest + warm_up + steps]:
            read = [token] * len(rows)
            begin = time.perf_counter_ns()
            decoder.step(read)
            samples.append((time.perf_counter_ns() - begin) / 1e6)
            if len(samples) >= LEAST_STEPS and time.perf_counter() - sweep_started > LONGEST_S:
                break
        sweeps.append(samples)
    return sweeps
