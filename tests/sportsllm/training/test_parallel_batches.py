"""Trainings that must equal the plain one: batches side by side, and optimizer states of 16 and 8 bits."""

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
from sportsllm.training.optimizers import Bfloat16AdamW, build_optimizers
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import RunState
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


def _config(bits: int, optimizer: str = "adamw", **changes: object) -> TrainConfig:
    base = {"steps": 40, "batch_size": 2, "accumulation": 2, "sequence": 64, "learning_rate": 3e-3, "warmup": 4}
    return TrainConfig(**{**base, "optimizer": optimizer, "optimizer_bits": bits, "precision": "fp32", **changes})


def test_the_first_step_is_torchs_and_later_ones_differ_by_rounding() -> None:
    """The first step reads no rounded state. Later, 2**-9 of each moment, in either direction, partly cancels."""
    torch.manual_seed(0)
    start = torch.randn(40, 30)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = Bfloat16AdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for number in range(50):
        gradient = torch.randn(40, 30) + 0.5
        ours.grad, theirs.grad = gradient, gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        if number == 0:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # the same sums in another order
    assert (ours - theirs).norm() < 0.01 * (theirs - start).norm()


@pytest.mark.parametrize(("optimizer", "few_bits"), [("adamw", (16, 8)), ("muon", (16,))])
def test_a_model_learns_as_well(
    optimizer: str, few_bits: tuple[int, ...], batches: PackedSequences, tmp_path: Path
) -> None:
    """The loss after 30 steps is that of 32 bits within 1%; it falls by a third of its start on the way."""
    losses = {}
    for bits in (32, *few_bits):
        (tmp_path / str(bits)).mkdir()
        config = _config(bits, optimizer, muon_learning_rate=0.01, steps=30)
        losses[bits] = train_model(fresh(), batches, language_model_loss, config, tmp_path / str(bits)).loss
    assert losses[32] is not None and losses[32] < 5
    for bits in few_bits:
        assert losses[bits] == pytest.approx(losses[32], rel=0.01) and losses[bits] != losses[32]


@pytest.mark.parametrize(("bits", "optimizer"), [(16, "adamw"), (16, "muon"), (8, "adamw")])
def test_a_run_goes_on_bit_for_bit(bits: int, optimizer: str, batches: PackedSequences, tmp_path: Path) -> None:
    config = _config(bits, optimizer, steps=6, warmup=0, schedule="wsd")
    whole, halves = fresh(), fresh()
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    train_model(whole, batches, language_model_loss, config, tmp_path / "whole")
    optimizers = build_optimizers(halves, config)
    state = RunState(tmp_path / "halves", halves, optimizers, torch.amp.GradScaler("cpu", enabled=False), "", config)
    _three_steps(halves, optimizers, batches)
    state.step = 3
    state.save()
    resumed = fresh()
    train_model(resumed, batches, language_model_loss, config, tmp_path / "halves", resume=True)
    assert torch.equal(weights(resumed), weights(whole))


def _three_steps(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], batches: PackedSequences) -> None:
    """The first half of the run, by hand."""
    model.train()
    for step in range(3):
        chosen = [batches.batch(2 * step + i) for i in range(2)]
        scored = sum(int((batch.targets != -100).sum()) for batch in chosen)
        for batch in chosen:
            (language_model_loss(model, batch) / scored).backward()  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def test_gradients_have_16_bits_with_loss_scaling_and_side_by_side(batches: PackedSequences, tmp_path: Path) -> None:
    for number, changes in enumerate(({"precision": "fp16"}, {"parallel_batches": 2})):
        model = fresh()
        before = weights(model).clone()
        (tmp_path / str(number)).mkdir()
        train_model(
            model, batches, language_model_loss, _config(16, steps=2, warmup=0, **changes), tmp_path / str(number)
        )
        assert torch.isfinite(weights(model)).all() and not torch.equal(weights(model), before)
        assert all(parameter.grad_dtype == torch.bfloat16 for parameter in model.parameters())
    build_optimizers(model, TrainConfig())  # the next training of the same model is an ordinary one
    assert all(parameter.grad_dtype == torch.float32 for parameter in model.parameters())
