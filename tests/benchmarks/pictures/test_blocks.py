"""What a drawing shows, against `transformers`' parameters and against lists written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.pictures.blocks import Drawing, Group, describe_model
from sportsllm.formats.huggingface.config import config_from_hf
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import FEED_FORWARD
from sportsllm.models.parts import HIDDEN, Kind, Matrix
from sportsllm.models.presets import PLANNED, PRESETS
from sportsllm.models.selected import Selection
from tests.support import families, gelu_kind
from tests.support.models import tiny_config


def family(name: str) -> ModelConfig:
    return config_from_hf(json.loads(families.CONFIGS[name].to_json_string()))


def boxes(drawing: Drawing) -> int:
    """The parameters that the boxes say, each as often as it stands for."""
    total = sum(part.total for part in (*drawing.before, *drawing.after))
    for block in drawing.blocks:
        for half in block.halves:
            norms = [half.before] if half.after is None else [half.before, half.after]
            inside = sum(norm.total for norm in norms) + sum(one.total for row in half.rows for one in row)
            total += len(block.layers) * inside
    return total


def names(drawing: Drawing, half: int, block: int = 0) -> list[list[str]]:
    return [[one.name for one in row] for row in drawing.blocks[block].halves[half].rows]


@pytest.mark.parametrize("name", families.CONFIGS)
def test_boxes_add_up_to_the_parameters_of_transformers(name: str) -> None:
    peer = families.peer(name)
    biases = sum(b.numel() for key, b in peer.named_buffers() if key.endswith("e_score_correction_bias"))
    drawing = describe_model(family(name))
    assert boxes(drawing) == drawing.parameters == sum(p.numel() for p in peer.parameters()) + biases


@pytest.mark.parametrize("name", PRESETS | PLANNED)
def test_every_shape_is_drawn_whole(name: str) -> None:
    config = (PRESETS | PLANNED)[name]
    drawing = describe_model(config)
    assert boxes(drawing) == drawing.parameters == config.parameters
    assert sorted(layer for block in drawing.blocks for layer in block.layers) == list(range(config.num_hidden_layers))


def test_selection_is_drawn_with_its_indexer_among_what_attention_reads() -> None:
    config = PRESETS["small"].with_changes(attention_kind="selected", selection=Selection(heads=12, parts=2, pairs=16))
    drawing = describe_model(config)
    assert boxes(drawing) == drawing.parameters == config.parameters
    assert names(drawing, 0) == [
        ["q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"],
        ["q", "k, cached", "v, cached"],
        ["index q", "index k, cached"],
        ["index scores"],
        ["attention scores"],
        ["attention output"],
        ["o_proj"],
    ]


def test_a_llama_in_order() -> None:
    drawing = describe_model(PRESETS["small"])
    assert names(drawing, 0) == [
        ["q_proj", "k_proj", "v_proj"],
        ["q", "k, cached", "v, cached"],
        ["attention scores"],
        ["attention output"],
        ["o_proj"],
    ]
    assert names(drawing, 1) == [["gate_proj", "up_proj"], ["gate", "up"], ["silu(gate) * up"], ["down_proj"]]
    attention, mlp = drawing.blocks[0].halves
    assert (attention.kind, attention.parameters, attention.kept) == (
        "grouped_query", 4 * 768 * 768, "key 12 \u00d7 64, value 12 \u00d7 64",
    )  # fmt: skip
    assert (mlp.kind, mlp.parameters, mlp.active) == ("swiglu", 3 * 768 * 2_048, 3 * 768 * 2_048)
    q, *_ = attention.rows[0]
    assert (q.name, q.total) == ("q_proj", 768 * 768) and not isinstance(q, Group) and q.shape == "768 \u00d7 768"


def test_gemma_has_norms_around_and_layers_of_two_types() -> None:
    drawing = describe_model(family("gemma3"))
    (block,) = drawing.blocks
    assert block.types == (("sliding, the last 8 tokens", (0, 2)), ("full", (1, 3)))
    after = [half.after.name if half.after else None for half in block.halves]
    assert after == ["attention_output_norm", "feed_forward_output_norm"]
    q, k, v = block.halves[0].rows[0]
    assert [getattr(one, "norms", ()) and one.norms[0].name for one in (q, k, v)] == ["q_norm", "k_norm", ()]
    assert drawing.before[0].note == "rows times 8" and drawing.after[-1].note == "the matrix of embed_tokens"


def test_latent_ranks_stand_below_what_makes_them_and_experts_are_drawn_once() -> None:
    drawing = describe_model(family("deepseek-v3-experts"))
    assert names(drawing, 0)[:2] == [["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj", "kv_b_proj"]]
    half = drawing.blocks[0].halves[1]
    assert half.active == half.parameters - 5 * 3 * 32 * 64  # three of eight
    experts, shared = half.rows[-1]
    assert isinstance(experts, Group) and isinstance(shared, Group)
    assert (experts.name, experts.times, shared.name, shared.times) == ("experts", 8, "shared_experts", 1)
    assert [[part.name for part in row] for row in experts.rows] == [
        ["gate_proj", "up_proj"], ["inner, of each chosen"], ["down_proj"],
    ]  # fmt: skip
    assert experts.total == 8 * 3 * 32 * 64 and shared.total == 3 * 64 * 64


def test_learned_positions_are_a_table_and_biases_count() -> None:
    drawing = describe_model(family("gpt2"))
    assert [(part.name, part.total) for part in drawing.before] == [
        ("embed_tokens", 384 * 64), ("embed_positions", 320 * 64),
    ]  # fmt: skip
    up = drawing.blocks[0].halves[1].rows[0][0]
    assert (up.name, up.total) == ("up_proj", 256 * 64 + 256)


class _Chain(Kind):
    """Matrices that read one another, with nothing said of what is between; one reads a state of its own."""

    def matrices(self, config: Any) -> tuple[Matrix, ...]:
        return (
            Matrix("narrow", 8, config.hidden_size, "low", HIDDEN, HIDDEN),
            Matrix("turn", 8, 8, "turned", "low", "low"),
            Matrix("loop", 8, 8, "low", "state", "state", bias=True),
            Matrix("widen", config.hidden_size, 8, HIDDEN, "turned", "turned", True),
        )

    def tensors(self, config: Any) -> tuple[Matrix, ...]:
        return self.matrices(config)


def test_a_kind_that_nobody_knows_is_drawn_by_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEED_FORWARD, "chain", _Chain())
    drawing = describe_model(tiny_config(mlp_kind="chain"))
    assert names(drawing, 1) == [["narrow"], ["turn", "loop"], ["widen"]]
    half = drawing.blocks[0].halves[1]
    assert (half.kind, half.parameters) == ("chain", 64 * 8 + 8 * 8 + 8 * 8 + 8 + 64 * 8)
    with gelu_kind.registered() as name:
        gelu = describe_model(tiny_config(mlp_kind=name)).blocks[0].halves[1]
        assert (gelu.kind, gelu.parameters) == (name, 2 * 64 * 96 + 96 + 64)
