"""Hidden-state matching against plain float64 code and autograd."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.distillation.loss import HiddenMatching, attached, default_layer_map, hidden_matching_loss
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import IGNORE, Batch, PackedSequences
from sportsllm.text.tokens import TokenizedDocuments
from sportsllm.training.optimizers import build_optimizers
from sportsllm.training.settings import TrainConfig
from tests.sportsllm.training.test_processes import same_run
from tests.support.forked import forked
from tests.support.models import TINY_VOCAB, saved, tiny_config, tiny_model

# Sums of ~1,000 float32 terms, each right to 6e-8 of its size.
LOSS_RTOL, GRADIENT_ATOL = 1e-5, 1e-5


def naive_hidden(student: Tensor, teacher: Tensor, targets: Tensor, projection: Tensor | None = None) -> Tensor:
    student, teacher = student.flatten(0, -2).double(), teacher.flatten(0, -2).double()
    predicted = student if projection is None else student @ projection.double().T
    errors = (predicted - teacher).square().mean(-1) / teacher.square().mean(-1)
    return errors[targets.flatten() != IGNORE].sum()


@pytest.mark.parametrize("projected", [True, False])
def test_hidden_states_equal_float64(projected: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (37, 8), (37, 12 if projected else 8), (12, 8)
    student, teacher, projection = (torch.randn(shape, generator=draw) for shape in shapes)
    teacher[5] *= 1000.0  # a massive token counts like any other
    targets = torch.zeros(37, dtype=torch.int64)
    targets[[0, 18, 36]] = IGNORE
    inputs = [student, projection] if projected else [student]
    given, exact = (
        [one.to(dtype, copy=True).requires_grad_() for one in inputs] for dtype in (torch.float32, torch.float64)
    )
    ours = hidden_matching_loss(given[0], teacher, targets, *given[1:])
    wanted = naive_hidden(exact[0], teacher, targets, *exact[1:])
    torch.testing.assert_close(ours.double(), wanted, rtol=LOSS_RTOL, atol=1e-7)
    gradients = torch.autograd.grad(ours * 3, given), torch.autograd.grad(wanted * 3, exact)
    for gradient, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 100 * GRADIENT_ATOL
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=GRADIENT_ATOL)


def batch_of(length: int = 16) -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 20, 40)
    ids = rng.integers(3, TINY_VOCAB, int(lengths.sum())).astype(np.uint32)
    return PackedSequences(TokenizedDocuments(ids, np.cumsum(lengths), 4 * len(ids)), length, 2, 0).batch(0)


def states_of(model: SportsLLM, batch: Batch) -> list[Tensor]:
    states: list[Tensor] = []
    model.hidden(batch.tokens, batch.documents, states=states)
    return states


@pytest.mark.parametrize("length", [256, 16])  # 16 are fewer tokens than channels
def test_fitted_projections_have_no_gradient_left(length: int) -> None:
    """The loss is quadratic in a projection, so that its minimum is where the gradient is 0, but for the ridge."""
    teacher = tiny_model(seed=1, num_hidden_layers=4)
    student = tiny_model(hidden_size=48, num_key_value_heads=1, dropout=0.3)
    batch = batch_of(length)
    module = HiddenMatching(student.config, teacher.config, default_layer_map(2, 4))
    with torch.inference_mode():
        states, wanted = ([s.clone() for s in states_of(model, batch)] for model in (student, teacher))

    def gradients() -> list[float]:
        losses = module([s.clone() for s in states], [s.clone() for s in wanted], batch.targets)
        return [float(g.norm()) for g in torch.autograd.grad(losses, list(module.projections))]

    before = gradients()
    module.fit(student.train(), teacher, batch)
    assert all(after < 0.02 * first for after, first in zip(gradients(), before, strict=True))
    assert all(float(matrix.detach().norm()) < 50 for matrix in module.projections)  # 120 to 350 without the ridge


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_reaches_every_matrix_of_the_student(checkpointed: bool) -> None:
    teacher, student = tiny_model(seed=1, num_hidden_layers=4), tiny_model(hidden_size=48, num_key_value_heads=1)
    student.train().checkpoint_activations = checkpointed
    batch = batch_of()
    with torch.inference_mode():
        teacher_states = states_of(teacher, batch)
    layers = default_layer_map(2, 4)
    module = HiddenMatching(student.config, teacher.config, layers)
    assert layers == ((0, 0), (1, 2), (2, 4)) and len(module.projections) == 3
    assert default_layer_map(3, 4) == ((0, 0), (1, 1), (2, 3), (3, 4))

    def gradients(naive: bool) -> tuple[Tensor, dict[str, Tensor]]:
        states = states_of(student, batch)
        if naive:
            pairs = zip(layers, module.projections, strict=True)
            losses = [naive_hidden(states[s], teacher_states[t], batch.targets, p) for (s, t), p in pairs]
            loss = torch.stack(losses).mean()
        else:
            loss = module(states, teacher_states, batch.targets)
        loss.backward()
        named = {**dict(student.named_parameters()), **dict(module.named_parameters())}
        found = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        for parameter in named.values():
            parameter.grad = None
        return loss.detach().double(), found

    ours, exact = gradients(False), gradients(True)
    torch.testing.assert_close(ours[0], exact[0], rtol=LOSS_RTOL, atol=0)
    assert ours[1].keys() == exact[1].keys()
    assert {"projections.2", "model.layers.1.self_attn.k_proj.weight"} < ours[1].keys()
    for name, gradient in ours[1].items():
        # Two ways through the same float32 model: rounding of some 1e-6 of the largest entry, passed on by its layers.
        scale = float(exact[1][name].abs().max())
        torch.testing.assert_close(gradient, exact[1][name], rtol=0, atol=2e-5 * scale)


def test_projections_are_learned_only_where_sizes_differ() -> None:
    config, layers = tiny_config(), default_layer_map(2, 2)
    assert not list(HiddenMatching(config, config, layers).parameters())
    wider = HiddenMatching(config, tiny_config(hidden_size=96), layers, seed=7)
    for matrix in wider.projections:
        # Orthogonal columns: lengths are kept but for float32's rounding.
        torch.testing.assert_close(matrix.T @ matrix, torch.eye(64), rtol=0, atol=1e-5)
    again = HiddenMatching(config, tiny_config(hidden_size=96), layers, seed=7)
    assert torch.equal(again.projections[2], wider.projections[2])


def test_adamw_trains_the_projections_and_the_student_keeps_none() -> None:
    student = tiny_model(hidden_size=32)
    names, module = set(student.state_dict()), HiddenMatching(student.config, tiny_config(), default_layer_map(2, 2))
    with attached(student, module):
        adamw = build_optimizers(student, TrainConfig(optimizer="muon"))[0]
        taken = {id(parameter) for group in adamw.param_groups for parameter in group["params"]}
        assert {id(projection) for projection in module.projections} < taken
    assert set(student.state_dict()) == names and not hasattr(student, "matching")


@pytest.mark.slow
def test_two_processes_match_the_states_that_one_does(
    checkpoint: Path, tokenizer_directory: Path, corpus_file: Path, tmp_path: Path
) -> None:
    """With parts of teacher, student and projections; the second is killed. Gradients' sums have another order."""
    student = saved(tmp_path / "student", tiny_model(seed=5, hidden_size=32), tokenizer_directory)
    words = ["distill", "--teacher", checkpoint, "--student", student, "--corpus", corpus_file, "--steps", 4]
    words += ["--batch-size", 2, "--sequence", 32, "--learning-rate", 1e-3, "--set", "hidden_weight=1"]
    words += ["--set", "precision=fp32", "--set", "log_every=1", "--set", "shard=true"]
    for name, rounds in (("one", "1"), ("two", "2:2,1")):
        said = forked(rounds, *map(str, words), "--out", str(tmp_path / name))
    assert "resumed at step 2 of 4" in said
    same_run(tmp_path / "two", tmp_path / "one", 4, 1e-5)
