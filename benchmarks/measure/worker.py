"""One measurement in a process of its own: `python -m benchmarks.measure.worker '{"mode": "speed", ...}'`.

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
from pathlib import Path
from typing import Any

from benchmarks.measure.bandwidth import measure_bandwidth
from benchmarks.measure.cpus import pin
from benchmarks.measure.energy import EnergyMeter, surroundings
from benchmarks.measure.memory import memory_split, peak_rss_bytes, watched_memory
from benchmarks.measure.page_cache import drop_files
from benchmarks.measure.sustained import measure_sustained
from benchmarks.measure.timing import draw_tokens, milliseconds, time_prompt, time_steps
from sportsllm.errors import ResourceError, SportsLLMError
from sportsllm.inference.decoder import Decoder, is_onnx_directory, open_decoder

ENERGY_S = 2.0
"""Counters move in steps of milliseconds, so a figure needs a while."""
ENERGY_READ_STEPS = 8


Mode = Callable[[Mapping[str, Any]], dict[str, Any]]


def main(arguments: Sequence[str], modes: Mapping[str, Mode] | None = None) -> int:
    """Measure what the JSON argument asks for; the exit code is 0 wherever a result or a reason was printed.

    `modes` are what another module measures, by name.
    """
    result_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up in the result
    specification = json.loads(arguments[0])
    cpus = pin(specification.get("cpus"))
    try:
        payload = (modes or _MODES)[specification["mode"]](specification)
        payload |= {"cpus": cpus, **surroundings(cpus)}  # the clock while it is still busy
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
    """Load time, time to first token by prompt length, time per further token by depth, and the energy of one.

    A step is timed alone, at depths from `depth` + `warm_up_steps` to `depth` + `warm_up_steps` + `steps`.
    """
    decoder, loaded = _open(specification)
    tokens = draw_tokens(decoder, specification["seed"])
    first = milliseconds(lambda: decoder.prefill([tokens[:32]], max_length=min(64, len(tokens))))
    ttft = {str(prompt): time_prompt(decoder, tokens, prompt, specification) for prompt in specification["prompts"]}
    steps = {str(depth): time_steps(decoder, tokens, [depth], specification) for depth in specification["depths"]}
    energy = _energy(decoder, tokens, specification)
    return {**loaded, "first_prefill_ms": first, "ttft_ms": ttft, "step_ms": steps, "energy": energy}


def _energy(decoder: Decoder, tokens: list[int], specification: Mapping[str, Any]) -> dict[str, Any]:
    """Joules of one token at `energy_depth`, the machine's idle share included; or under `absent` why not."""
    meter, depth = EnergyMeter(), specification.get("energy_depth")
    if meter.source is None or not depth:
        return {"absent": meter.reason if meter.source is None else "no decoding depth fits the context"}
    room = depth + int(specification["steps"])
    joules, seconds, count = 0.0, 0.0, 0
    try:
        while seconds < ENERGY_S:
            decoder.prefill([tokens[:depth]], max_length=room)
            before, started = meter.joules(), time.perf_counter()
            for index, token in enumerate(tokens[depth:room]):
                decoder.step([token])
                if index % ENERGY_READ_STEPS == 0:
                    meter.joules()  # where power is added up, it needs many readings
            joules += meter.joules() - before
            seconds += time.perf_counter() - started
            count += room - depth
    except OSError as error:
        return {"absent": str(error)}
    return {
        "joules_per_token": joules / count,
        "watts": joules / seconds,
        "depth": depth,
        "tokens": count,
        "source": meter.source,
    }


def measure_batch(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Time to read several prompts, and time of steps that give every row one token; `lengths` are the prompts'."""
    decoder, loaded = _open(specification)
    tokens = draw_tokens(decoder, specification["seed"])
    lengths = [int(length) for length in specification["lengths"]]
    steps = time_steps(decoder, tokens, lengths, specification)
    room = max(lengths) + int(specification["warm_up_steps"]) + int(specification["steps"])
    rows = [tokens[:length] for length in lengths]
    prefill = milliseconds(lambda: decoder.prefill(rows, max_length=room))
    peak = peak_rss_bytes()
    return {**loaded, "lengths": lengths, "step_ms": steps, "prefill_ms": prefill, "peak_rss_bytes": peak}


def measure_memory(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Peak resident memory of a process that loads the model, reads a prompt and writes a few tokens.

    Prompt and new tokens together fill `context_tokens`. Nothing else is held. `split` is what the memory consisted
    of when there was most of it, None where the system does not say.
    """
    before = peak_rss_bytes()
    with watched_memory() as split:
        decoder, loaded = _open(specification)
        after_load = peak_rss_bytes()
        tokens = draw_tokens(decoder, specification["seed"])[: int(specification["context_tokens"])]
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
        "split": split or None,
        "end_split": memory_split(),
    }


def measure_cold_load(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Load time after the directory's files were dropped from the page cache; or under `absent` why that failed.

    The library itself is imported before, as for the warm figure.
    """
    directory = Path(specification["directory"])
    importlib.import_module(_library(directory))
    reason = drop_files([path for path in directory.rglob("*") if path.is_file()])
    if reason is not None:
        return {"absent": reason}
    return _open(specification)[1]


def _library(directory: Path) -> str:
    return "onnxruntime" if is_onnx_directory(directory) else "torch"


def _open(specification: Mapping[str, Any]) -> tuple[Decoder, dict[str, Any]]:
    """The decoder, with the seconds that its library and its model took to load."""
    directory = Path(specification["directory"])
    library = _library(directory)
    started = time.perf_counter()
    module = importlib.import_module(library)
    imported = time.perf_counter()
    decoder = open_decoder(directory, int(specification["threads"]))
    return decoder, {
        "runtime": f"{library} {module.__version__}",
        "import_s": imported - started,
        "load_s": time.perf_counter() - imported,
    }


def _sustained(specification: Mapping[str, Any]) -> dict[str, Any]:
    decoder, loaded = _open(specification)
    return {**loaded, **measure_sustained(decoder, draw_tokens(decoder, specification["seed"]), specification)}


_MODES: dict[str, Mode] = {
    "speed": measure_speed,
    "batch": measure_batch,
    "memory": measure_memory,
    "cold": measure_cold_load,
    "bandwidth": measure_bandwidth,
    "sustained": _sustained,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
