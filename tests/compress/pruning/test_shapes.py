"""Shapes: which are possible, how many parameters they have, which meet a size."""

import itertools
from dataclasses import replace

import pytest

from compress.pruning.search import thinned
from compress.pruning.shapes import (
    Shape,
    block_counter,
    candidate_shapes,
    head_counts,
    shape_for_share,
    share_for_megabytes,
    widest_shapes,
)
from sportsllm.errors import UsageError
from sportsllm.models.config import Experts, ModelConfig
from sportsllm.models.kinds import ATTENTION, grouped_query
from sportsllm.models.presets import preset
from sportsllm.models.rope import RopeScaling
from sportsllm.models.sublayer import Sublayer
from tests.support.models import tiny_config

MIXED: dict[str, object] = {
    "num_hidden_layers": 3, "mlp_kind": "experts", "experts": Experts(4, 2), "dense_layers": 1,
    "dense_intermediate_size": 200,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(65, 96, 4, 2, 2, 16), "--hidden is 65"),
        (Shape(64, 0, 4, 2, 2, 16), "--intermediate is 0"),
        (Shape(64, 96, 3, 2, 2, 16), "--heads 3 is not a multiple"),
    ],
)
def test_impossible_shapes(shape: Shape, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape.applied_to(tiny_config())


def test_heads_whose_rotary_pairs_have_factors_stay_whole() -> None:
    """A factor belongs to one pair, and what stands for several has none."""
    scaling = RopeScaling("longrope", 4.0, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
    with pytest.raises(UsageError, match="--head-dim cannot be cut in a model of longrope"):
        Shape(64, 96, 4, 2, 2, 8).applied_to(tiny_config(rope_scaling=scaling))


def test_units_that_no_dimension_counts_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_heads(config: ModelConfig) -> Sublayer:
        found = grouped_query(config)
        return replace(found, units=tuple(replace(unit, field=f"{unit.name}s") for unit in found.units))

    monkeypatch.setitem(ATTENTION, "whole", whole_heads)
    config = tiny_config(attention_kind="whole")
    with pytest.raises(UsageError, match="--heads cannot be cut in a model of whole attention"):
        Shape(64, 96, 2, 2, 2, 16).applied_to(config)
    shapes = candidate_shapes(config, 0.6)
    assert {(shape.heads, shape.kv_heads) for shape in shapes} == {(4, 2)}
    count = block_counter(config)
    assert all(count(shape) == shape.applied_to(config).block_parameters for shape in shapes)


def test_heads_that_cannot_be_merged_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(64, 96, 4, 1, 2, 16)
    assert shape.applied_to(tiny_config()).num_key_value_heads == 1
    config = tiny_config(qk_norm=True)
    with pytest.raises(UsageError, match="grouped_query attention with q/k norms cannot merge"):
        shape.applied_to(config)
    with pytest.raises(UsageError, match="that rotates a part of each head cannot merge"):
        shape.applied_to(tiny_config(rotary_dim=8))
    monkeypatch.setitem(ATTENTION, "other", grouped_query)
    with pytest.raises(UsageError, match="--kv-heads: other attention cannot merge"):
        shape.applied_to(tiny_config(attention_kind="other"))
    assert not any(found.merges_kv_heads(config) for found in candidate_shapes(config, 0.8))
    assert any(found.merges_kv_heads(tiny_config()) for found in candidate_shapes(tiny_config(), 0.8))


def test_dense_layers_are_cut_by_the_same_share_and_stay() -> None:
    config = tiny_config(**MIXED)
    count = block_counter(config)
    for inner, hidden, layers in itertools.product((32, 64, 96), (32, 64), (2, 3)):
        shape = Shape(hidden, inner, 4, 2, layers, 16)
        smaller = shape.applied_to(config)
        assert count(shape) == smaller.block_parameters
        assert smaller.dense_intermediate_size == {32: 64, 64: 128, 96: 200}[inner]  # 200 / 3 and 2 / 3 of 200, in 32s
    assert all(shape.layers >= 2 for shape in candidate_shapes(config, 0.6))
    with pytest.raises(UsageError, match="--layers is 1; the first 1 of 3 have no experts and stay, choose 2 to 3"):
        Shape(64, 96, 4, 2, 1, 16).applied_to(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True, "tie_word_embeddings": False},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"mlp_kind": "gelu"},
        {"qk_norm": True, "joint_qk_norm": True},
    ],
    ids=str,
)
def test_counting_by_arithmetic_is_counting_a_config(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    count = block_counter(config)
    attention = [(4, 2, 16), (2, 2, 16), (2, 1, 8), (1, 1, 2)][: 2 if config.joint_qk_norm else 4]
    for hidden, inner, layers in itertools.product((32, 48, 64), (1, 31, 96), (1, 2)):
        for heads, kv_heads, head_dim in attention:
            shape = Shape(hidden, inner, heads, kv_heads, layers, head_dim)
            assert count(shape) == shape.applied_to(config).block_parameters


@pytest.mark.parametrize("share", [0.75, 0.5, 1 / 3])
@pytest.mark.parametrize("name", ["tiny-1m", "tiny-5m", "small"])
def test_share_is_met_and_shapes_fit_the_kernels(name: str, share: float) -> None:
    config = preset(name)
    shape = shape_for_share(config, share)
    found = shape.applied_to(config).block_parameters / config.block_parameters
    assert 0.85 * share < found <= share
    assert shape.hidden % 32 == 0 and shape.intermediate % 32 == 0 and shape.layers == config.num_hidden_layers
    assert shape.heads * config.num_key_value_heads == shape.kv_heads * config.num_attention_heads


def test_of_too_many_shapes_those_with_the_fewest_heads_are_left_out() -> None:
    shapes = [Shape(64, 96, heads, 2, layers, 16) for layers in (1, 2, 3) for heads in (2, 4, 6, 8, 10)]
    assert {shape.heads for shape in {*shapes} - {*thinned(shapes, 12)}} == {2}


def test_a_size_is_a_share_and_impossible_ones_are_refused() -> None:
    full = tiny_config()
    fixed, blocks = full.parameters - full.block_parameters, full.block_parameters
    assert share_for_megabytes(full, (fixed + 0.7 * blocks) * 4 / 1e6) == pytest.approx(0.7)
    with pytest.raises(UsageError, match="embedding and head alone"):
        share_for_megabytes(full, 0.001)
    with pytest.raises(UsageError, match="already"):
        share_for_megabytes(full, 1_000)
    with pytest.raises(UsageError, match="at most 1"):
        shape_for_share(full, 1.5)


def test_candidates_are_the_widest_of_every_shape_that_fits() -> None:
    """Against a loop over the whole grid."""
    config = preset("tiny-1m")
    full, count, target = Shape.of(config), block_counter(config), 0.6 * config.block_parameters
    widest: dict[tuple[int, ...], Shape] = {}
    heads = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4)]
    heads = [pair for pair in heads if pair in head_counts(config)]
    for layers, hidden, (query, key), inner in itertools.product(
        range(1, 5), range(32, 129, 32), heads, range(32, 321, 32)
    ):
        shape = Shape(hidden, inner, query, key, layers, full.head_dim)
        if count(shape) <= target:
            widest[layers, hidden, query, key] = shape
    largest = max(map(count, widest.values()))
    wanted = {shape for shape in widest.values() if count(shape) >= 0.9 * min(target, largest)}
    found = candidate_shapes(config, 0.6)
    assert set(found) == wanted and len(wanted) > 5 and [*map(count, found)] == sorted(map(count, found), reverse=True)


def test_experts_are_a_dimension_of_a_mixture() -> None:
    config = tiny_config(mlp_kind="experts", experts=Experts(4, 2))
    halved = replace(Shape.of(config), experts=2)
    assert Shape.of(config).name == "h64-i96-h4-kh2-l2-hd16-e4" and "experts" not in Shape.of(tiny_config()).sizes()
    smaller = halved.applied_to(config)
    assert smaller.chosen_experts.count == 2 and block_counter(config)(halved) == smaller.block_parameters
    fits = {shape.experts for shape in widest_shapes(config, lambda shape: True, experts=[4, 2], most=2)}
    assert fits == {2, 4}
