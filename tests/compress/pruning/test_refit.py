"""Closed-form repair after a cut."""

import pytest
import torch

from compress.pruning.kept_units import choose_units
from compress.pruning.refit import refit_layers
from compress.pruning.scores import importance_scores
from compress.pruning.shapes import Shape
from compress.pruning.slicing import slice_model
from sportsllm.models.language_model import SportsLLM
from tests.support.models import tiny_model


def samples(count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 384, (2, 60), generator=g) for _ in range(count)]


def distance(first: SportsLLM, second: SportsLLM, tokens: torch.Tensor) -> float:
    """Mean squared difference of the logits, as a share of their size."""
    with torch.inference_mode():
        a, b = first(tokens), second(tokens)
    return float((a - b).square().mean() / b.square().mean())


def test_a_model_that_lost_nothing_stays_as_it_is() -> None:
    model = tiny_model(attention_bias=True, mlp_bias=True, qk_norm=False)
    kept = choose_units(model.config, importance_scores(model, samples()), Shape.of(model.config))
    same = slice_model(model, kept)
    refit_layers(same, model, kept, samples())
    assert distance(same, model, samples(1, seed=9)[0]) < 1e-8  # squares of float32 rounding


def test_down_proj_is_the_least_squares_solution() -> None:
    """One layer, FFN neurons cut only: against lstsq in float64 on the concatenated tokens."""
    model = tiny_model(num_hidden_layers=1)
    kept = choose_units(model.config, importance_scores(model, samples()), Shape(64, 64, 4, 2, 1))
    pruned = slice_model(model, kept)
    plain = pruned.model.layers[0].mlp.down_proj.weight.detach().clone()
    refit_layers(pruned, model, kept, samples(), ridge=1e-10)
    full, inputs = [], []
    block = model.model.layers[0]
    handle = block.mlp.down_proj.register_forward_hook(lambda m, a, o: full.append(o) or inputs.append(a[0]))
    with torch.inference_mode():
        for tokens in samples():
            model.hidden(tokens)
    handle.remove()
    a = torch.cat([x.flatten(0, 1) for x in inputs]).double()[:, kept.units[0]["neuron"]]
    t = torch.cat([x.flatten(0, 1) for x in full]).double()
    expected = torch.linalg.lstsq(a, t).solution.T
    found = pruned.model.layers[0].mlp.down_proj.weight.detach().double()
    assert (expected - plain).norm() > 0.1 * plain.norm()  # there was something to fit
    # float32 sums of products: relative error near 1e-5 times the condition of the inputs.
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-3)


def test_a_redundant_neuron_and_head_cost_nothing() -> None:
    """Neurons that repeat others in every layer: cutting the copies alone hurts, refitting makes it exact."""
    model = tiny_model()
    with torch.no_grad():
        for block in model.model.layers:
            for name in ("gate_proj", "up_proj"):
                weight = getattr(block.mlp, name).weight
                weight[64:] = weight[:32]
    scores = importance_scores(model, samples())
    for neurons in scores.units["neuron"]:
        neurons[64:] = 0
    kept = choose_units(model.config, scores, Shape(64, 64, 4, 2, 2))
    plain, fitted = slice_model(model, kept), slice_model(model, kept)
    refit_layers(fitted, model, kept, samples(), ridge=1e-8)
    held_out = samples(1, seed=5)[0]
    assert distance(plain, model, held_out) > 1e-2
    assert distance(fitted, model, held_out) < 1e-5


@pytest.mark.parametrize("shape", [Shape(32, 96, 4, 2, 2), Shape(64, 32, 4, 2, 2), Shape(64, 96, 4, 2, 1)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"qk_norm": True}], ids=str)
def test_it_lowers_the_error_on_other_text(shape: Shape, changes: dict[str, object]) -> None:
    model = tiny_model(**changes)
    kept = choose_units(model.config, importance_scores(model, samples()), shape)
    plain, fitted = slice_model(model, kept), slice_model(model, kept)
    refit_layers(fitted, model, kept, samples(12))
    held_out = samples(1, seed=5)[0]
    assert distance(fitted, model, held_out) < distance(plain, model, held_out)
