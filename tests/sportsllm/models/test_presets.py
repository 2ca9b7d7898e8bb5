"""Shapes of one's own: what follows from a changed dimension, and what is refused."""

from typing import Any

import pytest

from sportsllm.errors import UsageError
from sportsllm.models.presets import changed_shape, described_shape, preset


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
            {
                "vocab_size": 500,
                "max_position_embeddings": 64,
                "intermediate_size": 96,
                "tie_word_embeddings": False,
            },
        ),
    ],
)
def test_what_is_given_replaces_the_models_own(name: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed_shape(preset(name), changes) == preset(name).with_changes(**expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 100}, "hidden size 100 is not divisible by 12 heads"),
        ({"heads": 5}, "hidden size 768 is not divisible by 5 heads"),
        ({"heads": 6, "kv_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"hidden": 36}, "head_dim is 3; rotary embedding needs an even number"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_dimensions_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        changed_shape(preset("small"), changes)


def test_heads_that_key_value_heads_cannot_share() -> None:
    with pytest.raises(UsageError, match="give --kv-heads too"):
        changed_shape(preset("tiny-1m"), {"heads": 1})


def test_the_line_has_the_documented_count() -> None:
    assert described_shape(preset("small")).endswith("vocabulary 16,000 (tied), context 2,048: 97,241,856 parameters")
    assert "untied" in described_shape(preset("base-162m"))


def test_heads_of_latent_attention_change_alone() -> None:
    config = changed_shape(preset("tiny-latent"), {"heads": 2})
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 16)
