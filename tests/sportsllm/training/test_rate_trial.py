"""Rates are chosen by short runs, and the model is as it was."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import Batch, PackedSequences
from sportsllm.training import rate_trial
from sportsllm.training.loop import language_model_loss
from sportsllm.training.rate_trial import RATES, choose_rates
from sportsllm.training.settings import TrainConfig
from tests.support.models import fresh, weights

CONFIG = TrainConfig(
    steps=400, batch_size=2, accumulation=1, sequence=32, learning_rate=1e-3, warmup=20, precision="fp32", log_every=50
)


@pytest.mark.parametrize(("scores", "wanted"), [([1, 2], 1), ([2, 1, 3], 1 / 3), ([4, 3, 2, 1], 1 / 27)])
def test_rates_fall_as_long_as_that_is_better(
    batches: PackedSequences, tmp_path: Path, scores: list[float], wanted: float
) -> None:
    model = fresh()
    before, moved = weights(model).clone(), list[float]()

    def selection(network: SportsLLM) -> float:
        moved.append(float((weights(network) - before).norm()))
        return scores[len(moved) - 1]

    chosen = choose_rates(model, batches, language_model_loss, CONFIG, tmp_path, selection)
    assert chosen.learning_rate == pytest.approx(1e-3 * wanted)
    assert chosen.muon_learning_rate == pytest.approx(0.02 * wanted)
    assert dataclasses.replace(chosen, learning_rate=1e-3, muon_learning_rate=0.02) == CONFIG
    assert moved == sorted(moved, reverse=True) and len(moved) == len(scores)
    assert torch.equal(weights(model), before)
    assert len(json.loads((tmp_path / RATES).read_text(encoding="utf-8"))) == len(scores)

    again = choose_rates(model, batches, language_model_loss, CONFIG, tmp_path, selection)
    assert again == chosen and len(moved) == len(scores), "a resumed run reads the choice"


def test_a_good_rate_wins(batches: PackedSequences, tmp_path: Path) -> None:
    """Real scores: a rate far too high is lowered, a low one stays."""

    def score(network: SportsLLM) -> float:
        with torch.inference_mode():
            return sum(float(language_model_loss(network, batches.batch(i))) for i in range(100, 104))

    for rate, stays in ((1e-4, True), (1.0, False)):
        config = dataclasses.replace(CONFIG, learning_rate=rate)
        (tmp_path / str(rate)).mkdir()
        chosen = choose_rates(fresh(), batches, language_model_loss, config, tmp_path / str(rate), score)
        assert (chosen.learning_rate == rate) == stays


def test_short_runs_keep_their_rates(batches: PackedSequences, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=399)
    assert choose_rates(fresh(), batches, language_model_loss, config, tmp_path, lambda _model: 0.0) is config
    assert not (tmp_path / RATES).exists()


@pytest.mark.parametrize(("accumulation", "wanted"), [(4, 2), (1, 1)])
def test_a_trial_accumulates_what_leaves_ten_steps(
    batches: PackedSequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, wanted: int
) -> None:
    seen: list[TrainConfig] = []
    monkeypatch.setattr(rate_trial, "train_model", lambda *given, **_names: seen.append(given[3]))
    config = dataclasses.replace(CONFIG, steps=800 // accumulation, accumulation=accumulation)
    choose_rates(fresh(), batches, language_model_loss, config, tmp_path, lambda _model: 0.0)
    assert {(trial.accumulation, trial.steps) for trial in seen} == {(wanted, 20 // wanted)}


def test_an_interrupt_leaves_nothing_to_resume(batches: PackedSequences, tmp_path: Path) -> None:
    """The short run's state is gone, so that it must not be named."""

    def presses_control_c(network: SportsLLM, batch: Batch) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return language_model_loss(network, batch)

    with pytest.raises(KeyboardInterrupt):
        choose_rates(fresh(), batches, presses_control_c, CONFIG, tmp_path, lambda _model: 0.0)
    assert not list(tmp_path.iterdir())
