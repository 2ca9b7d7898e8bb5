"""What an export is made of: names that a graph and its runtime share, the paths of graphs and their data, the files
beside them that loaders read, and which loaders open an export of a model. Imports no torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.files import read_json, write_json
from sportsllm.formats.huggingface import OWN_MODEL_TYPE, family_of, load_config, special_ids, to_hf
from sportsllm.inference.decoder import web_graphs
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import block_state

# As optimum, onnxruntime-genai and transformers.js name them.
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
LOGITS = "logits"
PAST, PRESENT = "past_key_values.", "present."  # followed by layer and state: `past_key_values.0.key`
KEEP_LOGITS = "num_logits_to_keep"  # optional input: 0 gives the logits of all positions, n those of the last n
ROPE_FREQUENCIES = ("inv_freq", "local_inv_freq")  # constants: angles per position, and those of sliding layers
ROPE_CACHES = ("cos_cache", "sin_cache", "local_cos_cache", "local_sin_cache")  # constants; see `rope_of` of the model

# Keys and values of the graph's metadata.
DATA_BYTES_KEY = "data_bytes"  # size that the data file must have
RUNTIME_KEY = "onnxruntime"  # the oldest version that a graph was tried with
OLDEST_RUNTIME = "1.31"
KERNELS_DOMAIN = "sportsllm"  # of the operators of `export/kernels`
KERNELS_KEY = "kernels"  # version of the kernels that the graph calls; absent if it calls none
CACHE_KEY = "cache"  # one of the next two; in place if an export does not say
IN_PLACE_CACHE = "shared"  # past and present are one buffer with room to grow; sequences are padded on the right
CONCAT_CACHE = "growing"  # present is past followed by the new tokens, a new tensor; masked columns do not count


def past_name(layer: int, state: str) -> str:
    """Name of the input with a layer's cached state; tokens are on the last axis but one."""
    return f"{PAST}{layer}.{state}"


def present_name(layer: int, state: str) -> str:
    """Name of the output with the new tokens added."""
    return f"{PRESENT}{layer}.{state}"


def cache_scale_name(layer: int, state: str) -> str:
    """The constant of an INT8 cache's scales of one state that a layer's attention caches."""
    short = {"key": "k", "value": "v"}.get(state, state)
    return f"model.layers.{layer}.self_attn.{short}_scale"


GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"

# By precision: transformers.js's name of it, and its suffix of the file name. Source: DEFAULT_DTYPE_SUFFIX_MAPPING in
# src/utils/dtypes.js of @huggingface/transformers 4.3.1.
WEB_NAMES = {
    "fp32": ("fp32", ""),
    "fp16": ("fp16", "_fp16"),
    "int8": ("q8", "_quantized"),
    "int4": ("q4", "_q4"),
    "int4 fp16": ("q4f16", "_q4f16"),  # 4-bit matrices, computed in float16
}


@dataclass(frozen=True)
class GraphFiles:
    """A graph and the data file that it names."""

    graph: Path
    data: Path


def plain_files(directory: Path) -> GraphFiles:
    """Paths that `export` writes."""
    return GraphFiles(directory / GRAPH_FILE, directory / DATA_FILE)


def web_precision(precision: str, in_half: bool) -> str:
    """The key of `WEB_NAMES` for a graph's matrices, and whether it computes in float16."""
    return f"{precision} fp16" if in_half and precision != "fp16" else precision


def web_files(directory: Path, precision: str) -> GraphFiles:
    """Paths that `export --format web` writes."""
    graph = directory / "onnx" / f"model{WEB_NAMES[precision][1]}.onnx"
    return GraphFiles(graph, graph.with_name(f"{graph.name}_data"))


def find_files(directory: Path) -> GraphFiles:
    """The paths of the graph in a directory, or of `plain_files` if it has none.

    Raises:
        ArtifactError: there are graphs of several precisions.
    """
    plain, graphs = plain_files(directory), web_graphs(directory)
    if plain.graph.exists() or not graphs:
        return plain
    if len(graphs) > 1:
        names = ", ".join(graph.name for graph in graphs)
        raise ArtifactError(f"{directory}: holds several graphs ({names}); give a directory with one of them")
    return GraphFiles(graphs[0], graphs[0].with_name(f"{graphs[0].name}_data"))


