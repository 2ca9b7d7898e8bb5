"""NF4: each number to the nearest of 16 codes that are dense where normal weights are (arXiv 2305.14314).

Each block is divided by its number largest in size. Codes and scales are those of bitsandbytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compress.quantization.grid import split_blocks
from sportsllm.storage.packed_weights import NF4, Nf4Weight

_SMALLEST = 1e-38  # a block of zeros divides by this and stays zero


def nf4_weight(weight_NK: Tensor, block_size: int) -> Nf4Weight:
    """Quantize a matrix.

    Args:
        weight_NK: any float type.
        block_size: numbers that share a scale, counted from row to row without a break.
    """
    rows, columns = weight_NK.shape
    blocks_GS = split_blocks(weight_NK.float().reshape(1, -1), block_size)[0]
    scales_G = blocks_GS.abs().amax(dim=-1)
    codes = torch.from_numpy(NF4)
    # A product with the reciprocal, as the library has it: a number halfway between two codes then goes the same way.
    shares_GS = (blocks_GS * (1 / scales_G.clamp(min=_SMALLEST))[:, None]).clamp_(-1, 1)
    found = torch.bucketize(shares_GS, (codes[:-1] + codes[1:]) / 2).to(torch.uint8).flatten().numpy()
    count = rows * columns
    both = found[: count + count % 2].reshape(-1, 2)  # blocks are even, so a byte's second half is there to take
    packed = np.ascontiguousarray((both[:, 0] << 4) | both[:, 1])
    return Nf4Weight(packed, scales_G.numpy(), block_size, rows, columns)
