"""Fewer key/value heads: exact where heads are functions of each other, and the best approximation where not."""

import pytest
import torch

from compress.pruning.kv_heads import merge_kv_heads
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


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=str)
def test_equal_heads_merge_without_a_trace(changes: dict[str, object]) -> None:
    model = model_with(**changes)
    with torch.no_grad():
        for block in model.model.layers:
            for name in ("k_proj", "v_proj"):
                module = getattr(block.self_attn, name)
                parts = [module.weight] if module.bias is None else [module.weight, module.bias]
                for part in parts:
                    heads = part.view(4, 16, -1)
                    heads[1], heads[3] = heads[0], heads[2]
    merged = merge_kv_heads(model, 2, samples())
    assert merged.config.num_key_value_heads == 2 and merged.config.num_attention_heads == 8
    assert torch.allclose(logits(merged), logits(model), atol=1e-4, rtol=1e-4)


def test_turned_and_scaled_heads_merge_without_a_trace() -> None:
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
    exact = merge_kv_heads(model, 2, samples())
    assert torch.allclose(logits(exact), logits(model), atol=1e-3, rtol=1e-3)


def outputs_of(model: SportsLLM, name: str) -> torch.Tensor:
    """(N, heads, E) outputs of a matrix of layer 0 over the calibration samples, float64."""
    found: list[torch.Tensor] = []
    module = model.get_submodule(f"model.layers.0.self_attn.{name}")
    handle = module.register_forward_hook(lambda _module, _args, output: found.append(output.flatten(0, 1)))
    with torch.inference_mode():
        for tokens in samples():
            model.hidden(tokens)
    handle.remove()
    return torch.cat(found).double().unflatten(-1, (-1, 16))


def as_complex(heads: torch.Tensor) -> torch.Tensor:
    """(..., E) to (..., E / 2): rotary pair p is p and p + E / 2."""
    return torch.complex(heads[..., :8], heads[..., 8:])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=str)
def test_shared_keys_are_the_best_that_one_number_a_pair_can_give(changes: dict[str, object]) -> None:
    """Against Eckart and Young: no rank-one approximation of a pair's keys is nearer than the first singular vector."""
    model = model_with(**changes)
    merged = merge_kv_heads(model, 2, samples())
    keys, shared = as_complex(outputs_of(model, "k_proj")), as_complex(outputs_of(merged, "k_proj"))
    old, new = as_complex(outputs_of(model, "q_proj")), as_complex(outputs_of(merged, "q_proj"))
    for group in range(2):
        heads = [2 * group, 2 * group + 1]
        # Both query heads of a key head are multiplied by the conjugate of what turns the shared key into its own.
        factors = torch.stack([(new[0, 2 * head] / old[0, 2 * head]).conj() for head in heads])
        weights = torch.stack([old[:, 2 * head : 2 * head + 2].abs().square().mean(0).sum(0).sqrt() for head in heads])
        error = ((keys[:, heads] - factors * shared[:, group, None]) * weights).abs().square().sum(dim=(0, 1))
        singular = torch.linalg.svdvals((keys[:, heads] * weights).permute(2, 0, 1))
        # Products of float32 activations are summed: a few units in the 7th place of each of 320 terms.
        torch.testing.assert_close(error, singular[:, 1].square(), rtol=1e-4, atol=0)


@torch.no_grad()
def test_shared_values_are_the_best_that_head_dim_numbers_can_give() -> None:
    """Against Eckart and Young on what o_proj makes of each head's values."""
    model = model_with()
    merged = merge_kv_heads(model, 2, samples())
    values, shared = outputs_of(model, "v_proj"), outputs_of(merged, "v_proj")
    old, new = (m.model.layers[0].self_attn.o_proj.weight.double().unflatten(1, (8, 16)) for m in (model, merged))
    for group in range(2):
        heads = range(4 * group, 4 * group + 4)
        wanted = torch.cat([values[:, head // 2] @ old[:, head].T for head in heads], dim=1)
        found = torch.cat([shared[:, group] @ new[:, head].T for head in heads], dim=1)
        least = torch.linalg.svdvals(wanted)[16:].square().sum()
        assert 0.01 * wanted.square().sum() < least  # heads of random weights share little
        # As above; o_proj is stored in float32 too.
        torch.testing.assert_close((found - wanted).square().sum(), least, rtol=1e-4, atol=0)


def test_impossible_merges() -> None:
    with pytest.raises(UsageError, match="must divide"):
        merge_kv_heads(model_with(), 3, samples())
    with pytest.raises(UsageError, match="q/k norms"):
        merge_kv_heads(model_with(qk_norm=True), 2, samples())
