"""GPTQ: round one column at a time and adjust the columns not yet rounded to cancel its error.

With H = the sum of x x^T over calibration tokens, the error of a matrix's outputs is tr((W - Q) H (W - Q)^T).
Three steps lower it, each from the one before:

    gptq        columns one after the other, the rest moved by the Cholesky factor of H^-1
                (https://arxiv.org/abs/2210.17323)
    coordinate_descent
                each weight in turn moved to where the error is least, the others held (https://arxiv.org/abs/2309.01885)
    fit_scales  all scales of a row at once, the integers held: least squares with one unknown per block

Shape suffixes: N rows (outputs), K columns (inputs), G blocks a row, S weights of a block, U unknowns a row, G or 2G.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from compress.layerwise import solved
from compress.quantization.grid import Grid, fit_grid, split_blocks, stored_scales
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.formats.safetensors import all_finite

DAMPING = 0.1  # of H's mean diagonal; the paper's 0.01 follows the calibration text too closely
ROUNDS = 2  # of `coordinate_descent` and a grid's refit in turn
AnyGrid = TypeVar("AnyGrid", bound=Grid)
_ROWS, _EQUATIONS = 256, 2**23  # rows whose float64 copies, and coefficients of scales, that are in memory together
_BAND = 1_024  # columns of a factor that are inverted together
_EXACT = 8_192  # inputs up to which a factor is made in float64; wider ones would take gigabytes
_PANEL = 32  # columns whose moves are gathered before they reach the columns behind them


def row_errors(difference_NK: Tensor, gram_KK: Tensor) -> Tensor:
    """(N,) the diagonal of D H D^T: the squared error of each output over the calibration tokens, float64."""
    return ((difference_NK @ gram_KK) * difference_NK).sum(dim=1, dtype=torch.float64)


def gptq_weight(
    weight_NK: Tensor,
    gram_KK: Tensor,
    bits: int,
    block_size: int,
    symmetric: bool,
    refine: bool = True,
) -> QuantizedWeight:
    """Quantize a matrix for inputs with second moment `gram_KK`.

    Columns are taken in their own order, each block's grid fitted when it is reached, and in the order of their
    inputs' strength (act-order) on a grid that is fitted before; of each row the better of both is refined.

    Args:
        refine: else one pass in act-order is all.
    """
    first = fit_grid(weight_NK, bits, block_size, symmetric, search=True, weights_K=gram_KK.diagonal())
    if not refine:
        grid, quants_NK = gptq(weight_NK, gram_KK, first, act_order=True)
        return grid.pack(quants_NK)

    grid, quants_NK = gptq_and_refine(
        weight_NK, gram_KK, first, lambda grid, quants_NK: (fit_scales(weight_NK, gram_KK, grid, quants_NK), quants_NK)
    )
    return grid.pack(quants_NK)


def gptq_and_refine(
    weight_NK: Tensor,
    gram_KK: Tensor,
    first: AnyGrid,
    refit: Callable[[AnyGrid, Tensor], tuple[AnyGrid, Tensor]],
) -> tuple[AnyGrid, Tensor]:
    """Round in both orders, then descend and refit in turn; of each row the rounding with less error stays.

    Args:
        first: grid fitted to the weights.
        refit: from a grid and its integers to a grid of less error and the integers on it.
    """
    found = [gptq(weight_NK, gram_KK, first, act_order=order) for order in (False, True)]
    grid, quants_NK = _better_rows(weight_NK, gram_KK, *found)
    for _ in range(ROUNDS):
        quants_NK = coordinate_descent(weight_NK, gram_KK, grid, quants_NK)
        grid, quants_NK = _better_rows(weight_NK, gram_KK, (grid, quants_NK), refit(grid, quants_NK))
    return grid, quants_NK


def _better_rows(
    weight_NK: Tensor, gram_KK: Tensor, first: tuple[AnyGrid, Tensor], second: tuple[AnyGrid, Tensor]
) -> tuple[AnyGrid, Tensor]:
    """Of two roundings of a matrix, each row's with less error."""
    errors = [row_errors(weight_NK - grid.values(quants_NK), gram_KK) for grid, quants_NK in (first, second)]
    better_N1 = (errors[1] < errors[0])[:, None]
    old, new = vars(first[0]), vars(second[0])
    rows: dict[str, Any] = {
        name: torch.where(better_N1, new[name], each) for name, each in old.items() if isinstance(each, Tensor)
    }
    return dataclasses.replace(first[0], **rows), torch.where(better_N1, second[1], first[1])


