"""Fits a changed layer to the full model's: for each of its matrices, with its own inputs a (which carry the errors of
every layer before it) and the outputs t that it should give,

    argmin_W  sum over tokens |t - W a|^2 + ridge * mean(|a|^2) * |W - W_given|^2

    matrices that write to   t = the full model's residual stream after this sublayer (after the layer's last one: the
    the residual stream          stream that the layer should lead to), less the changed model's before it
    all others               t = the full model's values; so too if a norm follows the sublayer

Shape suffixes: B sequences, T tokens of one, D hidden_size, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.layerwise import BAND, StoredStates, after_sublayer, half_moment, kept_like, mirrored
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import NORMS, adds_to_residual, input_groups
from sportsllm.models.language_model import Block, first_positions
from sportsllm.models.layers import Rope
from sportsllm.models.sublayer import HIDDEN, Matrix

_KEPT = 2  # hidden sizes: inputs of a matrix that are wider are computed again rather than kept in memory
RIDGE = 1e-3
"""Pull towards the given weights, as a share of the inputs' mean square."""


@dataclass
class LeastSquares:
    """Sums of a regression: float32 products, added up in float64."""

    gram_II: Tensor
    cross_OI: Tensor

    @staticmethod
    def over(samples: Iterable[tuple[Tensor, Tensor]]) -> LeastSquares:
        """Sums over at least one pair of inputs (..., I) and targets (..., O)."""
        sums: LeastSquares | None = None
        for inputs, targets in samples:
            inputs_NI, targets_NO = inputs.flatten(0, -2), targets.flatten(0, -2)
            if sums is None:
                zeros = partial(inputs_NI.new_zeros, dtype=torch.float64)
                width, height = inputs_NI.shape[1], targets_NO.shape[1]
                sums = LeastSquares(zeros(width, width), zeros(height, width))
            half_moment(inputs_NI, sums.gram_II)
            sums.cross_OI.add_(targets_NO.T @ inputs_NI)
        assert sums is not None, "there are samples"
        mirrored(sums.gram_II)
        return sums

    def solve(self, weight_OI: Tensor, ridge: float = RIDGE) -> Tensor:
        """argmin over W of sum |t - W a|^2 + ridge * mean(|a|^2) * |W - weight|^2, (O, I) float32.

        Without inputs that is the given weight.
        """
        if not self.gram_II.any():
            return weight_OI.detach().float()
        weight, diagonal = weight_OI.detach().double(), self.gram_II.diagonal()
        missed_OI, given = torch.addmm(self.cross_OI, weight, self.gram_II, alpha=-1), diagonal.clone()
        diagonal.add_(ridge * diagonal.mean())
        try:
            change = divided(missed_OI, self.gram_II)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # rounding has made the sums indefinite
            change = torch.linalg.solve(self.gram_II, missed_OI.T).T
        diagonal.copy_(given)
        return change.add_(weight).float()


def divided(rows_OI: Tensor, gram_II: Tensor) -> Tensor:
    """rows @ gram^-1 in place of the rows, for a symmetric matrix; a copy of a wide one would be gigabytes.

    Its lower triangle makes room for the Cholesky factor, and is filled in again from the upper one.

    Raises:
        LinAlgError: the matrix is not positive definite; the rows are as they were.
    """
    size, copies = len(gram_II), list[tuple[slice, Tensor]]()
    try:
        for start in range(0, size, BAND):
            band, behind = slice(start, min(start + BAND, size)), slice(min(start + BAND, size), size)
            copies.append((band, gram_II[band, band].clone()))
            gram_II[start:, band] -= gram_II[start:, :start] @ gram_II[band, :start].T
            gram_II[band, band] = root = torch.linalg.cholesky(gram_II[band, band])
            gram_II[behind, band] = torch.linalg.solve_triangular(root.T, gram_II[behind, band], upper=True, left=False)
        for band, _ in copies:
            rows_OI[:, band] -= rows_OI[:, : band.start] @ gram_II[band, : band.start].T
            root = gram_II[band, band].T
            rows_OI[:, band] = torch.linalg.solve_triangular(root, rows_OI[:, band], upper=True, left=False)
        for band, _ in reversed(copies):
            rows_OI[:, band] -= rows_OI[:, band.stop :] @ gram_II[band.stop :, band]
            root = gram_II[band, band]
            rows_OI[:, band] = torch.linalg.solve_triangular(root, rows_OI[:, band], upper=False, left=False)
    finally:
        for band, copy in copies:
            gram_II[band, band] = copy
        mirrored(gram_II)
    return rows_OI


class ResidualPair(NamedTuple):
    """Residual streams of every sample, (B, T, D) each: before a layer or sublayer of the full and of the changed
    model, and the full model's stream that the changed one should lead to.
    """

    full: Sequence[Tensor]
    changed: Sequence[Tensor]
    target: Sequence[Tensor]


@dataclass(frozen=True)
class LayerPair:
    """A layer that is fitted, and the full model's layer that it is fitted to.

    Attributes:
        block: the layer that is changed in place.
        source, config, rope: the full model's layer, its config and rotary tables.
        wanted: by a matrix's name in the block the weights (O, I) whose outputs for the full layer's input it should
            give; the full layer's own if None.
        into: (D, K) map of the full model's residual stream to the changed one's, if they differ.
        own_rope: rotary tables of the changed layer, if they differ.
        single_use: both layers are of no use after the fit, so their other matrices are dropped before the widest
            second moment is added up, if the inputs are in a file.
    """

    block: Block
    source: Block
    config: ModelConfig
    rope: Rope
    wanted: Mapping[str, Tensor] | None = None
    into: Tensor | None = None
    own_rope: Rope | None = None
    single_use: bool = False

    def linear(self, matrix: Matrix) -> nn.Linear:
        """A matrix of the layer that is changed."""
        linear = self.block.get_submodule(matrix.name)
        assert isinstance(linear, nn.Linear), "a matrix of a block is a linear layer"
        return linear


