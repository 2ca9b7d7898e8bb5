"""The best weights stay, and where nothing beats the start, the start stays."""

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sportsllm.errors import DivergedError, InterruptedRun
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import Validation
from tests.support.models import fresh, weights

CONFIG = TrainConfig(
    steps=4, batch_size=2, accumulation=1, sequence=32, learning_rate=1e-3, warmup=1, precision="fp32", validate_every=1
)


def scripted(scores: list[float], seen: list[torch.Tensor]) -> Callable[[SportsLLM], float]:
    """Gives the scores one after the other, and keeps the weights that each was asked for."""
    left: Iterator[float] = iter(scores)

    def validate(model: SportsLLM) -> float:
        seen.append(weights(model).clone())
        return next(left)

    return validate


@pytest.mark.parametrize(("scores", "best"), [([3, 2, 1, 5, 4], 2), ([1, 2, 3, 4, 5], 0), ([5, 4, 3, 2, 1], 4)])
def test_the_best_step_stays(
    batches: PackedSequences, tmp_path: Path, capsys: pytest.CaptureFixture[str], scores: list[float], best: int
) -> None:
    model, seen = fresh(), list[torch.Tensor]()
    validation = Validation(scripted(scores, seen), lambda _model: 7.0, keep_start=True)
    result = train_model(model, batches, language_model_loss, CONFIG, tmp_path, validation=validation)
    assert torch.equal(weights(model), seen[best]) and not torch.equal(seen[0], seen[1])
    assert result.best_step == best and result.valid_bits_per_byte == 7.0 and result.steps == 4
    said = capsys.readouterr().err
    assert ("the start is kept" in said) == (best == 0) and ("it is kept" in said) == (best == 2)


def test_a_fresh_start_is_not_scored(batches: PackedSequences, tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    config = dataclasses.replace(CONFIG, validate_every=0)
    validation = Validation(scripted([2.0], seen), lambda _model: 7.0)
    assert train_model(fresh(), batches, language_model_loss, config, tmp_path, validation=validation).best_step == 4
    assert len(seen) == 1


def test_a_run_that_diverges_keeps_the_best_so_far(batches: PackedSequences, tmp_path: Path) -> None:
    model, calls = fresh(), 0

    def breaks(network: SportsLLM, batch: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return language_model_loss(network, batch) * (math.nan if calls == 3 else 1.0)  # type: ignore[arg-type]

    seen: list[torch.Tensor] = []
    validation = Validation(scripted([3, 1, 2], seen), lambda _model: 7.0, keep_start=True)
    result = train_model(model, batches, breaks, CONFIG, tmp_path, validation=validation)
    assert (result.steps, result.best_step) == (2, 1) and torch.equal(weights(model), seen[1])
    calls = 0
    with pytest.raises(DivergedError):
        train_model(fresh(), batches, breaks, CONFIG, tmp_path)


def test_the_best_step_survives_an_interrupt(batches: PackedSequences, tmp_path: Path) -> None:
    model, seen, calls = fresh(), list[torch.Tensor](), 0

    def presses_control_c(network: SportsLLM, batch: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return language_model_loss(network, batch)  # type: ignore[arg-type]

    validation = Validation(scripted([3, 1, 2, 4, 5], seen), lambda _model: 7.0, keep_start=True)
    with pytest.raises(InterruptedRun):
        train_model(model, batches, presses_control_c, CONFIG, tmp_path, validation=validation)
    other = fresh()
    result = train_model(other, batches, language_model_loss, CONFIG, tmp_path, validation=validation, resume=True)
    assert result.best_step == 1 and torch.equal(weights(other), seen[1]) and len(seen) == 5
