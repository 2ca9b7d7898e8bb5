"""Does a GPU compute what the CPU computes, and how fast does it train? `make gpu-check`, at most 12 minutes.

    python -m benchmarks.studies.gpu_check --device cuda --work DIR --out benchmarks/results/gpu

Each verb of the line runs on the CPU and on the device from the same files, and the results are compared on the CPU.
Bounds follow from rounding. A sum of K products in float32 moves by about u = sqrt(K) 2^-24 with its order, and a pass
through L layers of two sublayers makes 2 L of them, one after the other. They are independent, so the loss may move by

    eval       4 sqrt(2 L) u                   four standard deviations
    train      4 sqrt(2 L 3 S) u               S steps of a forward and a backward pass of twice the products
    distill    4 sqrt(2 L 3 S) 2^-11           a float32 teacher computes in TF32, whose inputs have 11 bits
    prune      eval's / RIDGE                  the condition of the refit's equations is at most 1 / ridge
    quantize   eval's / DAMPING                likewise of GPTQ's Hessian

A value of GPTQ differs if it lies within its error, of up to 8 steps times 4 u / DAMPING, of a tie, on either side. In
its row it moves those after it, K / 2 on average.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.devices.load import list_devices, load_device, processor_name
from benchmarks.labels import csv_text
from benchmarks.model_size import training_flops_per_token
from compress.layer_fit import RIDGE
from compress.quantization.gptq import DAMPING
from sportsllm.commands import load_command
from sportsllm.console import output
from sportsllm.errors import ResourceError
from sportsllm.files import atomic_write_text, read_json_lines
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import preset
from sportsllm.processors import find_device
from sportsllm.training.loop import METRICS

LINE = {"model": "tiny-1m", "student": "tiny-300k", "steps": 20, "batch_size": 8, "sequence": 256, "samples": 32}
SPEED = {"small": (16, 150), "medium": (8, 100), "large": (4, 60)}
"""Presets with sequences of a batch and steps."""
SPEED_SEQUENCE = 2_048
COLUMNS = ("device", "part", "cpu", "found", "difference", "bound", "tokens_per_s", "share_of_peak_percent", "date")
SAME_CHIP = {"h200": "h100"}
_EXACT = {"accumulation": 1, "try_rates": False, "optimizer": "adamw", "precision": "fp32"}
Row = dict[str, Any]


def bounds(model: ModelConfig, steps: int) -> dict[str, float]:
    """By verb how far the loss may move, as a share of it; `codes`: the share of GPTQ's values that may differ."""
    wide = max(model.hidden_size, model.intermediate_size)
    moved = math.sqrt(wide) * 2.0**-24
    scored, trained = (4 * math.sqrt(2 * model.num_hidden_layers * passes) for passes in (1, 3 * steps))
    loss = {"eval": scored * moved, "train": trained * moved, "distill": trained * 2.0**-11}
    loss |= {"prune": scored * moved / RIDGE, "quantize": scored * moved / DAMPING}
    return loss | {"codes": 2 * 8 * 4 * moved / DAMPING * wide / 2}


def run(verb: str, device: str, **options: Any) -> Any:
    """A verb on a device, with float32 products as exact as they are before a teacher asks for TF32."""
    torch.set_float32_matmul_precision("highest")
    command = load_command(verb)
    known = inspect.signature(command).parameters
    return command(**options, **{name: device for name in ("device", "provider") if name in known})


def compare(device: str, work: Path, sizes: dict[str, Any]) -> Iterator[Row]:
    """The whole line on the CPU and on a device."""
    load_command("data simulate")(out=work / "text", megabytes=sizes.get("megabytes", 2.0), questions=0)
    text, valid = [work / "text" / "train.jsonl"], [work / "text" / "valid.jsonl"]
    trained = {name: sizes[name] for name in ("steps", "batch_size", "sequence")}
    trained |= {"corpus": text, "valid": valid, "settings": _EXACT}
    teacher, fitted = work / "train-cpu", {"samples": sizes["samples"]}
    shape = preset(sizes["model"])
    limit, narrow = bounds(shape, sizes["steps"]), shape.intermediate_size // 64 * 32  # a search could end elsewhere
    line: dict[str, dict[str, Any]] = {
        "train": {"model": sizes["model"], **trained},
        "distill": {"teacher": str(teacher), "student": sizes["student"], "start": "fresh", **trained},
        "prune": {"checkpoint": teacher, "intermediate": narrow, "calibration": text, "settings": fitted},
        "quantize": {"checkpoint": teacher, "calibration": text, "settings": fitted | {"uniform": True}},
    }
    for verb, options in line.items():
        made = {place: work / f"{verb}-{place}" for place in ("cpu", "device")}
        for place, out in made.items():
            run(verb, "cpu" if place == "cpu" else device, out=out, **options)
        cpu, found = (_loss(out, valid, "cpu") for out in made.values())
        yield _row(verb, cpu, found, limit[verb])
        if verb == "quantize":
            yield _row("quantize, codes that differ", 0.0, _codes_that_differ(*made.values()), limit["codes"])
    yield _row("eval", _loss(teacher, valid, "cpu"), _loss(teacher, valid, device), limit["eval"])