# onnxruntime-genai allocates the cache for this many tokens at once; callers can ask for more, up to the context.
GENAI_MAX_LENGTH = 1_024
_OPTIMUM_ALL_HEADS = ("gemma2", "mixtral", "olmo2")
_GENAI_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def caches_keys_and_values(config: ModelConfig) -> bool:
    """Whether a model caches what loaders other than this program's know."""
    return [state.name for state in block_state(config)] == ["key", "value"]


def not_opened_by(config: ModelConfig) -> str | None:
    """A line on the loaders that cannot open an export of a model; None if all can."""
    if not caches_keys_and_values(config):
        *others, last = (state.name for state in block_state(config))
        cached = f"{', '.join(others)} and {last}" if others else last
        return f"{cached} vectors are cached, which no other loader knows: the export runs in this program alone"
    if family_of(config) is None:
        return (
            "config.json: this mix of parts is of no family that Hugging Face's loaders know; optimum and "
            "transformers.js cannot open the export, onnxruntime-genai and this program can"
        )
    # optimum makes the first cache from config.json alone.
    if family_of(config) != "gemma3_text" and config.hidden_size != config.query_size:
        width = config.hidden_size / config.num_attention_heads
        return f"optimum cannot open the export: it expects heads of {width:g} channels, these have {config.head_dim}"
    if family_of(config) in _OPTIMUM_ALL_HEADS and config.num_key_value_heads != config.num_attention_heads:
        return f"optimum cannot open the export: for {family_of(config)} it expects a key head for each query head"
    return None


def write_loader_files(
    checkpoint: Path, directory: Path, in_place: bool = True, web: str | None = None, in_half: bool = False
) -> None:
    """Copy config.json and the tokenizer's files, and write generation_config.json and a loader's own settings.

    Other runtimes stop at the tokens of generation_config.json alone: the one that ends a turn is added.
    A quantization_config of bitsandbytes is left out: the graph has those matrices dense.

    Args:
        checkpoint: the source. A checkpoint without a tokenizer gives an export without one.
        in_place: whether the graph writes into one buffer for past and present.
        web: the graph's precision, for the settings of transformers.js; else genai_config.json of onnxruntime-genai,
            which reads models that cache keys and values.
        in_half: whether the graph caches in float16; onnxruntime-genai reads that from the graph.

    Raises:
        ArtifactError: config.json is missing or describes a model that is not supported.
    """
    from sportsllm.formats.checkpoint import TOKENIZER_FILES, write_generation_config
    from sportsllm.formats.packed import quantization_config
    from sportsllm.text.tokenizer import stop_tokens

    config, generation = load_config(checkpoint), directory / "generation_config.json"
    stops = stop_tokens(checkpoint, config)
    for name in ("config.json", *TOKENIZER_FILES):
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, directory / name)
    if unnamed := stops != config.stop_token_ids:
        config = config.with_changes(eos_token_id=stops)
    if not generation.exists():
        write_generation_config(directory, config)
    elif unnamed:
        write_json(generation, read_json(generation) | {"eos_token_id": list(stops)})
    settings = stored = read_json(checkpoint / "config.json")
    if settings.get("model_type") not in (OWN_MODEL_TYPE, written := family_of(config)) and written is not None:
        # A family that is only read: loaders have rules of their own for it, which this graph does not follow.
        settings = to_hf(config)
    if quantization_config(checkpoint) is None:
        settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    if web is not None:
        # The dtype that is loaded if the page names none, and the graph that has a data file beside it.
        graph = web_files(directory, web).graph.name
        dtype = WEB_NAMES[web][0]
        web_settings = {"dtype": dtype, "use_external_data_format": {graph: 1}}
        if in_half:  # else it makes a float32 cache
            web_settings["kv_cache_dtype"] = {dtype: "float16"}
        settings = settings | {"transformers.js_config": web_settings}
    if settings != stored:
        write_json(directory / "config.json", settings)
    if web is None and caches_keys_and_values(config):
        model_type = str(settings.get("model_type", "llama"))
        write_json(directory / "genai_config.json", genai_config(config, model_type, in_place))


def genai_config(config: ModelConfig, model_type: str, in_place: bool = True) -> dict[str, Any]:
    """The settings that onnxruntime-genai opens the directory with; `model_type` as in config.json."""
    context = config.max_position_embeddings
    model = {
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
    search = {"max_length": min(context, GENAI_MAX_LENGTH), "past_present_share_buffer": in_place}
    return {"model": model | special_ids(config), "search": {**search, "do_sample": False}}
