"""Greedy selection of a layer's units by the error of its output.

Each step picks the unit that most reduces that error; scores of single units keep twins. Here a unit counts by what the
matrix W that reads it makes of it, and only as far as the picked units cannot replace it after the refit
(`compress.pruning.cut`). With the picked columns S refitted, the least error of all tokens' outputs is

    min_B sum |W a - B a_S|^2 = tr W (G - G_:S G_SS^-1 G_S:) W^T        G = sum a a^T

and the next unit is the one that lowers it most: orthogonal least squares with outputs as targets
(https://doi.org/10.1080/00207178908953472); for layers of networks https://arxiv.org/abs/2207.06646.

Shape suffixes: U inputs of a matrix, O outputs, K units, S inputs of a unit (1, or head_dim of a head), C inputs picked
together, P inputs picked before, L inputs that are left, N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.layerwise import solved

_STEPS = 512  # picks; of more units, several are picked at once
_PENDING = 256  # picked inputs whose down-dates are applied to the whole matrix in one product
_RIDGE = 1e-6  # of the mean square of an input, so that a fully explained input still has a divisor


@torch.no_grad()
def pick_order(gram_UU: Tensor, weight_OU: Tensor, size: int) -> Tensor:
    """(K,) scores of the units, `size` inputs each, side by side: K for the first picked, 1 for the last.

    Of the residual R = G - G_:S G_SS^-1 G_S: a pick reads its own columns, the diagonal blocks and those of C^T C, with
    C = W R. Only these are kept up to date. R and C get the down-dates of `_PENDING` inputs in one product, and lose
    the inputs that are picked.
    """
    residual_UU = gram_UU.to(torch.float64, copy=True)
    residual_UU.diagonal().add_(_RIDGE * residual_UU.diagonal().mean())
    cross_OU, count = weight_OU.double() @ residual_UU, len(residual_UU) // size
    scores, units = torch.zeros(count), torch.arange(count)
    while len(units):
        picked, residual_UU, cross_OU = _pick_some(residual_UU, cross_OU, size, -(-count // _STEPS))
        scores[units[picked]] = torch.arange(len(units), len(units) - len(picked), -1.0)
        units = units[~torch.isin(torch.arange(len(units)), picked)]
    return scores


def _pick_some(residual_UU: Tensor, cross_OU: Tensor, size: int, at_once: int) -> tuple[Tensor, Tensor, Tensor]:
    """The next units, `_PENDING` inputs or all that are left, in their order; and both matrices without them."""
    count, picked = len(residual_UU) // size, list[Tensor]()
    left = torch.ones(count, dtype=torch.bool, device=residual_UU.device)
    blocks_KSS = residual_UU.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()
    squares_KSS = _unit_products(cross_OU, cross_OU, size)
    columns_UP, into_PU, read_OP = residual_UU[:, :0], residual_UU[:0], cross_OU[:, :0]
    while left.any() and len(into_PU) < _PENDING:
        among = left.nonzero().flatten()
        gain = _explained(blocks_KSS[among], squares_KSS[among])
        chosen = among[gain.topk(min(at_once, len(among))).indices]
        picked.append(chosen.cpu())
        left[chosen] = False
        own = (chosen[:, None] * size + torch.arange(size, device=chosen.device)).flatten()
        residual_UC = residual_UU[:, own] - columns_UP @ into_PU[:, own]
        read_OC = cross_OU[:, own] - read_OP @ into_PU[:, own]
        into_CU = torch.linalg.solve(_damped(residual_UC[own]), residual_UC.T)
        # C becomes C - C_S into, so that C^T C loses I^T H + H^T I.
        half_CU = read_OC.T @ cross_OU - (read_OC.T @ read_OP) @ into_PU - read_OC.T @ read_OC @ into_CU / 2
        change_KSS = _unit_products(into_CU, half_CU, size)
        squares_KSS -= change_KSS + change_KSS.mT
        blocks_KSS -= _unit_products(residual_UC.T, into_CU, size)
        columns_UP, into_PU = torch.cat([columns_UP, residual_UC], dim=1), torch.cat([into_PU, into_CU])
        read_OP = torch.cat([read_OP, read_OC], dim=1)
    rest = left.repeat_interleave(size).nonzero().flatten()
    into_PL = into_PU[:, rest]
    residual_LL = residual_UU[rest[:, None], rest].addmm_(columns_UP[rest], into_PL, alpha=-1)
    return torch.cat(picked), residual_LL, cross_OU[:, rest].addmm_(read_OP, into_PL, alpha=-1)


def _unit_products(a_NU: Tensor, b_NU: Tensor, size: int) -> Tensor:
    """(K, S, S) a_k^T b_k of the columns of each unit."""
    if size == 1:
        return (a_NU * b_NU).sum(dim=0).view(-1, 1, 1)
    a_NKS, b_NKS = (each.view(len(each), -1, size) for each in (a_NU, b_NU))
    return a_NKS.permute(1, 2, 0) @ b_NKS.transpose(0, 1)


def _explained(blocks_KSS: Tensor, squares_KSS: Tensor) -> Tensor:
    """(K,) by how much each unit would lower the error, tr R_SS^-1 C_S^T C_S."""
    if blocks_KSS.shape[1] == 1:
        return squares_KSS.flatten() / blocks_KSS.flatten().clamp(min=torch.finfo(blocks_KSS.dtype).tiny)
    return solved(_damped(blocks_KSS), squares_KSS).diagonal(dim1=1, dim2=2).sum(dim=1)


def _damped(blocks_SS: Tensor) -> Tensor:
    """(..., S, S), so that a unit that the picked ones explain fully still has a divisor."""
    return blocks_SS + torch.finfo(torch.float64).eps * torch.eye(blocks_SS.shape[-1], device=blocks_SS.device).double()