def _loss(model: Path, valid: list[Path], device: str) -> float:
    return float(run("eval", device, directory=model, text=valid).bits_per_byte)


def _codes_that_differ(first: Path, second: Path) -> float:
    """The share of two quantized checkpoints' bytes of 4-bit pairs or 8-bit values that differ."""
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (first, second))
    names = [name for name in ours if name.endswith("_packed")]
    differing = sum(int((ours[name] != theirs[name]).sum()) for name in names)
    return differing / sum(int(ours[name].numel()) for name in names)


def _row(part: str, cpu: float, found: float, bound: float) -> Row:
    difference = abs(found - cpu) / (abs(cpu) or 1.0)
    return {"part": part, "cpu": cpu, "found": found, "difference": difference, "bound": bound}


def measure(device: str, work: Path, presets: dict[str, tuple[int, int]], sequence: int, card: str) -> Iterator[Row]:
    """Training speed of presets with untrained weights, without the first steps, which start the device."""
    peak, tokenizer = peak_flops_per_s(card), None
    for name, (batch, steps) in presets.items():
        out = work / f"speed-{name}"
        options = {"steps": steps, "batch_size": batch, "sequence": sequence, "corpus": [work / "text" / "train.jsonl"]}
        settings = _EXACT | {"precision": "auto", "validate_every": 0, "log_every": max(1, steps // 5)}
        part = f"train {name}, batch {batch} x {sequence}"
        try:
            run("train", device, model=name, out=out, tokenizer=tokenizer, settings=settings, **options)
        except (ResourceError, torch.OutOfMemoryError):
            yield {"part": f"{part}: the device's memory is too small"}
            continue
        lines = [line for _, line in read_json_lines(out / METRICS) if "tokens_per_s" in line]
        (first, t0), (last, t1) = (
            (line["tokens"], line["tokens"] / line["tokens_per_s"]) for line in (lines[0], lines[-1])
        )
        rate = (last - first) / (t1 - t0)
        flops = rate * training_flops_per_token(load_config(out), sequence)
        share = None if peak is None else 100 * flops / peak
        tokenizer = tokenizer or out
        yield {"part": part, "tokens_per_s": rate, "share_of_peak_percent": share}


def peak_flops_per_s(card: str) -> float | None:
    """The 16-bit peak of the card's tensor cores, if `benchmarks/devices` describes it."""
    words = {SAME_CHIP.get(word, word) for word in card.lower().split()}
    for name in list_devices():
        if words & {"ti", "super", "laptop", "pcie", "nvl"} <= set(name.split("-")) <= words:  # no other card's
            hardware = load_device(name).hardware
            rate = None if hardware is None else hardware.fp16_matmul_rate
            return None if rate is None else 1e9 * rate.value
    return None


def main(arguments: Sequence[str] | None = None, line: dict[str, Any] = LINE, speed: dict[str, tuple[int, int]] = SPEED,
         sequence: int = SPEED_SEQUENCE) -> int:  # fmt: skip
    """Write the table; 1 if a part is beyond its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, required=True, help="a new directory")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    given = parser.parse_args(arguments)
    device = find_device(given.device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    table, found, wrong = given.out / f"{'-'.join(card.lower().split())}.csv", list[Row](), list[str]()
    speeds = measure(given.device, given.work, speed, sequence, card)
    for row in chain(compare(given.device, given.work, line), speeds):
        shown = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
        found.append({"device": card, **shown, "date": datetime.now(UTC).date().isoformat()})
        atomic_write_text(table, csv_text(COLUMNS, found))  # what was found stays if the next part fails
        output().print(", ".join(f"{name} {value}" for name, value in shown.items()))
        if "bound" in row and not row["difference"] <= row["bound"]:
            wrong.append(row["part"])
    if wrong:
        output().print(f"beyond the bound: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
