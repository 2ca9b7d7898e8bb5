"""Fields of Hugging Face's config.json that families of models share, and how they become `ModelConfig`'s.

A `Family` reads its own fields and writes them back; `sportsllm.formats.huggingface.families` lists them all, and
`sportsllm.formats.huggingface.config` does the fields that are common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.models.config import FULL, SLIDING, ModelConfig

Fields = dict[str, Any]
_HF_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING}
_HF_NAMES = {ours: theirs for theirs, ours in _HF_TYPES.items()}

# Fields of `ModelConfig` that are off in a LLaMA model; a family lists those that it has.
_SWITCHES = (
    "attention_kind", "mlp_kind", "qk_norm", "attention_bias", "attention_output_bias", "mlp_bias", "layer_types",
    "sliding_window", "rope_local_theta", "attention_scale", "embedding_scale", "output_norms", "norm_kind",
    "position_kind", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "experts",
    "dense_layers", "dense_intermediate_size", "selection",
)  # fmt: skip
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


class Family(NamedTuple):
    """How a model type's config.json differs from LLaMA's.

    Attributes:
        architecture: the class of `transformers`.
        read: takes the family's fields out of those of a file, given with its name, and returns what they mean.
        fits: whether a model can be written as one of the family.
        written: the family's fields of a model that fits; None for one of LLaMA's that the family has not.
        ties: whether embedding and head are one where the file does not say.
    """

    architecture: str
    read: Callable[[Fields, str], Fields]
    fits: Callable[[ModelConfig], bool]
    written: Callable[[ModelConfig], Fields]
    ties: bool = False


def only(config: ModelConfig, *allowed: str) -> bool:
    """Whether all switches but the allowed ones are as in a LLaMA model."""
    return all(getattr(config, name) == _DEFAULTS[name] for name in _SWITCHES if name not in allowed)


def one_bias(config: ModelConfig) -> bool:
    """Whether all of attention has biases, or none of it."""
    return config.attention_bias == config.attention_output_bias


def require(rest: Fields, where: str, **allowed: tuple[Any, ...]) -> None:
    """Take fields out that are harmless only with these values; the first is what absence means."""
    for key, values in allowed.items():
        value = rest.pop(key, values[0])
        if value not in values:
            raise ArtifactError(f"{where}: {key} is {value!r}; only {values[0]!r} is supported")


def biases(rest: Fields) -> Fields:
    """`attention_bias` of all of attention's matrices."""
    bias = bool(rest.pop("attention_bias", False))
    return {"attention_bias": bias, "attention_output_bias": bias}


def full_only(rest: Fields, where: str) -> None:
    """Take `layer_types` out, which may name full attention alone."""
    types = rest.pop("layer_types", None)
    if types is not None and set(types) != {"full_attention"}:
        raise ArtifactError(f"{where}: layer_types has {sorted(set(types))}; only 'full_attention' is supported")


def hiding_window(rest: Fields, context: int) -> int | None:
    """A sliding window that hides anything of the context."""
    window = rest.pop("sliding_window", None)
    return None if window is None or window >= context else int(window)


def read_llama(rest: Fields, where: str) -> Fields:
    """The fields of a model without anything of its own."""
    require(rest, where, hidden_act=("silu",), use_sliding_window=(False,))
    rest.pop("sliding_window", None)
    full_only(rest, where)
    return biases(rest)


def read_qwen2(rest: Fields, where: str) -> Fields:
    """Biases of q, k and v."""
    bias = bool(rest.pop("attention_bias", True))
    return read_llama(rest, where) | {"attention_bias": bias, "attention_output_bias": False}


def read_qwen3(rest: Fields, where: str) -> Fields:
    """Norms of query and key heads."""
    rest.setdefault("head_dim", 128)
    return read_llama(rest, where) | {"qk_norm": True}


def read_mistral(rest: Fields, where: str) -> Fields:
    """A window in all layers, or in those that `layer_types` names."""
    window = hiding_window(rest, rest.get("max_position_embeddings", 0))
    types = rest.pop("layer_types", None)
    values = read_llama(rest, where)
    if window is None:
        return values
    layers = int(rest["num_hidden_layers"])
    types = types or ["sliding_attention"] * layers
    return values | {"sliding_window": window, "layer_types": layer_types(types, where)}


def layer_types(given: list[str], where: str) -> tuple[str, ...]:
    """`ModelConfig.layer_types` of Hugging Face's."""
    unknown = sorted(set(given) - _HF_TYPES.keys())
    if unknown:
        raise ArtifactError(f"{where}: layer_types has {unknown[0]!r}; use {', '.join(_HF_TYPES)}")
    return tuple(_HF_TYPES[name] for name in given)


def hf_types(config: ModelConfig) -> list[str]:
    """The way back from `layer_types`."""
    return [_HF_NAMES[name] for name in config.layer_types or ()]


def write_llama(config: ModelConfig) -> Fields:
    """What LLaMA's files have beside the common fields."""
    return {"hidden_act": "silu"}


def write_qwen(config: ModelConfig) -> Fields:
    """The same of Qwen2 and Qwen3."""
    return {"hidden_act": "silu", "mlp_bias": None, "use_sliding_window": False}


def write_mistral(config: ModelConfig) -> Fields:
    """The same of Mistral."""
    own = {"sliding_window": config.sliding_window, "attention_bias": None, "mlp_bias": None}
    return {"hidden_act": "silu", **own}
