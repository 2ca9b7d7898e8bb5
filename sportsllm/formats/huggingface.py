"""Hugging Face's config.json: read into a `ModelConfig`, and written from one. Imports no large library."""

import math
from dataclasses import asdict, fields, replace
from pathlib import Path

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject, clip, read_json
from sportsllm.formats.huggingface_families import FAMILIES, Fields
from sportsllm.models.config import ModelConfig
from sportsllm.models.config_records import ROPE_TYPES, Experts, RopeScaling, Selection

# Fields of config.json that do not change the model's output.
_IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "initializer_range", "_name_or_path", "max_window_layers", "quantization_config",
    "transformers.js_config", "unk_token_id", "pretraining_tp", "cache_implementation", "auto_map", "id2label",
    "label2id", "_num_labels", "gradient_checkpointing", "output_router_logits", "_attn_implementation_autoset",
    # What every config of transformers has, most of it about generation.
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16",
}  # fmt: skip
# Fields that are harmless only with these values.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0, 0.0),
    "partial_rotary_factor": (1, 1.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "use_mrope": (False,),
}
COMMON_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Fields of `ModelConfig` that have the same name and meaning in the files of most families."""
_SIZES = ("num_attention_heads", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")
OWN_MODEL_TYPE = "sportsllm"
"""For models that are of no family of Hugging Face's: every field under its own name."""


def config_from_hf(data: JsonObject, where: str = "config.json") -> ModelConfig:
    """Read the parsed config.json of a model of `FAMILIES`; `where` is the file's name, for messages.

    Raises:
        ArtifactError: a field this program does not know or cannot honour; its name is in the message.
    """
    try:
        return _parse(data, where)
    except UsageError as error:
        raise ArtifactError(f"{where}: {clip(error, 250)}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ArtifactError(
            f"{where}: a field has a value of the wrong type ({clip(error, 200)}); correct it"
        ) from None


