"""Measures the models that predictions are checked on, in fresh processes, as `bench` does but shorter."""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

from benchmarks.measure.process import child_command, run_child, wait_for_quiet
from benchmarks.predict.calibrate import Readings, read_round
from benchmarks.predict.efficiency_fit import Measured
from benchmarks.predict.model_size import Stored
from benchmarks.spread import lower_quartile
from benchmarks.studies.prediction_models import (
    FITTED,
    FORMS,
    OTHERS,
    OTHERS_OF,
    SCORED,
    Form,
    make_checkpoint,
    make_export,
)
from sportsllm import console
from sportsllm.models.config import ModelConfig

PROMPTS, DEPTHS, MEMORY_TOKENS = (128, 512), (32, 512, 1_024), 1_024
STEPS, WARM_UP_STEPS = 128, 6
QUICK = {
    "seed": 0,
    "prompts": PROMPTS,
    "depths": DEPTHS,
    "steps": STEPS,
    "warm_up_steps": WARM_UP_STEPS,
    "repeats": 3,
    "seconds_per_figure": 0.1,
    "context_tokens": MEMORY_TOKENS,
    "memory_steps": 8,
}
"""`bench`'s steps, but fewer repeats: some thirty models have to be through in minutes. With 24 steps a figure would be
that of one depth, and at some, for a model, ONNX Runtime's attention takes half as long again (docs/log.md)."""
TIMEOUT_S = 300.0


def combinations(more: Mapping[str, ModelConfig] | None = None) -> Iterator[tuple[str, ModelConfig, dict[str, Form]]]:
    """Each shape with its forms; fitted and scored ones in turns.

    Args:
        more: shapes that are scored besides.
    """
    turns = chain.from_iterable(zip_longest(FITTED.items(), {**SCORED, **(more or {})}.items()))
    for name, config in filter(None, turns):
        yield name, config, {**FORMS, **{other: OTHERS[other] for other in OTHERS_OF.get(name, ())}}


@dataclass
class Model:
    """An export that is measured, and each process's medians so far: milliseconds by kind and tokens."""

    shape: str
    form: str
    config: ModelConfig
    stored: Stored
    directory: Path
    medians: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    peak_rss_bytes: float = 0.0


def measure(
    threads: int, rounds: int, readings: Readings | None = None, more: Mapping[str, ModelConfig] | None = None
) -> tuple[list[Measured], float]:
    """Every figure of every model, and the most cores that other programs used beside one.

    A time is the `lower_quartile` of the rounds' medians, since a prediction is of a machine that does nothing else.

    All models are there before the first is measured, and each round goes through all of them in an order of its own,
    so that a machine that is slower for a while, or at times as far apart as rounds, is so for all.

    Args:
        threads: CPU threads.
        rounds: fresh processes that measure each model's speed.
        readings: gets what `calibrate` reads, once more before each round, so that both see the same machine: how much
            of a cache that others share is this process's own changes within minutes.
        more: shapes that are scored beside the usual ones.

    Raises:
        ChildFailure: a measuring process failed.
        OSError: no room for 2.5 GB in the temporary folder.
    """
    wanted = list(combinations(more))
    count = sum(len(forms) for *_, forms in wanted)
    busiest = 0.0
    with (
        console.progress_bar("prediction check", count * (rounds + 2)) as progress,
        tempfile.TemporaryDirectory(prefix="prediction-") as folder,
    ):
        models = []
        for shape, config, forms in wanted:
            checkpoint = make_checkpoint(config, Path(folder) / shape)
            for name, form in forms.items():
                progress.advance(1, f"making {shape} {name}")
                directory = Path(folder) / f"{shape}-{name}"
                models.append(Model(shape, name, config, make_export(checkpoint, form, directory), directory))
            shutil.rmtree(checkpoint)
        wait_for_quiet()
        for turn, mode in enumerate(["speed"] * rounds + ["memory"]):
            if readings is not None and mode == "speed":
                for name in read_round(readings, threads):
                    progress.advance(0, name)
                busiest = max(busiest, readings.other_cpu_cores)
            for model in random.Random(turn).sample(models, len(models)):
                progress.advance(0, f"{mode} of {model.shape} {model.form}")
                busiest = max(busiest, _measure_one(model, mode, threads))
                progress.advance()
    return [figure for model in models for figure in _figures(model)], busiest


def _measure_one(model: Model, mode: str, threads: int) -> float:
    """Add a process's samples to a model's; returns the cores that other programs used."""
    specification = {**QUICK, "mode": mode, "directory": str(model.directory), "threads": threads}
    what = f"{model.shape} {model.form} ({mode})"
    child = run_child(child_command(specification), what, TIMEOUT_S, {"OMP_NUM_THREADS": str(threads)})
    if mode == "memory":
        model.peak_rss_bytes = float(child.payload["peak_rss_bytes"])
        return child.other_cpu_cores
    for prompt in PROMPTS:
        model.medians.setdefault(("ttft", prompt), []).append(statistics.median(child.payload["ttft_ms"][str(prompt)]))
    for depth in DEPTHS:
        # A step is timed behind the warm-up ones: the middle one sees that many more tokens.
        middle = depth + WARM_UP_STEPS + STEPS // 2
        steps = [sample for sweep in child.payload["step_ms"][str(depth)] for sample in sweep]
        model.medians.setdefault(("decode", middle), []).append(statistics.median(steps))
    return child.other_cpu_cores


def _figures(model: Model) -> Iterator[Measured]:
    found = {("memory", MEMORY_TOKENS): [model.peak_rss_bytes], **model.medians}
    for (kind, tokens), values in found.items():
        value = lower_quartile(values)
        apart = 100 * (statistics.median(values) / value - 1)
        yield Measured(model.shape, model.form, model.config, model.stored, kind, tokens, value, apart)
