"""Shapes by name, and with other dimensions. The tests assert the parameter counts of the full-size presets."""

from collections.abc import Mapping

from sportsllm.errors import UsageError, did_you_mean
from sportsllm.models.config import DIMENSIONS, Experts, ModelConfig


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
    # tiny-1m with a latent cache of 48 numbers a token and layer instead of 128, and with experts of half its width.
    "tiny-latent": _shape(2_048, 128, 320, 4, 4, 1, 1_024).with_changes(
        attention_kind="latent", kv_lora_rank=32, qk_nope_head_dim=16, head_dim=16, v_head_dim=32
    ),
    "tiny-experts": _shape(2_048, 128, 160, 4, 4, 2, 1_024).with_changes(mlp_kind="experts", experts=Experts(4, 2)),
    # LSTM in attention's place, the state of two vectors a layer instead of a cache that grows.
    "lstm-1m": _shape(2_048, 128, 224, 3, 1, 1, 1_024).with_changes(attention_kind="lstm", position_kind="none"),
    # Keys and values from two latents of 64, as one of 128; eight experts of 1,181,568 parameters, two a token.
    "latent-moe": _shape(16_000, 384, 1_536, 6, 8, 1, 1_024).with_changes(
        attention_kind="latent",
        kv_lora_rank=128,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        head_dim=16,
        v_head_dim=48,
        mlp_kind="experts",
        experts=Experts(8, 2, router="sigmoid", weights="softmax", gated=False, balance_loss=0.01),
        dropout=0.1,
    ),
}

PLANNED: dict[str, ModelConfig] = {
    # Shapes that `plan` alone knows. Every query head has its key/value head, embedding and head are two matrices of
    # 32,000 tokens, and the context has room for 100,000 tokens: where their source says nothing, as in base-162m.
    "8b": _shape(32_000, 4_096, 14_336, 32, 32, 32, 131_072, tied=False),
    "70b": _shape(32_000, 8_192, 28_672, 80, 64, 64, 131_072, tied=False),
    "200b": _shape(32_000, 12_288, 49_152, 100, 96, 96, 131_072, tied=False),
}

DEFAULT_PRESET = "small"
"""The one that changes of a shape start from if no model is named."""


def preset(name: str) -> ModelConfig:
    """The shape called `name`; the error for an unknown name lists them."""
    if name not in PRESETS:
        advice = did_you_mean(name, PRESETS) or f"choose one of {', '.join(PRESETS)}"
        raise UsageError(f"model {name!r} is neither a preset nor a directory; {advice}")
    return PRESETS[name]


def changed_shape(config: ModelConfig, changes: Mapping[str, float | bool]) -> ModelConfig:
    """A model with some dimensions replaced: those of `DIMENSIONS`, `context`, `tied`, or fields of `ModelConfig`.

    Where the width or the number of heads changes, a head takes its share of the width unless `head_dim` is given, and
    as many query heads share a key/value head as before unless `kv_heads` is given. Heads of latent attention keep
    their size.

    Raises:
        UsageError: dimensions that do not go together.
    """
    given = dict(changes)
    if config.attention_kind not in ("latent", "lstm"):  # their heads are no share of the width
        hidden = int(given.get("hidden", config.hidden_size))
        heads = int(given.get("heads", config.num_attention_heads))
        if changes.keys() & {"hidden", "heads"} and "head_dim" not in changes:
            if hidden % heads:
                raise UsageError(
                    f"hidden size {hidden} is not divisible by {heads} heads; change --set hidden or heads, or give "
                    "head_dim"
                )
            given["head_dim"] = hidden // heads
        if "heads" in changes and "kv_heads" not in changes:
            shared = config.num_attention_heads // config.num_key_value_heads
            if heads % shared:
                raise UsageError(
                    f"--set heads={heads}: {shared} query heads share a key/value head in this model, which does not "
                    "divide them; give kv_heads too"
                )
            given["kv_heads"] = heads // shared
    field_of = DIMENSIONS | {"context": "max_position_embeddings", "tied": "tie_word_embeddings"}
    try:
        return config.with_changes(**{field_of.get(name, name): value for name, value in given.items()})
    except UsageError as error:
        said = str(error).removeprefix("config: ")
        for name, field in field_of.items():
            said = said.replace(field, name)
        raise UsageError(f"{' '.join(f'{name}={value}' for name, value in changes.items())}: {said}") from None