def _parse(data: JsonObject, where: str) -> ModelConfig:
    model_type = data.get("model_type", "llama")
    if model_type == OWN_MODEL_TYPE:
        return _parse_own(data, where)
    if model_type not in FAMILIES:
        raise ArtifactError(
            f"{where}: model_type {clip(repr(model_type))} is not supported; use one of {', '.join(FAMILIES)}"
        )
    rest = Fields({key: value for key, value in data.items() if key not in _IGNORED}, where)
    rest.require(**_REQUIRED)
    family = FAMILIES[model_type]
    own = family.read(rest)
    try:
        values: JsonObject = {name: rest.pop(name) for name in _SIZES}
    except KeyError as error:
        raise ArtifactError(f"{where}: field {error} is missing") from None
    rope = dict(rest.pop("rope_parameters", None) or {})  # transformers 5 keeps theta and scaling together
    scaling = rest.pop("rope_scaling", None) or rope
    heads = values["num_attention_heads"]
    values |= {
        "num_key_value_heads": rest.pop("num_key_value_heads", None) or heads,
        "head_dim": rest.pop("head_dim", None) or values["hidden_size"] // heads,
        "tie_word_embeddings": rest.pop("tie_word_embeddings", family.ties),
        "rope_theta": rest.pop("rope_theta", None) or rope.get("rope_theta", 10_000.0),
        "rope_scaling": _rope_scaling(scaling, rest.get("max_position_embeddings"), where),
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = rest.pop(key, None)
        values[key] = tuple(value) if isinstance(value, list) else value
    own_defaults = ("max_position_embeddings", "rms_norm_eps", "mlp_bias", "dropout")
    values |= {key: rest.pop(key) for key in own_defaults if key in rest}
    if rest:
        raise ArtifactError(f"{where}: unknown field {sorted(rest)[0]!r}; remove it or use a supported model")
    return ModelConfig(**values | own)


def _parse_own(data: JsonObject, where: str) -> ModelConfig:
    values = {key: value for key, value in data.items() if key not in _IGNORED}
    unknown = sorted(values.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ArtifactError(f"{where}: unknown field {unknown[0]!r}; remove it or use a supported model")
    for name in ("eos_token_id", "layer_types"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if values.get("experts") is not None:
        values["experts"] = Experts(**values["experts"])
    if values.get("selection") is not None:
        values["selection"] = Selection(**values["selection"])
    scaling = _rope_scaling(values.get("rope_scaling") or {}, values.get("max_position_embeddings"), where)
    return ModelConfig(**values | {"rope_scaling": scaling})


def _rope_scaling(data: JsonObject, context: int | None, where: str) -> RopeScaling | None:
    """Hugging Face's record; `context`, the model's, is YaRN's original one where that is not said."""
    kind = data.get("rope_type", data.get("type", "default"))
    if kind in (None, "default"):
        return None
    if kind not in ROPE_TYPES:
        raise ArtifactError(
            f"{where}: rope_scaling type {kind!r} is not supported; use none or {', '.join(ROPE_TYPES)}"
        )
    known = {"factor", *(ROPE_TYPES[kind] or ROPE_TYPES["llama3"])}  # earlier versions wrote these for linear too
    unknown = set(data) - known - {"rope_type", "type", "rope_theta"}
    if unknown:
        raise ArtifactError(f"{where}: rope_scaling has an unknown field {sorted(unknown)[0]!r}")
    values = {key: data[key] for key in known & set(data) if data[key] is not None}
    values = {key: value for key, value in values.items() if value or not key.startswith("mscale")}  # 0 is unset
    if kind == "yarn":
        values.setdefault("original_max_position_embeddings", context or ModelConfig.max_position_embeddings)
    return RopeScaling(rope_type=kind, **values)


def to_hf(config: ModelConfig) -> JsonObject:
    """The config.json that Hugging Face's loaders read; one of our own where a model is of none of their families."""
    model_type = family_of(config)
    if model_type is None:
        own = {"architectures": ["SportsLLM"], "model_type": OWN_MODEL_TYPE} | asdict(config)
        return own | {"rope_scaling": _scaling_of(config)}
    data = _of_family(config, model_type)
    assert data is not None, "it is of this family"
    return data


def _of_family(config: ModelConfig, model_type: str) -> JsonObject | None:
    """A model's config.json as one of a family; None if the family has no such model."""
    family = FAMILIES[model_type]
    if (written := family.written(config)) is None:
        return None
    data: JsonObject = {"architectures": [family.architecture], "model_type": model_type}
    for name in COMMON_FIELDS:
        value = getattr(config, name)
        data[name] = list(value) if isinstance(value, tuple) else value
    if config.rope_scaling is not None:
        data["rope_scaling"] = config.rope_scaling.fields_used()
    if config.dropout:
        data["dropout"] = config.dropout
    dropped = {name for name in COMMON_FIELDS if name in written and written[name] is None}
    return {name: value for name, value in (data | written).items() if name not in dropped} | {"torch_dtype": "float32"}


def family_of(config: ModelConfig) -> str | None:
    """The model type that a model is written as: the first that reads back as the same model; None for no family."""
    return next((name for name in FAMILIES if _reads_back(config, name)), None)


def _reads_back(config: ModelConfig, model_type: str) -> bool:
    if (data := _of_family(config, model_type)) is None:
        return False
    try:
        found = config_from_hf(data)
    except ArtifactError:
        return False
    if data.get("rope_scaling") == _scaling_of(found):
        found = replace(found, rope_scaling=config.rope_scaling)
    for name in ("attention_scale", "embedding_scale"):  # powers of whole numbers
        given, read = getattr(config, name), getattr(found, name)
        if given is not None and read is not None and math.isclose(given, read, rel_tol=1e-6):
            found = found.with_changes(**{name: given})
    return found == config


def _scaling_of(config: ModelConfig) -> JsonObject | None:
    return None if config.rope_scaling is None else config.rope_scaling.fields_used()


def load_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json.

    Raises:
        ArtifactError: it is missing, no JSON, or describes a model that is not supported.
    """
    path = directory / "config.json"
    return config_from_hf(read_json(path), str(path))


def packed_by_bitsandbytes(quantization: object) -> str | None:
    """`NF4`, `FP4` or `INT8` where config.json's quantization_config is bitsandbytes', else None."""
    if not isinstance(quantization, dict):
        return None
    eight, four = bool(quantization.get("load_in_8bit")), bool(quantization.get("load_in_4bit"))
    if quantization.get("quant_method", "bitsandbytes" if eight or four else None) != "bitsandbytes":
        return None
    return "INT8" if eight else str(quantization.get("bnb_4bit_quant_type", "fp4")).upper()
