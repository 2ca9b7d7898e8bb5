"""Importance by what the others cannot replace: neurons and heads picked one by one for the output they explain.

Scores of single units, however they are made, keep twins and drop what has no substitute. Here the matrix behind the
units, W, tells what they are for, and the repair after the cut (`compress.pruning.refit`) tells what is lost: with the
kept columns S refitted, the least error of all tokens' outputs is

    min_B sum |W a - B a_S|^2 = tr W (G - G_:S G_SS^-1 G_S:) W^T        G = sum a a^T

and greedily the next unit is the one that lowers it most: forward column selection with outputs as targets, that is
orthogonal least squares (Chen, Billings and Luo, https://doi.org/10.1080/00207178908953472); selecting columns this way
for layers of networks: https://arxiv.org/abs/2207.06646. A unit's score is how early it was picked.
Shape suffixes: N tokens, U inputs of a matrix, O outputs, K units, S inputs of a unit (1, or head_dim of a head).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.pruning.scores import Scores, importance_scores
from sportsllm.console import progress_bar
from sportsllm.models.language_model import Block, SportsLLM

_STEPS = 512  # picks; of more units than that several are picked at once
_RIDGE = 1e-6  # of the mean square of an input, so that what is explained already divides by something


@torch.no_grad()
def output_scores(model: SportsLLM, samples: Sequence[Tensor]) -> Scores:
    """Scores of neurons and heads by selection; channels and layers as in `importance_scores`, from the same pass.

    Args:
        model: read, never changed.
        samples: token ids, each (B, T).

    Raises:
        ArtifactError: there are no samples.
    """
    blocks = cast("list[Block]", list(model.model.layers))
    with _grams([block.mlp.down_proj for block in blocks] + [block.self_attn.o_proj for block in blocks]) as grams:
        scores = importance_scores(model, samples)
    intermediate, heads = [], []
    with progress_bar("selection", len(blocks)) as bar:
        for number, block in enumerate(blocks):
            down, out = cast(nn.Linear, block.mlp.down_proj), cast(nn.Linear, block.self_attn.o_proj)
            intermediate.append(pick_order(grams[number], down.weight, 1))
            heads.append(pick_order(grams[len(blocks) + number], out.weight, model.config.head_dim))
            bar.advance()
    return dataclasses.replace(scores, intermediate=intermediate, heads=heads)


@contextmanager
def _grams(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Sums of a a^T over all tokens that pass through each module inside the `with`, (U, U) float32."""
    sums = [torch.zeros(())] * len(modules)

    def catch(place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any) -> None:
            a_NU = args[0].flatten(0, -2).float()
            sums[place] = sums[place] + a_NU.T @ a_NU

        return hook

    with ExitStack() as hooks:
        for place, module in enumerate(modules):
            hooks.callback(module.register_forward_pre_hook(catch(place)).remove)
        yield sums


def pick_order(gram_UU: Tensor, weight_OU: Tensor, size: int) -> Tensor:
    """(K,) scores of the units: K for the first picked, 1 for the last.

    Args:
        gram_UU: of the inputs.
        weight_OU: the matrix that reads them.
        size: inputs of a unit, side by side.
    """
    residual = gram_UU.double()
    residual = residual + _RIDGE * residual.diagonal().mean() * torch.eye(len(residual), device=residual.device)
    cross_OU = weight_OU.double() @ residual
    count = len(residual) // size
    scores = torch.zeros(count)
    left = torch.ones(count, dtype=torch.bool)
    at_once = -(-count // _STEPS)
    place = count
    while place:
        gain = _explained(residual, cross_OU, size).masked_fill(~left, -torch.inf)
        for unit in gain.topk(min(at_once, place)).indices.tolist():
            scores[unit], left[unit], place = float(place), False, place - 1
            own = slice(unit * size, (unit + 1) * size)
            into_SU = torch.linalg.solve(_damped(residual[own, own]), residual[own])
            cross_OU -= cross_OU[:, own].clone() @ into_SU
            residual -= residual[:, own].clone() @ into_SU
    return scores


def _explained(residual_UU: Tensor, cross_OU: Tensor, size: int) -> Tensor:
    """(K,) by how much each unit would lower the error: tr C_S G_SS^-1 C_S^T."""
    if size == 1:
        least = torch.finfo(residual_UU.dtype).tiny
        return cross_OU.square().sum(dim=0) / residual_UU.diagonal().clamp(min=least)
    units = len(residual_UU) // size
    blocks = residual_UU.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    crosses_KOS = cross_OU.view(-1, units, size).transpose(0, 1)
    solved = torch.linalg.solve(torch.stack([_damped(block) for block in blocks]), crosses_KOS.mT)
    return cast(Tensor, (crosses_KOS.mT * solved).sum(dim=(1, 2)))


def _damped(block_SS: Tensor) -> Tensor:
    """Of a unit that was picked nothing is left; it divides by this instead of by 0."""
    return block_SS + torch.finfo(torch.float64).eps * torch.eye(len(block_SS), device=block_SS.device).double()
