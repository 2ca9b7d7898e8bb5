import dataclasses
import math
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sportsllm.errors import InterruptedRun
from sportsllm.files import read_json_lines
from sportsllm.inference.scoring import TextScore
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import preset
from sportsllm.text.packing import IGNORE, PackedSequences
from sportsllm.training.loop import METRICS, language_model_loss, train_model
from sportsllm.training.optimizers import Muon, build_optimizers, newton_schulz, rate_factor
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import Validation
from tests.support.models import fresh, tiny_config, weights
from tests.support.training import interrupted_at

CONFIG = TrainConfig(
    steps=6, batch_size=2, accumulation=2, sequence=32, learning_rate=1e-3, warmup=2, log_every=3, precision="fp32"
)
EXPERTS = preset("tiny-experts").with_changes(num_hidden_layers=2)


@pytest.mark.parametrize(
    ("number", "changes"),
    [(signal.SIGINT, {}), (signal.SIGTERM, {"optimizer": "muon"}), (signal.SIGINT, {"optimizer_bits": 8})],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    batches: PackedSequences, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, number: signal.Signals
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    whole, half = fresh(dropout=0.1), fresh(dropout=0.1).eval()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train_model(whole, batches, language_model_loss, config, tmp_path / "a")

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(InterruptedRun, match="after step 3 of 6"):
        train_model(half, batches, interrupted_at(6, number), config, tmp_path / "b")
    result = train_model(other := fresh(dropout=0.1), batches, language_model_loss, config, tmp_path / "b", resume=True)
    assert result.steps == 6 and result.tokens == 6 * 128
    assert "resumed at step 3 of 6" in capsys.readouterr().err and torch.equal(weights(other), weights(whole))
    first, second = ([record for _, record in read_json_lines(tmp_path / name / METRICS)] for name in "ab")
    assert [(m["step"], m["loss"]) for m in first] == [(m["step"], m["loss"]) for m in second]


def test_training_learns_and_reports(batches: PackedSequences, tmp_path: Path) -> None:
    model = fresh()
    config = TrainConfig(steps=30, batch_size=2, accumulation=1, sequence=32, learning_rate=3e-3, warmup=3, log_every=5)
    seen = []
    validation = Validation(lambda m: seen.append(m) or 1.5, lambda *_: TextScore(1.25 * math.log(2), 1, 1))
    result = train_model(model, batches, language_model_loss, config, tmp_path, validation=validation)
    metrics = [m for _, m in read_json_lines(tmp_path / METRICS) if "loss" in m]
    assert metrics[-1]["loss"] < 0.9 * math.log(384) < 0.95 * metrics[0]["loss"]
    assert result.valid_bits_per_byte == pytest.approx(1.25)
    assert result.best_step == 30 and len(seen) == 1, "a fresh start is not scored"
    assert result.loss == metrics[-1]["loss"]


def test_accumulation_equals_one_large_batch(batches: PackedSequences, tmp_path: Path) -> None:
    pairs = ([PackedSequences(batches._documents, 32, size, seed) for size in (2, 4)] for seed in range(99))
    small, large = next(pair for pair in pairs if (pair[1].batch(0).targets == IGNORE).any())  # a document ends
    results, short = [], dataclasses.replace(CONFIG, steps=3, warmup=50, log_every=1)
    for data, size, accumulation in ((small, 2, 2), (large, 4, 1)):
        model, config = fresh(), dataclasses.replace(short, batch_size=size, accumulation=accumulation)
        train_model(model, data, language_model_loss, config, tmp_path)
        results.append(weights(model))
    # Adam divides by the root of a tiny second moment, so rounding shows at about 1e-4 of the rate.
    assert torch.allclose(*results, atol=1e-6)
    losses, chosen = [record["loss"] for _, record in read_json_lines(tmp_path / METRICS)], small.step(0, 2)
    scored = sum(int((batch.targets != IGNORE).sum()) for batch in chosen)
    nats = sum(float(language_model_loss(fresh(), batch).detach()) for batch in chosen)
    assert losses[0] == pytest.approx(nats / scored)


def test_gradients_are_clipped(batches: PackedSequences, tmp_path: Path) -> None:
    """To a norm beside which Adam's epsilon, 1e-8, leaves no step; float16's without the scale of its loss."""
    for precision in ("fp32", "fp16"):
        config = dataclasses.replace(CONFIG, clip_norm=1e-12, weight_decay=0.0, precision=precision)
        train_model(model := fresh(), batches, language_model_loss, config, tmp_path)
        assert torch.allclose(weights(model), weights(fresh()), atol=1e-6)
    norms = [record["grad_norm"] for _, record in read_json_lines(tmp_path / METRICS)]
    assert norms[2:] == pytest.approx(norms[:2], rel=0.01)


def test_a_float16_step_that_overflows_is_not_taken(batches: PackedSequences, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=1, precision="fp16", optimizer="muon")  # and AdamW, whose overflows
    (model := fresh()).model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    train_model(model, batches, language_model_loss, config, tmp_path)
    assert torch.equal(weights(model), weights(fresh()))


def test_a_model_learns_as_well_with_states_of_8_bits(batches: PackedSequences, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=30, accumulation=1, learning_rate=3e-3, warmup=4, log_every=10)
    plain, small = (
        train_model(fresh(), batches, language_model_loss, dataclasses.replace(config, optimizer_bits=bits), tmp_path)
        for bits in (32, 8)
    )
    assert plain.loss is not None and plain.loss < 5
    assert small.loss == pytest.approx(plain.loss, rel=0.01) and small.loss != plain.loss


def test_auxiliary_loss_of_the_model_is_trained(batches: PackedSequences, tmp_path: Path) -> None:
    class WithBalance(SportsLLM):
        def auxiliary_loss(self) -> torch.Tensor:
            return 100.0 * self.model.norm.weight.square().mean()

    model = WithBalance(tiny_config())
    model.initialize(0)
    for network in (model, plain := fresh()):
        (folder := tmp_path / type(network).__name__).mkdir()
        train_model(network, batches, language_model_loss, dataclasses.replace(CONFIG, log_every=1), folder)
    without, with_it = (next(read_json_lines(folder / METRICS))[1]["loss"] for folder in sorted(tmp_path.iterdir()))
    assert with_it - without == pytest.approx(100.0), "once a step"
    assert model.model.norm.weight.mean() < plain.model.norm.weight.mean()


def test_schedules() -> None:
    cosine = partial(rate_factor, TrainConfig(schedule="cosine", steps=110, warmup=10))
    assert cosine(0) == pytest.approx(0.1) and cosine(9) == 1.0
    assert cosine(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine(110) == pytest.approx(0.1)
    wsd = partial(rate_factor, TrainConfig(schedule="wsd", steps=100, warmup=10, decay_fraction=0.2))
    assert wsd(10) == wsd(80) == 1.0
    assert wsd(90) == pytest.approx(0.55) and wsd(100) == pytest.approx(0.1)


@pytest.mark.parametrize(("config", "routers"), [(tiny_config(tie_word_embeddings=False), 0), (EXPERTS, 2)])
def test_muon_takes_the_hidden_matrices_without_routers(config: ModelConfig, routers: int) -> None:
    model = SportsLLM(config)
    adamw, muon = build_optimizers(model, TrainConfig(optimizer="muon"))
    names = {id(p): name for name, p in model.named_parameters()}
    taken, rest = ({names[id(p)] for g in each.param_groups for p in g["params"]} for each in (muon, adamw))
    gates = {name for name in names.values() if name.endswith("mlp.gate.weight")}
    hidden = {name for name, p in model.named_parameters() if p.ndim > 1 and ".layers." in name}
    assert taken == hidden - gates and rest == set(names.values()) - taken and len(gates) == routers
    groups = [group for each in (adamw, muon) for group in each.param_groups]
    assert {(p.ndim > 1, g["weight_decay"]) for g in groups for p in g["params"]} == {(True, 0.1), (False, 0.0)}
    assert [group["peak_lr"] for group in groups] == [3e-4, 3e-4, 0.02]
    assert all(group["betas"] == (0.9, 0.95) for group in adamw.param_groups)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [((24, 16), {}), ((16, 24), {}), ((16, 16), {"muon_nesterov": False}), ((16, 24), {"muon_momentum": 0.8})],
)
def test_muon_takes_the_steps_of_torchs_own(shape: tuple[int, int], changes: dict[str, Any]) -> None:
    """Same state and update; torch's iteration runs in bfloat16, whose rounding (2**-9) grows over five steps."""
    torch.manual_seed(0)
    config = TrainConfig(optimizer="muon", **changes)
    start = [torch.randn(shape), torch.randn(shape)]
    ours = [torch.nn.Parameter(value.clone()) for value in start]
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    twin = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="original", momentum=config.muon_momentum,
        nesterov=config.muon_nesterov, ns_steps=5, ns_coefficients=(3.4445, -4.7750, 2.0315),
    )  # fmt: skip
    optimizers = [Muon(ours, config), twin]
    for _ in range(3):
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = torch.randn(shape)
            other.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for value, parameter, other in zip(start, ours, theirs, strict=True):
        moved, expected = parameter - value, other - value
        assert (moved - expected).norm() < 0.02 * expected.norm()
    assert optimizers[0].state_dict()["state"].keys() == optimizers[1].state_dict()["state"].keys()


def test_newton_schulz_equals_a_float64_loop_and_flattens_the_spectrum() -> None:
    matrices = torch.randn(3, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(matrices.float(), (3.4445, -4.775, 2.0315), 5, 1e-7)
    for matrix, found in zip(matrices, result, strict=True):
        u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(5):  # on the singular values alone: the polynomial keeps the singular vectors
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        torch.testing.assert_close(found.double(), u @ torch.diag(s) @ v, atol=1e-4, rtol=0)
        assert float(s.min()) > 0.6 and float(s.max()) < 1.3
