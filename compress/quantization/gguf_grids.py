"""The grids of llama.cpp's blocks (`sportsllm.formats.gguf.blocks`): a search of scales and least values, and GPTQ on
them.

Search: of each block alone the scale s and least value m of least squared error,

    argmin_{s, m, levels} sum_k weight_k (w_k - s * level_k + m)^2

over ranges from narrow to wide, for each of which levels are rounded and s and m solved by least squares, as
llama.cpp's quantizers do (`make_qx_quants`, `make_qkx3_quants` of ggml/src/ggml-quants.c). Super-blocks round s and m
to integers in float16 units, fitted once more to the levels that follow.

Shape suffixes: N rows, K columns, G blocks of a row, B super-blocks of a row, S weights of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantization.gptq import coordinate_descent, gptq_and_refine, least_error
from compress.quantization.grid import Grid, split_blocks
from sportsllm.errors import ArtifactError
from sportsllm.formats.gguf.blocks import TABLE, Blocks, BlockType

LEAST_STEPS = 63
"""The largest m of super-blocks."""
_UNITS = 8  # units that are tried
_TABLE = torch.tensor(TABLE, dtype=torch.float32)
_ENDS = 2 * max(map(abs, TABLE))  # of _NEAREST
# Where TABLE's next level becomes the nearest is a multiple of 0.5: the nearest to steps that are rounded up to those.
_NEAREST = _TABLE[torch.bucketize(torch.arange(-_ENDS, _ENDS + 1) / 2, (_TABLE[1:] + _TABLE[:-1]) / 2)]
# Ranges that are tried, as shares of the range that holds every weight. Those of few levels may gain from a wider one,
# since one side reaches a level further than the other.
_SHARES = torch.linspace(0.55, 1.15, 19).tolist()
_SHARES_LEAST = torch.linspace(0.5, 1.05, 12).tolist()
_SHARES_FINE = torch.linspace(0.9, 1.02, 7).tolist()


def _half(values: Tensor) -> Tensor:
    return values.half().float()


def _inverse(values: Tensor) -> Tensor:
    """1 / values, 0 for 0 and for values so small that it would be infinite."""
    return torch.where(values.abs() < torch.finfo(torch.float32).tiny, 0.0, 1 / values)


def _divided(first: Tensor, second: Tensor) -> Tensor:
    """0 if the second is 0."""
    return torch.where(second == 0, 0.0, first / torch.where(second == 0, 1.0, second))


def _levels(steps: Tensor, kind: BlockType) -> Tensor:
    """The nearest levels of weights that are divided by their scale, in place."""
    if kind.table:
        places = steps.mul_(2).ceil_().clamp_(-_ENDS, _ENDS).add_(_ENDS).int()
        return _NEAREST.index_select(0, places.flatten()).view(steps.shape)
    return steps.round_().clamp_(*kind.levels)


@dataclass(frozen=True)
class BlockGrid(Grid):
    """Scales and least values of one matrix as its type stores them; `zeros_NG` = least / scale is any number.

    Attributes:
        kind: the type.
        d_NB, dmin_NB: units of scales and least values of super-blocks, values of float16.
    """

    kind: BlockType
    d_NB: Tensor
    dmin_NB: Tensor

    @staticmethod
    def of(
        kind: BlockType, scales_NG: Tensor, least_NG: Tensor, units: tuple[Tensor, Tensor] | None = None
    ) -> BlockGrid:
        """The nearest that the type stores, in given units or in those that the largest value leads to."""
        d_NB, dmin_NB = units if units and kind.blocks > 1 else _units(kind, scales_NG, least_NG)
        whole_NG, least_whole_NG = _whole(kind, (d_NB, dmin_NB), scales_NG, least_NG)
        stored_NG = whole_NG * _by_block(kind, d_NB)
        zeros_NG = _divided(least_whole_NG * _by_block(kind, dmin_NB), stored_NG)
        bits = (kind.levels[1] - kind.levels[0]).bit_length()
        return BlockGrid(stored_NG, zeros_NG, bits, kind.size, not kind.least, kind, d_NB, dmin_NB)

    @property
    def least_NG(self) -> Tensor:
        """The least values."""
        return self.zeros_NG * self.scales_NG

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Levels of the least error."""
        return _levels((weight * _inverse(scale)).add_(zero), self.kind)

    def fit_block(self, block_NS: Tensor, weights_S: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Scale and zero of one block in the units of its super-block, (N,) each."""
        scale_N1, least_N1 = search(block_NS[:, None], self.kind, weights_S[None, None])
        units = None
        if self.kind.blocks > 1:
            place = group // self.kind.blocks
            units = self.d_NB[:, place : place + 1], self.dmin_NB[:, place : place + 1]
        found = BlockGrid.of(self.kind, scale_N1, least_N1, units)
        return found.scales_NG[:, 0], found.zeros_NG[:, 0]

    def blocks(self, levels_NK: Tensor) -> Blocks:
        """The matrix as it is packed."""
        kind, units = self.kind, (self.d_NB, self.dmin_NB)
        if kind.blocks == 1:
            units = self.scales_NG, _half(self.least_NG)
        whole = _whole(kind, units, self.scales_NG, self.least_NG)
        levels, scales, least = (each.long().numpy() for each in (levels_NK, *whole))
        return Blocks(kind, levels, units[0].numpy(), scales, units[1].numpy(), least)


def _by_block(kind: BlockType, values_NB: Tensor) -> Tensor:
    return values_NB.repeat_interleave(kind.blocks, dim=1) if kind.blocks > 1 else values_NB


def _units(kind: BlockType, scales_NG: Tensor, least_NG: Tensor) -> tuple[Tensor, Tensor]:
    """d and dmin, (N, B) each, that the largest scale and least value of each super-block reach."""
    if kind.blocks == 1:
        d_NB, dmin_NB = _half(scales_NG), _half(least_NG)
    else:
        low, high = kind.scales
        # A range of both signs reaches further below 0: d takes the other sign.
        d_NB = _unit(_supers(scales_NG, kind), low or high, kind.scales)
        dmin_NB = _unit(_supers(least_NG, kind), LEAST_STEPS, (0, LEAST_STEPS))
    if not (d_NB.isfinite().all() and dmin_NB.isfinite().all()):
        raise ArtifactError("weights overflow float16 scales; the checkpoint is damaged")
    return d_NB, dmin_NB


def _supers(values_NG: Tensor, kind: BlockType) -> Tensor:
    """(N, B, blocks of a super-block)."""
    return values_NG.view(len(values_NG), -1, kind.blocks)


def _unit(values_NBS: Tensor, end: int, ends: tuple[int, int]) -> Tensor:
    """The unit, (N, B), in which integers miss the values least; `end` is that of the value largest in size."""
    largest = values_NBS.gather(2, values_NBS.abs().argmax(dim=2, keepdim=True))
    found, best = _half(largest / end), torch.full_like(largest, torch.inf)
    for tried in range(_UNITS):
        unit = _half(largest / (end - tried * (1 if end > 0 else -1)))
        whole = _divided(values_NBS, unit).round().clamp(*ends)
        missed = (whole * unit - values_NBS).square().sum(dim=2, keepdim=True)
        found, best = torch.where(missed < best, unit, found), torch.minimum(missed, best)
    return found[..., 0]


def _whole(kind: BlockType, units: tuple[Tensor, Tensor], scales_NG: Tensor, least_NG: Tensor) -> tuple[Tensor, Tensor]:
    """s and m, integers, (N, G) each."""
    if kind.blocks == 1:
        return torch.ones_like(scales_NG), torch.ones_like(least_NG)
    d_NG, dmin_NG = (_by_block(kind, unit)[:, : scales_NG.shape[1]] for unit in units)
    scales = _divided(scales_NG, d_NG).round().clamp(*kind.scales)
    if kind.least:  # a scale of 0 would lose the least value, which a grid has in units of the scale
        scales = scales.clamp(min=1)
    return scales, _divided(least_NG, dmin_NG).round().clamp(0, LEAST_STEPS)


def search(blocks_NGS: Tensor, kind: BlockType, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values of blocks, (N, G) each, as real numbers; `weights` broadcast to the blocks."""
    counted = weights.expand_as(blocks_NGS)
    return _search_least(blocks_NGS, kind, counted) if kind.least else _search_scale(blocks_NGS, kind, counted)


def _search_scale(blocks: Tensor, kind: BlockType, counted: Tensor) -> tuple[Tensor, Tensor]:
    low, high = kind.levels
    size = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))[..., 0] / low
    scale, best = size, torch.full_like(size, torch.inf)
    fine, strong = high > 64 and not kind.table, counted * blocks
    for share in _SHARES_FINE if fine else _SHARES:
        for sign in (1.0,) if high == -low else (1.0, -1.0):
            levels = _levels(blocks * _inverse(size * (share * sign))[..., None], kind)
            cross, squares = (levels * strong).sum(dim=2), levels.square_().mul_(counted).sum(dim=2)
            gained = -_divided(cross.square(), squares)  # the error less sum of weight * w^2
            better = gained < best
            scale = torch.where(better, _divided(cross, squares), scale)
            best = torch.where(better, gained, best)
    if low == -high:
        scale = scale.abs()
    return scale, torch.zeros_like(scale)


