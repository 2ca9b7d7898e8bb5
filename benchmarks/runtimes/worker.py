"""One turn of one runtime, run as a file by its own interpreter: `PYTHON worker.py '{"kind": "genai", ...}'`.

Imports the standard library and the runtime only: its environment may have an older Python, and must not see packages
of this project's. All runtimes do the same work: greedy tokens after prompts of random ids, new ones each time, since
some runtimes cache prompts.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = "ours"
OTHER = "other"  # a second export of this project, so that two formats of a model are compared in turns
STEPS, WARM_UP = 96, 16
REPEATS = 3
NOT_INSTALLED = 78  # exit code, of nothing else

# From a prompt and a number of tokens: the seconds from the call until each of these tokens is chosen.
Generate = Callable[[list[int], int], list[float]]
# An open model: how it generates, and the shape it reports.
Opened = tuple[Generate, dict[str, Any]]


def stepwise(choose: Callable[[list[int], int], Iterator[None]]) -> Generate:
    """`Generate` of a generator that reads a prompt, with room for as many tokens in all, and yields after each one."""

    def generate(prompt: list[int], count: int) -> list[float]:
        began = time.perf_counter()
        return [time.perf_counter() - began for _ in islice(choose(prompt, len(prompt) + count), count)]

    return generate


def ours(directory: Path, threads: int, room: int, kernels: str = "auto") -> Opened:
    """This project's runtime."""
    sys.path.insert(0, str(ROOT))
    import numpy as np

    from sportsllm.inference.decoder import open_decoder

    decoder = open_decoder(directory, threads, kernels)

    def choose(prompt: list[int], length: int) -> Iterator[None]:
        logits = decoder.prefill([prompt], max_length=length)
        while True:
            token = int(np.argmax(logits[0]))
            yield
            logits = decoder.step([token])

    return stepwise(choose), {}


def genai(directory: Path, threads: int, room: int) -> Opened:
    """onnxruntime-genai, on our export or on a directory that its model builder wrote."""
    import onnxruntime_genai as og

    config = og.Config(str(directory))
    # The directory stays as it is. Tokens that end a text are held off by min_length.
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)
    shape = json.loads((directory / "genai_config.json").read_text(encoding="utf-8"))["model"]

    def choose(prompt: list[int], length: int) -> Iterator[None]:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt)
        while True:
            generator.generate_next_token()
            yield

    decoder = shape["decoder"]
    sizes = {key: decoder[key] for key in ("hidden_size", "num_hidden_layers")}
    return stepwise(choose), {"vocab_size": shape["vocab_size"], **sizes}


def optimum(directory: Path, threads: int, room: int) -> Opened:
    """optimum's ORTModelForCausalLM, its forward pass with its cache."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    torch.set_num_threads(threads)
    where = {"session_options": options, "provider": "CPUExecutionProvider"}
    model = ORTModelForCausalLM.from_pretrained(str(directory), **where)

    def choose(prompt: list[int], length: int) -> Iterator[None]:
        ids, past, read = torch.tensor([prompt]), None, len(prompt)
        while True:
            out = model(input_ids=ids, attention_mask=torch.ones(1, read, dtype=torch.long), past_key_values=past)
            ids, past, read = out.logits[:, -1:].argmax(-1), out.past_key_values, read + 1
            yield

    return stepwise(choose), _shape(directory)


def openvino(directory: Path, threads: int, room: int, **options: Any) -> Opened:
    """OpenVINO GenAI's LLMPipeline on the CPU, on a directory that its exporter wrote; options are its properties."""
    import numpy as np
    import openvino_genai as og
    from openvino import Tensor

    class Watch(og.StreamerBase):  # type: ignore[misc, name-defined]
        """Records when each token arrives; some releases hand over many at a time."""

        def __init__(self) -> None:
            super().__init__()
            self.began, self.times = time.perf_counter(), list[float]()

        def write(self, token: int | list[int]) -> object:
            now = time.perf_counter() - self.began
            self.times += [now] * (1 if isinstance(token, int) else len(token))
            return og.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    pipeline = og.LLMPipeline(str(directory), "CPU", INFERENCE_NUM_THREADS=threads, **options)

    def generate(prompt: list[int], count: int) -> list[float]:
        config = og.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        watch = Watch()
        pipeline.generate(Tensor(np.array([prompt], dtype=np.int64)), config, watch)
        return watch.times

    return generate, _shape(directory)


