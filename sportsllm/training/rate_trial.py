"""Try lower peak rates on a tenth of the tokens, since no rule knows a checkpoint that somebody else trained.

Short runs flatter high rates: one that wins after 12 steps loses after 200 (docs/log.md). Where a lower rate is better
even in a short run, the higher one undoes what the weights know.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path

import torch

from sportsllm.console import log
from sportsllm.errors import DivergedError, InterruptedRun
from sportsllm.files import atomic_write_text
from sportsllm.formats.json_files import read_json
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import PackedSequences
from sportsllm.training.best_step import Validate
from sportsllm.training.loop import Loss, train_model
from sportsllm.training.settings import TrainConfig

RATES = "rates.json"
_FACTOR = 3.0
_MOST_TRIALS = 4
_SHARE = 0.1  # of the tokens, for all trials together
_LEAST_STEPS = 10  # fewer say nothing about a rate


def choose_rates(
    model: SportsLLM, batches: PackedSequences, loss: Loss, config: TrainConfig, directory: Path, choosing: Validate
) -> TrainConfig:
    """The settings with the highest rates that no lower ones beat in short runs; the model stays as it is.

    The rates and a third of them are tried on the first batches, and a third of those again as long as that is better.
    Runs whose tenth is too short for that keep their rates.

    Args:
        model, batches, loss, config: of the run, which has not begun.
        directory: of the run; the scores stay there in rates.json, which a resumed run reads.
        choosing: scores the short runs.
    """
    short = dataclasses.replace(config, accumulation=1, parallel_batches=1, validate_every=0)
    tokens = config.steps * config.tokens_per_step * _SHARE / _MOST_TRIALS
    steps = int(tokens / short.tokens_per_step)
    if steps < _LEAST_STEPS:
        return config
    kept = directory / RATES
    if kept.exists():
        scores = {float(factor): score for factor, score in read_json(kept).items()}
    else:
        scores = _try(model, batches, loss, dataclasses.replace(short, steps=steps, warmup=1), choosing)
        atomic_write_text(kept, json.dumps(scores))
    best = min(scores, key=lambda factor: scores[factor])
    chosen = _scaled(config, best)
    tried = ", ".join(
        f"{_scaled(config, factor).learning_rate:.2g} {score:.4f}" for factor, score in sorted(scores.items())
    )
    log(f"rates tried on {steps} steps each, AdamW's and bits per byte: {tried}; {chosen.learning_rate:.2g} is taken")
    return chosen


def chosen_rates(config: TrainConfig) -> dict[str, float]:
    """The rates of a run, for its results: not those of its settings where some were tried."""
    return {"learning_rate": config.learning_rate, "muon_learning_rate": config.muon_learning_rate}


def _try(
    model: SportsLLM, batches: PackedSequences, loss: Loss, short: TrainConfig, choosing: Validate
) -> dict[float, float]:
    """Bits per byte by the factor on the rates."""
    start = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    parameters = dict(model.named_parameters())
    scores: dict[float, float] = {}

    def score(factor: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            try:
                train_model(
                    model, batches, loss, _scaled(short, factor), Path(directory), description=f"rate x {factor:.2g}"
                )
                scores[factor] = choosing(model)
            except DivergedError:
                scores[factor] = math.inf
            except InterruptedRun:  # nothing of the run itself is there to be resumed yet
                raise KeyboardInterrupt from None
        with torch.no_grad():
            for name, weight in start.items():
                parameters[name].copy_(weight)

    for trial in range(_MOST_TRIALS):
        score(_FACTOR**-trial)
        if min(scores, key=lambda factor: scores[factor]) != _FACTOR**-trial:
            break
    return scores


def _scaled(config: TrainConfig, factor: float) -> TrainConfig:
    return dataclasses.replace(
        config,
        learning_rate=config.learning_rate * factor,
        muon_learning_rate=config.muon_learning_rate * factor,
    )
