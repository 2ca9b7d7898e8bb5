"""Routing, balancing and counting of experts; logits are those of `transformers` in test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from benchmarks.flops import matmul_parameters
from sportsllm.errors import UsageError
from sportsllm.models.config import Experts
from sportsllm.models.experts import BIAS_STEP, balance_biases, imbalance, route, take_shares
from sportsllm.models.presets import PRESETS
from sportsllm.models.size import kv_cache_bytes_per_token
from sportsllm.text.packing import PackedSequences, tokenize
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.settings import TrainConfig
from tests.support.models import tiny_config, tiny_model


def model_with(**changes: Any) -> Any:
    return tiny_model(mlp_kind="experts", experts=Experts(**{"count": 4, "active": 2} | changes))


def test_latent_moe_has_the_documented_numbers() -> None:
    config = PRESETS["latent-moe"]
    matrices, experts = config.parameters_by_component(), config.chosen_experts
    router = experts.count * config.hidden_size
    one = 2 * 384 * 1_536 + 1_536 + 384
    assert (one, experts.count * one, router) == (1_181_568, 9_452_544, 3_072)
    assert matrices["feed_forward"] == config.num_hidden_layers * (experts.count * one + router)
    assert 2 * one + router == 2_366_208
    unused = config.num_hidden_layers * (experts.count - 2) * 2 * 384 * 1_536
    assert config.active_parameters == config.parameters - unused
    assert (
        matmul_parameters(config)
        == sum(
            config.num_hidden_layers * numbers
            for numbers in (router + 4 * 384 * 1_536, 384 * 64 + 64 * 8 * 48 + 384 * 144 + 128 * 8 * 80 + 8 * 48 * 384)
        )
        + 16_000 * 384
    )
    multi_head = 2 * 384 * 4 * config.num_hidden_layers  # bytes in float32 of a model of the same width
    assert multi_head / kv_cache_bytes_per_token(config)["fp32"] == pytest.approx(768 / 144)


def test_the_balancing_loss_is_that_of_transformers() -> None:
    """Theirs sums over the choices of a token, ours takes their mean."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 6, generator=generator)
    scores = logits.softmax(-1)
    chosen = scores.topk(2, dim=-1).indices
    assert float(imbalance(scores, chosen)) == pytest.approx(float(load_balancing_loss_func((logits,), 6, 2)) / 2)
    level = torch.full((8, 4), 0.25)
    assert float(imbalance(level, torch.arange(8)[:, None] % 4)) == pytest.approx(1.0)


def test_the_router_learns_through_the_chosen_weights() -> None:
    model = model_with(balance_loss=0.0).train()
    model(torch.arange(30)[None]).logsumexp(-1).sum().backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0
    assert model.auxiliary_loss() is None


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    half = model_with(router="sigmoid", choice_bias=True).model.layers[0].mlp
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        half.gate.bias.copy_(torch.tensor([0.0, 9.0, 9.0, 0.0]))
        scores, chosen, weights = route(half, x)
    assert set(chosen.flatten().tolist()) == {1, 2}
    kept = scores.gather(1, chosen)
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True))
    torch.testing.assert_close(scores, (x @ half.gate.weight.T).sigmoid(), rtol=1e-5, atol=1e-5)


def test_unused_experts_become_easier_to_choose() -> None:
    model = model_with(router="sigmoid", choice_bias=True)
    mlp = model.model.layers[0].mlp
    before = mlp.gate.bias.detach().clone()
    mlp.step_N = torch.tensor([10, 0, 5, 5])
    balance_biases(model)
    balance_biases(model)  # nothing has come since
    torch.testing.assert_close(mlp.gate.bias - before, BIAS_STEP * torch.tensor([-1.0, 1.0, 0.0, 0.0]))
    assert take_shares(model) == [[0.5, 0.0, 0.25, 0.25]] and take_shares(model) == []


def test_training_logs_the_share_of_every_expert(texts: list[str], tokenizer_directory: Path, tmp_path: Path) -> None:
    words = load_tokenizer(tokenizer_directory)
    batches = PackedSequences(tokenize(texts[:10], words), 32, 2, seed=0)
    config = TrainConfig(steps=4, batch_size=2, accumulation=1, sequence=32, warmup=1, log_every=2, optimizer="adamw")
    train_model(model_with(), batches, language_model_loss, config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [line["expert_shares"] for line in lines if "expert_shares" in line]
    assert len(shares) == 2
    assert all(sum(layer) == pytest.approx(1.0, abs=1e-3) for found in shares for layer in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"active": 5}, "5 experts a token of 4; choose 1 to 4"),
        ({"router": "hash"}, "router 'hash'"),
        ({"groups": 3}, "4 experts in 3 groups"),
    ],
)
def test_impossible_mixtures_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        model_with(**changes)
    with pytest.raises(UsageError, match="give both or none"):
        tiny_config(experts=Experts(4, 2))
