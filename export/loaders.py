"""The files beside the graph that loaders read, and which loaders open an export of a model. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from export.metadata import ATTENTION_MASK, INPUT_IDS, LOGITS, PAST, PRESENT
from export.paths import GRAPH_FILE, WEB_NAMES, web_files
from sportsllm.formats.huggingface import OWN_MODEL_TYPE, family_of, load_config, to_hf
from sportsllm.formats.json_files import read_json, write_json
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_state

# onnxruntime-genai allocates the cache for this many tokens at once; callers can ask for more, up to the context.
GENAI_MAX_LENGTH = 1_024
_GENAI_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def caches_keys_and_values(config: ModelConfig) -> bool:
    """Whether a model caches what loaders other than this program's know."""
    return [state.name for state in block_state(config)] == ["key", "value"]


def not_opened_by(config: ModelConfig) -> str | None:
    """A line on the loaders that cannot open an export of a model; None where all can."""
    if not caches_keys_and_values(config):
        *others, last = (state.name for state in block_state(config))
        cached = f"{', '.join(others)} and {last}" if others else last
        return f"{cached} vectors are cached, which no other loader knows: the export runs in this program alone"
    if family_of(config) is None:
        return (
            "config.json: this mix of parts is of no family that Hugging Face's loaders know; optimum and "
            "transformers.js cannot open the export, onnxruntime-genai and this program can"
        )
    if family_of(config) == "mixtral" and config.num_key_value_heads != config.num_attention_heads:
        return "optimum cannot open the export: for Mixtral it takes a cache with one key head a query head"
    return None


def write_loader_files(
    checkpoint: Path, directory: Path, in_place: bool = True, web: str | None = None, in_half: bool = False
) -> None:
    """Copy config.json and the tokenizer's files, and write generation_config.json and a loader's own settings.

    A quantization_config of bitsandbytes is left out: the graph has those matrices dense.

    Args:
        checkpoint: the source. A checkpoint without a tokenizer gives an export without one.
        directory: exists.
        in_place: whether the graph writes into one buffer for past and present.
        web: the graph's precision, for the settings of transformers.js; else genai_config.json of onnxruntime-genai,
            which reads models that cache keys and values.
        in_half: whether the graph caches in float16; onnxruntime-genai reads that from the graph.

    Raises:
        ArtifactError: config.json is missing or describes a model that is not supported.
    """
    from sportsllm.formats.checkpoint import TOKENIZER_FILES, write_generation_config
    from sportsllm.formats.safetensors import quantization_config

    config = load_config(checkpoint)
    for name in ("config.json", *TOKENIZER_FILES):
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, directory / name)
    if not (directory / "generation_config.json").exists():
        write_generation_config(directory, config)
    settings = read_json(checkpoint / "config.json")
    if settings.get("model_type") not in (OWN_MODEL_TYPE, written := family_of(config)) and written is not None:
        # A family that is only read: loaders have rules of their own for it, which this graph does not follow.
        settings = to_hf(config)
        write_json(directory / "config.json", settings)
    if quantization_config(checkpoint) is None and settings.pop("quantization_config", None) is not None:
        write_json(directory / "config.json", settings)
    if web is not None:
        # The dtype that is loaded where the page names none, and the graph that has a data file beside it.
        graph = web_files(directory, web).graph.name
        dtype = WEB_NAMES[web][0]
        settings["transformers.js_config"] = {"dtype": dtype, "use_external_data_format": {graph: 1}}
        if in_half:  # else it makes a float32 cache
            settings["transformers.js_config"]["kv_cache_dtype"] = {dtype: "float16"}
        write_json(directory / "config.json", settings)
        return
    if caches_keys_and_values(config):
        model_type = str(settings.get("model_type", "llama"))
        write_json(directory / "genai_config.json", genai_config(config, model_type, in_place))


def genai_config(config: ModelConfig, model_type: str, in_place: bool = True) -> dict[str, Any]:
    """The settings that onnxruntime-genai opens the directory with; `model_type` as in config.json."""
    context = config.max_position_embeddings
    model: dict[str, Any] = {
        # Read as "a decoder"; genai refuses names that it does not know, and reads some of them in its own way.
        "type": model_type if model_type in _GENAI_TYPES else "llama",
        "context_length": context,
        "vocab_size": config.vocab_size,
        "decoder": {
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "filename": GRAPH_FILE,
            "head_size": config.head_dim,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "inputs": {
                "input_ids": INPUT_IDS,
                "attention_mask": ATTENTION_MASK,
                "past_key_names": f"{PAST}%d.key",
                "past_value_names": f"{PAST}%d.value",
            },
            "outputs": {
                "logits": LOGITS,
                "present_key_names": f"{PRESENT}%d.key",
                "present_value_names": f"{PRESENT}%d.value",
            },
        },
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        if value is not None:
            model[name] = list(value) if isinstance(value, tuple) else value
    search = {"max_length": min(context, GENAI_MAX_LENGTH), "past_present_share_buffer": in_place}
    return {"model": model, "search": {**search, "do_sample": False}}
