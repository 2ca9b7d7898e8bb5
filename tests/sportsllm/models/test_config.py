import json
from typing import Any

import pytest

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.huggingface import config_from_hf, to_hf
from sportsllm.models.description import described_shape
from sportsllm.models.presets import PRESETS, changed_shape, preset
from tests.support.models import tiny_config


def test_hugging_face_round_trip() -> None:
    for config in [
        *PRESETS.values(),
        tiny_config(attention_bias=True),
        tiny_config(qk_norm=True),
        tiny_config(dropout=0.1),
    ]:
        assert config_from_hf(json.loads(json.dumps(to_hf(config)))) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mystery": 1}, "mystery"),
        ({"model_type": "bert"}, "bert"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": -1}, "hidden_size"),
    ],
)
def test_unsupported_field_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ArtifactError, match=named):
        config_from_hf({**to_hf(tiny_config()), **change})


def test_missing_field_is_named() -> None:
    data = to_hf(tiny_config())
    del data["hidden_size"]
    with pytest.raises(ArtifactError, match="hidden_size"):
        config_from_hf(data)


def test_transformers_5_rope_parameters_are_read() -> None:
    data = to_hf(tiny_config())
    del data["rope_theta"]
    data["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    config = config_from_hf(data)
    assert config.rope_theta == 5000.0
    assert config.rope_scaling is not None and config.rope_scaling.factor == 4.0


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "8"},
        {"rms_norm_eps": "1e-6"},
        {"layer_types": 5},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": [1]},
        {"vocab_size": None},
        {"rope_theta": float("nan")},
        *({name: size} for name in ("max_position_embeddings", "intermediate_size") for size in (2**31, 2**64)),
        {"num_hidden_layers": 2**20},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_one_line(change: dict[str, object]) -> None:
    with pytest.raises(ArtifactError, match=r"^config\.json: "):
        config_from_hf({**to_hf(tiny_config()), **change})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("attention_scale", value) for value in ("0.3", float("nan"), True)),
        ("embedding_scale", float("inf")),
        ("rope_local_theta", 0),
        *(("sliding_window", value) for value in (1.5, True, 0)),
        *(("bos_token_id", value) for value in ("x", -1, 1.5)),
        ("eos_token_id", ["x"]),
        ("q_lora_rank", "x"),
        ("layer_types", 5),
        ("layer_types", [1, 2]),
        ("mlp_kind", 1),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_named(name: str, value: object) -> None:
    own = to_hf(tiny_config(layer_types=("sliding", "unrotated"), sliding_window=4))
    assert own["model_type"] == "sportsllm"  # which has every field
    with pytest.raises(ArtifactError, match=rf"^config\.json: .*{name}"):
        config_from_hf(own | {name: value})


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("small", {}, {}),
        ("small", {"layers": 4, "dropout": 0.1}, {"num_hidden_layers": 4, "dropout": 0.1}),
        ("small", {"hidden": 384}, {"hidden_size": 384, "head_dim": 32}),
        ("small", {"heads": 6}, {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 128}),
        ("tiny-1m", {"heads": 8}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}),
        ("tiny-1m", {"heads": 8, "kv_heads": 1, "head_dim": 32}, {"num_attention_heads": 8, "num_key_value_heads": 1}),
        ("tiny-1m", {"hidden": 100, "head_dim": 16}, {"hidden_size": 100, "head_dim": 16}),
        (
            "tiny-1m",
            {"vocab_size": 500, "context": 64, "intermediate": 96, "tied": False},
            {"vocab_size": 500, "max_position_embeddings": 64, "intermediate_size": 96, "tie_word_embeddings": False},
        ),
    ],
)
def test_what_is_given_replaces_the_models_own(name: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed_shape(preset(name), changes) == preset(name).with_changes(**expected)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("small", {"hidden": 100}, "hidden size 100 is not divisible by 12 heads"),
        ("small", {"heads": 5}, "hidden size 768 is not divisible by 5 heads"),
        ("small", {"heads": 6, "kv_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ("small", {"hidden": 36}, "head_dim is 3; rotary embedding needs an even number"),
        ("small", {"dropout": 1.0}, "dropout is 1.0"),
        ("tiny-1m", {"heads": 1}, "give kv_heads too"),
    ],
)
def test_dimensions_that_do_not_go_together(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        changed_shape(preset(name), changes)


def test_the_line_has_the_documented_count() -> None:
    assert described_shape(preset("small")).endswith("vocabulary 16,000 (tied), context 2,048: 97,241,856 parameters")
    assert "untied" in described_shape(preset("base-162m"))


def test_heads_of_latent_attention_change_alone() -> None:
    config = changed_shape(preset("tiny-latent"), {"heads": 2})
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 16)
