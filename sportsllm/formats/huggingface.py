"""Hugging Face's config.json, read into a `ModelConfig` and written from one, and models of the hub.

Models of the hub are named `org/name` or `org/name@revision`. Only safetensors, JSON and chat templates at the top of a
repository are downloaded, never code or pickles, into the cache of `huggingface_hub`, whose environment variables hold:
HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Imports no large library.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

from sportsllm.errors import ArtifactError, ResourceError, SportsLLMError, UsageError
from sportsllm.files import JsonObject, clip, parse_json, read_json, write_json
from sportsllm.formats.families.experts import WITH_EXPERTS
from sportsllm.formats.families.family import ORIGINAL_CONTEXT, Family, Fields
from sportsllm.formats.families.gemma import GEMMA
from sportsllm.formats.families.layer_norm import LAYER_NORM
from sportsllm.formats.families.llama import LLAMA_LIKE
from sportsllm.formats.manifest import MANIFEST, plain_name, read_manifest
from sportsllm.models.config import Experts, ModelConfig, Selection
from sportsllm.models.description import block_tensors
from sportsllm.models.rope import ROPE_TYPES, RopeScaling

FAMILIES: dict[str, Family] = LLAMA_LIKE | GEMMA | LAYER_NORM | WITH_EXPERTS
"""By model type."""
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
    "attention_dropout",  # of the training that made the model
    # Written by other programs, and read by none: nanotron (SmolLM2), Unsloth, early versions of transformers.
    "is_llama_config", "unsloth_fixed", "unsloth_version", "n_special", "output_past", "predict_special_tokens",
    "max_sequence_length", "attn_implementation", "_attn_implementation", "_flash_attn_2_enabled",
}  # fmt: skip
_PARTIAL = "partial_rotary_factor"
# Fields that are harmless only with these values.
_REQUIRED: dict[str, tuple[object, ...]] = {
    _PARTIAL: (1, 1.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),  # SmolLM2
    "activation": (None, "swiglu"),  # Falcon 3, a LLaMA model
}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COMMON_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    "attention_bias", "mlp_bias", *SPECIAL_IDS,
)  # fmt: skip
"""Fields of `ModelConfig` that have the same name and meaning in the files of most families."""
_SWITCHES = tuple(field.name for field in fields(ModelConfig) if field.type == "bool")
_SIZES = ("num_attention_heads", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")
OWN_MODEL_TYPE = "sportsllm"
"""For models that are of no family of Hugging Face's: every field under its own name."""
_MOST_HEADER_BYTES = 100_000_000  # what the library of safetensors reads
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.][\w./-]*))?")
_HUB_SETTINGS, _HUB_WEIGHTS = ["*.json", "*.jinja"], ["*.safetensors"]
_HUB_SUBFOLDERS = ["*/*"]  # of other forms of the model


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
    rest |= _partial_rotation(data)
    family = FAMILIES[model_type]
    own = family.values(rest)
    rest.require(**_REQUIRED)
    try:
        values: JsonObject = {name: rest.pop(name) for name in _SIZES}
    except KeyError as error:
        raise ArtifactError(f"{where}: field {error} is missing") from None
    rope = dict(rest.pop("rope_parameters", None) or {})  # transformers 5 keeps theta and scaling together
    rope.pop(_PARTIAL, None)
    scaling = rest.pop("rope_scaling", None) or rope
    heads, theta = values["num_attention_heads"], rest.pop("rope_theta", None)
    values |= {
        "num_key_value_heads": rest.pop("num_key_value_heads", None) or heads,
        "head_dim": rest.pop("head_dim", None) or values["hidden_size"] // heads,
        "tie_word_embeddings": rest.pop("tie_word_embeddings", family.ties),
        "rope_theta": rope.get("rope_theta") or theta or 10_000.0,
        "rope_scaling": _rope_scaling(scaling, rest.get("max_position_embeddings"), where),
    }
    for key in SPECIAL_IDS:
        value = rest.pop(key, None)
        values[key] = tuple(value) if isinstance(value, list) else value
    optional = {"max_position_embeddings", "rms_norm_eps", "mlp_bias", "dropout", *family.names.values()}
    values |= {key: rest.pop(key) for key in optional & rest.keys()}
    if rest:
        raise ArtifactError(f"{where}: unknown field {sorted(rest)[0]!r}; remove it or use a supported model")
    values |= own
    values |= {name: bool(values[name]) for name in _SWITCHES if values.get(name, "") in (None, 0, 1)}  # old files
    return ModelConfig(**values)


