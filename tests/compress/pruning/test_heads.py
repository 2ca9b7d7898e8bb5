"""Fewer heads and channels: exact if what is cut is a function of what stays, else the best approximation."""

import pytest
import torch

from compress.pruning.cut import choose_units, slice_model
from compress.pruning.heads import nearest_pairs, reduce_heads
from compress.pruning.hidden import rotate
from compress.pruning.scores import measure_scores
from sportsllm.models.description import NORMS
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope import RopeScaling, inverse_frequencies
from tests.support.calibration import inputs_of, random_scores, random_tokens
from tests.support.models import FAMILIES, tiny_model

SAMPLES = random_tokens(4)


def model_with(**changes: object) -> SportsLLM:
    return tiny_model(num_attention_heads=8, num_key_value_heads=4, **changes)


def reduced(model: SportsLLM, **changes: object) -> SportsLLM:
    smaller = model.config.with_changes(**changes)
    return reduce_heads(model, smaller, random_scores(model, SAMPLES), SAMPLES)


def logits(model: SportsLLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(random_tokens(1, seed=7)[0])


def outputs_of(model: SportsLLM, name: str, size: int = 16) -> torch.Tensor:
    """(N, heads, size) outputs of a matrix of layer 0 over the calibration samples, float64."""
    module = model.get_submodule(path := f"model.layers.0.self_attn.{name}")
    outputs = inputs_of(model, [path], SAMPLES)[path] @ module.weight.double().T
    return (outputs if module.bias is None else outputs + module.bias.double()).unflatten(-1, (-1, size))


def as_complex(heads: torch.Tensor) -> torch.Tensor:
    """(..., E) to (..., E / 2): rotary pair p is p and p + E / 2."""
    return torch.complex(heads[..., :8], heads[..., 8:])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=str)
