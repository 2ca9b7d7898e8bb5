"""Measure this machine: time small models of several shapes and formats, and fit the coefficients to them.

The models are untrained decoders, exported as `export` writes them and measured as `fit` measures candidates, each in
fresh processes. The fit minimises

    sum of ln(predicted / measured)^2  +  RIDGE * sum of ln(coefficient / start)^2

over the formulas of `benchmarks.predict.latency`. Logarithms weigh errors by their factor. Coefficients that the
measurements do not determine stay near this machine's figures.
"""

from __future__ import annotations

import math
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from benchmarks.devices.load import load_device
from benchmarks.devices.schema import FORMAT, MOST_BAND, Coefficients, Device
from benchmarks.devices.verdict import limit_lengths
from benchmarks.measure.bench import LARGEST_WORKING_SET_BYTES, short_bench
from benchmarks.measure.machine import choose_cpus, machine, this_machine
from benchmarks.measure.process import QUIET_CORES, run_child, wait_for_quiet, worker_turn
from benchmarks.model_size import ModelFormat
from benchmarks.predict.latency import CALIBRATED_BAND, KNOWN_BYTES, Formulas, Terms, costs, resolve, total
from export.kernels.library import VERSION
from export.runtime.session import problem_of
from sportsllm.console import log, logged, progress_bar
from sportsllm.errors import UsageError
from sportsllm.files import describe
from sportsllm.models.config import ModelConfig
from sportsllm.process_memory import available_bytes

TIMEOUT_S = 300.0
SHARE_OF_MEMORY = 0.1  # of what is free, for the float32 weights of a shape
RIDGE = 0.03  # coefficients are known within a factor of 2 (ln 2 = 0.7), models deviate by 12%: (0.12 / 0.7)^2
MOST_CHANGE, ITERATIONS = 6.0, 50  # of a coefficient, as a factor: more is noise
CONTEXT = 1_024
Kind = Literal["tpot", "ttft", "memory"]


def shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    """A decoder with a context of `CONTEXT`."""
    return ModelConfig(
        vocab, hidden, inner, layers, heads, kv_heads, head_dim=hidden // heads, max_position_embeddings=CONTEXT
    )


# Few and many layers, shared and separate keys, inside a processor's caches and (48M parameters) beyond most.
SHAPES = (shape(2_000, 128, 384, 4, 4, 4), shape(8_000, 384, 1_024, 10, 6, 2), shape(8_000, 768, 2_048, 6, 12, 12))
FORMATS = (ModelFormat("fp32"), ModelFormat("int8", 128), ModelFormat("int4", 128))
INT8_CACHE = ModelFormat("int4", 128, cache="int8")


@dataclass(frozen=True)
class Figure:
    """One measured figure of a model: `tpot` (ms at depth `tokens`), `ttft` (ms for `tokens`) or `memory` (bytes)."""

    kind: Kind
    config: ModelConfig
    stored: ModelFormat
    tokens: int
    value: float

    def terms(self) -> Terms:
        """Terms of the formula for it."""
        formulas = Formulas(self.config, self.stored)
        return {"tpot": formulas.tpot, "ttft": formulas.ttft, "memory": formulas.memory}[self.kind](self.tokens)


class Probe(NamedTuple):
    """An export that is measured."""

    config: ModelConfig
    stored: ModelFormat
    directory: Path


def measure_models(models: Sequence[Probe], threads: int, rounds: int) -> tuple[list[Figure], float]:
    """Every figure of every model, the median of the rounds, and the most cores that other programs used meanwhile.

    Each round measures the models in another order, so that a slow phase of the machine affects all of them.
    """
    host, busiest = load_device("host"), 0.0
    seen: dict[tuple[Probe, str], list[float]] = {}
    wait_for_quiet(cpus=choose_cpus(threads))
    with progress_bar("small models", len(models) * rounds) as progress:
        for turn in range(rounds):
            for model in random.Random(turn).sample(models, len(models)):
                measured, other_cores = short_bench(model.directory, host, threads)
                busiest = max(busiest, other_cores)
                for name, value in measured.items():
                    if value is not None:
                        seen.setdefault((model, name), []).append(value)
                progress.advance(1, model.directory.name)
    figures = []
    for model in models:
        prompt, depth, context = limit_lengths(host.limits, model.config.max_position_embeddings)
        kinds: list[tuple[Kind, str, int | None, float]] = [("ttft", "ttft_ms", prompt, 1.0)]
        kinds += [("tpot", "tpot_p50_ms", depth, 1.0), ("memory", "peak_memory_mb", context, 1e6)]
        figures += [
            Figure(kind, model.config, model.stored, tokens, scale * statistics.median(seen[model, name]))
            for kind, name, tokens, scale in kinds
            if tokens is not None
        ]
    return figures, busiest


