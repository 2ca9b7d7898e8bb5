"""Rates are chosen by short runs, and the model is as it was."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import language_model_loss
from sportsllm.training.rate_trial import RATES, choose_rates
from sportsllm.training.settings import TrainConfig
from tests.support.models import fresh, weights

CONFIG = TrainConfig(
    steps=400, batch_size=2, accumulation=1, sequence=32, learning_rate=1e-3, warmup=20, precision="fp32", log_every=50
)


@pytest.mark.parametrize(("wanted", "factors"), [(1.0, 3), (3.0, 4), (1 / 3, 4)])
def test_the_best_of_the_tried_rates_is_taken(
    batches: PackedSequences, tmp_path: Path, wanted: float, factors: int
) -> None:
    model = fresh()
    before, moved = weights(model).clone(), list[float]()

    def choosing(network: SportsLLM) -> float:
        """Likes the run that moved the weights as far as the wanted factor does."""
        moved.append(float((weights(network) - before).norm()))
        order = [1 / 3, 1.0, 3.0]
        return abs(order.index(wanted) - (len(moved) - 1)) if len(moved) <= 3 else 9.0

    chosen = choose_rates(model, batches, language_model_loss, CONFIG, tmp_path, choosing)
    assert chosen.learning_rate == pytest.approx(1e-3 * wanted)
    assert chosen.muon_learning_rate == pytest.approx(0.02 * wanted)
    assert dataclasses.replace(chosen, learning_rate=1e-3, muon_learning_rate=0.02) == CONFIG
    assert moved[0] < moved[1] < moved[2] and len(moved) == factors
    assert torch.equal(weights(model), before)
    assert len(json.loads((tmp_path / RATES).read_text(encoding="utf-8"))) == factors

    again = choose_rates(model, batches, language_model_loss, CONFIG, tmp_path, choosing)
    assert again == chosen and len(moved) == factors, "a resumed run reads the choice"


def test_a_good_rate_wins(batches: PackedSequences, tmp_path: Path) -> None:
    """Real scores: a rate far too low is raised, one far too high is lowered."""

    def score(network: SportsLLM) -> float:
        with torch.inference_mode():
            return sum(float(language_model_loss(network, batches.batch(i))) for i in range(100, 104))

    for rate, side in ((1e-5, 1), (1.0, -1)):
        config = dataclasses.replace(CONFIG, learning_rate=rate)
        (tmp_path / str(side)).mkdir()
        chosen = choose_rates(fresh(), batches, language_model_loss, config, tmp_path / str(side), score)
        assert (chosen.learning_rate - rate) * side > 0


def test_short_runs_keep_their_rates(batches: PackedSequences, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=399)
    assert choose_rates(fresh(), batches, language_model_loss, config, tmp_path, lambda _model: 0.0) is config
    assert not (tmp_path / RATES).exists()
