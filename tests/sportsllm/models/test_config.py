import json

import pytest

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.huggingface import config_from_hf, to_hf
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import PRESETS, preset
from tests.support.models import tiny_config

COUNTS = {
    "small": 97_241_856,
    "small-32k": 109_529_856,
    "medium": 419_087_360,
    "large": 930_620_928,
    "base-162m": 162_417_408,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_preset_parameter_counts(name: str, count: int) -> None:
    assert preset(name).parameters == count


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


def test_unknown_field_of_our_own_record_is_refused() -> None:
    with pytest.raises(TypeError):
        ModelConfig(vocab=3)  # type: ignore[call-arg]


def test_unknown_preset_lists_the_others() -> None:
    with pytest.raises(UsageError, match="tiny-1m"):
        preset("huge")


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
