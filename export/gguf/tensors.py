"""A checkpoint's tensors in GGUF's number formats, packed ones number for number.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block of 32 numbers has its scale d, and in
Q4_1 its least value m, in float16:

    Q4_0  w = d * (q - 8)     INT4 without zero points
    Q4_1  w = d * q + m       INT4 with zero points, m = -zero_point * d
    Q8_0  w = d * q           INT8 without zero points, q from -128

Shape suffixes: N rows (outputs), K columns, G blocks of 32 in a row.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from sportsllm.errors import UsageError
from sportsllm.formats.packed_weights import ROW_BITS, QuantizedWeight, unpack

BLOCK = 32
Format = gguf.GGMLQuantizationType


def encode(weight: QuantizedWeight, module: str) -> tuple[npt.NDArray[np.uint8], Format]:
    """A packed matrix as GGUF stores it, (N, bytes of a row). Larger blocks become several of 32 with one scale.

    K must be a multiple of 32.

    Raises:
        UsageError: blocks, or zero points, that GGUF has no format for.
    """
    if weight.bits == ROW_BITS:
        raise UsageError(f"{module}: INT8 per row has no format in GGUF; quantize in blocks (leave --per-row out)")
    if weight.block_size % BLOCK:
        raise UsageError(
            f"{module}: blocks of {weight.block_size}; GGUF's have {BLOCK} numbers: quantize with --block-size 32"
        )
    if weight.bits == 8 and weight.zero_points is not None:
        raise UsageError(f"{module}: INT8 with zero points has no format in GGUF; quantize it with --symmetric")
    rows, groups = weight.out_features, weight.in_features // BLOCK

    def by_block(x_NG: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return x_NG.repeat(weight.block_size // BLOCK, axis=1)[:, :groups]

    quants = unpack(weight.packed.reshape(rows, -1), weight.bits)[:, : weight.in_features].reshape(rows, groups, BLOCK)
    scale_NG = by_block(weight.scales).astype(np.float16)
    if weight.bits == 8:
        parts, kind = [scale_NG, quants ^ 128], Format.Q8_0  # as a signed byte 128 less
    else:
        parts, kind = [scale_NG], Format.Q4_0
        if weight.zero_points is not None:
            least_NG = -by_block(weight.zero_point_values()) * scale_NG.astype(np.float32)
            parts, kind = [scale_NG, least_NG.astype(np.float16)], Format.Q4_1
        parts.append(quants[..., : BLOCK // 2] | quants[..., BLOCK // 2 :] << 4)
    blocks = np.concatenate([part.view(np.uint8).reshape(rows, groups, -1) for part in parts], axis=2)
    return blocks.reshape(rows, -1), kind


def dense(values: npt.NDArray[np.float32], half: bool) -> tuple[npt.NDArray[np.generic], Format]:
    """Dense numbers: matrices in float16 if asked for, vectors always in float32, as llama.cpp wants them."""
    if half and values.ndim == 2:
        return values.astype(np.float16), Format.F16
    return np.ascontiguousarray(values, dtype=np.float32), Format.F32
