"""Importance against a loop over samples, and against weights."""

from pathlib import Path

import pytest
import torch

from compress.pruning.rotation import principal_directions
from compress.pruning.scores import importance_scores, load_scores, magnitude_scores, random_scores, save_scores
from sportsllm.models.feed_forward_kinds import Experts
from tests.support.models import tiny_model


def samples(count: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (2, 20), generator=g) for _ in range(count)]


def test_scores_equal_a_loop_over_samples() -> None:
    """The formula written out sample by sample, in float64, from the model's own intermediate values."""
    model = tiny_model()
    scores = importance_scores(model, samples())
    caught: dict[str, list[torch.Tensor]] = {"neuron": [], "head": [], "in": [], "out": []}
    block = model.model.layers[1]
    neuron, head = torch.zeros(96, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    cosine, count = 0.0, 0
    hooks = [block.mlp.down_proj.register_forward_pre_hook(lambda m, a: caught["neuron"].append(a[0]))]
    hooks += [block.self_attn.o_proj.register_forward_pre_hook(lambda m, a: caught["head"].append(a[0]))]
    hooks += [block.register_forward_hook(lambda m, a, o: caught["in"].append(a[0]) or caught["out"].append(o))]
    with torch.inference_mode():
        for batch in samples():
            for row in batch:
                for values in caught.values():
                    values.clear()
                model.hidden(row[None])
                neuron += caught["neuron"][0][0].double().abs().mean(0) ** 2
                head += caught["head"][0][0].double().view(20, 4, 16).norm(dim=-1).mean(0) ** 2
                pairs = zip(caught["in"][0][0].double(), caught["out"][0][0].double(), strict=True)
                for x, y in pairs:
                    cosine += float(x @ y / (x.norm() * y.norm()))
                    count += 1
    for hook in hooks:
        hook.remove()
    assert torch.allclose(scores.units["neuron"][1].double(), neuron.sqrt(), rtol=1e-5)
    assert torch.allclose(scores.units["query_head"][1].double(), head.sqrt(), rtol=1e-5)
    assert float(scores.layer_distance[1, 2]) == pytest.approx(1 - cosine / count, abs=1e-5)


@torch.no_grad()
def test_magnitude_is_the_norm_of_what_a_unit_owns() -> None:
    model = tiny_model()
    directions = principal_directions(model, samples())
    scores = magnitude_scores(model, directions)
    block = model.model.layers[1]
    owned = [block.mlp.gate_proj.weight[5], block.mlp.up_proj.weight[5], block.mlp.down_proj.weight[:, 5]]
    assert float(scores.units["neuron"][1][5]) == pytest.approx(float(torch.cat(owned).norm()), rel=1e-5)
    owned = [block.self_attn.q_proj.weight[32:48].flatten(), block.self_attn.o_proj.weight[:, 32:48].flatten()]
    assert float(scores.units["query_head"][1][2]) == pytest.approx(float(torch.cat(owned).norm()), rel=1e-5)
    one, same, other = (random_scores(model.config, seed, directions).units["neuron"][0] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_scores_of_a_mixture_keep_every_experts_neurons(tmp_path: Path) -> None:
    """Layer 0 has neurons of its own, the others those of each expert."""
    model = tiny_model(
        num_hidden_layers=3,
        mlp_kind="experts",
        experts=Experts(3, 2),
        dense_layers=1,
        dense_intermediate_size=128,
    )
    scores = random_scores(model.config, 0, principal_directions(model, [torch.arange(8)[None]]))
    assert [len(score) for score in scores.units["neuron"]] == [128, 0, 0]
    assert [len(score) for score in scores.units["neuron of experts.2"]] == [0, 96, 96]
    save_scores(tmp_path, scores, model.config)
    found = load_scores(tmp_path, model.config)
    assert found.units.keys() == scores.units.keys()
    for name, layers in scores.units.items():
        assert all(map(torch.equal, found.units[name], layers)), name
