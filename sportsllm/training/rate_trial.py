"""Try a few peak rates on a tenth of the tokens, since no rule knows a checkpoint that somebody else trained."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path

import torch

from sportsllm.console import say
from sportsllm.errors import DivergedError
from sportsllm.files import atomic_write_text
from sportsllm.models.hf_config import read_json
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
    """The settings with the rates that do best in short runs on the first batches; the model stays as it is.

    A third of the rates, the rates and three times of them are tried, and one step further where the best is at the
    end. Runs whose tenth is too short for that keep their rates.

    Args:
        model, batches, loss, config: of the run, which has not begun.
        directory: of the run; the scores stay there in rates.json, which a resumed run reads.
        choosing: scores the short runs.
    """
    steps = int(config.steps * _SHARE / _MOST_TRIALS)
    if steps < _LEAST_STEPS:
        return config
    kept = directory / RATES
    if kept.exists():
        scores = {float(factor): score for factor, score in read_json(kept).items()}
    else:
        scores = _try(model, batches, loss, dataclasses.replace(config, steps=steps), choosing)
        atomic_write_text(kept, json.dumps(scores))
    best = min(scores, key=lambda factor: scores[factor])
    chosen = _scaled(config, best)
    tried = ", ".join(
        f"{_scaled(config, factor).learning_rate:.2g} {score:.4f}" for factor, score in sorted(scores.items())
    )
    say(f"rates tried on {steps} steps each, AdamW's and bits per byte: {tried}; {chosen.learning_rate:.2g} is taken")
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
    short = dataclasses.replace(short, warmup=max(1, short.steps // 20), validate_every=0)
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
        with torch.no_grad():
            for name, weight in start.items():
                parameters[name].copy_(weight)

    for factor in (1 / _FACTOR, 1.0, _FACTOR):
        score(factor)
    best = min(scores, key=lambda factor: scores[factor])
    if best != 1.0:
        score(best**2)
    return scores


def _scaled(config: TrainConfig, factor: float) -> TrainConfig:
    return dataclasses.replace(
        config,
        learning_rate=config.learning_rate * factor,
        muon_learning_rate=config.muon_learning_rate * factor,
    )
