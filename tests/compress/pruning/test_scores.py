"""Importance: distances of layers against a loop over tokens, selection by output against brute force."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.pruning.greedy import pick_order
from compress.pruning.scores import load_scores, measure_scores, save_scores
from sportsllm.models.config import Experts
from tests.support.calibration import inputs_of, random_scores, random_tokens
from tests.support.models import tiny_model


def test_distances_of_layers_equal_a_loop_over_tokens() -> None:
    """The formula written out token by token, in float64, from the model's own residual stream."""
    model, samples = tiny_model(), random_tokens(3, 20)
    states = inputs_of(model, ["model.layers.1", "model.norm"], samples)
    cosines = [float(x @ y / (x.norm() * y.norm())) for x, y in zip(*states.values(), strict=True)]
    found = float(measure_scores(model, samples).layer_distance[1, 2])
    assert found == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)


def test_scores_of_a_mixture_keep_every_experts_neurons(tmp_path: Path) -> None:
    """Layer 0 has neurons of its own, the others those of each expert."""
    model = tiny_model(
        num_hidden_layers=3, mlp_kind="experts", experts=Experts(3, 2), dense_layers=1, dense_intermediate_size=128
    )
    scores = random_scores(model, [torch.arange(8)[None]])
    neurons = {key: len(score) for key, score in scores.units.items() if key[0] in ("neuron", "neuron of experts.2")}
    assert neurons == {("neuron", 0): 128, ("neuron of experts.2", 1): 96, ("neuron of experts.2", 2): 96}
    save_scores(tmp_path, scores)
    found = load_scores(tmp_path, model.config)
    assert found.units.keys() == scores.units.keys()
    assert all(torch.equal(found.units[key], score) for key, score in scores.units.items())


def problem(units: int) -> tuple[Tensor, Tensor]:
    """Correlated inputs, (N, U), and a matrix that reads them, (O, U)."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(units, units, generator=generator, dtype=torch.float64)
    inputs = torch.randn(400, units, generator=generator, dtype=torch.float64) @ mixing
    return inputs, torch.randn(5, units, generator=generator, dtype=torch.float64)


def assert_greedy(scores: Tensor, inputs: Tensor, weight: Tensor, size: int, steps: int) -> None:
    """By brute force: each of the first picks leaves the least error when the picked inputs are refitted."""
    order, outputs = scores.argsort(descending=True).tolist(), inputs @ weight.T
    assert sorted(order) == [*range(weight.shape[1] // size)]

    def error(units: Sequence[int]) -> float:
        kept = inputs[:, [unit * size + place for unit in units for place in range(size)]]
        return float((outputs - kept @ torch.linalg.lstsq(kept, outputs).solution).square().sum())

    for step in range(steps):
        errors = {unit: error([*order[:step], unit]) for unit in order[step:]}
        # The ridge is 1e-6 of an input's mean square: it may decide between errors that near.
        assert errors[order[step]] <= min(errors.values()) * (1 + 1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_every_pick_is_the_one_that_helps_most(size: int) -> None:
    inputs, weight = problem(12)
    # The last pick is the only one left, and before it errors fall to rounding.
    assert_greedy(pick_order(inputs.T @ inputs, weight, size), inputs, weight, size, 12 // size - 2)


def test_many_units_are_picked_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = problem(12)
    one_by_one = pick_order(inputs.T @ inputs, weight, 1)
    monkeypatch.setattr("compress.pruning.greedy._PENDING", 3)  # the whole matrix is brought up to date now and then
    assert torch.equal(pick_order(inputs.T @ inputs, weight, 1), one_by_one)
    monkeypatch.setattr("compress.pruning.greedy._STEPS", 4)
    together = pick_order(inputs.T @ inputs, weight, 1)
    assert sorted(together.tolist()) == sorted(one_by_one.tolist()) == [float(n) for n in range(1, 13)]
    assert together.argmax() == one_by_one.argmax()


@pytest.mark.parametrize(
    ("name", "matrix", "size"), [("neuron", "mlp.down_proj", 1), ("query_head", "self_attn.o_proj", 16)]
)
def test_a_models_units_are_picked_as_brute_force_picks_them(name: str, matrix: str, size: int) -> None:
    """The first picks of the second layer, from the inputs and the matrix that the model itself has there."""
    model, samples, matrix = tiny_model(intermediate_size=16), random_tokens(4, 48), f"model.layers.1.{matrix}"
    inputs, weight = inputs_of(model, [matrix], samples)[matrix], model.get_submodule(matrix).weight.detach().double()
    assert_greedy(measure_scores(model, samples).units[name, 1], inputs, weight, size, 3)
