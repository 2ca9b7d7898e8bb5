"""Optimizer states of 16 and 8 bits against the plain ones."""

from pathlib import Path

import pytest
import torch

from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.optimizers import Bfloat16AdamW, build_optimizers
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import RunState
from tests.support.models import fresh, weights


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


def test_gradients_have_16_bits_with_loss_scaling(batches: PackedSequences, tmp_path: Path) -> None:
    model = fresh()
    before = weights(model).clone()
    train_model(model, batches, language_model_loss, _config(16, steps=2, warmup=0, precision="fp16"), tmp_path)
    assert torch.isfinite(weights(model)).all() and not torch.equal(weights(model), before)
    assert all(parameter.grad_dtype == torch.bfloat16 for parameter in model.parameters())
    build_optimizers(model, TrainConfig())  # the next training of the same model is an ordinary one
    assert all(parameter.grad_dtype == torch.float32 for parameter in model.parameters())
