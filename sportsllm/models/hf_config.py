"""Hugging Face's config.json: read into a `ModelConfig`, and written from one. Imports no large library."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ROPE_TYPES, ModelConfig, RopeScaling

# Fields of config.json that do not change the model's output.
_IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "initializer_range", "_name_or_path", "max_window_layers", "sliding_window", "quantization_config",
    "transformers.js_config", "unk_token_id",
}  # fmt: skip
# Fields that are harmless only with these values.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "is_decoder": (False, True),
    "use_mrope": (False,),
}
_SIZES = ("num_attention_heads", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")
_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
OWN_MODEL_TYPE = "sportsllm"
"""For kinds of attention or feed-forward that have no layout of Hugging Face's: every field under its own name."""


def config_from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read the parsed config.json of a LLaMA-family model; `where` is the file's name, for messages.

    Raises:
        ArtifactError: a field this program does not know or cannot honour; its name is in the message.
    """
    try:
        return _parse(data, where)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ArtifactError(f"{where}: a field has a value of the wrong kind ({error}); correct it") from None


def _parse(data: Mapping[str, Any], where: str) -> ModelConfig:
    model_type = data.get("model_type", "llama")
    if model_type == OWN_MODEL_TYPE:
        return _parse_own(data, where)
    if model_type not in _MODEL_TYPES:
        raise ArtifactError(
            f"{where}: model_type {model_type!r} is not supported; use one of {', '.join(_MODEL_TYPES)}"
        )
    rest = {key: value for key, value in data.items() if key not in _IGNORED}
    for key, allowed in _REQUIRED.items():
        value = rest.pop(key, allowed[0])
        if value not in allowed:
            raise ArtifactError(f"{where}: {key} is {value!r}; only {allowed[0]!r} is supported")
    layer_types = rest.pop("layer_types", None)
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise ArtifactError(f"{where}: layer_types has {sorted(set(layer_types))}; only 'full_attention' is supported")

    try:
        values: dict[str, Any] = {name: rest.pop(name) for name in _SIZES}
    except KeyError as error:
        raise ArtifactError(f"{where}: field {error} is missing") from None
    rope = dict(rest.pop("rope_parameters", None) or {})  # transformers 5 keeps theta and scaling together
    scaling = rest.pop("rope_scaling", None) or rope
    heads = values["num_attention_heads"]
    default_head_dim = 128 if model_type == "qwen3" else values["hidden_size"] // heads
    bias = bool(rest.pop("attention_bias", model_type == "qwen2"))
    values |= {
        "num_key_value_heads": rest.pop("num_key_value_heads", None) or heads,
        "head_dim": rest.pop("head_dim", None) or default_head_dim,
        "tie_word_embeddings": rest.pop("tie_word_embeddings", False),
        "rope_theta": rest.pop("rope_theta", None) or rope.get("rope_theta", 10_000.0),
        "rope_scaling": _rope_scaling(scaling, rest.get("max_position_embeddings"), where),
        "qk_norm": model_type == "qwen3",
        "attention_bias": bias,
        "attention_output_bias": bias and model_type != "qwen2",
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = rest.pop(key, None)
        values[key] = tuple(value) if isinstance(value, list) else value
    own_defaults = ("max_position_embeddings", "rms_norm_eps", "mlp_bias", "dropout")
    values |= {key: rest.pop(key) for key in own_defaults if key in rest}
    if rest:
        raise ArtifactError(f"{where}: unknown field {sorted(rest)[0]!r}; remove it or use a supported model")
    return _checked(values, where)


def _parse_own(data: Mapping[str, Any], where: str) -> ModelConfig:
    values = {key: value for key, value in data.items() if key not in _IGNORED}
    unknown = sorted(values.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ArtifactError(f"{where}: unknown field {unknown[0]!r}; remove it or use a supported model")
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    scaling = _rope_scaling(values.get("rope_scaling") or {}, values.get("max_position_embeddings"), where)
    return _checked(values | {"rope_scaling": scaling}, where)


def _checked(values: Mapping[str, Any], where: str) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except UsageError as error:
        raise ArtifactError(f"{where}: {error}") from None


def _rope_scaling(data: Mapping[str, Any], context: int | None, where: str) -> RopeScaling | None:
    """Hugging Face's record; `context`, the model's, is YaRN's original one where that is not said."""
    kind = data.get("rope_type", data.get("type", "default"))
    if kind in (None, "default"):
        return None
    known = {"factor", *(ROPE_TYPES.get(kind) or ROPE_TYPES["llama3"])}  # earlier versions wrote these for linear too
    unknown = set(data) - known - {"rope_type", "type", "rope_theta"}
    if kind in ROPE_TYPES and unknown:
        raise ArtifactError(f"{where}: rope_scaling has an unknown field {sorted(unknown)[0]!r}")
    values = {key: data[key] for key in known & set(data) if data[key] is not None}
    values = {key: value for key, value in values.items() if value or not key.startswith("mscale")}  # 0 is unset
    if kind == "yarn":
        values.setdefault("original_max_position_embeddings", context or ModelConfig.max_position_embeddings)
    try:
        return RopeScaling(rope_type=kind, **values)
    except UsageError as error:
        raise ArtifactError(f"{where}: {error}") from None


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json that Hugging Face's loaders read; one of our own where a kind is none of theirs."""
    if (config.attention_kind, config.mlp_kind) != (ModelConfig.attention_kind, ModelConfig.mlp_kind):
        own = {"architectures": ["SportsLLM"], "model_type": OWN_MODEL_TYPE} | asdict(config)
        return own | {"rope_scaling": config.rope_scaling and config.rope_scaling.fields_used()}
    model_type = _model_type(config)
    data: dict[str, Any] = {"architectures": [_MODEL_TYPES[model_type]], "model_type": model_type}
    ours = {"attention_output_bias", "qk_norm", "dropout", "attention_kind", "mlp_kind", "rope_scaling"}
    for field in fields(config):
        if field.name not in ours:
            value = getattr(config, field.name)
            data[field.name] = list(value) if isinstance(value, tuple) else value
    if model_type == "qwen2":
        del data["attention_bias"]
    if model_type != "llama":
        del data["mlp_bias"]
        data["use_sliding_window"] = False
    if config.rope_scaling is not None:
        data["rope_scaling"] = config.rope_scaling.fields_used()
    if config.dropout:
        data["dropout"] = config.dropout
    return data | {"hidden_act": "silu", "torch_dtype": "float32"}