def llama_bench(path: Path, threads: int, bench: str, options: dict[str, Any], gp: bool = False) -> Opened:
    """The program `bench` of a user's build, which does not sample; options: its flags without the dash.

    With `gp` it is ik_llama.cpp's, whose flag -gp takes the place of -d.
    """
    command = [bench, "-m", str(_gguf(path)), "-t", str(threads), "-r", "1", "-o", "json"]
    command += [text for name, value in options.items() for text in (f"-{name}", str(value))]

    def run(flags: str) -> dict[str, Any]:
        done = subprocess.run([*command, *flags.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{bench}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        _, begin, rows = done.stdout.partition("[\n")
        if not begin:
            raise RuntimeError(f"{bench}: printed no results; is it llama-bench?")
        found: dict[str, Any] = json.loads(begin + rows)[-1]
        return found

    def generate(prompt: list[int], count: int) -> list[float]:
        read, steps = len(prompt), count - 1
        first = read / run(f"-p {read} -n 0")["avg_ts"]
        deep = f"-p 0 -n 0 -gp {read},{steps}" if gp else f"-p 0 -n {steps} -d {read}"
        step = 1 / run(deep)["avg_ts"] if count > 2 else 0.0
        return [first + step * place for place in range(count)]

    return generate, {"version": run("-p 1 -n 0")["build_commit"]}


def llama_cpp(path: Path, threads: int, room: int, bench: str = "", ik: bool = False, **options: Any) -> Opened:
    """llama.cpp in xllamacpp's wheels, or ik_llama.cpp in ik-llama-cpp-python's, or either one's `llama-bench`.

    On a .gguf file or a directory with one; options: flags of `llama-bench`, or settings of `IkLlama`.
    """
    if bench:
        return llama_bench(path, threads, bench, options, gp=ik)
    sys.path.insert(0, str(ROOT))
    from benchmarks.runtimes.llama_engine import IkLlamaCpp, LlamaCpp

    model = IkLlamaCpp(_gguf(path), room, threads, **options) if ik else LlamaCpp(_gguf(path), room, threads)

    def choose(prompt: list[int], length: int) -> Iterator[None]:
        for logits in model.read_all(prompt):
            last = logits
        for place in range(len(prompt), length):
            token = int(last.argmax())
            yield
            last = model.read([token], place)

    return stepwise(choose), model.shape


def _gguf(path: Path) -> Path:
    """A .gguf file, or the one of a directory."""
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(found) != 1:
        raise ValueError(f"{path}: holds {len(found)} .gguf files; name one")
    return found[0]


# By the name in --against: the package whose version is reported, and the function that opens a model.
RUNTIMES: dict[str, tuple[str, Callable[..., Opened]]] = {
    OURS: ("sportsllm-compress", ours),
    OTHER: ("sportsllm-compress", ours),
    "genai": ("onnxruntime-genai", genai),
    "openvino": ("openvino-genai", openvino),
    "llama.cpp": ("xllamacpp", llama_cpp),
    "ik_llama.cpp": ("ik-llama-cpp-python", partial(llama_cpp, ik=True)),
    "optimum": ("optimum-onnx", optimum),
}


def _shape(directory: Path) -> dict[str, Any]:
    """The model's shape from the config.json beside it, if there is one."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers") if key in config}


def time_turn(generate: Generate, depths: list[int], vocab_size: int) -> dict[str, dict[str, float]]:
    """Milliseconds to the first token and tokens per second after it, by the prompt's length in tokens.

    A rate is that of up to `STEPS` greedy tokens together, the depth in their middle, sampling included, since not
    every runtime can leave it out. The first ones after a prompt do not count, so that returning several
    tokens at once is no advantage. Medians of `REPEATS` prompts, after one to warm up.
    """
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        return [int(vocab_size * generator.random()) for _ in range(count)]  # the same ids in every Python version

    ttft, rates = {}, {}
    for depth in depths:
        steps, warm_up = min(STEPS, 2 * (depth // 2)), min(WARM_UP, depth // 4)
        prompt, count = max(1, depth - steps // 2 - warm_up), 1 + warm_up + steps
        generate(draw(depth), 1 + warm_up)
        firsts, seconds = [], []
        for _ in range(REPEATS):
            firsts.append(generate(draw(depth), 2)[0])
            times = generate(draw(prompt), count)
            if len(times) != count:
                raise RuntimeError(f"gave {len(times)} tokens instead of {count}")
            seconds.append(times[-1] - times[warm_up])
        ttft[str(depth)] = 1e3 * statistics.median(firsts)
        rates[str(depth)] = steps / statistics.median(seconds)
    return {"ttft_ms": ttft, "generated_tokens_per_s": rates}


def run_turn(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure the runtime `kind`, a key of `RUNTIMES`."""
    package, opener = RUNTIMES[asked["kind"]]
    depths = asked["depths"]
    room = max(depths) + 1 + WARM_UP + STEPS
    generate, shape = opener(Path(asked["directory"]), int(asked["threads"]), room, **asked["options"])
    figures = time_turn(generate, depths, int(asked["vocab_size"]))
    peak_rss_bytes = runpy.run_path(str(ROOT / "sportsllm" / "process_memory.py"))["peak_rss_bytes"]
    peak = max(peak_rss_bytes(), peak_rss_bytes(children=True))
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    version: str | None = shape.pop("version", None)
    with suppress(metadata.PackageNotFoundError):
        version = version or metadata.version(package)
    return {**figures, "peak_rss_bytes": peak, "cpus": cpus, "shape": shape, "version": version}


def main() -> None:
    """Print one JSON object on standard output; with one line under `error` if the runtime refused."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # our modules have plain names
    result_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up in the result
    try:
        payload = run_turn(json.loads(sys.argv[1]))
    except MemoryError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        code = NOT_INSTALLED if isinstance(error, ModuleNotFoundError) else 1
        payload = {"error": f"{type(error).__name__}: {lines[0][:300]}", "exit_code": code}
    result_stream.write(json.dumps(payload) + "\n")
    result_stream.flush()


if __name__ == "__main__":
    main()
