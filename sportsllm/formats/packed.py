"""The quantized matrix: representation only, laid out byte for byte as MatMulNBits reads it.

N rows (outputs), K columns (inputs), G = ceil(K / block_size) blocks a row. The integers of a block share one
float16 scale and one zero point:  w[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g].
Source: ONNX Runtime contrib operators, MatMulNBits. Algorithms that choose q live in `compress`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from sportsllm.errors import ArtifactError
from sportsllm.files import as_object, read_json, validate
from sportsllm.models.memory import SCALE_BYTES

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

QUANT_METHOD = "sportsllm-nbits"
BITS = (4, 8)


@dataclass(frozen=True)
class PackedModule:
    """Bits of a module's matrix."""

    bits: Literal[4, 8]


@dataclass(frozen=True)
class QuantizationRecord:
    """The quantization_config of a checkpoint that this program quantized.

    `bits` and `block_size` are those of most matrices in the layers, `head_bits` those of embedding and head.
    """

    bits: Literal[4, 8] = 4
    block_size: int = 32
    head_bits: Literal[4, 8, 32] = 8
    symmetric: bool = True
    modules: dict[str, PackedModule] = field(default_factory=dict)


def bitsandbytes_kind(directory: Path) -> str | None:
    """`NF4`, `FP4` or `INT8` if bitsandbytes packed a checkpoint's matrices, else None."""
    record = read_json(directory / "config.json").get("quantization_config")
    if not isinstance(record, dict):
        return None
    eight, four = bool(record.get("load_in_8bit")), bool(record.get("load_in_4bit"))
    if record.get("quant_method", "bitsandbytes" if eight or four else None) != "bitsandbytes":
        return None
    return "INT8" if eight else str(record.get("bnb_4bit_quant_type", "fp4")).upper()


def quantization_config(directory: Path) -> QuantizationRecord | None:
    """How this program quantized a checkpoint; None for dense ones and for bitsandbytes', which read as dense.

    Raises:
        ArtifactError: another method quantized it, or the record is damaged.
    """
    path = directory / "config.json"
    data = read_json(path).get("quantization_config")
    if data is None or bitsandbytes_kind(directory) is not None:
        return None
    where = f"{path}: quantization_config"
    method = as_object(data, where).get("quant_method")
    if method != QUANT_METHOD:
        raise ArtifactError(f"{path}: quant_method {method!r} is not supported; use the unquantized checkpoint")
    return validate(QuantizationRecord, data, where, "quantize the checkpoint again")


@dataclass(frozen=True)
class QuantizedWeight:
    """A packed (N, K) matrix.

    Attributes:
        packed: (N, G, block_size * bits / 8) uint8; at 4 bits the even element is the low nibble. The
            last block of a row is padded with the zero point if K is not a multiple of block_size.
        scales: (N, G) float32, each a value of float16, which is stored.
        zero_points: (N, ceil(G * bits / 8)) uint8, or None for the middle of the range, 2 ** (bits - 1).
        bits: 4 or 8.
        block_size: values that share a scale.
        in_features: K, without padding.
    """

    packed: ByteArray
    scales: FloatArray
    zero_points: ByteArray | None
    bits: int
    block_size: int
    in_features: int

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.packed.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes on disk: packed integers, scales and zero points."""
        zero = 0 if self.zero_points is None else self.zero_points.nbytes
        return self.packed.nbytes + SCALE_BYTES * self.scales.size + zero

    def zero_point_values(self) -> FloatArray:
        """Zero points, (N, G) float32."""
        shape = self.scales.shape
        if self.zero_points is None:
            return np.full(shape, 2.0 ** (self.bits - 1), dtype=np.float32)
        return unpack(self.zero_points, self.bits)[:, : shape[1]].astype(np.float32)

    def dequantize(self) -> FloatArray:
        """The matrix the runtime multiplies by, (N, K) float32."""
        rows, groups, _ = self.packed.shape
        quants = unpack(self.packed.reshape(rows, -1), self.bits).reshape(rows, groups, self.block_size)
        values = quants.astype(np.float32)  # changed in place: new arrays of this size cost more than the arithmetic
        values -= self.zero_point_values()[:, :, None]
        values *= self.scales[:, :, None]
        return values.reshape(rows, -1)[:, : self.in_features]


def pack(quants: ByteArray, bits: int) -> ByteArray:
    """Pack integers along the last axis; an odd count of 4-bit integers is padded with 0."""
    if bits != 4:
        return quants
    if quants.shape[-1] % 2:
        quants = np.concatenate([quants, np.zeros_like(quants[..., :1])], axis=-1)
    return quants[..., 0::2] | (quants[..., 1::2] << np.uint8(4))


def unpack(packed: ByteArray, bits: int) -> ByteArray:
    """Inverse of `pack`, padding included."""
    if bits != 4:
        return packed
    return np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