def _search_least(blocks: Tensor, kind: BlockType, counted: Tensor) -> tuple[Tensor, Tensor]:
    top = kind.levels[1]
    positive = kind.blocks > 1  # super-blocks store no negative least value
    low, high = blocks.amin(dim=2), blocks.amax(dim=2)
    if positive:
        low, high = low.clamp(max=0), high.clamp(min=0)
    strong = counted * blocks
    total, first = counted.sum(dim=2), strong.sum(dim=2)
    scale, least = (high - low) / top, -low
    best = torch.full_like(scale, torch.inf)
    for share in _SHARES_LEAST:
        for side in (0.0, 0.5, 1.0):
            s = (high - low) * (share / top)
            m = -(low + (high - low) * ((1 - share) * side))
            for _ in range(2):
                levels = _levels((blocks + m[..., None]).mul_(_inverse(s)[..., None]), kind)
                sums, cross = (counted * levels).sum(dim=2), (levels * strong).sum(dim=2)
                squares = levels.square_().mul_(counted).sum(dim=2)
                determinant = total * squares - sums.square()
                s = _divided(total * cross - sums * first, determinant)
                m = _divided(sums * cross - squares * first, determinant)
                if positive:
                    alone = m < 0
                    s, m = torch.where(alone, _divided(cross, squares), s), m.clamp(min=0)
            # Of the squared error the part that depends on s, m and levels.
            error = s.square() * squares - 2 * s * (m * sums + cross) + m.square() * total + 2 * m * first
            better = (error < best) & (s > 0)
            scale, least = torch.where(better, s, scale), torch.where(better, m, least)
            best = torch.where(better, error, best)
    # A block of one value keeps it as its least value, which a grid has in units of the scale.
    return torch.where(scale == 0, least.abs() / top, scale), least


