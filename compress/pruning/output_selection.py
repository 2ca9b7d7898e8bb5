"""Rank units by greedy selection: each step picks the unit that most reduces the error of the layer's output.

Scores of single units keep twins and drop units that nothing can replace. Here a unit counts by what the matrix W that
reads it makes of it, and only as far as the picked units cannot replace it after the refit (`compress.pruning.refit`).
With the picked columns S refitted, the least error of all tokens' outputs is

    min_B sum |W a - B a_S|^2 = tr W (G - G_:S G_SS^-1 G_S:) W^T        G = sum a a^T

and the next unit is the one that lowers it most: forward column selection with outputs as targets, that is
orthogonal least squares (Chen, Billings and Luo, https://doi.org/10.1080/00207178908953472); selecting columns this way
for layers of networks: https://arxiv.org/abs/2207.06646. A unit's score is how early it was picked.
Shape suffixes: N tokens, U inputs of a matrix, O outputs, K units, S inputs of a unit (1, or head_dim of a head).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from compress.layerwise import second_moment, summed
from compress.pruning.scores import Scores, by_unit, importance_scores, layer_units
from sportsllm.console import progress_bar
from sportsllm.models.language_model import Block, SportsLLM

_STEPS = 512  # picks; where there are more units, several are picked at once
_RIDGE = 1e-6  # of the mean square of an input, so that an input that is fully explained still has a divisor


@torch.no_grad()
def output_scores(model: SportsLLM, samples: Sequence[Tensor]) -> Scores:
    """Scores of units by selection; channels and layers, arguments and errors as in `importance_scores`."""
    blocks = cast("list[Block]", list(model.model.layers))
    units = layer_units(model.config)
    readers = {
        (name, layer): (block.get_submodule(matrix), lambda given, _output: second_moment(given))
        for layer, block in enumerate(blocks)
        for name, (_, matrix) in units[layer].items()
    }
    with summed(readers) as grams:
        scores = importance_scores(model, samples)
    picked: dict[tuple[str, int], Tensor] = {}
    with progress_bar("selection", len(readers)) as bar:
        for name, layer in readers:
            unit, matrix = units[layer][name]
            weight = blocks[layer].get_parameter(f"{matrix}.weight")
            picked[name, layer] = pick_order(grams.pop((name, layer)), weight, unit.size)
            bar.advance()
    return dataclasses.replace(scores, units=by_unit(picked, len(blocks)))


def pick_order(gram_UU: Tensor, weight_OU: Tensor, size: int) -> Tensor:
    """(K,) scores of the units, `size` inputs each, side by side: K for the first picked, 1 for the last."""
    residual = gram_UU.double()
    residual = residual + _RIDGE * residual.diagonal().mean() * torch.eye(len(residual), device=residual.device)
    cross_OU = weight_OU.double() @ residual
    count = len(residual) // size
    scores = torch.zeros(count)
    left = torch.ones(count, dtype=torch.bool)
    at_once = -(-count // _STEPS)
    place = count
    while place:
        gain = _explained(residual, cross_OU, size, left)
        for unit in gain.topk(min(at_once, place)).indices.tolist():
            scores[unit], left[unit], place = float(place), False, place - 1
            own = slice(unit * size, (unit + 1) * size)
            into_SU = torch.linalg.solve(_damped(residual[own, own]), residual[own])
            cross_OU -= cross_OU[:, own].clone() @ into_SU
            residual -= residual[:, own].clone() @ into_SU
    return scores


def _explained(residual_UU: Tensor, cross_OU: Tensor, size: int, left_K: Tensor) -> Tensor:
    """(K,) by how much each unit that is left would lower the error, tr C_S G_SS^-1 C_S^T; -inf for picked ones."""
    gain = torch.full((len(left_K),), -torch.inf, dtype=residual_UU.dtype)
    if size == 1:
        least = torch.finfo(residual_UU.dtype).tiny
        gain[left_K] = (cross_OU.square().sum(dim=0) / residual_UU.diagonal().clamp(min=least))[left_K]
        return gain
    units = len(left_K)
    blocks = residual_UU.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)[left_K]
    crosses_KOS = cross_OU.view(-1, units, size).transpose(0, 1)[left_K]
    solved = torch.linalg.solve(_damped(blocks), crosses_KOS.mT)
    gain[left_K] = (crosses_KOS.mT * solved).sum(dim=(1, 2))
    return gain


def _damped(blocks_SS: Tensor) -> Tensor:
    """(..., S, S), so that a unit that the picked ones explain fully still has a divisor."""
    return blocks_SS + torch.finfo(torch.float64).eps * torch.eye(blocks_SS.shape[-1], device=blocks_SS.device).double()