def test_shared_keys_are_the_best_that_one_number_a_pair_can_give(changes: dict[str, object]) -> None:
    """Against Eckart and Young: no rank-one approximation of a pair's keys is nearer than the first singular vector."""
    model = model_with(**changes)
    merged = reduced(model, num_key_value_heads=2)
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
@pytest.mark.parametrize(("kv_heads", "size"), [(2, 16), (4, 8)])
def test_fewer_values_are_the_best_that_their_number_can_give(kv_heads: int, size: int) -> None:
    """Against Eckart and Young on what o_proj makes of each head's values, shared by two heads or of half the size."""
    model = model_with()
    made = reduced(model, num_key_value_heads=kv_heads, head_dim=size)
    values, kept = outputs_of(model, "v_proj"), outputs_of(made, "v_proj", size)
    old, new = (m.model.layers[0].self_attn.o_proj.weight.double().unflatten(1, (8, -1)) for m in (model, made))
    for group, heads in enumerate(torch.arange(8).chunk(kv_heads)):
        wanted = torch.cat([values[:, head // 2] @ old[:, head].T for head in heads], dim=1)
        found = torch.cat([kept[:, group] @ new[:, head].T for head in heads], dim=1)
        least = torch.linalg.svdvals(wanted)[size:].square().sum()
        assert 0.01 * wanted.square().sum() < least  # heads of random weights share little
        # As above; o_proj is stored in float32 too.
        torch.testing.assert_close((found - wanted).square().sum(), least, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 4},
        {"head_dim": 6, "rope_theta": 500.0},
        {"head_dim": 64, "rope_scaling": RopeScaling("llama3", 8.0, original_max_position_embeddings=64)},
    ],
    ids=str,
)
def test_pairs_go_to_the_nearest_frequency(changes: dict[str, object]) -> None:
    """By brute force over angles per position, from the formula of the unscaled table."""
    full = tiny_model(head_dim=96).config
    smaller = full.with_changes(**changes)
    old = [full.rope_theta ** (-p / 48) for p in range(48)]
    count = smaller.head_dim // 2
    new = [smaller.rope_theta ** (-r / count) for r in range(count)]
    if smaller.rope_scaling is not None:
        new = [float(value) for value in inverse_frequencies(smaller)]
    found = nearest_pairs(full, smaller)
    for r, pairs in enumerate(found):
        mine = [p for p in range(48) if all(abs(old[p] - new[r]) <= abs(old[p] - other) for other in new)]
        assert pairs == (mine or [min(range(48), key=lambda p: abs(old[p] - new[r]))])
    # Halves keep every other pair alone or with its neighbour, and equal tables keep every pair.
    assert nearest_pairs(full, full) == [[p] for p in range(48)]


CUT = [{}, {"attention_bias": True}, {"qk_norm": True}, {"attention_scale": 0.5}]


@pytest.mark.parametrize("changes", CUT, ids=str)
def test_channels_that_say_nothing_are_cut_without_a_trace(changes: dict[str, object]) -> None:
    """Even rotary pairs have the frequencies of a head of half the size; values lie in eight dimensions."""
    g = torch.Generator().manual_seed(1)
    model = model_with(**changes)
    odd = torch.tensor([1, 3, 5, 7, 9, 11, 13, 15])
    with torch.no_grad():
        for block in model.model.layers:
            for name in ("q_proj", "k_proj"):
                module = getattr(block.self_attn, name)
                for part in [module.weight] if module.bias is None else [module.weight, module.bias]:
                    part.view(-1, 16, *part.shape[1:])[:, odd] = 0
            value = block.self_attn.v_proj
            mix = torch.randn(4, 16, 8, generator=g)
            value.weight.copy_((mix @ value.weight.view(4, 16, -1)[:, :8]).flatten(0, 1))
            if value.bias is not None:
                value.bias.copy_((mix @ value.bias.view(4, 16, 1)[:, :8]).flatten())
    half = reduced(model, head_dim=8)
    assert half.model.layers[0].self_attn.q_proj.weight.shape == (64, 64)
    if model.config.qk_norm:  # sizes of the kept halves differ from the whole's: exact but for one factor a layer
        cosine = torch.cosine_similarity(logits(half).flatten(), logits(model).flatten(), dim=0)
        assert cosine > 0.999
    else:
        assert torch.allclose(logits(half), logits(model), atol=1e-3, rtol=1e-3)


def test_one_shared_head_is_read_by_the_strongest_of_all() -> None:
    """Four query heads of two groups on one key/value head: exact where all the others write nothing."""
    model = model_with()
    scores = random_scores(model, SAMPLES)
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            scores.units["query_head", layer] = torch.tensor([7.0, 9, 0, 0, 0, 0, 8, 6])
            attention = block.self_attn
            for name in ("k_proj", "v_proj"):
                heads = getattr(attention, name).weight.view(4, 16, -1)
                heads[3] = heads[0]
            columns = attention.o_proj.weight.view(64, 8, 16)
            columns[:, 2:6] = 0
    smaller = model.config.with_changes(num_attention_heads=4, num_key_value_heads=1)
    made = reduce_heads(model, smaller, scores, SAMPLES)
    assert torch.allclose(logits(made), logits(model), atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_a_stream_that_fills_a_subspace_is_cut_to_it_without_a_trace(changes: dict[str, object]) -> None:
    """All that writes to the stream writes into 48 directions, none of which is a channel."""
    model = tiny_model(**changes)
    if model.lm_head is None:  # two uses of a table have an exact basis only if the last norm has one size
        torch.nn.init.constant_(model.model.norm.weight, 1.5)
    basis = torch.linalg.qr(torch.randn(64, 48, generator=torch.Generator().manual_seed(1))).Q
    onto = basis @ basis.T
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ onto)
    for block in model.model.layers:
        for writer in (block.self_attn.o_proj, block.mlp.down_proj):
            writer.weight.copy_(onto @ writer.weight)
            if writer.bias is not None:
                writer.bias.copy_(onto @ writer.bias)
    scores = measure_scores(model, SAMPLES)
    kept = choose_units(model.config, scores, model.config.with_changes(hidden_size=48), [0, 1])
    cut = slice_model(rotate(model, scores.directions, 48), kept)
    assert cut.config.hidden_size == 48
    assert torch.allclose(logits(cut), logits(model), atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_the_first_directions_are_the_best_of_their_number() -> None:
    """Against Eckart and Young, on the states that the norms read, scaled as the tied head needs it."""
    model = tiny_model()
    model.model.norm.weight[[3, 9]] = torch.tensor([0.0, -1.0])  # a channel that is not read, and one turned around
    norms = [f"model.layers.{layer}.{norm}" for layer in range(2) for norm in NORMS.values()]
    directions = measure_scores(model, SAMPLES).directions
    weight = model.model.norm.weight.double()
    states = torch.cat([*inputs_of(model, [*norms, "model.norm"], SAMPLES).values()])
    states = states / (states.square().mean(dim=1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    states = states * (weight / weight.mean()).clamp(min=1e-2).sqrt()
    basis = directions.basis[:, :40].double()
    lost = (states - states @ basis @ basis.T).square().sum()
    # Products are float32, summed over 1,600 states.
    torch.testing.assert_close(lost, torch.linalg.svdvals(states)[40:].square().sum(), rtol=1e-4, atol=0)


@torch.no_grad()
def test_norms_keep_the_size_of_what_stays() -> None:
    """Each norm's outputs have the mean square of the full model's normalised states in the directions that stay."""
    model = tiny_model(tie_word_embeddings=False)
    scores = measure_scores(model, SAMPLES)
    kept = choose_units(model.config, scores, model.config.with_changes(hidden_size=32), [0, 1])
    cut = slice_model(rotate(model, scores.directions, 32), kept)
    tokens = SAMPLES[0]
    full = torch.nn.functional.rms_norm(model.model.embed_tokens(tokens), (64,))
    ours = cut.model.layers[0].input_layernorm(cut.model.embed_tokens(tokens))
    wanted = (full @ scores.directions.into(32)).square().sum(dim=-1).mean()
    assert float(ours.square().sum(dim=-1).mean()) == pytest.approx(float(wanted), rel=0.05)  # 80 of the 320 tokens
