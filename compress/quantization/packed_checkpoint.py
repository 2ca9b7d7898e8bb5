"""What a quantized checkpoint is made of: which matrix gets how many bits, and the tensors that come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.quantization.grid import check_grid, fit_grid
from compress.quantization.nf4 import nf4_weight
from sportsllm.errors import UsageError
from sportsllm.storage.packed_matrix import NF4_CODES
from sportsllm.storage.packed_weights import ROW_BITS, Nf4Weight, QuantizedWeight, stored_bits

HEAD_BITS = (4, 8, 32)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class Precision:
    """Bits of every matrix.

    Attributes:
        bits: of the layers' matrices, 4 or 8, or ROW_BITS for the form with one scale a row.
        block_size: numbers that share a scale, of all matrices that are stored in blocks.
        head_bits: of embedding and head; 32 leaves them alone.
        symmetric: zero in the middle of the range, or a zero point a block.
        modules: bits of single matrices of the layers, by name, where they are others.
    """

    bits: int = 4
    block_size: int = 32
    head_bits: int = 8
    symmetric: bool = True
    modules: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_grid(self.bits, self.block_size)
        if self.bits == ROW_BITS and not self.symmetric:
            raise UsageError("--per-row has no zero points; leave --asymmetric out")
        if self.head_bits not in HEAD_BITS:
            raise UsageError(f"--head-bits is {self.head_bits}; choose one of {', '.join(map(str, HEAD_BITS))}")

    def of(self, module: str) -> int:
        """Bits of a matrix, for example of `model.layers.0.mlp.up_proj`."""
        return self.head_bits if module in (EMBEDDING, HEAD) else self.modules.get(module, self.bits)

    def grid(self, module: str, columns: int) -> tuple[int, int, bool]:
        """Bits, block size and symmetry of a module's matrix with so many columns."""
        return self.shaped(self.of(module), columns)

    def shaped(self, bits: int, columns: int) -> tuple[int, int, bool]:
        """The same of any matrix with `bits`."""
        return bits, columns if bits == ROW_BITS else self.block_size, self.symmetric


class PackedTensors:
    """Collects the tensors of a quantized checkpoint, and what its quantization_config records.

    Args:
        precision: bits of every matrix.
        nf4: round the layers' matrices to NF4's codes instead of whole numbers.
    """

    def __init__(self, precision: Precision, nf4: bool = False) -> None:
        self.precision, self.nf4 = precision, nf4
        self.tensors: dict[str, Tensor] = {}
        self.modules: dict[str, dict[str, int | str]] = {}
        self._packed: dict[str, QuantizedWeight | Nf4Weight] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor as it is, for example a norm's weight."""
        self.tensors[name] = tensor.detach().clone()  # one that is read in place would keep the whole file in memory

    def add_packed(self, module: str, packed: QuantizedWeight | Nf4Weight) -> None:
        """A module's packed matrix."""
        self.tensors |= {f"{module}.{name}": tensor for name, tensor in packed_tensors(packed).items()}
        self._packed[module] = packed
        self.modules[module] = {"bits": packed.bits, "block_size": packed.block_size}
        if isinstance(packed, Nf4Weight):
            self.modules[module]["codes"] = NF4_CODES

    def add_matrix(self, module: str, weight_NK: Tensor, search: bool) -> None:
        """Round a module's matrix to the nearest numbers of its grid, or keep it at 32 bits."""
        bits = self.precision.of(module)
        if bits == 32:
            self.add(f"{module}.weight", weight_NK)
            return
        if self.nf4 and module not in (EMBEDDING, HEAD):
            self.add_packed(module, nf4_weight(weight_NK, self.precision.block_size))
            return
        self.add_packed(module, round_weight(weight_NK, bits, self.precision, search))

    def matrix(self, module: str) -> Tensor:
        """What a module's stored matrix stands for, (N, K) float32."""
        dense = self.tensors.get(f"{module}.weight")
        if dense is not None:
            return dense
        return torch.from_numpy(self._packed[module].dequantize())

    def bits_of_layers(self) -> float:
        """Bits that a number of the layers' packed matrices takes on average, scales and zero points counted."""
        layers = [packed for module, packed in self._packed.items() if module not in (EMBEDDING, HEAD)]
        return 8 * sum(p.nbytes for p in layers) / sum(p.out_features * p.in_features for p in layers)

    def record(self) -> dict[str, Any]:
        """For config.json."""
        precision = self.precision
        return {
            "bits": stored_bits(precision.bits),
            "per_row": precision.bits == ROW_BITS,
            "block_size": precision.block_size,
            "head_bits": precision.head_bits,
            "symmetric": precision.symmetric,
            "modules": self.modules,
        }


def packed_bytes(rows: int, columns: int, bits: int, precision: Precision) -> int:
    """What a matrix takes: numbers, scales and zero points; 32 bits are not packed."""
    if bits == 32:
        return 4 * rows * columns
    _, block, symmetric = precision.shaped(bits, columns)
    groups = -(-columns // block)
    zeros = 0 if symmetric else -(-groups * bits // 8)
    return rows * (groups * (block * stored_bits(bits) // 8 + 4) + zeros)


def packed_tensors(packed: QuantizedWeight | Nf4Weight) -> dict[str, Tensor]:
    """A packed matrix's tensors, by the last part of their names."""
    arrays = {"weight_packed": packed.packed, "weight_scale": packed.scales, "weight_zero_point": packed.zero_points}
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}


def round_weight(weight_NK: Tensor, bits: int, precision: Precision, search: bool) -> QuantizedWeight:
    """Every number to the nearest of its block's grid; `search` as in `compress.quantization.grid.fit_grid`."""
    grid = fit_grid(weight_NK, *precision.shaped(bits, weight_NK.shape[1]), search=search)
    return grid.pack(grid.round(weight_NK.float()))