def fit(figures: Sequence[Figure], start: Coefficients) -> Coefficients:
    """The coefficients that describe the figures best, see the module; by Gauss and Newton's method."""
    prices, rows = costs(start), [figure.terms() for figure in figures]
    names = sorted({name for terms in rows for name in terms} - {KNOWN_BYTES})
    amounts = np.array([[terms.get(name, 0.0) for name in names] for terms in rows])
    known = np.array([terms.get(KNOWN_BYTES, 0.0) for terms in rows])
    measured = np.array([figure.value for figure in figures])
    first = np.log([max(prices[name], 1e-12) for name in names])
    logs, most = first.copy(), math.log(MOST_CHANGE)
    for _ in range(ITERATIONS):
        parts = amounts * np.exp(logs)
        predicted = parts.sum(axis=1) + known
        slopes = np.vstack([parts / predicted[:, None], math.sqrt(RIDGE) * np.eye(len(names))])
        errors = np.concatenate([np.log(predicted / measured), math.sqrt(RIDGE) * (logs - first)])
        logs -= np.clip(np.linalg.lstsq(slopes, errors, rcond=None)[0], -0.5, 0.5)
        logs = np.clip(logs, first - most, first + most)
    # A rate's cost is its inverse, any other's is in proportion to it.
    changes = np.exp(logs - first)
    found = {
        name: getattr(start, name) * (1 / change if name.endswith("_per_s") else change)
        for name, change in zip(names, changes.tolist(), strict=True)
    }
    return start.model_copy(update={name: float(f"{value:.4g}") for name, value in found.items()})


def band_of(coefficients: Coefficients, figures: Sequence[Figure]) -> dict[str, float]:
    """The factor, either way, that holds 90% of the figures of each kind."""
    prices, found = costs(coefficients), dict[str, list[float]]()
    for figure in figures:
        found.setdefault(figure.kind, []).append(abs(math.log(total(figure.terms(), prices) / figure.value)))
    return {kind: round(math.exp(np.percentile(errors, 90)), 2) for kind, errors in found.items()}


def export_untrained(
    config: ModelConfig, stored: ModelFormat, directory: Path, inline: bool = False, in_half: bool = False
) -> None:
    """Export a model with random weights, rounded to nearest, as `export` does but without its parity gate.

    Args:
        inline: whether the graph has ONNX Runtime's operators instead of calls of this program's kernels.
        in_half: compute and cache in float16, for GPUs.
    """
    import torch

    from compress.quantization.config import QuantizationConfig
    from compress.quantization.layer_by_layer import round_checkpoint
    from compress.quantization.packed_checkpoint import PackedCheckpoint
    from export.cache_scales import CacheScales
    from export.graph.builder import CACHED_TYPES, FLOAT, HALF, GraphForm
    from export.graph.decoder import write_graph
    from sportsllm.formats.checkpoint import save_checkpoint, write_config
    from sportsllm.formats.safetensors import WEIGHTS
    from sportsllm.models.description import block_state
    from sportsllm.models.language_model import SportsLLM

    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        source, packed_to = Path(folder) / "dense", Path(folder) / "packed"
        source.mkdir()
        model = SportsLLM(config)
        model.initialize(0)
        save_checkpoint(source, model)
        if stored.quantized:
            packed_to.mkdir()
            bits = {"int8": 8, "int4": 4}[stored.precision]
            grids = QuantizationConfig(bits, stored.block_size, stored.head_bits, not stored.zero_points)
            packed = PackedCheckpoint(config, grids, "rtn", packed_to / WEIGHTS)
            round_checkpoint(source, packed)
            write_config(packed_to, config, quantization=packed.record())
            source = packed_to
        full = tuple(torch.full((config.num_hidden_layers, *state.shape), 0.05) for state in block_state(config))
        scales = CacheScales(full) if stored.cache == "int8" else None
        operators, real = "standard" if stored.standard else "onnx", HALF if in_half else FLOAT
        write_graph(source, directory, GraphForm(operators, real, real, CACHED_TYPES[stored.cache], scales, inline))
        shutil.copyfile(source / "config.json", directory / "config.json")


