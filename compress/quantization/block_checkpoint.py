"""A model rounded to llama.cpp's blocks, for `export --format gguf`, which calls `round_to_blocks` by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from compress.quantization.config import QuantizationConfig
from compress.quantization.gguf_grids import gptq_blocks, plain
from compress.quantization.layer_by_layer import round_checkpoint
from compress.quantization.packed_checkpoint import ROWS, PackedCheckpoint
from sportsllm.errors import ArtifactError
from sportsllm.formats.gguf.blocks import BLOCK_TYPES, Blocks, BlockType, RoundedModel, StoredMatrix
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.calibration import CalibrationText
from sportsllm.models.config import ModelConfig

SAMPLES = 64
"""Calibration samples."""
_DENSE = {"F16": torch.float16, "F32": torch.float32}


class BlockCheckpoint(PackedCheckpoint):
    """Collects matrices in blocks; `types` names the type of each module's, `F16` or `F32` for dense ones."""

    def __init__(self, model: ModelConfig, types: Mapping[str, str], method: str = "mse") -> None:
        bits = 8 if set(types.values()) <= {"Q8_0", *_DENSE} else 4  # for channel scaling
        super().__init__(model, QuantizationConfig(bits), method)
        self.types = types
        self.stored: dict[str, StoredMatrix] = {}

    def add_matrix(self, module: str, weight_NK: Tensor) -> None:
        """A module's matrix, on the grid of least squared error."""
        if (dense := _DENSE.get(self.types[module])) is not None:
            self._store(module, weight_NK.to(dense).numpy())
        else:
            self._add(module, weight_NK, plain)

    def add_by_gptq(self, module: str, weight_NK: Tensor, gram_KK: Tensor) -> None:
        """A module's matrix, rounded for inputs with the damped second moment `gram_KK`."""
        if self.types[module] in _DENSE:
            self.add_matrix(module, weight_NK)
        else:
            self._add(module, weight_NK, lambda rows_NK, kind: gptq_blocks(rows_NK, gram_KK, kind))

    def _add(self, module: str, weight_NK: Tensor, rounded: Callable[[Tensor, BlockType], Blocks]) -> None:
        kind = BLOCK_TYPES[self.types[module]]
        try:  # packed part by part, since levels take 8 bytes each before
            parts = [rounded(rows_NK, kind).pack() for rows_NK in torch.split(weight_NK, ROWS)]
        except ArtifactError as error:
            raise ArtifactError(f"{module}: {error}") from None
        self._store(module, np.concatenate(parts))

    def _store(self, module: str, data: np.ndarray) -> None:
        self.stored[module] = StoredMatrix(self.types[module], data)
        self.modules[module] = {}

    def matrix(self, module: str, rows_N: Tensor | None = None) -> Tensor:
        """The weights that a module's blocks, or given rows of them, stand for, (N, K) float32."""
        kind, data = self.stored[module]
        data = data if rows_N is None else data[rows_N.numpy()]
        return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


@torch.no_grad()
def round_to_blocks(checkpoint: Path, types: Mapping[str, str], text: CalibrationText) -> RoundedModel:
    """Round an unquantized checkpoint's matrices, layer by layer, to llama.cpp's blocks.

    `types` names one for each module. Without files in `text`, scales are searched for each block alone.
    """
    model = load_config(checkpoint)
    found = BlockCheckpoint(model, types, "gptq" if text.files else "mse")
    round_checkpoint(checkpoint, found, text.read(checkpoint, model, SAMPLES) if text.files else [])
    return RoundedModel({f"{module}.weight": matrix for module, matrix in found.stored.items()}, found.tensors)
