"""One measurement in a process of its own: `python -m benchmarks.measure.worker '{"mode": "speed", ...}'`.

Prints one JSON object. Imports nothing beyond numpy and the model's own runtime, so that the memory it reports is the
model's. Times are milliseconds, sizes bytes, unless the name says otherwise.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.measure.probes import measure_bandwidth, read_sensors
from sportsllm.errors import ResourceError, SportsLLMError
from sportsllm.inference.decoder import (
    Decoder,
    Logits,
    Verifier,
    is_onnx_directory,
    kernels_of,
    open_decoder,
    placement_of,
)
from sportsllm.inference.sampling import Sampling, generate
from sportsllm.process_memory import peak_rss_bytes

STABLE_WITHIN = 0.10  # warm-up ends when the last three times agree this well
WARM_UP_CALLS, WARM_UP_S = 8, 1.5
LONGEST_S = 4.0  # a slow model gets fewer repeats rather than more time than this for one figure
LEAST_STEPS, MOST_SWEEPS = 16, 4
FOLLOWED, MOST_TURNS = 128, 5  # tokens of a text, and turns with and without prompt lookup
WINDOWS, LEAST_WINDOW_S, MOST_WINDOW_S = 30, 1.0, 30.0  # of a sustained run
Specification = Mapping[str, Any]


def main(arguments: Sequence[str]) -> None:
    """Print the result that the JSON argument asks for, or an error."""
    result_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up in the result
    asked = json.loads(arguments[0])
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    try:
        payload = MODES[asked["mode"]](asked) | {"cpus": cpus}
    except SportsLLMError as error:
        payload = {"error": str(error), "exit_code": error.exit_code}
    except ModuleNotFoundError as error:
        advice = "install it with: pip install 'sportsllm-compress[compress]', or measure an export"
        message = f"{asked.get('directory', 'this')}: needs the package {error.name!r}; {advice}"
        payload = {"error": message, "exit_code": ResourceError.exit_code}
    result_stream.write(json.dumps(payload) + "\n")
    result_stream.flush()


def measure_speed(asked: Specification) -> dict[str, Any]:
    """Load time, time to first token by prompt length, and times of single steps by depth."""
    decoder, loaded = _open(asked)
    tokens = _draw_tokens(decoder, asked)
    ttft = {str(prompt): time_prompt(decoder, tokens, prompt, asked) for prompt in asked["prompts"]}
    steps = {str(depth): time_depth(decoder, tokens, depth, asked) for depth in asked["depths"]}
    return {**loaded, "ttft_ms": ttft, "step_ms": steps, "exact_rows": getattr(decoder, "exact_rows", 1)}


def measure_memory(asked: Specification) -> dict[str, Any]:
    """Peak resident memory of loading the model, reading a prompt and writing a few tokens: `context_tokens` in all."""
    decoder, loaded = _open(asked)
    tokens = _draw_tokens(decoder, asked)[: int(asked["context_tokens"])]
    steps = min(int(asked["memory_steps"]), len(tokens) // 2)
    decoder.prefill([tokens[:-steps]], max_length=len(tokens))
    for token in tokens[-steps:]:
        decoder.step([token])
    return {**loaded, "context_tokens": len(tokens), "peak_rss_bytes": peak_rss_bytes()}


def measure_sustained(asked: Specification) -> dict[str, Any]:
    """Load, then `decode_windows`."""
    decoder, loaded = _open(asked)
    return {**loaded, "windows": decode_windows(decoder, _draw_tokens(decoder, asked), asked)}


def measure_texts(asked: Specification) -> dict[str, Any]:
    """Load, then `time_text` of a repeated match report, of the next report, and of the model's own text.

    All have the length of the model's own text, which ends after `longest_text_s`. A very short context has no texts.
    """
    from sportsllm.simulator import simulate
    from sportsllm.text.tokenizer import load_tokenizer

    decoder, loaded = _open(asked)
    tokenizer = load_tokenizer(Path(asked["directory"]), decoder.config)
    begin, count = [tokenizer.begin_id], min(FOLLOWED, (decoder.config.max_position_embeddings - 1) // 2)
    if count < LEAST_STEPS:
        return {**loaded, "texts": {}}
    reports = tokenizer.encode("\n\n".join(simulate(asked["seed"], index).text for index in range(8)))
    first, second = reports[:count], reports[count : 2 * count]
    own, started = list[int](), time.perf_counter()
    for token in generate(decoder, begin, count, Sampling(seed=asked["seed"])):
        own.append(token)
        if len(own) >= LEAST_STEPS and time.perf_counter() - started > asked["longest_text_s"]:
            break
    first, second = first[: len(own)], second[: len(own)]
    kinds = {"copying": (begin + first, first), "match reports": (begin + first, second), "open text": (begin, own)}
    return {**loaded, "texts": {kind: time_text(cast(Verifier, decoder), *text, asked) for kind, text in kinds.items()}}


MODES: dict[str, Callable[[Specification], dict[str, Any]]] = {
    "speed": measure_speed,
    "memory": measure_memory,
    "bandwidth": lambda asked: measure_bandwidth(asked["threads"], asked["working_set_bytes"]),
    "sustained": measure_sustained,
    "texts": measure_texts,
}


def _open(asked: Specification) -> tuple[Decoder, dict[str, Any]]:
    """The decoder, with the seconds that it took to load."""
    directory = Path(asked["directory"])
    library = "onnxruntime" if is_onnx_directory(directory) else "torch"
    module = importlib.import_module(library)
    started = time.perf_counter()
    decoder = open_decoder(directory, asked["threads"], asked.get("kernels", "auto"), asked.get("provider", "cpu"))
    kernels, placement = kernels_of(decoder), placement_of(decoder)
    loaded: dict[str, Any] = {"load_s": time.perf_counter() - started}
    loaded |= {"runtime": f"{library} {module.__version__}", "kernels": kernels and kernels[0]}
    loaded["placement"] = placement and {**placement[0], "line": placement[1]}
    return decoder, loaded


def _draw_tokens(decoder: Decoder, asked: Specification) -> list[int]:
    """A context full of token ids from a seeded generator."""
    config, generator = decoder.config, np.random.default_rng(asked["seed"])
    return [int(token) for token in generator.integers(0, config.vocab_size, config.max_position_embeddings)]


def milliseconds(work: Callable[[], Any]) -> float:
    """How long one call of `work` takes."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e6


