"""The runtime's grid: each block of a row has a scale and a zero point, and holds integers of 4 or 8 bits.

Shape suffixes: N rows (outputs), K columns (inputs), G blocks a row, S weights of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sportsllm.formats.packed import QuantizedWeight, pack

# Ranges that are tried, as shares of the range that holds every weight. At 4 bits a block without outliers may also
# gain from a wider one, since the symmetric grid reaches 8 steps to one side and 7 to the other. At 8 bits the widest
# has 127 steps to each side, as GGUF's Q8_0 has, whose weights it keeps as they are.
_SHARES = {4: (0.5, 1.15, 27), 8: (0.9, 128 / 127, 7)}


@dataclass(frozen=True)
class Grid:
    """Scales and zero points of one matrix.

    Attributes:
        scales_NG: float32, values of float16; 0 where a block has no number but 0.
        zeros_NG: zero points, integers in float32.
        bits: 4 or 8.
        block_size: S.
        symmetric: whether every zero point is 2 ** (bits - 1).
    """

    scales_NG: Tensor
    zeros_NG: Tensor
    bits: int
    block_size: int
    symmetric: bool

    def round(self, weight_NK: Tensor) -> Tensor:
        """The nearest values of the grid, (N, K) integers in float32."""
        return self.nearest(weight_NK, *self.by_column(weight_NK.shape[1]))

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """As `nearest`; other grids round in another way."""
        return nearest(weight, scale, zero, self.bits)

    def fit_block(self, block_NS: Tensor, weights_S: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point of one block, (N,) each, for weights that have changed."""
        scales, zeros = searched_range(block_NS[:, None], self.bits, self.symmetric, weights_S[None])
        return scales[:, 0], zeros[:, 0]

    def values(self, quants_NK: Tensor) -> Tensor:
        """The weights that integers of the grid stand for, (N, K)."""
        scales, zeros = self.by_column(quants_NK.shape[1])
        return (quants_NK - zeros) * scales

    def pack(self, quants_NK: Tensor) -> QuantizedWeight:
        """As the runtime reads it; the last block is padded with its zero point, which stands for 0."""
        rows, columns = quants_NK.shape
        groups = self.scales_NG.shape[1]
        filled = self.zeros_NG.repeat_interleave(self.block_size, dim=1)
        filled[:, :columns] = quants_NK
        numbers = filled.view(rows, groups, self.block_size).to(torch.uint8).cpu().numpy()
        zeros = None if self.symmetric else pack(self.zeros_NG.to(torch.uint8).cpu().numpy(), self.bits)
        return QuantizedWeight(
            packed=pack(numbers, self.bits),
            scales=self.scales_NG.float().cpu().numpy(),
            zero_points=zeros,
            bits=self.bits,
            block_size=self.block_size,
            in_features=columns,
        )

    def by_column(self, columns: int) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each weight, (N, K) each."""
        scales, zeros = (t.repeat_interleave(self.block_size, 1)[:, :columns] for t in (self.scales_NG, self.zeros_NG))
        return scales, zeros


def stored_scales(scales: Tensor) -> Tensor:
    """The nearest values of float16, in which scales are stored; a scale that is not 0 never becomes 0."""
    half = scales.half()
    return torch.where((half == 0) & (scales != 0), torch.full_like(half, 2.0**-24).copysign(half), half).float()


def nearest(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Round to integers of the grid; all three broadcast."""
    return torch.clamp(torch.round(weight / torch.where(scale == 0, 1.0, scale)) + zero, 0, 2**bits - 1)


def split_blocks(weight_NK: Tensor, block_size: int) -> Tensor:
    """(N, G, S), zeros behind the last column."""
    rows, columns = weight_NK.shape
    padded_NK = F.pad(weight_NK, (0, -columns % block_size)) if columns % block_size else weight_NK
    return padded_NK.reshape(rows, -1, block_size)


def full_range(blocks_NGS: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points, (N, G) each, of the smallest grid that holds every weight.

    symmetric:   scale = the number largest in size / -2^(bits-1), zero point 2^(bits-1)  (the full range is used)
    asymmetric:  scale = (max - min) / (2^bits - 1), zero point = round(-min / scale), both reaching to 0
    """
    if symmetric:
        index = blocks_NGS.abs().argmax(dim=-1, keepdim=True)
        scales = stored_scales(blocks_NGS.gather(-1, index)[..., 0] / -(2.0 ** (bits - 1)))
        return scales, torch.full_like(scales, 2.0 ** (bits - 1))
    low, high = blocks_NGS.amin(dim=-1).clamp(max=0), blocks_NGS.amax(dim=-1).clamp(min=0)
    return _between(low, high, bits)


def _between(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    top = 2.0**bits - 1
    scales = stored_scales((high - low) / top)
    zeros = torch.round(-low / torch.where(scales == 0, 1.0, scales))
    return scales, zeros.clamp(0, top)


def searched_range(
    blocks_NGS: Tensor, bits: int, symmetric: bool, weights_GS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `full_range`, but the grid of least squared error among narrower and wider ones, its scale then fitted.

    Args:
        blocks_NGS: of `split_blocks`.
        bits, symmetric: of the grid.
        weights_GS: how much each column's error counts; all alike if not given.
    """
    counted = torch.ones_like(blocks_NGS[:1]) if weights_GS is None else weights_GS[None]
    scales, zeros = full_range(blocks_NGS, bits, symmetric)

    def error(scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        levels = nearest(blocks_NGS, scales[..., None], zeros[..., None], bits) - zeros[..., None]
        missed = (levels * scales[..., None]).sub_(blocks_NGS).square_().mul_(counted)
        return missed.sum(dim=-1), levels

    best, levels = error(scales, zeros)
    low, high = blocks_NGS.amin(dim=-1).clamp(max=0), blocks_NGS.amax(dim=-1).clamp(min=0)
    for share in torch.linspace(*_SHARES[bits]).tolist():
        if symmetric:
            size = stored_scales(torch.maximum(-low, high) * (share / 2 ** (bits - 1)))
            tried = [(size, zeros), (-size, zeros)]
        else:
            tried = [_between(low * min(share, 1.0), high * min(share, 1.0), bits)]
        for candidate in tried:
            found, steps = error(*candidate)
            better = found < best
            scales, zeros = torch.where(better, candidate[0], scales), torch.where(better, candidate[1], zeros)
            best = torch.minimum(best, found)
            levels = torch.where(better[..., None], steps, levels)
    # The scale of least error for these integers; rounding to it again can only help.
    squares = (counted * levels.square()).sum(dim=-1)
    fitted = (counted * levels * blocks_NGS).sum(dim=-1) / torch.where(squares == 0, 1.0, squares)
    fitted = torch.where(fitted == 0, scales, stored_scales(fitted))
    found, _ = error(fitted, zeros)
    return torch.where(found < best, fitted, scales), zeros


def fit_grid(
    weight_NK: Tensor, bits: int, block_size: int, symmetric: bool, *, search: bool, weights_K: Tensor | None = None
) -> Grid:
    """The grid of a matrix: `searched_range` if `search`, else `full_range`."""
    blocks_NGS = split_blocks(weight_NK.float(), block_size)
    if not search:
        return Grid(*full_range(blocks_NGS, bits, symmetric), bits, block_size, symmetric)
    weights_GS = None if weights_K is None else split_blocks(weights_K[None].float(), block_size)[0]
    return Grid(*searched_range(blocks_NGS, bits, symmetric, weights_GS), bits, block_size, symmetric)