def write_models(folder: Path, wanted: Iterable[tuple[ModelConfig, ModelFormat]]) -> list[Probe]:
    """Export random weights of each shape and format, with this program's kernels if they run here."""
    problem = problem_of(VERSION)
    if problem:
        log(f"calibrating ONNX Runtime's operators alone: {problem}")
    log("writing small models")
    models = []
    for number, (config, stored) in enumerate(wanted, start=1):
        name = f"model {number}, {config.parameters / 1e6:.0f}M parameters, {stored.name}"  # messages show it
        models.append(Probe(config, stored, folder / name))
        with logged(folder / "log.txt"):
            export_untrained(*models[-1], inline=bool(problem))
    return models


def calibrate(threads: int, rounds: int) -> tuple[Coefficients, float]:
    """This machine's coefficients, and the most cores that other programs used meanwhile.

    The band is that of calibrated predictions, or of the fit itself if wider. Takes 500 MB of temporary files.
    """
    free = available_bytes()
    shapes = [each for each in SHAPES if 4 * each.parameters <= SHARE_OF_MEMORY * free] or SHAPES[:1]
    wanted = [(config, stored) for config in shapes for stored in FORMATS]
    wanted += [(config, INT8_CACHE) for config in shapes[:2]]
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        figures, busiest = measure_models(write_models(Path(folder), wanted), threads, rounds)
    host = load_device("host").model_copy(update={"hardware": this_machine(threads)})
    fitted, noisy = fit(figures, resolve(host)), ", other programs running" if busiest > QUIET_CORES else ""
    within = {kind: max(each, getattr(CALIBRATED_BAND, kind)) for kind, each in band_of(fitted, figures).items()}
    if (worst := max(within.values())) > MOST_BAND:
        raise UsageError(
            f"the measurements are off by a factor of {worst:.0f}{noisy}: nothing is written; calibrate again on a "
            "quiet machine, with more --rounds"
        )
    source = f"`calibrate`: {len(wanted)} models, {threads} threads{noisy}"
    changes = {"source": source, "date": datetime.now(UTC).date(), "kind": "measured"}
    return fitted.model_copy(update={**changes, "band": CALIBRATED_BAND.model_copy(update=within)}), busiest


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})


def read_bandwidth(counts: Sequence[int]) -> dict[int, float]:
    """Bytes a second that each number of threads reads beyond the caches, pinned, each in a fresh process."""
    size, found = min(LARGEST_WORKING_SET_BYTES, available_bytes() // 4), dict[int, float]()
    for threads in counts:
        asked = {"threads": threads, "cpus": choose_cpus(threads), "working_set_bytes": size}
        found[threads] = float(run_child(worker_turn(asked, "bandwidth"), TIMEOUT_S)["bandwidth_bytes_per_s"])
    return found


def choose_threads(rates: Mapping[int, float]) -> int:
    """The most threads that read within 10% of the fastest: prompts gain from more, but a memory channel may lose.

    A Raspberry Pi 5 reads 13.2 GB/s with two threads and 11.6 with four.
    """
    return max(threads for threads, rate in rates.items() if rate >= 0.9 * max(rates.values()))


def this_device(name: str, threads: int, decided: Device) -> Device:
    """This machine as a device with the limits of `decided`.

    It is recognised by processor, instruction set and memory; not at all if the system names no processor.

    Raises:
        UsageError: limits that cannot hold here.
    """
    here, hardware = machine(), this_machine(threads)
    rule, memory_mb = None, hardware.memory_total.value
    if here["processor"] != here["architecture"]:
        rule = {"processor": here["processor"], "instruction_set": hardware.instruction_set.value}
        rule |= {"min_memory_mb": 0.98 * memory_mb, "max_memory_mb": 1.02 * memory_mb}
    fields = {"format": FORMAT, "name": name, "kind": "calibrated machine", "processor": "cpu", "recognise": rule}
    fields |= {"title": f"{here['processor']}, {threads} threads", "hardware": hardware, "limits": decided.limits}
    try:
        return Device.model_validate(fields | {"description": f"Measured by `calibrate` on {here['system']}."})
    except ValidationError as error:
        raise UsageError(f"--limits-from {decided.name}: {describe(error)}; choose another device's limits") from None
