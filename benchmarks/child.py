"""One measurement in a process of its own: `python -m benchmarks.child '{"mode": "speed", ...}'`.

Prints one JSON object on standard output. Imports nothing beyond numpy and the model's own runtime, so that
the memory it reports is the model's. Tokens are drawn from a seeded generator; choosing tokens and turning
text into them is not part of any figure. Times are milliseconds, sizes bytes, unless the name says otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sportsllm.decoder import Decoder, is_onnx_directory, open_decoder
from sportsllm.errors import ResourceError, SportsLLMError

STABLE_WITHIN = 0.10
"""Warm-up ends when the last three times agree this well."""
WARM_UP_CALLS = 8
WARM_UP_S = 1.5
LONGEST_S = 4.0
"""A slow model gets fewer repeats rather than more time than this for one figure."""
LEAST_STEPS = 16
MOST_SWEEPS = 4


Mode = Callable[[Mapping[str, Any]], dict[str, Any]]


def main(arguments: Sequence[str], modes: Mapping[str, Mode] | None = None) -> int:
    """Measure what the JSON argument asks for; the exit code is 0 wherever a result or a reason was printed.

    `modes` are what another module measures, by name.
    """
    result_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up in the result
    specification = json.loads(arguments[0])
    try:
        payload = (modes or _MODES)[specification["mode"]](specification)
    except SportsLLMError as error:
        payload = {"error": str(error), "exit_code": error.exit_code}
    except ModuleNotFoundError as error:
        advice = "install it with: pip install 'sportsllm-compress[compress]', or measure an export"
        payload = {
            "error": f"{specification.get('directory', 'this')}: needs the package {error.name!r}; {advice}",
            "exit_code": ResourceError.exit_code,
        }
    result_stream.write(json.dumps(payload) + "\n")
    result_stream.flush()
    return 0


def measure_speed(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Load time, time to first token by prompt length, and time per further token by depth.

    A step is timed alone, at depths from `depth` + `warm_up_steps` to `depth` + `warm_up_steps` + `steps`.
    """
    decoder, loaded = _open(specification)
    tokens = _tokens(decoder, specification["seed"])
    repeats, seconds = int(specification["repeats"]), float(specification["seconds_per_figure"])
    first = _milliseconds(lambda: decoder.prefill([tokens[:32]], max_length=min(64, len(tokens))))
    ttft = {}
    for prompt in specification["prompts"]:
        room = min(prompt + int(specification["steps"]), len(tokens))

        def read_prompt(prompt: int = prompt, room: int = room) -> None:
            decoder.prefill([tokens[:prompt]], max_length=room)

        ttft[str(prompt)] = _repeat(read_prompt, repeats, seconds)
    step_samples = {
        str(depth): _decode(decoder, tokens, depth, specification, seconds) for depth in specification["depths"]
    }
    return {**loaded, "first_prefill_ms": first, "ttft_ms": ttft, "step_ms": step_samples}


def _repeat(work: Callable[[], None], repeats: int, seconds: float) -> list[float]:
    """Times of `work` after a warm-up: `repeats` of them, and more while `seconds` are not used up."""
    warm: list[float] = []
    started = time.perf_counter()
    while len(warm) < WARM_UP_CALLS and not (warm and time.perf_counter() - started > WARM_UP_S):
        warm.append(_milliseconds(work))
        if len(warm) >= 3 and max(warm[-3:]) <= (1 + STABLE_WITHIN) * min(warm[-3:]):
            break
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < repeats or time.perf_counter() - started < seconds:
        samples.append(_milliseconds(work))
        if len(samples) > 1 and time.perf_counter() - started > LONGEST_S:
            break
    return samples


def _decode(
    decoder: Decoder, tokens: list[int], depth: int, specification: Mapping[str, Any], seconds: float
) -> list[list[float]]:
    """Times of single steps after a prompt of `depth` tokens, one list a sweep; the first steps only warm up."""
    warm_up, steps = int(specification["warm_up_steps"]), int(specification["steps"])
    sweeps: list[list[float]] = []
    started = time.perf_counter()
    while not sweeps or (len(sweeps) < MOST_SWEEPS and time.perf_counter() - started < seconds):
        decoder.prefill([tokens[:depth]], max_length=depth + warm_up + steps)
        for index in range(warm_up):
            decoder.step([tokens[depth + index]])
        samples: list[float] = []
        sweep_started = time.perf_counter()
        for token in tokens[depth + warm_up : depth + warm_up + steps]:
            begin = time.perf_counter_ns()
            decoder.step([token])
            samples.append((time.perf_counter_ns() - begin) / 1e6)
            if len(samples) >= LEAST_STEPS and time.perf_counter() - sweep_started > LONGEST_S:
                break
        sweeps.append(samples)
    return sweeps


