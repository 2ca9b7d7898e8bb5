"""One measurement in a process of its own: `python -m benchmarks.measure.worker '{"mode": "speed", ...}'`.

Prints one JSON object. Imports nothing beyond numpy and the model's own runtime, so that the memory it reports is the
model's. Times are milliseconds, sizes bytes, unless the name says otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import timing
from benchmarks.measure.bandwidth import measure_bandwidth
from benchmarks.measure.cpus import pin
from benchmarks.measure.energy import read_sensors
from benchmarks.measure.page_cache import drop_files
from sportsllm.errors import ResourceError, SportsLLMError
from sportsllm.inference.decoder import Decoder, is_onnx_directory, kernels_of, open_decoder, placement_of
from sportsllm.process_memory import peak_rss_bytes

Mode = Callable[[Mapping[str, Any]], dict[str, Any]]


def main(arguments: Sequence[str], modes: Mapping[str, Mode] | None = None) -> int:
    """Print what the JSON argument asks for, or the reason why not; `modes` are those of another module."""
    result_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up in the result
    specification = json.loads(arguments[0])
    cpus = pin(specification.get("cpus"))
    try:
        payload = (modes or _MODES)[specification["mode"]](specification)
        payload |= {"cpus": cpus, **read_sensors(cpus)}  # the clock while it is still busy
    except SportsLLMError as error:
        payload = {"error": str(error), "exit_code": error.exit_code}
    except ModuleNotFoundError as error:
        advice = "install it with: pip install 'sportsllm-compress[compress]', or measure an export"
        message = f"{specification.get('directory', 'this')}: needs the package {error.name!r}; {advice}"
        payload = {"error": message, "exit_code": ResourceError.exit_code}
    result_stream.write(json.dumps(payload) + "\n")
    result_stream.flush()
    return 0


def measure_speed(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Load time, time to first token by prompt length, time to read the tokens of each depth and of single steps after
    them, and the energy of one."""
    decoder, loaded = _open(specification)
    tokens = timing.draw_tokens(decoder, specification["seed"])
    first = timing.milliseconds(lambda: decoder.prefill([tokens[:32]], max_length=min(64, len(tokens))))
    prompts, depths = specification["prompts"], specification["depths"]
    ttft = {str(prompt): timing.time_prompt(decoder, tokens, prompt, specification) for prompt in prompts}
    steps = {str(depth): timing.time_depth(decoder, tokens, depth, specification) for depth in depths}
    few = {**specification, "repeats": 3, "seconds_per_figure": 0.0}
    reading = {
        str(depth): ttft[str(depth)] if depth in prompts else timing.time_prompt(decoder, tokens, depth, few)
        for depth in depths
    }
    energy = timing.measure_energy(decoder, tokens, specification.get("energy_depth", 0), specification["steps"])
    times = {"first_prefill_ms": first, "ttft_ms": ttft, "step_ms": steps, "reading_ms": reading}
    return {**loaded, **times, "energy": energy}


def measure_batch(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Time to read several prompts, and time of steps that give every row one token; `lengths` are the prompts'."""
    decoder, loaded = _open(specification)
    tokens = timing.draw_tokens(decoder, specification["seed"])
    lengths = specification["lengths"]
    steps = timing.time_steps(decoder, tokens, lengths, specification)
    room = max(lengths) + specification["warm_up_steps"] + specification["steps"]
    rows = [tokens[:length] for length in lengths]
    prefill = timing.milliseconds(lambda: decoder.prefill(rows, max_length=room))
    return {**loaded, "lengths": lengths, "step_ms": steps, "prefill_ms": prefill, "peak_rss_bytes": peak_rss_bytes()}


def measure_memory(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Peak resident memory of loading the model, reading a prompt and writing a few tokens: `context_tokens` in all."""
    before = peak_rss_bytes()
    decoder, loaded = _open(specification)
    after_load = peak_rss_bytes()
    tokens = timing.draw_tokens(decoder, specification["seed"])[: int(specification["context_tokens"])]
    steps = min(int(specification["memory_steps"]), len(tokens) // 2)
    decoder.prefill([tokens[:-steps]], max_length=len(tokens))
    for token in tokens[-steps:]:
        decoder.step([token])
    sizes = {"before_load_bytes": before, "after_load_bytes": after_load, "peak_rss_bytes": peak_rss_bytes()}
    return {**loaded, "context_tokens": len(tokens), **sizes}


def measure_cold_load(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Load time after the directory's files were dropped from the page cache; or under `absent` why that failed."""
    directory = Path(specification["directory"])
    importlib.import_module(_library(directory))  # before, as for the warm figure
    reason = drop_files([path for path in directory.rglob("*") if path.is_file()])
    return {"absent": reason} if reason is not None else _open(specification)[1]


def measure_minutes(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Load, then `benchmarks.measure.timing.measure_sustained`."""
    decoder, loaded = _open(specification)
    tokens = timing.draw_tokens(decoder, specification["seed"])
    return {**loaded, **timing.measure_sustained(decoder, tokens, specification)}


def _library(directory: Path) -> str:
    return "onnxruntime" if is_onnx_directory(directory) else "torch"


def _open(specification: Mapping[str, Any]) -> tuple[Decoder, dict[str, Any]]:
    """The decoder, with the seconds that its library and its model took to load."""
    directory = Path(specification["directory"])
    library = _library(directory)
    started = time.perf_counter()
    module = importlib.import_module(library)
    imported = time.perf_counter()
    asked = specification.get("kernels", "auto"), specification.get("provider", "cpu")
    decoder = open_decoder(directory, specification["threads"], *asked)
    kernels, placement = kernels_of(decoder), placement_of(decoder)
    seconds = {"import_s": imported - started, "load_s": time.perf_counter() - imported}
    return decoder, {
        "runtime": f"{library} {module.__version__}",
        "kernels": None if kernels is None else kernels[0],
        "placement": None if placement is None else {**placement[0], "line": placement[1]},
        **seconds,
    }


_MODES: dict[str, Mode] = {
    "speed": measure_speed,
    "batch": measure_batch,
    "memory": measure_memory,
    "cold": measure_cold_load,
    "bandwidth": measure_bandwidth,
    "sustained": measure_minutes,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
