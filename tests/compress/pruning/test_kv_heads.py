"""Fewer key/value heads: exact where heads are functions of each other, and better than the mean where not."""

import pytest
import torch

from compress.pruning.kv_heads import KV_MERGES, convert_kv_heads
from sportsllm.errors import UsageError
from sportsllm.models.language_model import SportsLLM
from tests.support.models import tiny_model


def samples(count: int = 4, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 384, (2, 40), generator=g) for _ in range(count)]


def model_with(**changes: object) -> SportsLLM:
    return tiny_model(num_attention_heads=8, num_key_value_heads=4, **changes)


def logits(model: SportsLLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(samples(1, seed=7)[0])


@pytest.mark.parametrize("how", KV_MERGES)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=str)
def test_equal_heads_merge_without_a_trace(how: str, changes: dict[str, object]) -> None:
    model = model_with(**changes)
    with torch.no_grad():
        for block in model.model.layers:
            for name in ("k_proj", "v_proj"):
                module = getattr(block.self_attn, name)
                parts = [module.weight] if module.bias is None else [module.weight, module.bias]
                for part in parts:
                    heads = part.view(4, 16, -1)
                    heads[1], heads[3] = heads[0], heads[2]
    merged = convert_kv_heads(model, 2, samples(), how)
    assert merged.config.num_key_value_heads == 2 and merged.config.num_attention_heads == 8
    assert torch.allclose(logits(merged), logits(model), atol=1e-4, rtol=1e-4)


def test_turned_and_scaled_heads_merge_without_a_trace_by_pca() -> None:
    """Keys that are each other's rotary pairs turned and scaled, values any invertible map of each other."""
    g = torch.Generator().manual_seed(1)
    model = model_with()
    with torch.no_grad():
        for block in model.model.layers:
            keys = block.self_attn.k_proj.weight.view(4, 2, 8, -1)
            angle, scale = torch.rand(8, 1, generator=g) * 6, 0.5 + torch.rand(8, 1, generator=g)
            for a, b in ((0, 1), (2, 3)):
                x, y = keys[a, 0].clone(), keys[a, 1].clone()
                keys[b, 0] = scale * (angle.cos() * x - angle.sin() * y)
                keys[b, 1] = scale * (angle.sin() * x + angle.cos() * y)
                values = block.self_attn.v_proj.weight.view(4, 16, -1)
                values[b] = torch.randn(16, 16, generator=g) @ values[a]
    exact = convert_kv_heads(model, 2, samples(), "pca")
    assert torch.allclose(logits(exact), logits(model), atol=1e-3, rtol=1e-3)
    for how in ("mean", "select"):
        assert not torch.allclose(logits(convert_kv_heads(model, 2, samples(), how)), logits(model), atol=1e-1)


def test_mean_is_the_mean() -> None:
    model = model_with()
    merged = convert_kv_heads(model, 2, [], "mean")
    weight = model.model.layers[0].self_attn.k_proj.weight
    expected = (weight[:16] + weight[16:32]) / 2
    assert torch.allclose(merged.model.layers[0].self_attn.k_proj.weight[:16], expected, atol=1e-7)


def test_pca_loses_least_on_unrelated_heads() -> None:
    model = model_with()
    reference = logits(model)
    errors = {how: float((logits(convert_kv_heads(model, 1, samples(), how)) - reference).norm()) for how in KV_MERGES}
    assert errors["pca"] < min(errors["mean"], errors["select"])


def test_impossible_merges() -> None:
    with pytest.raises(UsageError, match="must divide"):
        convert_kv_heads(model_with(), 3, samples())
    with pytest.raises(UsageError, match="not known"):
        convert_kv_heads(model_with(), 2, samples(), "sum")
    with pytest.raises(UsageError, match="q/k norms"):
        convert_kv_heads(model_with(qk_norm=True), 2, samples())
