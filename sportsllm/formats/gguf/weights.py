"""GGUF tensors under Hugging Face's names, as float32.

Shape suffixes: R rows, C columns, H heads, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import gguf
import numpy as np
import torch
from torch import Tensor

from sportsllm.formats.gguf.config import ARCHITECTURES, ROPE_FACTORS, GGUFFile, architecture, granite_factors
from sportsllm.formats.layouts import UnlikeTensor, parts_of
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import parameters

_ROWS = 8_192  # of a table that are dequantized together
_EXPERT = re.compile(r"\bexperts\.(\d+)\b")
_ARCHITECTURES = {kind: number for number, kind in gguf.MODEL_ARCH_NAMES.items()}


def gguf_names(kind: str, config: ModelConfig) -> dict[str, str]:
    """By a parameter's name its tensor in a GGUF file, which all experts share, and GPT-2's query, key and value."""
    its, names = ARCHITECTURES[kind], gguf.get_tensor_name_map(_ARCHITECTURES[kind], config.num_hidden_layers)
    found = dict[str, str]()
    for name, part in parts_of(its.layout or its.family, config).items():
        stored = names.get_name(_EXPERT.sub("experts", part.stored), (".weight", ".bias"))
        if stored is not None:
            found[name] = stored
    return found


def paired_heads(kind: str, config: ModelConfig, parameter: str) -> int:
    """How many heads a parameter's rows belong to if they are queries or keys in llama.cpp's own order, else 0."""
    if not ARCHITECTURES[kind].paired:
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


class GGUFTensors(Mapping[str, Tensor]):
    """Every parameter of the model by its name, in the order of `parameters`: float32, dequantized when it is read."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Find the tensors.

        Raises:
            ArtifactError: one is missing or of no use.
        """
        self._kind = kind = architecture(file)
        self._config, its = config, ARCHITECTURES[kind]
        factors = granite_factors(file) if kind == "granite" else {}
        self._parts = parts_of(its.layout or its.family, config, config_json=factors)
        self._parameters, self._stored = {item.name: item for item in parameters(config)}, gguf_names(kind, config)
        for name in map(self._stored.get, self._parts):
            if name not in file.tensors:
                raise file.error(f"tensor {name!r} is missing; convert the model again")
        if extra := set(file.tensors) - {ROPE_FACTORS, *self._stored.values()}:
            raise file.error(f"tensor {min(extra)!r} belongs to no part of a {kind} model; use the original checkpoint")
        self._file = replace(file, metadata={})  # the vocabulary takes more memory than all names

    def __getitem__(self, name: str) -> Tensor:
        """Read a parameter.

        Raises:
            ArtifactError: its tensor is of another shape or not finite.
        """
        parameter, part, stored = self._parameters[name], self._parts[name], self._stored[name]
        kind, config, number = self._kind, self._config, _EXPERT.search(name)
        tensor = _dense(self._file, stored, (int(number[1]), config.chosen_experts.count) if number else None)
        try:  # Gemma's norms are 1 + weight already
            if kind in ("phi3", "granite"):
                tensor = part.read(tensor)  # its rows of a fused matrix, or multiplied
            elif kind in ("gpt2", "gptneox") and parameter.role in ("matrix", "bias"):
                # Matrices lie as (outputs, inputs) here, unlike in Hugging Face's files.
                tensor = part.read(tensor.T if tensor.ndim == 2 else tensor)
        except UnlikeTensor as error:
            raise self._file.error(f"tensor {stored!r} {error}") from None
        if tuple(tensor.shape) != parameter.shape:
            shape = tuple(tensor.shape)
            raise self._file.error(f"tensor {stored!r} has shape {shape}, the header asks for {parameter.shape}")
        heads = paired_heads(kind, config, name)
        return rows_in_halves(tensor, heads) if heads else tensor

    get_tensor = __getitem__

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _dense(file: GGUFFile, name: str, expert: tuple[int, int] | None = None) -> Tensor:
    """A whole tensor, or the matrix of an `expert`, given by its number and how many there are."""
    stored = file.tensors[name]
    shape = [int(size) for size in reversed(stored.shape)]
    # A map of its own: what is read through the reader's counts as memory for as long as that is open.
    place = int(stored.data_offset)
    data = np.memmap(file.path, stored.data.dtype, "r", place, stored.data.shape) if stored.data.size else stored.data
    if expert is not None and len(shape) == 3 and shape[0] == expert[1]:
        shape, data = shape[1:], data[expert[0]]
    values = np.empty(shape, np.float32)
    starts = range(0, len(values), _ROWS) if values.ndim > 1 else ()
    for rows in tuple(slice(start, start + _ROWS) for start in starts) or (...,):
        values[rows] = gguf.dequantize(data[rows], stored.tensor_type)
        if not np.isfinite(values[rows]).all():
            raise file.error(f"tensor {name!r} holds NaN or infinity; copy or download the file again")
    return torch.from_numpy(values)
