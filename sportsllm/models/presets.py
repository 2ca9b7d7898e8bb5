"""Shapes by name. The parameter counts of the full-size presets are asserted in the tests."""

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig


def _shape(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, context: int, tied: bool = True
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
    )


PRESETS: dict[str, ModelConfig] = {
    "small": _shape(16_000, 768, 2_048, 12, 12, 12, 2_048),
    "small-32k": _shape(32_000, 768, 2_048, 12, 12, 12, 2_048),
    "medium": _shape(16_000, 1_024, 4_096, 24, 16, 16, 2_048),
    "large": _shape(16_000, 1_536, 6_144, 24, 16, 16, 4_096),
    "base-162m": _shape(32_000, 768, 3_072, 12, 12, 12, 2_048, tied=False),
    # For quick starts, tests and laptops: the same family, head_dim a multiple of 16.
    "tiny-5m": _shape(4_096, 256, 640, 6, 4, 2, 1_024),
    "tiny-1m-deep": _shape(2_048, 96, 352, 6, 3, 3, 512),  # thirds and halves of it are whole layers and blocks
    "tiny-1m": _shape(2_048, 128, 320, 4, 4, 2, 1_024),
    "tiny-700k": _shape(2_048, 128, 256, 3, 4, 2, 1_024),
    "tiny-300k": _shape(2_048, 64, 192, 4, 2, 1, 1_024),
}

DEFAULT_PRESET = "small"
"""The one that changes of a shape start from where no model is named."""


def preset(name: str) -> ModelConfig:
    """The shape called `name`; the error for an unknown name lists them."""
    if name not in PRESETS:
        raise UsageError(f"model {name!r} is not a preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
