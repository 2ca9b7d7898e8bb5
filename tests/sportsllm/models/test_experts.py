"""Routing, balancing and counting of experts; logits are those of `transformers` in test_families.py."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from benchmarks.model_size import matmul_parameters
from sportsllm.models import memory as size
from sportsllm.models.config import Experts
from sportsllm.models.experts import BIAS_STEP, balance_biases, imbalance, pop_expert_load, route
from sportsllm.models.presets import PRESETS
from sportsllm.models.training_memory import TrainingStep, training_memory
from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.settings import TrainConfig
from tests.support.models import tiny_model


def model_with(dense: bool = False, **changes: Any) -> Any:
    """`dense` puts a layer without experts before the others."""
    first = {"num_hidden_layers": 3, "dense_layers": 1, "dense_intermediate_size": 128} if dense else {}
    return tiny_model(mlp_kind="experts", experts=Experts(**{"count": 4, "active": 2} | changes), **first)


def test_latent_moe_has_the_documented_numbers() -> None:
    config = PRESETS["latent-moe"]
    matrices, experts = config.parameters_by_component(), config.chosen_experts
    router = experts.count * config.hidden_size
    one = 2 * 384 * 1_536 + 1_536 + 384
    assert matrices["feed_forward"] == config.num_hidden_layers * (experts.count * one + router)
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
    assert multi_head / size.kv_cache_bytes_per_token(config)["fp32"] == pytest.approx(768 / 144)


def test_layers_without_experts_are_counted_as_they_are() -> None:
    model = model_with(shared=1, dense=True)
    config = model.config
    one, router = 3 * 64 * 96, 4 * 64
    dense, mixture = 3 * 64 * 128, 4 * one + one + router
    attention = 2 * 64 * 64 + 2 * 32 * 64
    assert config.parameters_by_component()["feed_forward"] == dense + 2 * mixture
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert config.active_parameters == config.parameters - 2 * 2 * one
    assert matmul_parameters(config) == 3 * attention + dense + 2 * (3 * one + router) + 384 * 64
    assert size.component_bytes(config, size.WeightFormat("fp32"))["feed_forward"] == 4 * (dense + 2 * mixture)
    assert size.matrix_parameters(config) == 3 * attention + dense + 2 * mixture
    weights = [s for s in size.tensor_shapes(config, 1, 8) if s.kind == "weight" and "embed" not in s.name]
    assert sum(math.prod(s.shape) * s.layers for s in weights) == size.matrix_parameters(config)
    assert [(part.experts is None, layers) for part, layers in config.runs()] == [(True, 1), (False, 2)]


def test_training_memory_lies_between_that_of_like_layers() -> None:
    mixed = model_with(dense=True).config
    step = TrainingStep(1, 64)
    dense, mixture = (part.with_changes(num_hidden_layers=3) for part, _ in mixed.runs())
    least, found, most = (training_memory(config, step).activations for config in (dense, mixed, mixture))
    assert least < found < most
    assert 3 * found == pytest.approx(least + 2 * most)  # both without what is no layer's: the last norm, the tables


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
    mixture = model_with(router="sigmoid", choice_bias=True).model.layers[0].mlp
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mixture.gate.bias.copy_(torch.tensor([0.0, 9.0, 9.0, 0.0]))
        scores, chosen, weights = route(mixture, x)
    assert set(chosen.flatten().tolist()) == {1, 2}
    kept = scores.gather(1, chosen)
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True))
    torch.testing.assert_close(scores, (x @ mixture.gate.weight.T).sigmoid(), rtol=1e-5, atol=1e-5)


def test_unused_experts_become_easier_to_choose() -> None:
    model = model_with(router="sigmoid", choice_bias=True)
    mlp = model.model.layers[0].mlp
    before = mlp.gate.bias.detach().clone()
    mlp.step_tokens_per_expert = torch.tensor([10, 0, 5, 5])
    balance_biases(model)
    balance_biases(model)  # nothing has come since
    torch.testing.assert_close(mlp.gate.bias - before, BIAS_STEP * torch.tensor([-1.0, 1.0, 0.0, 0.0]))
    assert pop_expert_load(model) == [[0.5, 0.0, 0.25, 0.25]] and pop_expert_load(model) == []


def test_training_logs_the_share_of_every_expert(batches: PackedSequences, tmp_path: Path) -> None:
    config = TrainConfig(steps=4, batch_size=2, accumulation=1, sequence=32, warmup=1, log_every=2, optimizer="adamw")
    train_model(model_with(), batches, language_model_loss, config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [line["expert_shares"] for line in lines if "expert_shares" in line]
    assert len(shares) == 2
    assert all(sum(layer) == pytest.approx(1.0, abs=1e-3) for found in shares for layer in found)
