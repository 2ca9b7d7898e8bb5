"""Tiny GGUF files, written by the package `gguf` as llama.cpp's converter writes them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from export.gguf.write import add_facts
from sportsllm.errors import ArtifactError
from sportsllm.formats.gguf.convert import convert_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 50_000.0,
}  # fmt: skip
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "phi3": gguf.MODEL_ARCH.PHI3, "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gpt2": gguf.MODEL_ARCH.GPT2, "gemma2": gguf.MODEL_ARCH.GEMMA2, "olmo2": gguf.MODEL_ARCH.OLMO2,
    "stablelm": gguf.MODEL_ARCH.STABLELM, "gpt_neox": gguf.MODEL_ARCH.GPTNEOX, "granite": gguf.MODEL_ARCH.GRANITE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "mixtral": gguf.MODEL_ARCH.LLAMA,
}  # fmt: skip


def random_weights(model: Any) -> Any:
    """A model of `transformers` with random numbers, large enough that every part of it shows in the logits."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim == 2 else parameter.normal_(1, 0.2)
    return model.eval()


def byte_level(directory: Path, **changes: Any) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer.json."""
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    special = {item["content"] for item in data["added_tokens"]}
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    merges = data["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 2,
    } | changes


def write_file(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    formats: Sequence[str] = (),
    quantize: Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray] = gguf.quantize,
) -> Path:
    """A GGUF file: `settings` under the architecture's name, `tokenizer` under `tokenizer.ggml`; None leaves one out.

    Matrices of tensors are in `formats`, in turn (float32 if empty).
    """
    writer = gguf.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{key}": value for key, value in settings.items()}
    keys |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    add_facts(writer, {key: value for key, value in keys.items() if value is not None})
    writer.add_name("Tiny")
    for number, (name, values) in enumerate(tensors.items()):
        kind = gguf.GGMLQuantizationType[formats[number % len(formats)] if formats and values.ndim == 2 else "F32"]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def settings_of(config: Any) -> dict[str, Any]:
    """The architecture's keys of a config of `transformers`."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The tensors of a model of `transformers` as the converter writes them.

    Gemma's norms with 1 added, rotary pairs side by side, GPT-2's matrices turned.
    """
    config, found = model.config, {}
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if config.model_type == "gpt2" and name.endswith((".c_attn.weight", ".c_fc.weight", ".c_proj.weight")):
            values = np.ascontiguousarray(values.T)
        paired = config.model_type in ("llama", "smollm3", "granite", "mixtral")
        if paired and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if ".query_key_value." in name:
            by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
            values = np.ascontiguousarray(by_head.swapaxes(0, 1).reshape(values.shape))
        if ".experts." in name:
            first, number, last = re.split(r"(?<=experts)\.(\d+)", name)
            others = [] if number == "0" else [*found[names.get_name(first + last, (".weight",))]]
            name, values = first + last, np.stack([*others, values])
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return found


def write_model(
    path: Path, model: Any, tokenizer: Mapping[str, Any], formats: Sequence[str] = (), **settings: Any
) -> Path:
    """A model of `transformers` as a GGUF file; `settings` replace its own."""
    return write_file(
        path, model.config.model_type, settings_of(model.config) | settings, tokenizer, tensors_of(model), formats
    )


def refused(file: Path, message: str, out: Path) -> None:
    """The file is not converted, for a reason in one line that names it, and nothing is left behind."""
    with pytest.raises(ArtifactError) as caught:
        convert_gguf(file, out)
    assert message in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not out.exists() and not list(out.parent.glob("*.partial*"))
