"""Batches of one step computed side by side: the same training as one after another."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sportsllm.errors import DivergedError, UsageError
from sportsllm.models.language_model import SportsLLM
from sportsllm.processors import batch_threads
from sportsllm.text.packing import Batch, PackedSequences
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.settings import TrainConfig
from tests.support.models import fresh, weights

CONFIG = TrainConfig(
    steps=4, batch_size=2, accumulation=3, sequence=32, learning_rate=1e-3, warmup=2, optimizer="muon", precision="fp32"
)


@pytest.fixture(autouse=True)
def kept_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("parallel", [2, 3])
def test_trains_bit_for_bit_as_one_batch_after_another(batches: PackedSequences, tmp_path: Path, parallel: int) -> None:
    torch.set_num_threads(1)  # a product's rounding may depend on its threads
    trained = []
    for name, count in (("one", 1), ("parallel", parallel)):
        model = fresh()
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)  # what is frozen stays
        (tmp_path / name).mkdir()
        config = dataclasses.replace(CONFIG, parallel_batches=count)
        result = train_model(model, batches, language_model_loss, config, tmp_path / name)
        trained.append((weights(model), result.loss))
    assert torch.equal(trained[0][0], trained[1][0])
    assert trained[0][1] == trained[1][1]


def test_a_batch_that_is_not_finite_is_named_and_the_step_not_taken(batches: PackedSequences, tmp_path: Path) -> None:
    model = fresh()
    before = weights(model).clone()

    def broken(model: SportsLLM, batch: Batch) -> torch.Tensor:
        return language_model_loss(model, batch) * (float("nan") if batch.index == 1 else 1.0)

    config = dataclasses.replace(CONFIG, parallel_batches=2)
    with pytest.raises(DivergedError, match=r"step 1: the loss of batch 1 is nan; the step was not taken"):
        train_model(model, batches, broken, config, tmp_path)
    assert torch.equal(weights(model), before)


def test_each_thread_gets_its_share_and_the_caller_keeps_all() -> None:
    torch.set_num_threads(4)
    with batch_threads(2) as pool:
        assert pool is not None
        assert list(pool.map(lambda _: torch.get_num_threads(), range(6))) == [2] * 6
        assert torch.get_num_threads() == 4
    with batch_threads(1) as none:
        assert none is None
    assert torch.get_num_threads() == 4


def test_refused_if_it_would_change_the_training(batches: PackedSequences, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="parallel_batches is 4, the batches of a step are 3"):
        dataclasses.replace(CONFIG, parallel_batches=4)
    with pytest.raises(UsageError, match="parallel_batches=0: must be at least 1"):
        dataclasses.replace(CONFIG, parallel_batches=0)
    config = dataclasses.replace(CONFIG, parallel_batches=2)
    for model, message in ((fresh(dropout=0.1), "dropout"), (fresh().to("meta"), "for a CPU, the model is on meta")):
        with pytest.raises(UsageError, match=message):
            train_model(model, batches, language_model_loss, config, tmp_path)


def test_blocks_with_a_loss_of_their_own_are_refused(batches: PackedSequences, tmp_path: Path) -> None:
    model = fresh()
    model.model.layers[0].auxiliary_loss = torch.ones(())
    with pytest.raises(UsageError, match="blocks add losses of their own"):
        train_model(model, batches, language_model_loss, dataclasses.replace(CONFIG, parallel_batches=2), tmp_path)