Solve = Callable[[str, nn.Linear, LeastSquares], None]


def fit_block(pair: LayerPair, streams: ResidualPair, between_BTD: Sequence[Tensor], solve: Solve) -> Sequence[Tensor]:
    """Fit the matrices of one layer to what the full model computes, those that read the same input together.

    Args:
        pair, streams: the layer and the residual streams around it.
        between_BTD: the full model's residual stream after the layer's attention.
        solve: given a matrix's name in the block, the matrix and the sums, sets the matrix's weight. Later matrices
            read what the new weight computes.

    Returns:
        The residual stream after the changed layer.
    """
    changed_BTD, parallel = streams.changed, pair.config.parallel_residual
    for sublayer, full_BTD, after_BTD in zip(
        NORMS, (streams.full, between_BTD), (between_BTD, streams.target), strict=True
    ):
        groups = [group for group in input_groups(pair.config) if group[0].name.startswith(f"{sublayer}.")]
        writers = [matrix.name for group in groups for matrix in group if adds_to_residual(pair.config, matrix)]
        assert len(writers) <= 1, f"{writers}: of a sublayer one matrix writes to the residual stream"
        read = ResidualPair(full_BTD, changed_BTD, after_BTD)
        if parallel:
            read = ResidualPair(streams.full, streams.changed, after_BTD)
        following: Sequence[Tensor] | None = None
        for group in groups:
            _fit_readers(pair, sublayer, [each for each in group if each.name not in writers], read, solve)
            for matrix in (each for each in group if each.name in writers):
                following = _fit_writer(pair, sublayer, matrix, read, changed_BTD, solve)
        if following is None:
            own_rope, reads = pair.own_rope or pair.rope, read.changed if parallel else None
            following = after_sublayer(pair.block, sublayer, changed_BTD, own_rope, reads)
        changed_BTD = following
    return changed_BTD


def _fit_readers(pair: LayerPair, sublayer: str, group: Sequence[Matrix], streams: ResidualPair, solve: Solve) -> None:
    """Fit matrices of one sublayer that read the same input and do not write to the residual stream."""

    def inputs(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> Iterator[Tensor]:
        return (matrix_input(block, sublayer, group[0].name, x, rope) for x in states_BTD)

    shared: LeastSquares | None = None
    for matrix in group:
        ours = inputs(pair.block, streams.changed, pair.own_rope or pair.rope)
        if matrix.routed and matrix.column_unit != HIDDEN:
            # The full model sends other tokens here, so there is nothing to compare with: no fit.
            gram_II = LeastSquares.over((x, x) for x in ours).gram_II
            sums = LeastSquares(gram_II, pair.linear(matrix).weight.detach().double() @ gram_II)
        else:
            # The wanted weights times the full layer's input: one sum of products serves all. Biases are the same.
            theirs = inputs(pair.source, streams.full, pair.rope)
            shared = shared or LeastSquares.over(zip(ours, theirs, strict=True))
            full_OI = pair.source.get_parameter(f"{matrix.name}.weight")
            weight_OI = full_OI if pair.wanted is None else pair.wanted[matrix.name]
            sums = LeastSquares(shared.gram_II, weight_OI.double() @ shared.cross_OI)
        solve(matrix.name, pair.linear(matrix), sums)


def _fit_writer(
    pair: LayerPair, sublayer: str, matrix: Matrix, streams: ResidualPair, base: Sequence[Tensor], solve: Solve
) -> Sequence[Tensor] | None:
    """Fit the matrix whose output is added to `base`.

    Returns:
        The residual stream after the sublayer if the matrix's inputs were kept, so that attention need not be computed
        again; else None.
    """
    linear, rope = pair.linear(matrix), pair.own_rope or pair.rope
    ours = (matrix_input(pair.block, sublayer, matrix.name, x, rope) for x in streams.changed)
    keeps = isinstance(streams.changed, StoredStates) or matrix.columns <= _KEPT * pair.config.hidden_size
    kept = kept_like(streams.changed, ours) if keeps else None
    if pair.single_use and sublayer == "mlp" and isinstance(kept, StoredStates):
        for parameter in (*pair.source.parameters(), *pair.block.parameters()):
            if parameter.ndim > 1 and parameter is not linear.weight:
                parameter.data = parameter.new_empty(0, 0)
    bias, ends = 0.0 if linear.bias is None else linear.bias, zip(streams.target, base, strict=True)
    targets = ((after if pair.into is None else after @ pair.into) - before - bias for after, before in ends)
    solve(matrix.name, linear, LeastSquares.over(zip(ours if kept is None else kept, targets, strict=True)))
    if kept is None:
        return None
    return kept_like(streams.changed, (before + linear(own) for before, own in zip(base, kept, strict=True)))


class _InputFound(Exception):
    """Ends a forward pass whose rest is not needed."""


def matrix_input(block: Block, sublayer: str, matrix: str, x_BTD: Tensor, rope: Rope) -> Tensor:
    """The input of a matrix of a block, given the residual stream x before its sublayer."""
    found: list[Tensor] = []

    def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0])
        raise _InputFound

    with block.get_submodule(matrix).register_forward_pre_hook(stop), suppress(_InputFound):
        block.add_sublayer(sublayer, x_BTD, first_positions(rope, x_BTD))
    return found[0]
