"""llama.cpp's blocks of quantized weights: what each type stores of a row, and its bytes.

A block of `size` weights has a scale and, in some types, a least value; several blocks may form a super-block of 256:

    w = scale * level - least
    Q4_0, Q5_0, Q8_0, IQ4_NL    scale = d                        Q4_1, Q5_1    scale = d, least = -m
    Q6_K, IQ4_XS                scale = d * s                    Q4_K, Q5_K    scale = d * s, least = dmin * m

d, m of Q4_1 and Q5_1, and dmin are float16, s and m of super-blocks whole numbers. A level is a whole number, or of
IQ4_NL and IQ4_XS an entry of a table. Source of the layouts: ggml/src/ggml-common.h and ggml-quants.c of
https://github.com/ggml-org/llama.cpp.

Shape suffixes: N rows, K columns, G blocks of a row, B super-blocks of a row (B = G without them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.signedinteger[Any]]
Floats = npt.NDArray[np.float32]

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS (`kvalues_iq4nl`)."""


@dataclass(frozen=True)
class BlockType:
    """A type of quantized tensor.

    Attributes:
        name: llama.cpp's.
        size: weights of a block.
        levels: the least and the largest; of the table its ends.
        least: whether blocks have a least value, which super-blocks store as a whole number from 0.
        blocks: blocks of a super-block, or 1.
        scales: the least and the largest s of a super-block's blocks.
        table: whether levels are those of TABLE.
    """

    name: str
    size: int
    levels: tuple[int, int]
    least: bool = False
    blocks: int = 1
    scales: tuple[int, int] = (1, 1)
    table: bool = False

    @property
    def width(self) -> int:
        """Columns must be a multiple of this."""
        return self.size * self.blocks


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 32, (-8, 7)),
        BlockType("Q4_1", 32, (0, 15), least=True),
        BlockType("Q5_0", 32, (-16, 15)),
        BlockType("Q5_1", 32, (0, 31), least=True),
        BlockType("Q8_0", 32, (-127, 127)),  # readers negate codes: never -128
        BlockType("IQ4_NL", 32, (TABLE[0], TABLE[-1]), table=True),
        BlockType("IQ4_XS", 32, (TABLE[0], TABLE[-1]), blocks=8, scales=(-32, 31), table=True),
        BlockType("Q4_K", 32, (0, 15), least=True, blocks=8, scales=(0, 63)),
        BlockType("Q5_K", 32, (0, 31), least=True, blocks=8, scales=(0, 63)),
        BlockType("Q6_K", 16, (-32, 31), blocks=16, scales=(-128, 127)),
    )
}


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks, before it is packed.

    Attributes:
        kind: the type.
        levels_NK: of the weights.
        d_NB: values of float16.
        scales_NG: s; ones without super-blocks.
        dmin_NB: values of float16; without super-blocks -m; zeros if the type has no least values.
        least_NG: m of super-blocks, else ones.
    """

    kind: BlockType
    levels_NK: Ints
    d_NB: Floats
    scales_NG: Ints
    dmin_NB: Floats
    least_NG: Ints

    def pack(self) -> Bytes:
        """As GGUF stores it, (N, bytes of a row)."""
        kind, rows = self.kind, len(self.levels_NK)
        levels = np.searchsorted(TABLE, self.levels_NK) if kind.table else self.levels_NK - min(kind.levels[0], 0)
        if kind.name == "Q8_0":
            levels = self.levels_NK
        codes = levels.astype(np.uint8).reshape(-1, kind.width)
        d, dmin = (_half(value.reshape(-1, 1)) for value in (self.d_NB, self.dmin_NB))
        scales, least = (value.reshape(-1, kind.blocks) for value in (self.scales_NG, self.least_NG))
        fifth = [_fifth_bits(codes)] if kind.levels[1] - kind.levels[0] == 31 else []
        if kind.name == "Q8_0":
            parts = [d, codes]
        elif kind.name == "Q6_K":
            parts = [*_six_bits(codes), scales.astype(np.int8).view(np.uint8), d]
        elif kind.name == "IQ4_XS":
            parts = [d, *_signed_six(scales), _nibbles(codes, 32)]
        elif kind.blocks > 1:
            parts = [d, dmin, _scales_and_least(scales, least), *fifth, _nibbles(codes, 64)]
        else:
            m = [_half(-self.dmin_NB.reshape(-1, 1))] if kind.least else []
            parts = [d, *m, *fifth, _nibbles(codes, 32)]
        return np.concatenate(parts, axis=1).reshape(rows, -1)


class StoredMatrix(NamedTuple):
    """A matrix as a GGUF file holds it: the name of its type, and (N, bytes of a row) or (N, K) float16 for F16."""

    kind: str
    data: npt.NDArray[np.generic]


class RoundedModel(NamedTuple):
    """A model for a GGUF file: its matrices in blocks and all other parameters, under their names in the model."""

    matrices: Mapping[str, StoredMatrix]
    others: Mapping[str, Tensor]


def _half(values: Floats) -> Bytes:
    return np.ascontiguousarray(values, dtype=np.float16).view(np.uint8)


def _nibbles(codes: Bytes, run: int) -> Bytes:
    """Four bits of each code: of each run the first half in the low, the second in the high nibbles."""
    halves = (codes & np.uint8(15)).reshape(len(codes), -1, 2, run // 2)
    packed: Bytes = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)
    return packed


def _fifth_bits(codes: Bytes) -> Bytes:
    """The fifth bits of 32 weights, in order; in a super-block byte l has the weights l of its eight blocks."""
    high = (codes >> 4).reshape(len(codes), -1, 32)
    if high.shape[1] == 1:
        return np.packbits(high[:, 0], axis=1, bitorder="little")
    return np.packbits(high, axis=1, bitorder="little").reshape(len(codes), -1)


def _scales_and_least(scales: Ints, least: Ints) -> Bytes:
    """Eight pairs of six bits in twelve bytes: those of the first four whole, below the last four's upper two bits."""
    s, m = scales.astype(np.uint8), least.astype(np.uint8)
    upper = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (s, m)]
    return np.concatenate([*upper, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1)


def _signed_six(scales: Ints) -> list[Bytes]:
    """The upper two bits of eight scales, in one whole number, then the lower four."""
    stored = (scales + 32).astype(np.uint16)
    upper = (stored >> 4 << 2 * np.arange(8, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    lower = (stored & np.uint16(15)).astype(np.uint8)
    return [upper[:, None].view(np.uint8), lower[:, 0::2] | lower[:, 1::2] << 4]


def _six_bits(codes: Bytes) -> list[Bytes]:
    """In each half of 128 weights the lower four bits of l and l + 64; the upper two of every 32nd."""
    quarters = codes.reshape(len(codes), 2, 4, 32) >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper: Bytes = np.bitwise_or.reduce(quarters, axis=2).reshape(len(codes), -1)
    return [_nibbles(codes, 128), upper]
