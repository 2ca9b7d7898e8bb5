"""Decode and prefill speed of an export beside other runtimes on the same weights, in turns: A B C A B C.

    python -m benchmarks.peers EXPORT [EXPORT ...]
        --genai PYTHON=DIRECTORY --optimum PYTHON=DIRECTORY --threads 2 --rounds 3

Every peer has an environment of its own (PYTHON, its interpreter) and a directory that its own tool made from
the same weights; every turn is a fresh process. What a turn times is the same for all: reading a prompt of 512
random tokens up to the first chosen token, and single greedy steps at depths 32 and 512.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPTS = (32, 512)
STEPS, WARM_UP = 96, 16

# A turn in a peer's own interpreter: this file alone is run there, and prints one JSON object.
Start = Callable[[list[int]], Callable[[], object]]


def time_turn(start: Start, vocab_size: int) -> dict[str, float]:
    """Milliseconds to the first token of a 512-token prompt, and tokens a second at each depth.

    Args:
        start: reads a prompt and chooses the first token; returns a function that makes one further token.
        vocab_size: prompts are ids below it.
    """
    state = 12_345
    prompt = []
    for _ in range(max(PROMPTS)):  # the same ids in every environment, without numpy
        state = (1_103_515_245 * state + 12_345) % 2**31
        prompt.append(3 + state % (vocab_size - 3))
    figures: dict[str, float] = {}
    for depth in PROMPTS:
        start(prompt[:depth])
        firsts = []
        for _ in range(3):
            began = time.perf_counter()
            step = start(prompt[:depth])
            firsts.append(time.perf_counter() - began)
        times = []
        for number in range(WARM_UP + STEPS):
            began = time.perf_counter()
            step()
            if number >= WARM_UP:
                times.append(time.perf_counter() - began)
        figures[f"ttft_ms_{depth}"] = 1e3 * statistics.median(firsts)
        figures[f"tokens_per_s_{depth}"] = 1 / statistics.median(times)
    return figures


def ours(directory: Path, threads: int) -> Start:
    """This project's runtime."""
    import numpy as np

    from export.runtime import open as open_export

    decoder = open_export(directory, threads)

    def start(prompt: list[int]) -> Callable[[], object]:
        token = int(np.argmax(decoder.prefill([prompt], max_length=1024)[0]))

        def step() -> None:
            nonlocal token
            token = int(np.argmax(decoder.step([token])[0]))

        return step

    return start


def genai(directory: Path, threads: int) -> Start:
    """onnxruntime-genai, on a directory that its model builder wrote."""
    import onnxruntime_genai as og

    path = directory / "genai_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model"]["decoder"].setdefault("session_options", {})["intra_op_num_threads"] = threads
    path.write_text(json.dumps(settings), encoding="utf-8")
    model = og.Model(str(directory))

    def start(prompt: list[int]) -> Callable[[], object]:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=1024, do_sample=False, min_length=1024)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt)
        generator.generate_next_token()
        return lambda: generator.generate_next_token()

    return start


def optimum(directory: Path, threads: int) -> Start:
    """optimum's ORTModelForCausalLM, its forward pass with its cache."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    torch.set_num_threads(threads)
    model = ORTModelForCausalLM.from_pretrained(
        str(directory), session_options=options, provider="CPUExecutionProvider"
    )

    def start(prompt: list[int]) -> Callable[[], object]:
        state: dict[str, Any] = {"ids": torch.tensor([prompt]), "past": None, "length": len(prompt)}

        def step() -> None:
            mask = torch.ones(1, state["length"], dtype=torch.long)
            out = model(input_ids=state["ids"], attention_mask=mask, past_key_values=state["past"])
            state["ids"] = out.logits[:, -1:].argmax(-1)
            state["past"], state["length"] = out.past_key_values, state["length"] + 1

        step()
        return step

    return start


RUNTIMES: dict[str, Callable[[Path, int], Start]] = {"ours": ours, "genai": genai, "optimum": optimum}


def run_turn(python: str, kind: str, directory: Path, threads: int) -> dict[str, float]:
    """One turn in a fresh process of `python`."""
    command = [python, "-P", str(Path(__file__)), "--turn", kind, str(directory), str(threads)]
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={"PYTHONPATH": root}, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} {directory}: failed: {done.stderr.strip().splitlines()[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _turn(kind: str, directory: Path, threads: int) -> None:
    from resource import RUSAGE_SELF, getrusage

    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) if kind != "genai" else None
    genai_settings = (
        json.loads((directory / "genai_config.json").read_text(encoding="utf-8")) if kind == "genai" else {}
    )
    vocab_size = config["vocab_size"] if config else genai_settings["model"]["vocab_size"]
    figures = time_turn(RUNTIMES[kind](directory, threads), vocab_size)
    figures["peak_rss_mb"] = getrusage(RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps(figures))


def compare(entries: Sequence[tuple[str, str, Path]], threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over `rounds` of every entry (kind, interpreter, directory), all entries in turn each round."""
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for kind, python, directory in entries:
            results.setdefault(f"{kind}:{directory.name}", []).append(run_turn(python, kind, directory, threads))
    return {
        name: {key: round(statistics.median(turn[key] for turn in turns), 1) for key in turns[0]}
        for name, turns in results.items()
    }


def main() -> None:
    """Measure the exports and peers named on the command line; one JSON object."""
    if sys.argv[1:2] == ["--turn"]:
        _turn(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path, help="directories that `export` wrote")
    parser.add_argument("--genai", action="append", default=[], metavar="PYTHON=DIRECTORY")
    parser.add_argument("--optimum", action="append", default=[], metavar="PYTHON=DIRECTORY")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    entries = [("ours", sys.executable, path.resolve()) for path in arguments.exports]
    for kind in ("genai", "optimum"):
        for text in getattr(arguments, kind):
            python, _, directory = text.partition("=")
            entries.append((kind, python, Path(directory).resolve()))
    print(json.dumps(compare(entries, arguments.threads, arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
