"""Experts that go, and experts joined to a dense model: without a trace if nothing of them is missed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from compress.prune import prune
from compress.pruning.experts import expert_energy, fit_experts, joined_neurons, reduce_experts
from compress.pruning.shapes import fewer_experts
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import Experts
from tests.support.calibration import inputs_of, random_tokens
from tests.support.models import saved, tiny_config, tiny_model

SAMPLES = random_tokens(3, 24, rows=1)


def model_with(**changes: Any) -> Any:
    return tiny_model(mlp_kind="experts", experts=Experts(**{"count": 4, "active": 2} | changes))


def test_energies_by_the_definition() -> None:
    model = model_with()
    half, name = model.model.layers[1].mlp, "model.layers.1.mlp"
    inputs = inputs_of(model, [name], SAMPLES)[name].float()
    expected = torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        for x in inputs:
            scores = (half.gate.weight @ x).softmax(0)
            best = scores.topk(2).indices.tolist()
            for e in best:
                expert = half.experts.get_submodule(str(e))
                y = expert.down_proj(silu(expert.gate_proj(x)) * expert.up_proj(x))
                expected[e] += float((y * scores[e] / scores[best].sum()).double().square().sum())
        found = expert_energy(half, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)  # float32 sums in another order


@pytest.mark.parametrize("normed", [False, True])
def test_an_expert_that_nobody_chose_leaves_no_trace(normed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    experts = Experts(4, 2, router="sigmoid", choice_bias=True, shared=1)
    model = tiny_model(mlp_kind="experts", experts=experts, output_norms=normed)
    with torch.no_grad():
        for layer, unused in ((0, 0), (1, 2)):
            model.model.layers[layer].mlp.gate.bias[unused] = -9.0
    reduced = reduce_experts(model, fewer_experts(model.config, 3), SAMPLES)
    assert "experts that no token was sent to: layer 0: 0; layer 1: 2" in capsys.readouterr().err
    assert reduced.config.chosen_experts.count == 3
    assert reduced.config.parameters < model.config.parameters
    with torch.inference_mode():
        torch.testing.assert_close(reduced(SAMPLES[0]), model(SAMPLES[0]), rtol=1e-5, atol=1e-5)


def test_a_fit_leaves_no_more_than_least_squares_over_all_experts() -> None:
    """Every expert sees every token, so that all down_proj together are one regression, solved here in float64."""
    half = model_with(active=4, shared=1, gated=False).model.layers[0].mlp
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2_000, 64, generator=generator), torch.randn(2_000, 64, generator=generator)

    def error() -> float:
        with torch.inference_mode():
            return float((half(x[None])[0] - target).double().square().mean())

    with torch.inference_mode():
        scores = (x @ half.gate.weight.T).softmax(-1)
        names = [*(f"experts.{n}" for n in range(4)), "shared_experts"]
        weights = [*(scores[:, [n]] for n in range(4)), torch.ones(2_000, 1)]
        modules = [half.get_submodule(name) for name in names]
        for module in modules:
            module.down_proj.bias.normal_(generator=generator)
        biases = sum(w * m.down_proj.bias for w, m in zip(weights, modules, strict=True)).double()
        values = torch.cat([w * silu(m.up_proj(x)) for w, m in zip(weights, modules, strict=True)], dim=1).double()
    best = torch.linalg.lstsq(values, target - biases).solution
    least = float((values @ best + biases - target).square().mean())
    before = error()
    fit_experts(half, x, target)
    assert before > 1.1 * error()
    assert least <= error() < least + 0.1 * (before - least)  # two passes, one expert after the other


def test_neurons_that_explain_nothing_are_left_out() -> None:
    """Half of each expert's neurons have no output in the function that is wanted."""
    half = model_with().model.layers[0].mlp
    x = torch.randn(3_000, 64, generator=torch.Generator().manual_seed(0))
    experts = half.experts[:2]
    with torch.no_grad():
        for expert in experts:
            expert.down_proj.weight[:, 48:] = 0.0
        wanted = sum(e.down_proj(silu(e.gate_proj(x)) * e.up_proj(x)) for e in experts)
    parts = joined_neurons(experts, 96, x, wanted)
    kept = torch.cat([expert.up_proj.weight[:48] for expert in experts])
    torch.testing.assert_close(parts["up_proj.weight"], kept)


@pytest.mark.parametrize(
    ("experts", "count", "said"),
    [
        (None, 2, "--experts: the model has no experts"),
        (Experts(4, 2), 5, "--experts is 5; the model has 4, choose 1 to 4"),
        (Experts(4, 2, groups=2, active_groups=1), 2, "chooses among 2 groups"),
    ],
)
def test_impossible_numbers_are_refused(experts: Experts | None, count: int, said: str) -> None:
    config = tiny_config() if experts is None else tiny_config(mlp_kind="experts", experts=experts)
    with pytest.raises(UsageError, match=said):
        fewer_experts(config, count)


def test_layers_without_experts_stay(tokenizer_directory: Path, corpus_file: Path, tmp_path: Path) -> None:
    first = {"num_hidden_layers": 4, "dense_layers": 2, "dense_intermediate_size": 128}
    model = tiny_model(mlp_kind="experts", experts=Experts(4, 2), **first)
    full = saved(tmp_path / "full", model, tokenizer_directory)
    given = {"experts": 2, "intermediate": 48, "layers": 3, "settings": {"samples": 4}}
    result = prune(full, out=tmp_path / "out", calibration=[corpus_file], **given)
    smaller = load_config(tmp_path / "out")
    assert (smaller.num_hidden_layers, smaller.dense_layers, smaller.dense_intermediate_size) == (3, 2, 64)
    assert result.kept_layers[:2] == [0, 1] and result.parameters == smaller.parameters
    with pytest.raises(UsageError, match="nothing is cut"):
        prune(full, out=tmp_path / "same", calibration=[corpus_file], experts=4)
