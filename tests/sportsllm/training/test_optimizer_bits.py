"""Optimizer states of 8 bits against the plain ones."""

from pathlib import Path

import pytest
import torch

from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.optimizers import build_optimizers
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import RunState
from tests.support.models import fresh, weights


def _config(bits: int, **changes: object) -> TrainConfig:
    base = {"steps": 40, "batch_size": 2, "accumulation": 2, "sequence": 64, "learning_rate": 3e-3, "warmup": 4}
    return TrainConfig(**{**base, "optimizer": "adamw", "optimizer_bits": bits, "precision": "fp32", **changes})


def test_a_model_learns_as_well(batches: PackedSequences, tmp_path: Path) -> None:
    """The loss after 30 steps is that of 32 bits within 1%; it falls by a third of its start on the way."""
    losses = {}
    for bits in (32, 8):
        (tmp_path / str(bits)).mkdir()
        config = _config(bits, steps=30, accumulation=1)
        losses[bits] = train_model(fresh(), batches, language_model_loss, config, tmp_path / str(bits)).loss
    assert losses[32] is not None and losses[32] < 5
    assert losses[8] == pytest.approx(losses[32], rel=0.01) and losses[8] != losses[32]


def test_a_run_goes_on_bit_for_bit(batches: PackedSequences, tmp_path: Path) -> None:
    config = _config(8, steps=6, warmup=0, schedule="wsd")
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
