"""What is sliced and what stays, and a student's config cut out of a full model."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from compress.layerwise import KnownStates
from compress.pruning.cut import check_cut, choose_units, cut_to_config, kept_layers, slice_model
from compress.pruning.scores import Scores, measure_scores
from compress.pruning.shapes import Shape
from sportsllm.errors import UsageError
from sportsllm.models.config import Experts
from sportsllm.models.language_model import SportsLLM
from tests.support.calibration import random_tokens
from tests.support.models import FAMILIES, tiny_config, tiny_model

SAMPLES, SHORT = random_tokens(12, 60, rows=1), random_tokens(3, 20)
HELD_OUT = random_tokens(1, 50, seed=9)[0]


@torch.inference_mode()
def logits(*models: SportsLLM) -> list[torch.Tensor]:
    return [model(HELD_OUT) for model in models]


def error(model: SportsLLM, full: SportsLLM) -> float:
    ours, theirs = logits(model, full)
    return float((ours - theirs).square().mean() / theirs.square().mean())


@pytest.mark.parametrize(("normed", "hidden"), [(False, 48), (True, 64)])
def test_what_says_nothing_is_cut_in_all_dimensions_at_once(normed: bool, hidden: int) -> None:
    """A model inside a larger one whose other channels, neurons, heads and rotary pairs are idle."""
    model = tiny_model(num_attention_heads=6, num_key_value_heads=3, output_norms=normed)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)  # a tied table has an exact basis
        model.model.embed_tokens.weight[:, 48:] = 0
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight[48:] = 0
            for reader in (attention.q_proj, attention.k_proj):
                reader.weight.view(-1, 16, 64)[:, 1::2] = 0
            values = attention.v_proj.weight.view(3, 16, 64)
            values[:, 8:] = values[:, :8]
            attention.o_proj.weight[:, 32:64] = 0
            mlp.down_proj.weight[:, 64:] = 0
    smaller = model.config.with_changes(
        hidden_size=hidden, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    cut = cut_to_config(model, smaller, SAMPLES)
    # The ridge pulls every matrix a little towards its pruned weights.
    torch.testing.assert_close(*logits(cut.model, model), atol=2e-2, rtol=2e-2)


def test_a_tied_head_gets_untied() -> None:
    model = tiny_model()
    cut = cut_to_config(model, tiny_config(tie_word_embeddings=False), SAMPLES[:6])
    assert torch.equal(cut.model.head_weight, model.model.embed_tokens.weight)
    assert error(cut.model, model) < 1e-8
    with pytest.raises(UsageError, match="tie_word_embeddings is true; the full model has an untied head"):
        cut_to_config(cut.model, tiny_config(), SAMPLES)


def test_a_mixture_is_cut_to_a_dense_model() -> None:
    """All neurons stay and weigh alike, and then a third of them goes; the first layer is dense already."""
    first = {"num_hidden_layers": 3, "dense_layers": 1, "dense_intermediate_size": 192}
    model = tiny_model(mlp_kind="experts", experts=Experts(2, 2), **first)
    with torch.no_grad():
        for block in model.model.layers[1:]:
            block.mlp.gate.weight[1] = block.mlp.gate.weight[0]
    dense = tiny_config(intermediate_size=192, num_hidden_layers=3)
    whole, less = (
        cut_to_config(model, dense.with_changes(intermediate_size=width), SAMPLES[:6]).model for width in (192, 128)
    )
    assert whole.config == dense
    assert error(whole, model) < 1e-3 and error(less, model) > 0.05  # the ridge's pull, and a third of the neurons


MIXTURE = {"mlp_kind": "experts", "experts": Experts(2, 2)}
REFUSED: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({}, {"hidden_size": 65}, "hidden_size is 65, more than the full model's 64"),
    ({}, {"max_position_embeddings": 256}, "max_position_embeddings is 256, more"),
    ({}, {"vocab_size": 400}, "vocab_size is 400, the full model's is 384"),
    ({"qk_norm": True}, {"qk_norm": True, "num_key_value_heads": 1}, "with q/k norms cannot merge"),
    (MIXTURE, {"intermediate_size": 193}, "intermediate_size is 193, more than the 192 neurons of a layer"),
    (MIXTURE, {"mlp_kind": "geglu"}, "mlp_kind is geglu, the full model's is swiglu"),
    (MIXTURE | {"experts": Experts(2, 2, gated=False)}, {}, "experts without a gate cannot be made"),
]


@pytest.mark.parametrize(("full", "changes", "message"), REFUSED, ids=str)
def test_what_no_cut_can_reach_is_named(full: dict[str, object], changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_cut(tiny_config(**full), tiny_config(**changes))


def pruned_to(model: SportsLLM, scores: Scores, shape: Shape, layers: list[int] | None = None) -> SportsLLM:
    smaller = shape.applied_to(model.config)
    return slice_model(model, choose_units(model.config, scores, smaller, layers or [*range(shape.layers)]))


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_dead_units_are_cut_without_a_trace(changes: dict[str, object]) -> None:
    """Neurons and heads that write nothing score lowest; cutting exactly those, or nothing, leaves the logits alone."""
    model = tiny_model(**changes)
    dead_neurons, dead_heads = torch.arange(0, 96, 3), torch.tensor([1, 2])  # one head in each group
    with torch.no_grad():
        for block in model.model.layers:
            for name in {"gate_proj", "up_proj"} & dict(block.mlp.named_children()).keys():
                module = block.mlp.get_submodule(name)
                module.weight[dead_neurons] = 0
                if module.bias is not None:
                    module.bias[dead_neurons] = 0
    scores = measure_scores(model, SHORT)
    assert torch.equal(*logits(pruned_to(model, scores, Shape.of(model.config)), model))
    for layer in range(2):
        assert set(torch.argsort(scores.units["neuron", layer])[:32].tolist()) == set(dead_neurons.tolist())
        scores.units["query_head", layer][dead_heads] = 0
        with torch.no_grad():
            columns = (dead_heads[:, None] * 16 + torch.arange(16)).flatten()
            model.model.layers[layer].self_attn.o_proj.weight[:, columns] = 0
    pruned = pruned_to(model, scores, Shape(hidden=64, intermediate=64, heads=2, kv_heads=2, layers=2, head_dim=16))
    assert torch.allclose(*logits(pruned, model), atol=1e-4, rtol=1e-5)


def test_a_layer_that_does_nothing_is_the_one_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(num_hidden_layers=4, logit_softcap=2.0)
    with torch.no_grad():
        for module in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
            module.weight.zero_()
    scores = measure_scores(model, SHORT)
    scores.layer_distance[range(4), range(1, 5)] = torch.tensor([0.02, 0.04, 0.03, 0.01])  # the loss decides
    keep, tried = kept_layers(model, scores, 3, SHORT, KnownStates(model))
    assert keep == [0, 1, 3] and [run.first_dropped for run in tried] == [3, 0, 2]
    assert tried == kept_layers(model, scores, 3, SHORT)[1]
    with torch.inference_mode():
        whole = cross_entropy(model(SHORT[0])[:, :-1].flatten(0, 1), SHORT[0][:, 1:].flatten())
    monkeypatch.setattr("compress.pruning.cut._RUN_SAMPLES", 1)
    assert kept_layers(model, scores, 3, SHORT)[1][2].loss == pytest.approx(float(whole), rel=1e-5)
    pruned = pruned_to(model, scores, Shape(64, 96, 4, 2, 3, 16), keep)
    assert torch.allclose(*logits(pruned, model), atol=1e-5)
    assert len(model.model.layers) == 4


def test_a_norm_of_all_heads_keeps_the_entries_of_those_that_stay() -> None:
    model = tiny_model(qk_norm=True, joint_qk_norm=True, input_norms=False, output_norms=True)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_norm.weight.copy_(torch.arange(64.0))
            block.self_attn.k_norm.weight.copy_(torch.arange(32.0))
    scores = measure_scores(model, SHORT)
    for layer in range(2):
        scores.units["query_head", layer] = torch.tensor([0.0, 1, 3, 2])
    pruned = pruned_to(model, scores, Shape(hidden=64, intermediate=96, heads=2, kv_heads=1, layers=2, head_dim=16))
    for block in pruned.model.layers:
        assert block.self_attn.q_norm.weight.tolist() == list(range(32, 64))
        assert block.self_attn.k_norm.weight.tolist() == list(range(16, 32))
