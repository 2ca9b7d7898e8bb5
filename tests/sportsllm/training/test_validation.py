"""The best weights stay, the start too if nothing beats it, and rates are chosen by short runs."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import prune, quantize
from sportsllm import processes
from sportsllm.errors import ArtifactError, DivergedError, InterruptedRun
from sportsllm.inference.scoring import TextScore
from sportsllm.models.language_model import SportsLLM
from sportsllm.results import TrainingResult
from sportsllm.text.packing import PackedSequences
from sportsllm.training import rate_trial
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.rate_trial import RATES, choose_rates
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import Validation
from tests.support.models import fresh, weights
from tests.support.training import diverging_at, interrupted_at

CONFIG = TrainConfig(
    steps=4, batch_size=2, accumulation=1, sequence=32, learning_rate=1e-3, warmup=1, precision="fp32", validate_every=1
)


def reported(model: SportsLLM, tokens: int) -> TextScore:
    """Two documents, whose nats are sums of weights; the first alone if few tokens are asked for."""
    nats = [float(weights(model).abs().sum()), 1.0]
    return TextScore(sum(nats), 2, 2, tuple(nats[: 1 if tokens < 20_000 else 2]))


def scripted(scores: list[float], seen: list[torch.Tensor]) -> Callable[[SportsLLM], float]:
    """Gives the scores one after the other, and keeps the weights that each was asked for."""
    left: Iterator[float] = iter(scores)

    def validate(model: SportsLLM) -> float:
        seen.append(weights(model).clone())
        return next(left)

    return validate


@pytest.mark.parametrize(("scores", "best"), [([3, 2, 1, 5, 4], 2), ([1, 2, 1, 4, 5], 0), ([5, 4, 3, 2, 1], 4)])
def test_the_best_step_stays(
    batches: PackedSequences, tmp_path: Path, capsys: pytest.CaptureFixture[str], scores: list[float], best: int
) -> None:
    validation = Validation(scripted(scores, seen := []), reported, keep_start=True)
    result = train_model(model := fresh(), batches, language_model_loss, CONFIG, tmp_path, validation=validation)
    assert torch.equal(weights(model), seen[best]) and not torch.equal(seen[0], seen[1])
    assert result.best_step == best and result.valid_bits_per_byte == reported(model, 65_536).bits_per_byte
    ratio = float(seen[0].abs().sum() / seen[best].abs().sum())
    assert result.bits_per_byte_before == pytest.approx(ratio * result.valid_bits_per_byte) and result.steps == 4
    said = capsys.readouterr().err
    assert ("keeping the start" in said) == (best == 0) and ("keeping it" in said) == (best == 2)


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ([1.0] * 20, [1.1] * 20, "yes"),
        ([1.0] * 20, [0.5, 1.6] * 10, "uncertain"),
        ([1.0, 2.0], [1.5, 2.5], "uncertain"),
        ([1.0] * 20, [0.9] * 20, None),
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], None),
    ],
)
def test_a_result_worse_than_its_start_says_so(
    batches: PackedSequences,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: list[float],
    after: list[float],
    worse: str | None,
) -> None:
    """The selection split prefers the last step whatever the report split says."""
    scores = iter([TextScore(sum(nats), len(nats), len(nats), tuple(nats)) for nats in (before, after)])
    validation = Validation(scripted([5, 4, 3, 2, 1], []), lambda _model, _tokens: next(scores), keep_start=True)
    result = train_model(fresh(), batches, language_model_loss, CONFIG, tmp_path, validation=validation)
    assert result.worse_than_start == worse
    found = dataclasses.asdict(result) | {"out": tmp_path, "bits_per_byte_before_recovery": 1.0}
    cache = {"kv_cache_bytes_per_token": {"fp32": 1}, "kv_cache_bytes_per_token_before": {"fp32": 1}}
    print(TrainingResult.of(found).line())
    prune._print_result(prune.PruneResult.of(found | cache))
    quantize._print(quantize.QuantizeResult.of(found))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("worse than the start") == (0 if worse is None else 3)
    assert said.count("uncertain") == (3 if worse == "uncertain" else 0)


def test_a_start_without_a_score_is_refused(
    batches: PackedSequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step would be better than nan, and the first process's score decides: all keep the weights of one step."""
    validation = Validation(scripted([math.nan, 1], []), reported, keep_start=True)
    for first in (str, lambda _own: "nan"):
        monkeypatch.setattr(processes, "from_first", first)
        with pytest.raises(ArtifactError, match="logits are not finite"):
            train_model(fresh(), batches, language_model_loss, CONFIG, tmp_path, validation=validation)


def test_a_run_that_diverges_keeps_the_best_so_far(batches: PackedSequences, tmp_path: Path) -> None:
    validation = Validation(scripted([3, 1, 2], seen := []), reported, keep_start=True)
    result = train_model(model := fresh(), batches, diverging_at(3), CONFIG, tmp_path, validation=validation)
    assert (result.steps, result.best_step) == (2, 1) and torch.equal(weights(model), seen[1])
    with pytest.raises(DivergedError):
        train_model(fresh(), batches, diverging_at(3), CONFIG, tmp_path)


