"""The shape of a model by its dimensions' short names: changed, and said in a line. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

DIMENSIONS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
    "head_dim": "head_dim",
}
"""Each dimension of a shape, as flags and files name it, and the field of `ModelConfig` that it is."""
_FIELDS = {
    **DIMENSIONS,
    "context": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "dropout": "dropout",
    "tied": "tie_word_embeddings",
}


def changed_shape(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """A model with some dimensions replaced.

    Where the width or the number of heads changes, a head takes its share of the width unless `head_dim` is given, and
    as many query heads share a key/value head as before unless `kv_heads` is given. Heads of latent attention keep
    their size.

    Args:
        config: to start from.
        changes: by the flags' names: those of `DIMENSIONS`, `context`, `vocab_size`, `dropout` and `tied`.

    Raises:
        UsageError: dimensions that do not go together.
    """
    hidden, heads = changes.get("hidden", config.hidden_size), changes.get("heads", config.num_attention_heads)
    derived: dict[str, int] = {}
    if config.attention_kind in ("latent", "lstm"):  # no head is a share of the width
        return config.with_changes(**{_FIELDS[name]: value for name, value in changes.items()})
    if changes.keys() & {"hidden", "heads"} and "head_dim" not in changes:
        if hidden % heads:
            raise UsageError(
                f"hidden size {hidden} is not divisible by {heads} heads; change --hidden or --heads, "
                "or give --head-dim"
            )
        derived["head_dim"] = hidden // heads
    if "heads" in changes and "kv_heads" not in changes:
        shared = config.num_attention_heads // config.num_key_value_heads
        if heads % shared:
            raise UsageError(
                f"--heads {heads}: {shared} query heads share a key/value head in this model, which does not divide "
                "them; give --kv-heads too"
            )
        derived["kv_heads"] = heads // shared
    return config.with_changes(**{_FIELDS[name]: value for name, value in {**derived, **changes}.items()})


def described_shape(config: ModelConfig) -> str:
    """The shape and the number of parameters, in a line."""
    experts, heads = config.experts, f"on {config.num_key_value_heads} key/value heads"
    if config.attention_kind == "latent":
        heads = f"on a latent of {config.kv_rank}"
    if config.selection is not None:
        heads += f" that see {config.selection.tokens:,} tokens"
    mixing = f"{config.num_attention_heads} heads of {config.head_dim} {heads}"
    if config.attention_kind == "lstm":
        mixing = f"LSTM of {config.cells:,} cells"
    inner = f"FFN {config.intermediate_size:,}"
    if experts is not None:
        inner = f"{experts.active} of {experts.count} experts of {config.intermediate_size:,}"
        inner += f" and {experts.shared} shared" if experts.shared else ""
    if config.dense_layers:
        inner += f" after {config.dense_layers} with FFN {config.dense_intermediate_size:,}"
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    return (
        f"{config.num_hidden_layers} layers of {config.hidden_size:,}, {inner}, "
        f"{mixing}, "
        f"vocabulary {config.vocab_size:,} ({'tied' if config.tie_word_embeddings else 'untied'}), "
        f"context {config.max_position_embeddings:,}{dropout}: {config.parameters:,} parameters"
    )