def _model_type(config: ModelConfig) -> str:
    one_bias = config.attention_bias == config.attention_output_bias
    if config.qk_norm:
        kind, possible = "qwen3", one_bias and not config.mlp_bias
    elif config.attention_bias and not one_bias:
        kind, possible = "qwen2", not config.mlp_bias
    else:
        kind, possible = "llama", one_bias
    if not possible:
        raise UsageError(
            "config: this mix of attention_bias, attention_output_bias, mlp_bias and qk_norm belongs to "
            "no Hugging Face model type; use llama's, qwen2's or qwen3's"
        )
    return kind


def load_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json.

    Raises:
        ArtifactError: it is missing, no JSON, or describes a model that is not supported.
    """
    path = directory / "config.json"
    return config_from_hf(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file, or say in one line why not."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; is {path.parent} a checkpoint or an export?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not valid JSON ({error}); write the directory again") from None
    if not isinstance(data, dict):
        raise ArtifactError(f"{path}: holds a {type(data).__name__}, not a JSON object")
    return data


def packed_by_bitsandbytes(quantization: Any) -> str | None:
    """`NF4`, `FP4` or `INT8` where config.json's quantization_config is bitsandbytes', else None."""
    if not isinstance(quantization, dict):
        return None
    eight, four = bool(quantization.get("load_in_8bit")), bool(quantization.get("load_in_4bit"))
    if quantization.get("quant_method", "bitsandbytes" if eight or four else None) != "bitsandbytes":
        return None
    return "INT8" if eight else str(quantization.get("bnb_4bit_quant_type", "fp4")).upper()
