"""GGUF tensors under Hugging Face's names, as float32.

Shape suffixes: R rows, C columns, H heads, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from sportsllm.formats.gguf.config import ROPE_FACTORS, architecture
from sportsllm.formats.gguf.file import GGUFFile
from sportsllm.formats.layouts import UnlikeTensor, parts_of
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import parameters

_LAYOUTS = {"gemma3": "gemma3_text", "phi3": "phi3", "gpt2": "gpt2"}
"""Architectures that name or fuse tensors as a layout of Hugging Face's does; Gemma's norms are 1 + weight here."""
_ARCHITECTURES = {kind: number for number, kind in gguf.MODEL_ARCH_NAMES.items()}


def gguf_name(kind: str, config: ModelConfig, parameter: str) -> str | None:
    """What a GGUF file of an architecture calls a parameter that Hugging Face names so."""
    found: str | None = _name_map(kind, config.num_hidden_layers).get_name(parameter, (".weight", ".bias"))
    return found


@cache
def _name_map(kind: str, layers: int) -> Any:
    return gguf.get_tensor_name_map(_ARCHITECTURES[kind], layers)


def paired_heads(kind: str, config: ModelConfig, parameter: str) -> int:
    """How many heads a parameter's rows belong to if they are queries or keys in llama.cpp's own order, else 0."""
    if kind not in ("llama", "smollm3"):
        return 0
    found = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    return next((heads for part, heads in found.items() if part in parameter), 0)


def rows_in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys whose rotary pairs are neighbours, reordered into Hugging Face's two halves.

    llama.cpp rotates channels 2i and 2i + 1 of a head together, Hugging Face's Llama channels i and i + D / 2:

        halves[h, i], halves[h, i + D / 2] = rows[h, 2 * i], rows[h, 2 * i + 1]

    Args:
        rows: (H * D, C) weights or (H * D,) biases.
        heads: H.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def rows_in_pairs(rows: Tensor, heads: int) -> Tensor:
    """The way back from `rows_in_halves`: Hugging Face's rows in llama.cpp's order, contiguous."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def read_weights(file: GGUFFile, config: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of the model, float32.

    Raises:
        ArtifactError: a tensor is missing, of another shape, not finite, in a format that is not known, or of no use.
    """
    kind = architecture(file)
    parts = parts_of(_LAYOUTS.get(kind, ""), config)
    unused = set(file.tensors) - {ROPE_FACTORS}
    found: dict[str, Tensor] = {}
    for parameter in parameters(config):
        part = parts.get(parameter.name)
        name = gguf_name(kind, config, parameter.name if part is None else part.stored)
        if name is None or name not in file.tensors:
            raise file.error(f"tensor {name!r} is missing; convert the model again")
        unused.discard(name)
        tensor = _dense(file, name)
        try:
            if kind == "phi3" and part is not None:
                tensor = part.read(tensor)  # its rows of a fused matrix
            elif kind == "gpt2" and part is not None and parameter.role in ("matrix", "bias"):
                # Matrices lie as (outputs, inputs) here, unlike in Hugging Face's files.
                tensor = part.read(tensor.T if tensor.ndim == 2 else tensor)
        except UnlikeTensor as error:
            raise file.error(f"tensor {name!r} {error}") from None
        if tuple(tensor.shape) != parameter.shape:
            shape = tuple(tensor.shape)
            raise file.error(f"tensor {name!r} has shape {shape}, the header asks for {parameter.shape}")
        heads = paired_heads(kind, config, parameter.name)
        found[parameter.name] = rows_in_halves(tensor, heads) if heads else tensor
    if unused:
        raise file.error(f"tensor {sorted(unused)[0]!r} belongs to no part of a {kind} model; refuse")
    return found


def _dense(file: GGUFFile, name: str) -> Tensor:
    stored = file.tensors[name]
    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        raise file.error(f"tensor {name!r}: format {stored.tensor_type.name} is not known to gguf") from None
    if not np.isfinite(values).all():
        raise file.error(f"tensor {name!r} holds NaN or infinity; copy or download the file again")
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
