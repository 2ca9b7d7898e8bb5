"""What is sliced and what stays."""

from collections.abc import Iterator

import pytest
import torch

from compress.pruning.cut import choose_units, kept_layers, slice_model
from compress.pruning.scores import Scores, measure_scores
from compress.pruning.shapes import Shape
from sportsllm.models.language_model import SportsLLM
from tests.support import gelu_kind
from tests.support.models import tiny_model


@pytest.fixture(autouse=True)
def _gelu() -> Iterator[None]:
    """A second kind of feed-forward: two matrices with biases."""
    with gelu_kind.registered():
        yield


def samples(count: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (2, 20), generator=g) for _ in range(count)]


FAMILIES = [
    {},
    {"tie_word_embeddings": False},
    {"qk_norm": True},
    {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"mlp_kind": "gelu"},
]


def pruned_to(model: SportsLLM, scores: Scores, shape: Shape, layers: list[int] | None = None) -> SportsLLM:
    return slice_model(model, choose_units(model.config, scores, shape.applied_to(model.config), layers))


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_the_full_shape_changes_no_logit(changes: dict[str, object]) -> None:
    model = tiny_model(**changes)
    pruned = pruned_to(model, measure_scores(model, samples(), "activation"), Shape.of(model.config))
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.equal(pruned(tokens), model(tokens))


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_dead_units_are_cut_without_a_trace(changes: dict[str, object]) -> None:
    """Neurons and heads that write nothing score lowest; cutting exactly those leaves the logits alone."""
    model = tiny_model(**changes)
    dead_neurons, dead_heads = torch.arange(0, 96, 3), torch.tensor([1, 2])  # one head in each group
    with torch.no_grad():
        for block in model.model.layers:
            for name in {"gate_proj", "up_proj"} & dict(block.mlp.named_children()).keys():
                module = block.mlp.get_submodule(name)
                module.weight[dead_neurons] = 0
                if module.bias is not None:
                    module.bias[dead_neurons] = 0
    scores = measure_scores(model, samples(), "activation")
    for layer in range(2):
        assert set(torch.argsort(scores.units["neuron"][layer])[:32].tolist()) == set(dead_neurons.tolist())
        scores.units["query_head"][layer][dead_heads] = 0
        with torch.no_grad():
            columns = (dead_heads[:, None] * 16 + torch.arange(16)).flatten()
            model.model.layers[layer].self_attn.o_proj.weight[:, columns] = 0
    pruned = pruned_to(model, scores, Shape(hidden=64, intermediate=64, heads=2, kv_heads=2, layers=2, head_dim=16))
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.allclose(pruned(tokens), model(tokens), atol=1e-4, rtol=1e-5)


def test_a_layer_that_does_nothing_is_the_one_dropped() -> None:
    model = tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        for module in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            module.weight.zero_()
    scores = measure_scores(model, samples(), "activation")
    keep, tried = kept_layers(model, scores, 3, samples())
    assert keep == [0, 1, 3] and len(tried) == 3
    pruned = pruned_to(model, scores, Shape(64, 96, 4, 2, 3, 16), keep)
    tokens = samples(1)[0]
    with torch.inference_mode():
        assert torch.allclose(pruned(tokens), model(tokens), atol=1e-5)
    assert len(model.model.layers) == 4