def damped_gram(gram_KK: Tensor) -> Tensor:
    """H plus a share of its mean diagonal, float32, scaled to a mean diagonal of 1; inputs that are always 0 get 1."""
    diagonal = gram_KK.diagonal()
    mean = diagonal.double().mean()
    if not mean > 0:
        return torch.eye(len(gram_KK), device=gram_KK.device)
    gram = torch.empty_like(gram_KK, dtype=torch.float32)
    for rows, given in zip(torch.split(gram, _ROWS), torch.split(gram_KK, _ROWS), strict=True):
        rows.copy_(given.double() / mean)
    gram.diagonal().add_(torch.where(diagonal == 0, 1.0, DAMPING))
    return gram


def gptq(weight_NK: Tensor, gram_KK: Tensor, grid: AnyGrid, *, act_order: bool) -> tuple[AnyGrid, Tensor]:
    """The algorithm of the paper on contiguous blocks.

    Args:
        grid: fitted to the given weights.
        act_order: take the columns with the strongest inputs first, on the given grid.

    Returns:
        The grid and (N, K) integers.
    """
    columns, block_size = weight_NK.shape[1], grid.block_size
    diagonal = gram_KK.diagonal()
    order = torch.arange(columns, device=gram_KK.device)
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    factor_KK, groups = inverse_factor(gram_KK, order), (order // block_size).cpu().tolist()
    left_KN = _transposed(weight_NK)[order]
    quants_KN = torch.empty_like(left_KN)
    scales_GN, zeros_GN = _transposed(grid.scales_NG), _transposed(grid.zeros_NG)
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        errors_KN = weight_NK.new_empty(stop - start, len(weight_NK))
        for place in range(start, stop):
            group = groups[place]
            if not act_order and place % block_size == 0:
                # What earlier columns left to this block, which lies in this panel or begins with it.
                end = place + block_size
                ahead_NS = _transposed(left_KN[place:end])
                block_NS, weights_1S = (
                    split_blocks(each, block_size)[:, 0] for each in (ahead_NS, diagonal[None, place:end])
                )
                scales_GN[group], zeros_GN[group] = grid.fit_block(block_NS, weights_1S[0], group)
            scale, zero = scales_GN[group], zeros_GN[group]
            quants_KN[place] = grid.nearest(left_KN[place], scale, zero)
            error = (left_KN[place] - (quants_KN[place] - zero) * scale) / factor_KK[place, place]
            left_KN[place:stop].addr_(factor_KK[place, place:stop], error, alpha=-1)
            errors_KN[place - start] = error
        left_KN[stop:].addmm_(factor_KK[start:stop, stop:].T, errors_KN, alpha=-1)
    unsorted_KN = torch.empty_like(quants_KN)
    unsorted_KN[order] = quants_KN
    grid = dataclasses.replace(grid, scales_NG=_transposed(scales_GN), zeros_NG=_transposed(zeros_GN))
    return grid, _transposed(unsorted_KN)


def _transposed(tensor: Tensor) -> Tensor:
    """A copy whose rows are columns: what is taken column by column lies in one piece."""
    return tensor.T.clone(memory_format=torch.contiguous_format)


def inverse_factor(gram_KK: Tensor, order: Tensor | None = None) -> Tensor:
    """The upper Cholesky factor of H^-1, float32; an H that is not positive definite is damped until it is.

    With J the reversal of rows and L L^T = J H J it is J L^-1 J, so H is not inverted.
    `order` is that of the factor's rows and columns, as in H if None.
    """
    assert all_finite(gram_KK), "callers have checked it; no damping would end"
    back = (torch.arange(len(gram_KK), device=gram_KK.device) if order is None else order).flip(0)
    dtype = torch.float64 if len(gram_KK) <= _EXACT else torch.float32
    diagonal, more = gram_KK.diagonal()[back].to(dtype), DAMPING
    while True:
        gram = gram_KK[back[:, None], back].to(dtype)
        gram.diagonal().copy_(diagonal)
        upper, failed = torch.linalg.cholesky_ex(gram, upper=True)
        del gram  # two matrices of this size are the peak
        if not failed:
            _invert(upper.T)
            factor: Tensor = upper.T.flip(0, 1).float()
            return factor
        diagonal = diagonal + more * diagonal.abs().clamp(min=1e-8)
        more *= 10


def _invert(lower_KK: Tensor) -> None:
    """Invert a lower triangular matrix in place."""
    size = len(lower_KK)
    for start in reversed(range(0, size, _BAND)):
        band, below = slice(start, min(start + _BAND, size)), slice(min(start + _BAND, size), size)
        unit = torch.eye(len(lower_KK[band]), dtype=lower_KK.dtype, device=lower_KK.device)
        corner = torch.linalg.solve_triangular(lower_KK[band, band], unit, upper=False)
        lower_KK[below, band] = lower_KK[below, below] @ (lower_KK[below, band] @ -corner)
        lower_KK[band, band] = corner


def coordinate_descent(weight_NK: Tensor, gram_KK: Tensor, grid: Grid, quants_NK: Tensor) -> Tensor:
    """Move one column after the other to the integers of least error, all the others held; never worse.

    Args:
        gram_KK: H, its diagonal above 0.
        quants_NK: where to start.
    """
    quants_KN, columns = _transposed(quants_NK), weight_NK.shape[1]
    scales_GN, zeros_GN = _transposed(grid.scales_NG), _transposed(grid.zeros_NG)
    pull_KN = gram_KK @ (weight_NK - grid.values(quants_KN.T)).T  # minus half the error's gradient
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        changes_KN = weight_NK.new_zeros(stop - start, len(weight_NK))
        for column in range(start, stop):
            group = column // grid.block_size
            scale, zero = scales_GN[group], zeros_GN[group]
            old = (quants_KN[column] - zero) * scale
            wanted = old + pull_KN[column] / gram_KK[column, column]
            quants_KN[column] = grid.nearest(wanted, scale, zero)
            change = (quants_KN[column] - zero) * scale - old
            pull_KN[start:stop].addr_(gram_KK[column, start:stop], change, alpha=-1)
            changes_KN[column - start] = change
        pull_KN[stop:].addmm_(gram_KK[stop:, start:stop], changes_KN, alpha=-1)
    return _transposed(quants_KN)


def fit_scales(weight_NK: Tensor, gram_KK: Tensor, grid: Grid, quants_NK: Tensor) -> Grid:
    """The scales of least output error for given integers, all blocks of a row together."""
    levels_NK = quants_NK - grid.zeros_NG.repeat_interleave(grid.block_size, dim=1)[:, : quants_NK.shape[1]]
    found_NG = least_error(weight_NK, gram_KK, levels_NK, grid.block_size)
    kept = ~torch.isfinite(found_NG) | (found_NG == 0)  # a block of zeros has no equation: its scale stays
    return dataclasses.replace(grid, scales_NG=torch.where(kept, grid.scales_NG, stored_scales(found_NG)))


def least_error(weight_NK: Tensor, gram_KK: Tensor, levels_NK: Tensor, block: int, least: bool = False) -> Tensor:
    """The scales s of least output error for levels L, (N, G); with `least` also least values m, (N, 2G), see `refit`.

    Row by row: sum over h of A[g, h] s[h] = b[g], where A[g, h] = the sum over block g times block h of L H L^T, and
    b[g] = the sum over block g of L times (W H). Least values are scales of the level -1, and need whole blocks.
    """
    wanted_NK = weight_NK @ gram_KK
    parts = [split_blocks(levels_NK * wanted_NK, block).sum(dim=-1)]
    if least:
        parts.append(-split_blocks(wanted_NK, block).sum(dim=-1))
    right_NU = torch.cat(parts, dim=1)
    rows = max(1, min(_ROWS, _EQUATIONS // right_NU.shape[1] ** 2))
    split = zip(torch.split(levels_NK, rows), torch.split(right_NU, rows), strict=True)
    return torch.cat([_solved_rows(levels, right, gram_KK, block) for levels, right in split])


def _solved_rows(levels_NK: Tensor, right_NU: Tensor, gram_KK: Tensor, block: int) -> Tensor:
    """`least_error` of some rows; the equations of a whole matrix would be many times its size."""
    (rows, columns), unknowns, groups = levels_NK.shape, right_NU.shape[1], -(-levels_NK.shape[1] // block)
    left = levels_NK.new_empty(rows, unknowns, unknowns)
    for group in range(groups):
        start = group * block
        part = slice(start, min(start + block, columns))
        found = split_blocks((levels_NK[:, part] @ gram_KK[part, start:]) * levels_NK[:, start:], block).sum(dim=-1)
        left[:, group, group:groups] = left[:, group:groups, group] = found
    if unknowns > groups:
        sums_GSH = split_blocks(gram_KK, block).sum(dim=-1).view(groups, block, groups)
        left[:, :groups, groups:] = -torch.einsum("ngs,gsh->ngh", split_blocks(levels_NK, block), sums_GSH)
        left[:, groups:, :groups] = left[:, :groups, groups:].mT
        left[:, groups:, groups:] = sums_GSH.sum(dim=1)
    left = left.double()
    diagonal = left.diagonal(dim1=1, dim2=2)
    # The ridge is below what float32 sums can tell apart.
    diagonal.add_(torch.where(diagonal == 0, 1.0, 1e-7 * diagonal))
    return solved(left, right_NU.double()[..., None])[..., 0].float()