def plain_grid(weight_NK: Tensor, kind: BlockType, weights_K: Tensor | None = None) -> BlockGrid:
    """The grid of least squared error, each column's error counting by `weights_K`.

    K must be a multiple of the type's width.
    """
    blocks_NGS = split_blocks(weight_NK.float(), kind.size)
    if weights_K is None:
        weights: Tensor = torch.ones(1, 1, 1)
    else:
        weights = split_blocks(weights_K[None].float(), kind.size)
    grid = BlockGrid.of(kind, *search(blocks_NGS, kind, weights))
    return grid if kind.blocks == 1 else _refit_units(grid, blocks_NGS, weights)


def _refit_units(grid: BlockGrid, blocks_NGS: Tensor, weights: Tensor) -> BlockGrid:
    """d and dmin by least squares for the levels that the grid leads to, s and m held."""
    kind = grid.kind
    levels = grid.nearest(blocks_NGS, grid.scales_NG[..., None], grid.zeros_NG[..., None])
    d_NG = _by_block(kind, grid.d_NB)
    u = levels * _divided(grid.scales_NG, d_NG)[..., None]
    v = -_divided(grid.least_NG, _by_block(kind, grid.dmin_NB))[..., None].expand_as(u)

    def summed(product: Tensor) -> Tensor:
        return _supers((weights * product).sum(dim=2), kind).sum(dim=2)

    uu, uv, vv, ux, vx = summed(u * u), summed(u * v), summed(v * v), summed(u * blocks_NGS), summed(v * blocks_NGS)
    if kind.least:
        determinant = uu * vv - uv * uv
        solvable = determinant > 1e-6 * uu * vv
        d = torch.where(solvable, _divided(ux * vv - vx * uv, determinant), grid.d_NB)
        dmin = torch.where(solvable, _divided(vx * uu - ux * uv, determinant), grid.dmin_NB)
    else:
        d, dmin = torch.where(uu > 0, _divided(ux, uu), grid.d_NB), grid.dmin_NB
    usable = d.isfinite() & dmin.isfinite() & (dmin >= 0) & (d != 0)
    d, dmin = _half(torch.where(usable, d, grid.d_NB)), _half(torch.where(usable, dmin, grid.dmin_NB))
    scales_NG = _divided(grid.scales_NG, d_NG) * _by_block(kind, d)
    return BlockGrid.of(kind, scales_NG, -v[..., 0] * _by_block(kind, dmin), (d, dmin))


