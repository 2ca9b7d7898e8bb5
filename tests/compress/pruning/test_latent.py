"""Latent attention out of keys and values: exact where nothing is lost, best in its metric where something is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.prune import prune
from compress.pruning.heads import as_complex, as_real
from compress.pruning.latent import _factored, latent_config, to_latent
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope_scaling import RopeScaling
from tests.support.models import tiny_config, tiny_model

SAMPLES = [torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def without_latent_norms(model: SportsLLM) -> SportsLLM:
    """The norm of the latent, which the layout has and the model does not, is all that cannot be written exactly."""
    for block in model.model.layers:
        block.get_submodule("self_attn").kv_a_layernorm = nn.Identity()
    return model


def with_one_key_for_all(model: SportsLLM) -> SportsLLM:
    """Keys of every head made complex multiples of the first one's, pair by pair."""
    generator, size = torch.Generator().manual_seed(7), model.config.head_dim
    with torch.no_grad():
        for block in model.model.layers:
            weight = block.get_submodule("self_attn").k_proj.weight
            keys = as_complex(weight.view(-1, size, weight.shape[1]))
            factors = torch.randn(len(keys), size // 2, 1, generator=generator, dtype=torch.complex64)
            weight.copy_(as_real(factors * keys[:1]).flatten(0, 1))
    return model


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_nothing_is_lost_where_heads_share_a_key(kv_heads: int) -> None:
    model = with_one_key_for_all(tiny_model(num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=8))
    smaller = latent_config(model.config, kv_heads * 8 - (kv_heads == 1))  # room for all values
    if kv_heads == 1:  # a latent as wide as all values would cache no less: give the values a rank less
        for block in model.model.layers:
            block.get_submodule("self_attn").v_proj.weight.data[-1] = 0.0
    reduced = without_latent_norms(to_latent(model, smaller, SAMPLES, refit=False))
    with torch.inference_mode():
        torch.testing.assert_close(reduced(SAMPLES[0]), model(SAMPLES[0]), rtol=1e-4, atol=1e-4)  # roots of float64


def test_values_are_compressed_as_well_as_they_can_be() -> None:
    """With silent queries the whole rank is the values': what is dropped is the tail of a float64 SVD."""
    model = tiny_model(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    half: Any = model.model.layers[0].get_submodule("self_attn")
    half.q_proj.weight.data.zero_()
    x_ND = torch.randn(500, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    smaller = latent_config(model.config, 5)
    found = _factored(half, x_ND.T @ x_ND / len(x_ND), model.config, smaller)
    latent_NR = x_ND @ found.tensors["kv_a_proj_with_mqa.weight"][:5].double().T
    made = (latent_NR @ found.tensors["kv_b_proj.weight"].double().T).view(len(x_ND), 4, 16)[..., 8:]
    true = (x_ND @ half.v_proj.weight.double().T).view(len(x_ND), 2, 8).repeat_interleave(2, dim=1)
    outputs = half.o_proj.weight.double().view(-1, 4, 8)
    error = torch.einsum("nhe,dhe->nhd", made - true, outputs).square().sum() / len(x_ND)
    roots = [torch.linalg.cholesky(sum_of(outputs, group)).mT for group in range(2)]
    stacked_NE = (x_ND @ half.v_proj.weight.double().T).view(len(x_ND), 2, 8)
    weighted = torch.cat([stacked_NE[:, group] @ roots[group].mT for group in range(2)], dim=1)
    tail = torch.linalg.svdvals(weighted)[5:].square().sum() / len(x_ND)
    torch.testing.assert_close(error, tail, rtol=1e-4, atol=0.0)  # tensors are float32


def sum_of(outputs_DHE: Tensor, group: int) -> Tensor:
    read_DHE = outputs_DHE[:, 2 * group : 2 * group + 2]
    return torch.einsum("dhe,dhf->ef", read_DHE, read_DHE)


def test_the_refit_brings_the_residual_stream_nearer() -> None:
    model = tiny_model(num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    with torch.no_grad():
        for parameter in model.parameters():  # of a size that matters
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    smaller = latent_config(model.config, 16)
    with torch.inference_mode():
        wanted = torch.cat([model.hidden(tokens) for tokens in SAMPLES])
        errors = []
        for refit in (False, True):
            reduced = to_latent(model, smaller, SAMPLES, refit=refit)
            errors.append(float((torch.cat([reduced.hidden(t) for t in SAMPLES]) - wanted).square().mean()))
    assert errors[1] < 0.8 * errors[0], errors


def test_the_command_writes_a_checkpoint_of_the_layout(
    tokenizer_directory: Path, corpus_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    model = tiny_model(num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    save_checkpoint(tmp_path / "full", model, tokenizer_directory)
    given = {"latent": 16, "intermediate": 32, "settings": {"samples": 8}}
    result = prune(tmp_path / "full", out=tmp_path / "out", calibration=[corpus_file], **given)
    smaller = load_config(tmp_path / "out")
    assert (smaller.attention_kind, smaller.kv_rank) == ("latent", 16)
    assert (smaller.head_dim, smaller.intermediate_size) == (8, 32)
    before, after = result.kv_cache_bytes_per_token_before["fp32"], result.kv_cache_bytes_per_token["fp32"]
    assert (before, after) == (4 * 2 * 64, 4 * 2 * 24)  # two layers: 64 numbers of keys and values; 16 + 8
    load_checkpoint(tmp_path / "out")
    oracle = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        ours = load_checkpoint(tmp_path / "out")(SAMPLES[0])
        torch.testing.assert_close(ours, oracle(SAMPLES[0]).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "rank", "said"),
    [
        ({}, 24, "--latent is 24; with a rotated key of 8 channels, and for fewer than the 32 .*, choose 1 to 23"),
        ({}, 0, "--latent is 0"),
        ({"qk_norm": True}, 8, "has norms of queries and keys"),
        ({"attention_bias": True}, 8, "has biases in attention"),
        ({"rope_scaling": RopeScaling("linear", 2.0)}, 8, "has a stretched rotary table"),
        ({"layer_types": ("full", "unrotated")}, 8, "has layers that see or rotate otherwise"),
        ({"output_norms": True}, 8, "has norms after attention"),
    ],
)
def test_what_cannot_be_made_latent_is_refused(changes: Any, rank: int, said: str) -> None:
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **changes)
    with pytest.raises(UsageError, match=said):
        latent_config(config, rank)


def test_latent_attention_is_not_made_latent_again() -> None:
    config = latent_config(tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=8), 8)
    with pytest.raises(UsageError, match="of kind 'latent' already"):
        latent_config(config, 4)
