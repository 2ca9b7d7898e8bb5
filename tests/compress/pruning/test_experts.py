"""Experts that go: by their outputs, without a trace where they were not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from compress.pruning.experts import expert_energies, fewer_experts, keep_experts
from compress.pruning.plan import PruneTarget, prune_run
from compress.pruning.run import PruneConfig, PruneJob
from sportsllm.errors import UsageError
from sportsllm.models.config import Experts
from sportsllm.models.hf_config import load_config
from sportsllm.storage.checkpoint import save_checkpoint
from tests.support.models import tiny_config, tiny_model

SAMPLES = [torch.randint(0, 384, (1, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def model_with(**changes: Any) -> Any:
    return tiny_model(mlp_kind="experts", experts=Experts(**{"count": 4, "active": 2} | changes))


def test_energies_by_the_definition() -> None:
    model = model_with()
    found = expert_energies(model, SAMPLES)
    half, seen = model.model.layers[1].mlp, []
    with torch.inference_mode(), half.register_forward_pre_hook(lambda _, given: seen.append(given[0][0])):
        for tokens in SAMPLES:
            model.hidden(tokens)
    expected = torch.zeros(4, dtype=torch.float64)
    with torch.inference_mode():
        for x in torch.cat(seen):
            scores = (half.gate.weight @ x).softmax(0)
            best = scores.topk(2).indices.tolist()
            for e in best:
                expert = half.experts.get_submodule(str(e))
                y = expert.down_proj(silu(expert.gate_proj(x)) * expert.up_proj(x))
                expected[e] += float((y * scores[e] / scores[best].sum()).double().square().sum())
    torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=0.0)  # float32 sums in another order


def test_an_expert_that_nobody_chose_leaves_no_trace() -> None:
    model = model_with(router="sigmoid", choice_bias=True, shared=1)
    with torch.no_grad():
        for layer, unused in ((0, 0), (1, 2)):
            model.model.layers[layer].mlp.gate.bias[unused] = -9.0
    reduced = keep_experts(model, fewer_experts(model.config, 3, None), SAMPLES)
    assert reduced.config.chosen_experts.count == 3
    assert reduced.config.parameters < model.config.parameters
    with torch.inference_mode():
        torch.testing.assert_close(reduced(SAMPLES[0]), model(SAMPLES[0]), rtol=1e-5, atol=1e-5)


def test_the_command_keeps_the_number(tokenizer_directory: Path, corpus_file: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    save_checkpoint(tmp_path / "full", model_with(), tokenizer_directory)
    job = PruneJob(tmp_path / "full", [corpus_file], PruneConfig(samples=4), experts=2, experts_per_token=1)
    result = prune_run(job, PruneTarget(dimensions={"intermediate": 64}), tmp_path / "out")
    smaller = load_config(tmp_path / "out")
    assert (smaller.chosen_experts.count, smaller.chosen_experts.active, smaller.intermediate_size) == (2, 1, 64)
    assert result["parameters"] == smaller.parameters and 0.3 < result["share_of_block_parameters"] < 0.7


@pytest.mark.parametrize(
    ("experts", "count", "active", "said"),
    [
        (None, 2, None, "--experts: the model has no experts"),
        (Experts(4, 2), 5, None, "--experts is 5; the model has 4, choose 1 to 4"),
        (Experts(4, 2), 2, 3, "--experts-per-token is 3; choose 1 to 2"),
        (Experts(4, 2, groups=2, active_groups=1), 2, None, "chooses among 2 groups"),
    ],
)
def test_impossible_numbers_are_refused(experts: Experts | None, count: int, active: int | None, said: str) -> None:
    config = tiny_config() if experts is None else tiny_config(mlp_kind="experts", experts=experts)
    with pytest.raises(UsageError, match=said):
        fewer_experts(config, count, active)
