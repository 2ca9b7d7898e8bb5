"""The matrices of a checkpoint as an exported graph stores them: dense, half precision, or packed.

N rows (outputs), K columns (inputs), G blocks a row. Several matrices that read the same input are stacked
by rows into one, which costs one call instead of several; packed bytes are copied as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from export.graph.builder import Array
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import read_packed
from sportsllm.formats.packed import ROW_BITS
from sportsllm.formats.safetensors import TensorFiles


@dataclass(frozen=True)
class Packing:
    """How a packed matrix is laid out; see `sportsllm.formats.packed`."""

    bits: int
    block_size: int
    asymmetric: bool  # whether there are zero points

    @property
    def per_row(self) -> bool:
        """Whether there is one scale per row, for a product of whole numbers."""
        return self.bits == ROW_BITS


class Weights:
    """Reads tensors of one checkpoint by module name, each when asked for."""

    def __init__(self, checkpoint: Path) -> None:
        self._directory = checkpoint
        self._tensors = TensorFiles(checkpoint)
        self._packings: dict[str, Packing | None] = {}

    def packing(self, module: str, shape: tuple[int, int]) -> Packing | None:
        """Layout of a module's matrix, or None where it is dense.

        Raises:
            ArtifactError: its tensors are incomplete or do not fit the (N, K) that the config asks for.
        """
        if module not in self._packings:
            found = None
            if f"{module}.weight_packed" in self._tensors:
                weight = read_packed(self._tensors, module, shape, self._directory)
                found = Packing(weight.bits, weight.block_size, f"{module}.weight_zero_point" in self._tensors)
            self._packings[module] = found
        return self._packings[module]

    def read(self, name: str, shape: Sequence[int]) -> npt.NDArray[np.float32]:
        """One dense tensor in float32.

        Raises:
            ArtifactError: it is missing, of another shape, or not finite.
        """
        if name not in self._tensors:
            stored = self._tensors.stored_name(name)
            raise ArtifactError(f"{self._directory}: tensor {stored!r} is missing; config.json asks for it")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise ArtifactError(
                f"{self._directory}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {tuple(shape)}"
            )
        return cast(npt.NDArray[np.float32], tensor.float().numpy())

    def read_dequantized(self, module: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """A matrix's numbers, packed or dense, (N, K) float32."""
        if f"{module}.weight_packed" not in self._tensors:
            return self.read(f"{module}.weight", shape)
        return read_packed(self._tensors, module, shape, self._directory).dequantize()

    def read_half(self, name: str, shape: Sequence[int]) -> npt.NDArray[np.float16]:
        """One dense tensor rounded to float16.

        Raises:
            ArtifactError: as `read`, or a number lies beyond float16's range.
        """
        return self._rounded_to_half(name, self.read(name, shape))

    def _rounded_to_half(self, name: str, full: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        if full.size and float(np.abs(full).max()) > float(np.finfo(np.float16).max):
            raise ArtifactError(
                f"{self._directory}: tensor {name!r} has numbers beyond float16's 65,504; export it as fp32"
            )
        return full.astype(np.float16)

    def read_stacked(self, shapes: Mapping[str, tuple[int, int]], half: bool) -> Array:
        """Dense matrices, given as (N, K) by module with equal K, one under the other."""
        read = self.read_half if half else self.read
        return _stack([read(f"{name}.weight", shape) for name, shape in shapes.items()])

    def read_packed(self, modules: Sequence[str], part: str) -> Array:
        """One part, `packed`, `scale` or `zero_point`, of matrices with equal packing, one under the other."""
        return _stack([self._tensors[f"{name}.weight_{part}"].numpy() for name in modules])

    def read_per_row(self, modules: Sequence[str]) -> npt.NDArray[np.int8]:
        """Matrices with one scale per row, as (K, N) signed numbers side by side."""
        signed = self.read_packed(modules, "packed")[:, 0].astype(np.int16) - 2 ** (ROW_BITS - 1)
        return np.ascontiguousarray(signed.astype(np.int8).T)

    def read_per_row_scales(self, modules: Sequence[str]) -> npt.NDArray[np.float16]:
        """The scales of `read_per_row`'s matrices, (N,)."""
        return cast(npt.NDArray[np.float16], self.read_packed(modules, "scale")[:, 0])


def _stack(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