def plain(weight_NK: Tensor, kind: BlockType) -> Blocks:
    """Round a matrix without calibration text."""
    grid = plain_grid(weight_NK, kind)
    return grid.blocks(grid.round(weight_NK.float()))


def gptq_blocks(weight_NK: Tensor, gram_KK: Tensor, kind: BlockType) -> Blocks:
    """Round a float32 matrix for inputs with second moment `gram_KK`, damped, as `gptq_weight` does on a grid.

    K is a multiple of the type's width.
    """
    first = plain_grid(weight_NK, kind, gram_KK.diagonal())

    def refitted(grid: BlockGrid, levels_NK: Tensor) -> tuple[BlockGrid, Tensor]:
        grid = refit(weight_NK, gram_KK, grid, levels_NK)
        return grid, coordinate_descent(weight_NK, gram_KK, grid, levels_NK)

    grid, levels_NK = gptq_and_refine(weight_NK, gram_KK, first, refitted)
    return grid.blocks(levels_NK)


def refit(weight_NK: Tensor, gram_KK: Tensor, grid: BlockGrid, levels_NK: Tensor) -> BlockGrid:
    """Scales and least values of least output error for given levels, all of a row together, then as they are stored.

    With U the levels and V = -1, by row and block: argmin over s, m of (W - s U - m V) H (W - s U - m V)^T.
    """
    kind, groups = grid.kind, grid.scales_NG.shape[1]
    found = least_error(weight_NK, gram_KK, levels_NK, kind.size, kind.least)
    scales, least = found[:, :groups], found[:, groups:] if kind.least else grid.least_NG
    usable = scales.isfinite() & least.isfinite() & (scales != 0)
    if kind.least or kind.levels[0] == -kind.levels[1]:
        usable &= scales > 0
    scales, least = torch.where(usable, scales, grid.scales_NG), torch.where(usable, least, grid.least_NG)
    return BlockGrid.of(kind, scales, least)