def test_a_first_step_that_diverges_is_an_error_and_not_taken(batches: PackedSequences, tmp_path: Path) -> None:
    """Else the start would be called the result of a run that has done nothing."""
    model, validation = fresh(), Validation(scripted([3], []), reported, keep_start=True)
    with pytest.raises(DivergedError, match="step 1: the loss of batch 0 is nan"):
        train_model(model, batches, diverging_at(1), CONFIG, tmp_path, validation=validation)
    assert torch.equal(weights(model), weights(fresh()))


def test_the_best_step_survives_an_interrupt(batches: PackedSequences, tmp_path: Path) -> None:
    validation = Validation(scripted([3, 1, 2, 4, 5], seen := []), reported, keep_start=True)
    with pytest.raises(InterruptedRun):
        train_model(fresh(), batches, interrupted_at(3), CONFIG, tmp_path, validation=validation)
    other = fresh()
    result = train_model(other, batches, language_model_loss, CONFIG, tmp_path, validation=validation, resume=True)
    assert result.best_step == 1 and torch.equal(weights(other), seen[1]) and len(seen) == 5


LONG = TrainConfig(
    steps=400, batch_size=2, accumulation=1, sequence=32, learning_rate=1e-3, warmup=20, precision="fp32", log_every=50
)


@pytest.mark.parametrize(("scores", "wanted"), [([1, 2], 1), ([2, 1, 3], 1 / 3), ([4, 3, 2, 1], 1 / 27)])
def test_rates_fall_as_long_as_that_is_better(
    batches: PackedSequences, tmp_path: Path, scores: list[float], wanted: float
) -> None:
    before, moved = weights(model := fresh()).clone(), list[float]()

    def selection(network: SportsLLM) -> float:
        moved.append(float((weights(network) - before).norm()))
        return scores[len(moved) - 1]

    chosen = choose_rates(model, batches, language_model_loss, LONG, tmp_path, selection)
    assert chosen.learning_rate == pytest.approx(1e-3 * wanted)
    assert chosen.muon_learning_rate == pytest.approx(0.02 * wanted)
    assert dataclasses.replace(chosen, learning_rate=1e-3, muon_learning_rate=0.02) == LONG
    assert moved == sorted(set(moved), reverse=True) and len(moved) == len(scores)
    assert torch.equal(weights(model), before)
    assert len(json.loads((tmp_path / RATES).read_text(encoding="utf-8"))) == len(scores)

    again = choose_rates(model, batches, language_model_loss, LONG, tmp_path, selection)
    assert again == chosen and len(moved) == len(scores), "a resumed run reads the choice"


@pytest.mark.parametrize(("broken", "wanted"), [([2], 1 / 3), ([2, 4], 1 / 9), ([2, 4, 6, 8], 1)])
def test_a_trial_that_diverges_loses_and_leaves_no_gradient(
    batches: PackedSequences, tmp_path: Path, broken: list[int], wanted: float
) -> None:
    model, config = fresh(), dataclasses.replace(LONG, accumulation=2)  # the first of two batches has left gradients
    chosen = choose_rates(model, batches, diverging_at(*broken), config, tmp_path, lambda _model: 1.0)
    assert chosen.learning_rate == pytest.approx(1e-3 * wanted)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_short_runs_keep_their_rates(batches: PackedSequences, tmp_path: Path) -> None:
    config = dataclasses.replace(LONG, steps=399)
    assert choose_rates(fresh(), batches, language_model_loss, config, tmp_path, lambda _model: 0.0) is config
    assert not (tmp_path / RATES).exists()


@pytest.mark.parametrize(("accumulation", "wanted"), [(4, 2), (1, 1)])
def test_a_trial_accumulates_what_leaves_ten_steps(
    batches: PackedSequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, wanted: int
) -> None:
    seen, folders = list[TrainConfig](), set[Path]()

    def noted(*given: Any, **_names: Any) -> None:
        seen.append(given[3])
        folders.add(given[4].parent)

    monkeypatch.setattr(rate_trial, "train_model", noted)
    config = dataclasses.replace(LONG, steps=800 // accumulation, accumulation=accumulation)
    choose_rates(fresh(), batches, language_model_loss, config, tmp_path, lambda _model: 0.0)
    assert {(trial.accumulation, trial.steps) for trial in seen} == {(wanted, 20 // wanted)}
    assert folders == {tmp_path}, "a state that a trial saves is where the run's own would be, not in memory"


def test_an_interrupt_leaves_nothing_to_resume(batches: PackedSequences, tmp_path: Path) -> None:
    """The short run's state is gone, so that it must not be named."""
    with pytest.raises(KeyboardInterrupt):
        choose_rates(fresh(), batches, interrupted_at(1), LONG, tmp_path, lambda _model: 0.0)
    assert not list(tmp_path.iterdir())
