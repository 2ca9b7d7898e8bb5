"""Quantization settings: bits and grid of every matrix, and their size on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sportsllm.errors import UsageError
from sportsllm.formats.packed import BITS
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, matrix_shapes
from sportsllm.models.kinds import least_bits
from sportsllm.models.memory import BLOCK_SIZES, matrix_parameters, quantized_bytes

HEAD_BITS = (4, 8, 32)
UNPACKED = 32
"""Bits of a matrix that stays float32."""


class GridSpec(NamedTuple):
    """The grid of one matrix: bits of an integer, 4 or 8, group size, and whether it is symmetric."""

    bits: int
    block_size: int
    symmetric: bool


@dataclass(frozen=True)
class QuantizationConfig:
    """Bits and grid of every matrix.

    Attributes:
        bits: of the layers' matrices, 4 or 8.
        block_size: group size: weights that share a scale.
        head_bits: of embedding and head; 32 keeps float32.
        symmetric: symmetric, or asymmetric with a zero point per 4-bit block. 8-bit blocks are always symmetric.
        modules: bits of single matrices of the layers, by name, that differ from `bits`.
    """

    bits: int = 4
    block_size: int = 32
    head_bits: int = 8
    symmetric: bool = True
    modules: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("--bits", self.bits, BITS),
            ("--group-size", self.block_size, BLOCK_SIZES),
            ("--set head_bits", self.head_bits, HEAD_BITS),
        ):
            if value not in known:
                raise UsageError(f"{flag} is {value}; choose one of {', '.join(map(str, known))}")
        if self.bits == 8 and not self.symmetric:
            raise UsageError("symmetric=false is for 4 bits; with --bits 8 leave it out")

    def bits_for(self, module: str) -> int:
        """Bits of a matrix, for example of `model.layers.0.mlp.up_proj`."""
        if module in (EMBEDDING, HEAD):
            return self.head_bits
        return max(self.modules.get(module, self.bits), least_bits(module.partition(".mlp.")[2]))

    def grid_for(self, module: str) -> GridSpec:
        """The grid of a matrix that is packed."""
        bits = self.bits_for(module)
        return GridSpec(bits, self.block_size, self.symmetric or bits == 8)

    def bytes_for(self, module: str, rows: int, columns: int) -> int:
        """Size of a matrix on disk, with scales and zero points."""
        if self.bits_for(module) == UNPACKED:
            return 4 * rows * columns
        grid = self.grid_for(module)
        return quantized_bytes(rows, columns, grid.bits, grid.block_size, not grid.symmetric)

    def record(self) -> dict[str, Any]:
        """For manifests, config.json and results."""
        return {
            "bits": self.bits,
            "block_size": self.block_size,
            "head_bits": self.head_bits,
            "symmetric": self.symmetric,
        }


def matrix_bytes(model: ModelConfig, config: QuantizationConfig, layers_only: bool = False) -> int:
    """Size of all matrices of a model on disk, with scales and zero points."""
    shapes = matrix_shapes(model, layers_only)
    return sum(config.bytes_for(name, *shape) for name, shape in shapes.items())


def matrix_weights(model: ModelConfig, layers_only: bool = False) -> int:
    """Weights in all matrices of a model."""
    return sum(rows * columns for rows, columns in matrix_shapes(model, layers_only).values())


def bits_per_weight(model: ModelConfig, config: QuantizationConfig) -> float:
    """Average bits per weight of the layers' matrices, with scales and zero points."""
    return 8 * matrix_bytes(model, config, layers_only=True) / matrix_weights(model, layers_only=True)


def padding_percent(model: ModelConfig, config: QuantizationConfig) -> float:
    """Percent of values that fill the last group of each row."""
    return 100 * (matrix_parameters(model, config.block_size) / matrix_parameters(model) - 1)