def _partial_rotation(data: JsonObject) -> JsonObject:
    """The share of each head that is rotated, if it is where transformers 5 keeps it."""
    rope = data.get("rope_parameters") or {}
    return {_PARTIAL: rope[_PARTIAL]} if _PARTIAL in rope else {}


def _parse_own(data: JsonObject, where: str) -> ModelConfig:
    values = {key: value for key, value in data.items() if key not in _IGNORED}
    unknown = sorted(values.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ArtifactError(f"{where}: unknown field {unknown[0]!r}; remove it or use a supported model")
    for name in ("eos_token_id", "layer_types"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    for name, record in (("experts", Experts), ("selection", Selection)):
        if values.get(name) is not None:
            values[name] = record(**values[name])
    scaling = _rope_scaling(values.get("rope_scaling") or {}, values.get("max_position_embeddings"), where)
    return ModelConfig(**values | {"rope_scaling": scaling})


def _rope_scaling(data: JsonObject, context: int | None, where: str) -> RopeScaling | None:
    """Hugging Face's record; `context`, the model's, is YaRN's original one if that is not said."""
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
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    values = {key: value for key, value in values.items() if value or not key.startswith("mscale")}  # 0 is unset
    if kind == "yarn":
        values.setdefault("original_max_position_embeddings", context or ModelConfig.max_position_embeddings)
    return RopeScaling(rope_type=kind, **values)


def to_hf(config: ModelConfig) -> JsonObject:
    """The config.json that Hugging Face's loaders read; one of our own if a model is of none of their families."""
    for model_type in FAMILIES:
        data = _of_family(config, model_type)
        if data is not None and _reads_back(config, data):
            return data
    own = {"architectures": ["SportsLLM"], "model_type": OWN_MODEL_TYPE} | asdict(config)
    return own | {"rope_scaling": _scaling_of(config)}


def _of_family(config: ModelConfig, model_type: str) -> JsonObject | None:
    """A model's config.json as one of a family; None if the family has no such model."""
    family = FAMILIES[model_type]
    data: JsonObject = {"architectures": [family.architecture], "model_type": model_type}
    for name in COMMON_FIELDS:
        value = getattr(config, name)
        data[name] = list(value) if isinstance(value, tuple) else value
    if config.rope_scaling is not None:
        data["rope_scaling"] = config.rope_scaling.fields_used()
        if config.rope_scaling.rope_type == "longrope":
            data[ORIGINAL_CONTEXT] = config.rope_scaling.original_max_position_embeddings
    if config.dropout:
        data["dropout"] = config.dropout
    written = family.written(config, data)
    return None if written is None else written | {"torch_dtype": "float32"}


def special_ids(config: ModelConfig) -> JsonObject:
    """The ids of the special tokens that a model has, as its files name them."""
    found = {name: getattr(config, name) for name in SPECIAL_IDS}
    return {name: list(id) if isinstance(id, tuple) else id for name, id in found.items() if id is not None}


def family_of(config: ModelConfig) -> str | None:
    """The model type that a model is written as: the first that reads back as the same model; None for no family."""
    model_type: str = to_hf(config)["model_type"]
    return None if model_type == OWN_MODEL_TYPE else model_type


def _reads_back(config: ModelConfig, data: JsonObject) -> bool:
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
    """Read `directory`/config.json, and from generation_config.json further tokens that end a text.

    Raises:
        ArtifactError: it is missing, no JSON, or describes a model that is not supported.
    """
    path = directory / "config.json"
    data = read_json(path)
    try:
        return _with_stops(config_from_hf(data, str(path)), directory / "generation_config.json")
    except ArtifactError as error:
        if data.get("model_type", "llama") in (OWN_MODEL_TYPE, *FAMILIES) or not _has_llama_names(directory):
            raise
        found = f"{error}; its tensors have LLaMA's names"
    try:
        config_from_hf(data | {"model_type": "llama"}, str(path))
    except ArtifactError as error:
        raise ArtifactError(f"{found}, but its config.json differs: {str(error).removeprefix(f'{path}: ')}") from None
    raise ArtifactError(f"{found}, and so has config.json; if it is one, set model_type to 'llama'")


def _with_stops(config: ModelConfig, path: Path) -> ModelConfig:
    """The config with the end tokens of generation_config.json behind its own: a chat model's turns often end there."""
    named = read_json(path).get("eos_token_id") if path.exists() else None
    ids = [each for each in (named if isinstance(named, list) else [named]) if type(each) is int]
    ends = dict.fromkeys([*config.stop_token_ids, *(each for each in ids if 0 <= each < config.vocab_size)])
    if ends.keys() == set(config.stop_token_ids):
        return config
    return replace(config, eos_token_id=tuple(ends) if len(ends) > 1 else next(iter(ends)))


def _has_llama_names(directory: Path) -> bool:
    """Whether the first layer in a directory's safetensors has the tensors of LLaMA's, and no others but biases."""
    names = set[str]()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")  # of the header, JSON
            names |= parse_json(stream.read(min(size, _MOST_HEADER_BYTES)), path).keys()
    first = {name.removeprefix("model.layers.0.") for name in names if name.startswith("model.layers.0.")}
    llama = {item.name for item in block_tensors(ModelConfig(1, 1, 1, 1, 1, 1, 2))}
    return {name for name in first if not name.endswith("_proj.bias")} == llama


@contextmanager
def checkpoint_with(checkpoint: Path, config: ModelConfig) -> Iterator[Path]:
    """A directory of links to a checkpoint's files, whose config.json has the context and rotary scaling of `config`.

    It is `checkpoint` itself if nothing differs, and gone afterwards if it is not. Errors name `checkpoint`.

    Args:
        config: the checkpoint's, but for `max_position_embeddings` and `rope_scaling`.
    """
    if config == load_config(checkpoint):
        yield checkpoint
        return
    data = read_json(checkpoint / "config.json")
    data |= _partial_rotation(data)
    data.pop("rope_parameters", None)  # transformers 5 keeps theta and scaling there
    data |= {
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_of(config),
    }
    if config.rope_local_theta is not None:
        data["rope_local_base_freq"] = config.rope_local_theta
    with tempfile.TemporaryDirectory() as folder:
        view = Path(folder) / plain_name(checkpoint)
        view.mkdir()
        if (checkpoint / MANIFEST).exists():
            manifest = read_manifest(checkpoint)
            files = {name: entry for name, entry in manifest.files.items() if name != "config.json"}
            replace(manifest, files=files).write(view)
        write_json(view / "config.json", data)
        for path in checkpoint.resolve().iterdir():
            if not (view / path.name).exists():
                (view / path.name).symlink_to(path, path.is_dir())
        try:
            yield view
        except SportsLLMError as error:
            raise type(error)(str(error).replace(str(view), str(checkpoint))) from None


def download_model(text: str) -> Path:
    """The directory of a model of the hub; the text as a path if it is no name of one.

    A name without a revision whose first part is a directory, or `runs`, which the commands write to, is a path, so
    that a mistyped path asks nobody.

    Raises:
        ArtifactError: the hub has no such model, or it has no safetensors or is unsupported.
        ResourceError: the model asks for permission, or the hub cannot be reached.
    """
    if (match := _HUB_NAME.fullmatch(text)) is None:
        return Path(text)
    model, revision = match.groups()
    if revision is None and (Path(model).parent.is_dir() or model.startswith("runs/")):
        return Path(text)
    load_config(_download(text, model, revision, _HUB_SETTINGS))  # before the weights, which are large
    folder = _download(text, model, revision, _HUB_SETTINGS + _HUB_WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        raise ArtifactError(
            f"{text}: has no safetensors at the top of its repository (or, offline, in the cache); other formats of "
            "weights are not downloaded"
        )
    from sportsllm.console import log

    log(f"{text}: commit {folder.name[:12]}, {folder}")
    return folder


def _download(name: str, model: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder in the cache with a model's files of some patterns."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_HUB_SUBFOLDERS)
        )
    except (errors.RevisionNotFoundError, errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        kind = ResourceError if isinstance(error, errors.GatedRepoError) else ArtifactError
        raise kind(f"{name}: no directory here, and the model hub refuses it: {clip(error, 200)}") from None
    except Exception as error:  # HTTP and connection errors have no common class
        if isinstance(error, OSError) and error.errno is not None:  # a full disk, no permission
            raise
        raise ResourceError(
            f"{name}: no directory here, and it cannot be downloaded ({type(error).__name__}: {clip(error, 120)}); "
            "without a network give a directory or a GGUF file"
        ) from None
