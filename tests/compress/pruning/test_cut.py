"""A student's config cut out of a full model."""

import pytest
import torch

from compress.pruning.cut import PruneConfig, check_cut, cut_to_config
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.config_records import Experts
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import preset
from tests.support.models import tiny_config, tiny_model


def samples(count: int = 6, length: int = 60) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 384, (1, length), generator=g) for _ in range(count)]


def proportions(name: str) -> ModelConfig:
    """A preset's shape at a sixteenth of its widths and a sixth of its depth, head sizes in proportion."""
    full = preset(name)
    return full.with_changes(
        vocab_size=384,
        hidden_size=full.hidden_size // 16,
        intermediate_size=full.intermediate_size // 16,
        num_hidden_layers=full.num_hidden_layers // 6,
        head_dim=full.head_dim // 16 * 2,
        max_position_embeddings=full.max_position_embeddings // 32,
    )


def error(model: SportsLLM, full: SportsLLM) -> float:
    tokens = torch.randint(0, 384, (2, 50), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        ours, theirs = model(tokens), full(tokens)
    return float((ours - theirs).square().mean() / theirs.square().mean())


@pytest.mark.parametrize("refit", [False, True])
def test_the_whole_model_is_cut_to_itself(refit: bool) -> None:
    model = tiny_model(attention_bias=True)
    cut = cut_to_config(model, model.config, PruneConfig(refit=refit), samples())
    assert cut.layers == [0, 1]
    assert error(cut.model, model) < 1e-8  # squares of float32 rounding


@pytest.mark.parametrize(("teacher", "student"), [("large", "small"), ("large", "medium")])
def test_presets_are_cut_out_of_larger_ones(teacher: str, student: str) -> None:
    """Hidden, FFN, depth, heads, head size and context shrink together; text longer than the context is no obstacle."""
    model, smaller = SportsLLM(proportions(teacher)), proportions(student)
    model.initialize(0)
    pieces = samples(6, model.config.max_position_embeddings)
    cut = cut_to_config(model.eval(), smaller, PruneConfig(), pieces)
    assert cut.model.config == smaller and len(cut.layers) == smaller.num_hidden_layers
    with torch.inference_mode():
        assert bool(cut.model(pieces[0][:, : smaller.max_position_embeddings]).isfinite().all())


def test_what_says_nothing_is_cut_in_all_dimensions_at_once() -> None:
    """A model inside a larger one whose other channels, neurons, heads and rotary pairs are idle."""
    model = tiny_model(num_attention_heads=6, num_key_value_heads=3)
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
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    cut = cut_to_config(model, smaller, PruneConfig(), samples(12))
    tokens = samples(1)[0]
    with torch.inference_mode():
        ours, theirs = cut.model(tokens), model(tokens)
    # The ridge pulls every matrix a little towards its pruned weights.
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_a_tied_head_gets_untied() -> None:
    model = tiny_model()
    cut = cut_to_config(model, tiny_config(tie_word_embeddings=False), PruneConfig(refit=False), samples())
    assert torch.equal(cut.model.head_weight, model.model.embed_tokens.weight)
    assert error(cut.model, model) == 0


def test_a_mixture_is_cut_to_a_dense_model() -> None:
    """All neurons stay and weigh alike, and then a third of them goes."""
    model = tiny_model(mlp_kind="experts", experts=Experts(2, 2))
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight[1] = block.mlp.gate.weight[0]
    whole, less = (
        cut_to_config(model, tiny_config(intermediate_size=width), PruneConfig(), samples()).model
        for width in (192, 128)
    )
    assert whole.config == tiny_config(intermediate_size=192)
    assert error(whole, model) < 0.05 < error(less, model)
    with pytest.raises(UsageError, match="intermediate_size is 193, more than the 192 neurons of a layer"):
        check_cut(model.config, tiny_config(intermediate_size=193))
    with pytest.raises(UsageError, match="experts without a gate cannot be made"):
        check_cut(tiny_config(mlp_kind="experts", experts=Experts(2, 2, gated=False)), tiny_config())
    with pytest.raises(UsageError, match="mlp_kind is geglu, the full model's is swiglu"):
        check_cut(model.config, tiny_config(mlp_kind="geglu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 65}, "hidden_size is 65, more than the full model's 64"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, more"),
        ({"head_dim": 32}, "head_dim is 32, more"),
        ({"max_position_embeddings": 256}, "max_position_embeddings is 256, more"),
        ({"vocab_size": 400}, "vocab_size is 400, the full model's is 384"),
        ({"qk_norm": True}, "qk_norm is True, the full model's is False"),
    ],
    ids=str,
)
def test_what_no_cut_can_reach_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut_to_config(tiny_model(), tiny_config(**changes), PruneConfig(), samples())
    with pytest.raises(UsageError, match="tie_word_embeddings"):
        cut_to_config(tiny_model(tie_word_embeddings=False), tiny_config(), PruneConfig(), samples())
    with pytest.raises(UsageError, match="with q/k norms cannot merge"):
        smaller = tiny_config(qk_norm=True, num_key_value_heads=1)
        cut_to_config(tiny_model(qk_norm=True), smaller, PruneConfig(), samples())
