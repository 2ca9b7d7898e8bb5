"""Trial runs that choose the learning rates, since no rule knows a checkpoint that somebody else trained.

Short runs flatter high rates: a rate that wins after 12 steps loses after 200 (docs/results). If a lower rate is better
even in a short run, the higher one destroys what the weights know.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path

import torch

from sportsllm import processes
from sportsllm.console import log
from sportsllm.errors import DivergedError, InterruptedRun
from sportsllm.files import as_object, atomic_write_text, parse_json
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import Loss, train_model
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import Validate

RATES = "rates.json"
_FACTOR = 3.0
_MOST_TRIALS = 4
_FRACTION = 0.1  # of the tokens, for all trials together
_LEAST_STEPS = 10  # fewer say nothing about a rate


def choose_rates(
    model: SportsLLM, batches: PackedSequences, loss: Loss, config: TrainConfig, directory: Path, selection: Validate
) -> TrainConfig:
    """The settings with the highest rates that no lower ones beat in short runs; the model stays as it is.

    The rates and a third of them are tried on the first batches, and a third of those again until that is worse. A step
    of a trial accumulates as many batches as a step of the run, or as many as leave ten steps: smaller batches are
    noisier, which favours low rates. If a tenth of the tokens is too short for trials, the rates stay.

    Args:
        model, batches, loss, config: of the run, which has not begun.
        directory: of the run; the first process's scores stay there in rates.json, which resumed runs read.
        selection: scores the short runs, in bits per byte.
    """
    affordable = int(config.steps * config.accumulation * _FRACTION / _MOST_TRIALS)  # batches of a trial
    accumulation = min(config.accumulation, affordable // _LEAST_STEPS)
    if accumulation < 1:
        return config
    steps, kept = affordable // accumulation, directory / RATES
    known = processes.from_first(kept.read_text(encoding="utf-8") if kept.exists() else "")
    if not known:
        log(f"trying learning rates on {steps} steps each")
        short = dataclasses.replace(config, accumulation=accumulation, validate_every=0, steps=steps, warmup=1)
        known = processes.from_first(json.dumps(_try(model, batches, loss, short, directory, selection)))
        atomic_write_text(kept, known)
    scores = {float(factor): score for factor, score in as_object(parse_json(known, kept), kept).items()}
    chosen = _scaled(config, min(scores, key=scores.__getitem__))
    tried = [f"{_scaled(config, factor).learning_rate:.2g} {score:.4f}" for factor, score in sorted(scores.items())]
    rates = f"AdamW's rate and bits per byte after {steps} steps: {', '.join(tried)}"
    log(f"{rates}; using {chosen.learning_rate:.2g}")
    return chosen


def _try(
    model: SportsLLM, batches: PackedSequences, loss: Loss, short: TrainConfig, directory: Path, selection: Validate
) -> dict[float, float]:
    """Scores by the factor on the rates; a long trial saves its state, for which `directory` has room."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    start = [weight.detach().clone() for weight in weights]
    scores: dict[float, float] = {}
    for factor in (_FACTOR**-trial for trial in range(_MOST_TRIALS)):
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            try:
                trial, name = _scaled(short, factor), f"rate x {factor:.2g}"
                train_model(model, batches, loss, trial, Path(scratch), description=name)
                scores[factor] = selection(model)
            except DivergedError:
                scores[factor] = math.inf
            except InterruptedRun:  # nothing of the run itself is there to be resumed yet
                raise KeyboardInterrupt from None
        with torch.no_grad():
            for weight, before in zip(weights, start, strict=True):
                weight.copy_(before)
                weight.grad = None  # of a step that diverged
        if scores[factor] > min(scores.values()):
            break
    return scores


def _scaled(config: TrainConfig, factor: float) -> TrainConfig:
    rates = {name: getattr(config, name) * factor for name in ("learning_rate", "muon_learning_rate")}
    return dataclasses.replace(config, **rates)