def time_prompt(decoder: Decoder, tokens: Sequence[int], prompt: int, asked: Specification) -> list[float]:
    """Times to read the first `prompt` tokens, `repeats` or more until `seconds_per_figure` are over, warmed up."""
    room = min(prompt + asked["steps"], len(tokens))
    read_prompt = functools.partial(decoder.prefill, [tokens[:prompt]], max_length=room)
    warm: list[float] = []
    started = time.perf_counter()
    while len(warm) < WARM_UP_CALLS and not (warm and time.perf_counter() - started > WARM_UP_S):
        warm.append(milliseconds(read_prompt))
        if len(warm) >= 3 and max(warm[-3:]) <= (1 + STABLE_WITHIN) * min(warm[-3:]):
            break
    samples: list[float] = []
    repeats, seconds, started = asked["repeats"], asked["seconds_per_figure"], time.perf_counter()
    while len(samples) < repeats or time.perf_counter() - started < seconds:
        samples.append(milliseconds(read_prompt))
        if len(samples) > 1 and time.perf_counter() - started > LONGEST_S:
            break
    return samples


def window_around(depth: int, warm_up: int, steps: int) -> tuple[int, range]:
    """Tokens of a prompt, and positions of at most `steps` timed steps after at most `warm_up` untimed ones.

    Their mean is the depth: at a depth of 32 these are 32 steps, at positions 16 to 47.
    """
    steps = min(steps, depth)
    first = depth - steps // 2
    return first - min(warm_up, first // 2), range(first, first + steps)


def time_depth(decoder: Decoder, tokens: Sequence[int], depth: int, asked: Specification) -> list[list[float]]:
    """Times of single steps at `depth` tokens, in ms, by sweep; see `window_around`."""
    prompt, timed = window_around(depth, asked["warm_up_steps"], asked["steps"])
    sweeps: list[list[float]] = []
    seconds, started = asked["seconds_per_figure"], time.perf_counter()
    most = MOST_SWEEPS * max(1, 128 // len(timed))  # short windows are swept more often
    while not sweeps or (len(sweeps) < most and time.perf_counter() - started < seconds):
        decoder.prefill([tokens[:prompt]], max_length=timed.stop)
        for token in tokens[prompt : timed.start]:
            decoder.step([token])
        sweeps.append([])
        sweep_started = time.perf_counter()
        for token in tokens[timed.start : timed.stop]:
            sweeps[-1].append(milliseconds(functools.partial(decoder.step, [token])))
            if len(sweeps[-1]) >= LEAST_STEPS and time.perf_counter() - sweep_started > LONGEST_S:
                break
    return sweeps


class Follower:
    """A decoder whose likeliest tokens are those of a given text, so that greedy generation writes it.

    Attributes:
        exact_rows: tokens that it lets prompt lookup read at once; 1 switches that off.
        passes, proposed: passes after the prompt, and the proposed tokens that they read.
    """

    def __init__(self, decoder: Verifier, text: Sequence[int], exact_rows: int) -> None:
        self._decoder, self._text, self._written = decoder, text, 0
        self.config, self.exact_rows = decoder.config, exact_rows
        self.passes = self.proposed = 0
        self.score, self.stream_logits = decoder.score, decoder.stream_logits

    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
        return self._lead(self._decoder.prefill(rows, max_length))

    def step(self, tokens: Sequence[int]) -> Logits:
        self.passes += 1
        return self._lead(self._decoder.step(tokens))

    def read(self, tokens: Sequence[int]) -> Logits:
        self.passes, self.proposed = self.passes + 1, self.proposed + len(tokens) - 1
        return self._lead(self._decoder.read(tokens))

    def rewind(self, count: int) -> None:
        self._written -= count
        self._decoder.rewind(count)

    def _lead(self, logits_TV: Logits) -> Logits:
        for logits_V in logits_TV:
            logits_V[self._text[self._written]] = np.finfo(np.float32).max
            self._written += 1
        return logits_TV


def time_text(decoder: Verifier, prompt: Sequence[int], text: Sequence[int], asked: Specification) -> dict[str, Any]:
    """Speed of writing `text` with and without prompt lookup, in turns, and how many proposals were accepted."""
    speeds: dict[int, list[float]] = {decoder.exact_rows: [], 1: []}
    started, made = time.perf_counter(), len(text) - 1  # the prompt's pass gives the first token
    while not speeds[1] or (len(speeds[1]) < MOST_TURNS and time.perf_counter() - started < asked["seconds_per_text"]):
        for exact_rows, samples in reversed(speeds.items()):
            follower = Follower(decoder, text, exact_rows)
            written = generate(follower, prompt, len(text), Sampling(temperature=0))
            next(written)
            samples.append(made * 1000 / milliseconds(functools.partial(list, written)))
    accepted = made - follower.passes  # of the last turn, which had proposals
    return {
        "tokens": made,
        "proposed": follower.proposed,
        "accepted": accepted,
        "tokens_per_pass": made / follower.passes,
        "tokens_per_s": float(np.median(speeds[decoder.exact_rows])),
        "plain_tokens_per_s": float(np.median(speeds[1])),
    }


def decode_for(decoder: Decoder, tokens: Sequence[int], depth: int, room: int, least_s: float) -> tuple[int, float]:
    """Decode from `depth` to `room` tokens again and again, once at least and for `least_s` seconds of decoding.

    Returns tokens and seconds of the steps, the prompts left out.
    """
    count, seconds = 0, 0.0
    while not count or seconds < least_s:
        decoder.prefill([tokens[:depth]], max_length=room)
        started = time.perf_counter()
        for token in tokens[depth:room]:
            decoder.step([token])
        seconds += time.perf_counter() - started
        count += room - depth
    return count, seconds


def decode_windows(decoder: Decoder, tokens: Sequence[int], asked: Specification) -> list[dict[str, Any]]:
    """Decode after a prompt of `depth`, again and again for `minutes`: speed and sensors by window.

    A window has a thirtieth of the run, but 1 to 30 s of decoding; none begins less than half of that before the end.
    """
    depth, minutes = asked["depth"], asked["minutes"]
    room = depth + asked["warm_up_steps"] + asked["steps"]
    length = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, 60 * minutes / WINDOWS))
    windows = list[dict[str, Any]]()
    decode_for(decoder, tokens, depth, room, 0.0)  # warm-up
    started = time.perf_counter()
    while not windows or time.perf_counter() - started + length / 2 < 60 * minutes:
        begin = time.perf_counter() - started
        count, busy = decode_for(decoder, tokens, depth, room, length)
        window = {"start_s": begin, "tokens_per_s": count / busy, "tokens": count}
        windows.append({**window, **read_sensors(asked.get("cpus") or ())})
    return windows


if __name__ == "__main__":
    main(sys.argv[1:])
