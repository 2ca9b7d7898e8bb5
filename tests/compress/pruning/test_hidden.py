"""The residual stream in other bases: exact where directions are empty, and the best of their number where not."""

import pytest
import torch

from compress.pruning.cut import choose_units, slice_model
from compress.pruning.hidden import rotate
from compress.pruning.scores import measure_scores
from sportsllm.models.kinds import NORMS
from sportsllm.models.language_model import SportsLLM
from tests.support import gelu_kind
from tests.support.models import tiny_model


def samples(count: int = 4, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 384, (2, 40), generator=g) for _ in range(count)]


def logits(model: SportsLLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(samples(1, seed=7)[0])


FAMILIES = [
    {},
    {"tie_word_embeddings": False},
    {"qk_norm": True},
    {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"mlp_kind": "gelu"},
]


def model_with(changes: dict[str, object]) -> SportsLLM:
    """Norms of all sizes; the last one of a tied head has one size, since two uses of a table leave no exact basis."""
    model = tiny_model(**changes)
    if model.lm_head is None:
        torch.nn.init.constant_(model.model.norm.weight, 1.5)
    return model


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_all_directions_are_the_same_model(changes: dict[str, object]) -> None:
    with gelu_kind.registered():
        model = model_with(changes)
        turned = rotate(model, measure_scores(model, samples(), "activation").directions, 64)
        assert not torch.allclose(turned.model.embed_tokens.weight, model.model.embed_tokens.weight, atol=0.1)
        assert torch.allclose(logits(turned), logits(model), atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_a_stream_that_fills_a_subspace_is_cut_to_it_without_a_trace(changes: dict[str, object]) -> None:
    """All that writes to the stream writes into 48 directions, none of which is a channel."""
    with gelu_kind.registered():
        model = model_with(changes)
        basis = torch.linalg.qr(torch.randn(64, 48, generator=torch.Generator().manual_seed(1))).Q
        onto = basis @ basis.T
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ onto)
        for block in model.model.layers:
            for writer in (block.self_attn.o_proj, block.mlp.down_proj):
                writer.weight.copy_(onto @ writer.weight)
                if writer.bias is not None:
                    writer.bias.copy_(onto @ writer.bias)
        scores = measure_scores(model, samples(), "activation")
        kept = choose_units(model.config, scores, model.config.with_changes(hidden_size=48))
        cut = slice_model(rotate(model, scores.directions, 48), kept)
        assert cut.config.hidden_size == 48
        assert torch.allclose(logits(cut), logits(model), atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_the_first_directions_are_the_best_of_their_number() -> None:
    """Against Eckart and Young, on the states that the norms read, scaled as the tied head needs it."""
    model = tiny_model()
    caught: list[torch.Tensor] = []
    norms = [model.get_submodule(f"model.layers.{layer}.{norm}") for layer in range(2) for norm in NORMS.values()]
    hooks = [
        norm.register_forward_pre_hook(lambda _module, args: caught.append(args[0].flatten(0, 1).double()))
        for norm in [*norms, model.model.norm]
    ]
    directions = measure_scores(model, samples(), "activation").directions
    for hook in hooks:
        hook.remove()
    weight = model.model.norm.weight.double()
    states = torch.cat(caught)
    states = states / (states.square().mean(dim=1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    states = states * (weight / weight.mean()).sqrt()
    basis = directions.basis[:, :40].double()
    lost = (states - states @ basis @ basis.T).square().sum()
    # Products are float32, summed over 1,600 states.
    torch.testing.assert_close(lost, torch.linalg.svdvals(states)[40:].square().sum(), rtol=1e-4, atol=0)


@torch.no_grad()
def test_norms_keep_the_size_of_what_stays() -> None:
    """Each norm's outputs have the mean square of the full model's normalised states in the directions that stay."""
    model = tiny_model(tie_word_embeddings=False)
    directions = measure_scores(model, samples(), "activation").directions
    scores = measure_scores(model, samples(), "activation")
    kept = choose_units(model.config, scores, model.config.with_changes(hidden_size=32))
    cut = slice_model(rotate(model, directions, 32), kept)
    tokens = samples(1)[0]
    full = torch.nn.functional.rms_norm(model.model.embed_tokens(tokens), (64,))
    ours = cut.model.layers[0].input_layernorm(cut.model.embed_tokens(tokens))
    wanted = (full @ directions.into(32)).square().sum(dim=-1).mean()
    assert float(ours.square().sum(dim=-1).mean()) == pytest.approx(float(wanted), rel=0.05)  # 80 of the 320 tokens
