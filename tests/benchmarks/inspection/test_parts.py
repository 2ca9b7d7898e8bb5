"""What a drawing shows, against `transformers`' parameters and against lists written by hand."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.inspection.drawing import draw_model
from benchmarks.inspection.parts import Drawing, describe_model
from sportsllm.formats.huggingface import config_from_hf
from sportsllm.models.attention_kinds import Selection
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import FEED_FORWARD
from sportsllm.models.parts import HIDDEN, Kind, Matrix
from sportsllm.models.presets import PLANNED, PRESETS
from tests.support import families, gelu_kind
from tests.support.models import tiny_config


def family(name: str) -> ModelConfig:
    return config_from_hf(json.loads(families.CONFIGS[name].to_json_string()))


def names(drawing: Drawing, sublayer: int, block: int = 0) -> list[list[str]]:
    """Rows of boxes, the norms around left out."""
    rows = drawing.blocks[block].sublayers[sublayer].rows
    return [[part.name for part in row] for row in rows if row[0].note != "around"]


@pytest.mark.parametrize("name", families.CONFIGS)
def test_boxes_add_up_to_the_parameters_of_transformers(name: str) -> None:
    peer = families.peer(name)
    biases = sum(b.numel() for key, b in peer.named_buffers() if key.endswith("e_score_correction_bias"))
    drawing = describe_model(family(name))
    assert drawing.parameters == sum(p.numel() for p in peer.parameters()) + biases


@pytest.mark.parametrize("name", PRESETS | PLANNED)
def test_every_shape_is_drawn_whole(name: str) -> None:
    config = (PRESETS | PLANNED)[name]
    drawing = describe_model(config)
    assert drawing.parameters == config.parameters
    assert sorted(layer for block in drawing.blocks for layer in block.layers) == list(range(config.num_hidden_layers))


def test_selection_is_drawn_with_its_indexer_among_what_attention_reads() -> None:
    config = PRESETS["small"].with_changes(attention_kind="selected", selection=Selection(heads=12, parts=2, pairs=16))
    drawing = describe_model(config)
    assert drawing.parameters == config.parameters
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
    attention, mlp = drawing.blocks[0].sublayers
    assert (attention.kind, attention.parameters, attention.kept) == (
        "grouped_query", 4 * 768 * 768, "key 12 \u00d7 64, value 12 \u00d7 64",
    )  # fmt: skip
    assert (mlp.kind, mlp.parameters, mlp.active) == ("swiglu", 3 * 768 * 2_048, 3 * 768 * 2_048)
    q, *_ = attention.rows[1]
    assert (q.name, q.total) == ("q_proj", 768 * 768) and q.shape == "768 \u00d7 768"


def test_gemma_has_norms_around_and_layers_of_two_types() -> None:
    drawing = describe_model(family("gemma3"))
    (block,) = drawing.blocks
    assert block.types == (("sliding, the last 8 tokens", (0, 2)), ("full", (1, 3)))
    assert [each.rows[-1][0].name for each in block.sublayers] == ["attention_output_norm", "feed_forward_output_norm"]
    assert names(drawing, 0)[0] == ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj"]
    assert drawing.before[0].note == "rows times 8" and drawing.after[-1].note == "the matrix of embed_tokens"


def test_latent_ranks_stand_below_what_makes_them_and_experts_are_drawn_once() -> None:
    drawing = describe_model(family("deepseek-v3-experts"))
    first, second = names(drawing, 0)[:2]
    assert first == ["q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"]
    assert second == ["q_b_proj", "kv_b_proj"]
    half = drawing.blocks[0].sublayers[1]
    assert half.active == half.parameters - 5 * 3 * 32 * 64  # three of eight
    parts = {part.name: part for row in half.rows for part in row}
    assert (parts["experts.N.up_proj"].times, parts["experts.N.up_proj"].total) == (8, 8 * 32 * 64)
    assert parts["shared_experts.up_proj"].times == 1
    rows = names(drawing, 1)
    assert rows.index(["inner, of each chosen"]) < next(
        at for at, row in enumerate(rows) if "experts.N.down_proj" in row
    )


def test_learned_positions_are_a_table_and_biases_count() -> None:
    drawing = describe_model(family("gpt2"))
    assert [(part.name, part.total) for part in drawing.before] == [
        ("embed_tokens", 384 * 64), ("embed_positions", 320 * 64),
    ]  # fmt: skip
    up = drawing.blocks[0].sublayers[1].rows[1][0]
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
    half = drawing.blocks[0].sublayers[1]
    assert (half.kind, half.parameters) == ("chain", 64 * 8 + 8 * 8 + 8 * 8 + 8 + 64 * 8)
    with gelu_kind.registered() as name:
        gelu = describe_model(tiny_config(mlp_kind=name)).blocks[0].sublayers[1]
        assert (gelu.kind, gelu.parameters) == (name, 2 * 64 * 96 + 96 + 64)


def test_a_drawing_names_every_part_in_one_svg() -> None:
    drawing = describe_model(family("deepseek-v3-experts"))
    svg = ElementTree.fromstring(draw_model(drawing, "a <b>"))
    words = [element.text for element in svg.iter() if element.text]
    assert "a <b>" in words and f"{drawing.parameters:,}" in words[0]
    text = " ".join(words)
    for each in drawing.blocks[0].sublayers:
        assert all(part.name.split()[0] in text for row in each.rows for part in row)
