from typing import Any

import pytest

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.huggingface import config_from_hf, to_hf
from sportsllm.models.config import Experts, Selection
from sportsllm.models.presets import changed_shape, preset
from tests.support.lstm_models import LSTM
from tests.support.models import tiny_config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mystery", 1),
        ("model_type", "bert"),
        ("hidden_act", "gelu"),
        *(("hidden_size", value) for value in (-1, "8")),
        *((name, size) for name in ("max_position_embeddings", "intermediate_size") for size in (2**31, 2**64)),
        ("num_hidden_layers", 2**20),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("rms_norm_eps", "1e-6"),
        ("rope_theta", float("nan")),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "beta": 1}),
        *(("rope_scaling", value) for value in ({"type": "linear"}, [1])),
        *(("attention_scale", value) for value in ("0.3", float("nan"), True)),
        ("embedding_scale", float("inf")),
        ("rope_local_theta", 0),
        *(("sliding_window", value) for value in (1.5, True, 0)),
        *(("bos_token_id", value) for value in ("x", -1, 1.5)),
        ("eos_token_id", ["x"]),
        ("q_lora_rank", "x"),
        *(("layer_types", value) for value in (5, [1, 2], ["sliding_attention"])),
        ("mlp_kind", 1),
    ],
    ids=str,
)
def test_a_value_that_a_field_cannot_have_is_named(name: str, value: object) -> None:
    """In a layout that has every field and in LLaMA's, which ignores a window."""
    own = to_hf(tiny_config(layer_types=("sliding", "unrotated"), sliding_window=4))
    assert own["model_type"] == "sportsllm"
    unnamed = {"{'type': 'linear'}": "'factor'", "[1]": "wrong type", "5": "(layer_types|'int' object)"}
    said = unnamed.get(str(value), name)
    for data in [own] if name == "sliding_window" else [own, to_hf(tiny_config())]:
        with pytest.raises(ArtifactError, match=rf"^config\.json: .*{said}"):
            config_from_hf(data | {name: value})


def test_a_missing_field_is_named() -> None:
    data = to_hf(tiny_config())
    del data["hidden_size"]
    with pytest.raises(ArtifactError, match="hidden_size"):
        config_from_hf(data)


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
        ("tiny-latent", {"heads": 2}, {"num_attention_heads": 2}),
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
        ("small", {"heads": 6, "kv_heads": 4}, "^heads=6 kv_heads=4: heads 6 is not a multiple of kv_heads 4"),
        ("small", {"hidden": 36}, "head_dim is 3; rotary embedding needs an even number"),
        ("small", {"dropout": 1.0}, "dropout is 1.0"),
        ("tiny-1m", {"heads": 1}, "give kv_heads too"),
    ],
)
def test_dimensions_that_do_not_go_together(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        changed_shape(preset(name), changes)


MIXTURE = {"mlp_kind": "experts", "experts": Experts(4, 2)}
SELECTED = {"attention_kind": "selected", "selection": Selection(tokens=24, block=4, heads=3, parts=2, pairs=4)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (MIXTURE | {"dense_layers": 2}, "dense_layers is 2; only a mixture of experts has such"),
        (MIXTURE | {"dense_layers": 1}, "dense_intermediate_size is None"),
        ({"dense_layers": 1}, "dense_layers is 1; only a mixture"),
        (MIXTURE | {"dense_intermediate_size": 96}, "dense_layers is 0; only a mixture"),
        ({"experts": Experts(4, 2)}, "give both or none"),
        (LSTM | {"position_kind": "rotary"}, "position_kind is 'rotary'"),
        (LSTM | {"num_attention_heads": 2, "num_key_value_heads": 2}, "num_attention_heads is 2"),
        (LSTM | {"qk_norm": True}, "qk_norm is True"),
        (LSTM | {"attention_kind": "grouped_query"}, "'grouped_query' needs positions"),
        (SELECTED | {"selection": None}, "attention_kind 'selected' with selection None; give both"),
        (SELECTED | {"attention_kind": "grouped_query"}, "attention_kind 'grouped_query' with selection"),
        (SELECTED | {"layer_types": ("sliding", "full"), "sliding_window": 8}, "layer_types is .* it must be None"),
        (SELECTED | {"position_kind": "learned"}, "'learned'; with attention_kind 'selected' it must be 'rotary'"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        (Experts, {"active": 5}, "5 of 4 experts per token; choose 1 to 4"),
        (Experts, {"router": "hash"}, "router is 'hash'; use one of softmax, sigmoid"),
        (Experts, {"groups": 3}, "4 experts in 3 groups"),
        *(
            (Selection, sizes, "config: selection: ")
            for sizes in ({"tokens": 30, "block": 4}, {"tokens": 8, "block": 4}, {"block": 0}, {"heads": 1.5})
        ),
    ],
)
def test_sizes_of_mixtures_and_selections(kind: type, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kind(**({"count": 4, "active": 2} if kind is Experts else {}) | sizes)
