"""What a drawing shows, against the parameters of every shape and against lists written by hand."""

import json

import pytest

from benchmarks.inspect import _page
from benchmarks.inspection.drawing import Drawing, describe_model, draw_model
from sportsllm.formats.huggingface import config_from_hf
from sportsllm.models.config import ModelConfig, Selection
from sportsllm.models.presets import PLANNED, PRESETS
from tests.support import families


def family(name: str) -> ModelConfig:
    return config_from_hf(json.loads(families.CONFIGS[name].to_json_string()))


def names(drawing: Drawing, sublayer: int) -> list[list[str]]:
    """Rows of boxes below the norm before the sublayer."""
    return [[part.name for part in row] for row in drawing.blocks[0].sublayers[sublayer].rows[1:]]


def numel(drawing: Drawing) -> int:
    tables = sum(part.parameters for part in (*drawing.before, *drawing.after))
    return tables + sum(len(block.layers) * block.parameters for block in drawing.blocks)


@pytest.mark.parametrize("name", PRESETS | PLANNED | families.CONFIGS)
def test_every_shape_is_drawn_whole(name: str) -> None:
    config = (PRESETS | PLANNED).get(name) or family(name)
    drawing = describe_model(config)
    assert numel(drawing) == config.parameters
    assert sorted(layer for block in drawing.blocks for layer in block.layers) == list(range(config.num_hidden_layers))


def test_a_llama_in_order() -> None:
    drawing = describe_model(PRESETS["small"])
    cached, scores = ["q", "k, cached", "v, cached"], [["attention scores"], ["attention output"], ["o_proj"]]
    assert names(drawing, 0) == [["q_proj", "k_proj", "v_proj"], cached, *scores]
    assert names(drawing, 1) == [["gate_proj", "up_proj"], ["gate", "up"], ["silu(gate) * up"], ["down_proj"]]
    attention, mlp = drawing.blocks[0].sublayers
    assert attention.kind == "grouped_query" and attention.rows[2][1].shape == "12 \u00d7 T \u00d7 64"
    assert (attention.parameters, mlp.parameters) == (768 + 4 * 768 * 768, 768 + 3 * 768 * 2_048)
    assert (attention.rows[1][0].shape, attention.rows[1][0].parameters) == ("768 \u00d7 768", 768 * 768)
    selection = Selection(heads=12, parts=2, pairs=16)
    selected = describe_model(PRESETS["small"].with_changes(attention_kind="selected", selection=selection))
    assert names(selected, 0) == [
        ["q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"],
        [*cached, "index q", "index k, cached"],
        ["index scores"],
        *scores,
    ]


def test_latent_ranks_stand_below_what_makes_them_and_experts_are_drawn_once() -> None:
    drawing = describe_model(family("deepseek-v3-experts"))
    assert names(drawing, 0)[:3] == [
        ["q_a_proj", "kv_a_proj_with_mqa"],
        ["q_a_layernorm", "kv_a_layernorm"],
        ["q_b_proj", "kv_b_proj"],
    ]
    half = drawing.blocks[0].sublayers[1]
    assert half.active == half.parameters - 5 * 3 * 32 * 64  # three of eight
    parts = {part.name: part for row in half.rows for part in row}
    assert (parts["experts.N.up_proj"].times, parts["experts.N.up_proj"].parameters) == (8, 32 * 64)
    assert parts["shared_experts.up_proj"].times == 1
    assert names(drawing, 1)[-2:] == [["inner, of each chosen"], ["experts.N.down_proj", "shared_experts.down_proj"]]
    page = _page("a <b>", draw_model(family("deepseek-v3-experts")), [])
    assert "<main><h1" in page and ">a &lt;b&gt;</h1>" in page and f"{numel(drawing):,} parameters" in page
    assert all(f"<b>{name}</b>" in page for name in parts)