def measure_memory(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Peak resident memory of a process that loads the model, reads a prompt and writes a few tokens.

    Prompt and new tokens together fill `context_tokens`. Nothing else is held.
    """
    before = peak_rss_bytes()
    decoder, loaded = _open(specification)
    after_load = peak_rss_bytes()
    tokens = _tokens(decoder, specification["seed"])[: int(specification["context_tokens"])]
    steps = min(int(specification["memory_steps"]), len(tokens) // 2)
    decoder.prefill([tokens[:-steps]], max_length=len(tokens))
    for token in tokens[-steps:]:
        decoder.step([token])
    return {
        **loaded,
        "context_tokens": len(tokens),
        "before_load_bytes": before,
        "after_load_bytes": after_load,
        "peak_rss_bytes": peak_rss_bytes(),
        "end_split_bytes": _status_bytes(("RssAnon", "RssFile")),
    }


def peak_rss_bytes() -> int:
    """The most physical memory this process has held since it started, file-backed pages included.

    Linux counts it for each address space as VmHWM (`man 5 proc`), so what the parent process held before
    it started this one does not enter, as it can with getrusage; elsewhere getrusage has to do.
    """
    peak = _status_bytes(("VmHWM",)).get("VmHWM")
    if peak is not None:
        return peak
    import resource

    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024


def _status_bytes(names: Sequence[str]) -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in names if name in fields}


def measure_bandwidth(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes per second at which this machine's cores read a working set of `working_set_bytes` again and again.

    Every thread owns a slice and reads it with numpy's `max` and with `dot` of the slice with itself, which
    load each number once; the faster of the two counts. A working set of the model's size stays in the same
    caches, or misses them, as the model's weights do from token to token.
    """
    threads = int(specification["threads"])
    count = max(1, int(specification["working_set_bytes"]) // 4 // threads)
    slices = [np.ones(count, dtype=np.float32) for _ in range(threads)]
    kernels: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
        "max": lambda slice_: slice_.max(),
        "dot": lambda slice_: slice_ @ slice_,
    }
    rates: dict[str, list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:

        def seconds(kernel: Callable[[np.ndarray[Any, Any]], Any], repeats: int) -> float:
            def read(slice_: np.ndarray[Any, Any]) -> None:
                for _ in range(repeats):
                    kernel(slice_)

            started = time.perf_counter()
            list(pool.map(read, slices))
            return time.perf_counter() - started

        for name, kernel in kernels.items():
            repeats = 1
            while seconds(kernel, repeats) < 0.02:
                repeats *= 2
            rates[name] = [4 * count * threads * repeats / seconds(kernel, repeats) for _ in range(5)]
    return {
        "working_set_bytes": 4 * count * threads,
        "rates_bytes_per_s": rates,
        "bandwidth_bytes_per_s": max(max(samples) for samples in rates.values()),
    }


def _open(specification: Mapping[str, Any]) -> tuple[Decoder, dict[str, Any]]:
    """The decoder, with the seconds that its library and its model took to load."""
    directory = Path(specification["directory"])
    library = "onnxruntime" if is_onnx_directory(directory) else "torch"
    started = time.perf_counter()
    module = importlib.import_module(library)
    imported = time.perf_counter()
    decoder = open_decoder(directory, int(specification["threads"]))
    return decoder, {
        "runtime": f"{library} {module.__version__}",
        "import_s": imported - started,
        "load_s": time.perf_counter() - imported,
    }


def _tokens(decoder: Decoder, seed: int) -> list[int]:
    config = decoder.config
    drawn = np.random.default_rng(seed).integers(0, config.vocab_size, config.max_position_embeddings)
    return [int(token) for token in drawn]


def _milliseconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e6


_MODES: dict[str, Mode] = {
    "speed": measure_speed,
    "memory": measure_memory,
    "bandwidth": measure_bandwidth,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
