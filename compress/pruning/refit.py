"""Refit after a cut, without gradients: each matrix is fitted by least squares to what the full model computes.

Layer by layer both models read the calibration text. For each matrix of the cut model, with its own inputs a
(drifted by every cut before it) and the values t that it should give, the weights become

    argmin_W  sum over tokens |t - W a|^2 + ridge * mean(|a|^2) * |W - W_cut|^2

    matrices that write to   t = the full model's residual stream after this half of the block (after the block's last
    the residual stream          half: at the next kept layer), less the cut model's before it
    all others               t = the full model's values of the rows that stay; so too where a norm follows the half

so that each layer makes up for the layers before it, and the layer before a dropped one for that one.
The structured form of optimal brain compression's update (https://arxiv.org/abs/2208.11580).
Shape suffixes: N tokens, I inputs, O outputs, B samples, T tokens of one, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from compress.pruning.kept_units import KeptUnits
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS, adds_to_residual, block_matrices, input_groups
from sportsllm.models.language_model import Block, Rope, SportsLLM, first_positions
from sportsllm.models.parts import Matrix

RIDGE = 1e-3
_KEPT = 2  # hidden sizes: inputs of a matrix that are wider are computed again rather than kept


@dataclass
class LeastSquares:
    """Sums of a regression; float32 products, summed in float64."""

    gram_II: Tensor
    cross_OI: Tensor

    @staticmethod
    def over(samples: Iterable[tuple[Tensor, Tensor]]) -> LeastSquares:
        """Sums over at least one pair of inputs (..., I) and targets (..., O)."""
        gram_II = cross_OI = torch.zeros(1, 1).double()  # grows to (I, I) and (O, I)
        for inputs, targets in samples:
            inputs_NI, targets_NO = inputs.flatten(0, -2), targets.flatten(0, -2)
            gram_II = gram_II + inputs_NI.T @ inputs_NI
            cross_OI = cross_OI + targets_NO.T @ inputs_NI
        return LeastSquares(gram_II, cross_OI)

    def solve(self, weight_OI: Tensor, ridge: float) -> Tensor:
        """The weights of least squared error, pulled towards the given ones; float32, (O, I). Those without inputs."""
        if not self.gram_II.any():
            return weight_OI.detach().float()
        weight = weight_OI.detach().double()
        damped = self.gram_II + ridge * self.gram_II.diagonal().mean() * torch.eye(len(self.gram_II)).double()
        change = torch.linalg.solve(damped, (self.cross_OI - weight @ self.gram_II).T).T
        return cast(Tensor, weight + change).float()


Solve = Callable[[str, nn.Linear, LeastSquares], None]


class ResidualPair(NamedTuple):
    """Residual streams of every sample, (B, T, D) each: before a layer or half of one of the full and of the changed
    model, and the full model's that the changed one should lead to.
    """

    full: Sequence[Tensor]
    changed: Sequence[Tensor]
    target: Sequence[Tensor]


class LayerStates(NamedTuple):
    """Residual streams of every sample, (B, T, D) each, in a layer: after its attention, and at its end."""

    attention: list[Tensor]
    end: list[Tensor]

    @staticmethod
    def of(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> LayerStates:
        """Of a layer that reads `states_BTD`."""
        attention, feed_forward = NORMS
        between = after_sublayer(block, attention, states_BTD, rope)
        return LayerStates(between, after_sublayer(block, feed_forward, between, rope))


@dataclass(frozen=True)
class LayerPair:
    """A layer that is fitted, and the full model's layer, config and rotary tables that it is fitted with.

    `wanted` are, by a matrix's name in the block, the weights (O, I) whose outputs for the full layer's input it should
    give; the full layer's own if None. `into`, (D, K), maps the full model's residual stream to the cut one, if they
    differ. `own_rope` is the fitted layer's rotary tables, if they are others.
    """

    block: Block
    source: Block
    config: ModelConfig
    rope: Rope
    wanted: Mapping[str, Tensor] | None = None
    into: Tensor | None = None
    own_rope: Rope | None = None


@torch.no_grad()
def refit_layers(
    pruned: SportsLLM,
    model: SportsLLM,
    kept: KeptUnits,
    samples: Sequence[Tensor],
    reduced: SportsLLM | None = None,
    into: Tensor | None = None,
    ridge: float = RIDGE,
) -> None:
    """Fit the matrices of `pruned`, which has the units `kept`, to the full model in place.

    Embedding, norms and biases stay as they are.

    Args:
        pruned, model, kept: the cut model, the full one and what stays.
        samples: calibration token ids, (B, T) each, several times more than the widest input.
        reduced: `model` with other heads, if they were changed before; `kept` counts its units.
        into: (D, K) map of the full model's residual stream to the cut one's, if they differ.
        ridge: the pull towards the cut weights, as a share of the inputs' mean square.
    """

    def solve(_name: str, linear: nn.Linear, sums: LeastSquares) -> None:
        linear.weight.data = sums.solve(linear.weight, ridge)

    rope, cut_rope = model.rope, pruned.rope
    blocks, cut_blocks, wanted_blocks = (
        cast("list[Block]", list(one.model.layers)) for one in (model, pruned, reduced or model)
    )
    full_BTD = [model.embedded(tokens) for tokens in samples]
    cut_BTD = [pruned.embedded(tokens) for tokens in samples]
    for block in blocks[: kept.layers[0]]:
        full_BTD = run_layer(block, full_BTD, rope)
    with progress_bar("refit", len(kept.layers)) as bar:
        for new, (layer, after) in enumerate(pairwise([*kept.layers, len(blocks)])):
            between_BTD, target_BTD = LayerStates.of(blocks[layer], full_BTD, rope)
            for block in blocks[layer + 1 : after]:
                target_BTD = run_layer(block, target_BTD, rope)
            own = kept.full.of_layer(layer)
            wanted = {
                matrix.name: wanted_blocks[layer].get_parameter(f"{matrix.name}.weight")[kept.of_matrix(matrix, new)[0]]
                for matrix in block_matrices(own)
                if not adds_to_residual(own, matrix)
            }
            pair = LayerPair(cut_blocks[new], blocks[layer], own, rope, wanted, into, cut_rope)
            cut_BTD = refit_block(pair, ResidualPair(full_BTD, cut_BTD, target_BTD), between_BTD, solve)
            full_BTD = target_BTD
            bar.advance()


def run_layer(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> list[Tensor]:
    """The residual stream after a layer."""
    return [block(x, first_positions(rope, x)) for x in states_BTD]


def refit_block(pair: LayerPair, streams: ResidualPair, between_BTD: Sequence[Tensor], solve: Solve) -> list[Tensor]:
    """Fit the matrices of one layer to what the full model computes, those that read the same input together.

    Args:
        pair, streams: the layer and the residual streams around it.
        between_BTD: the full model's residual stream after the layer's attention.
        solve: given a matrix's name in the block, the matrix and the sums, sets the matrix's weight; later matrices see
            it.

    Returns:
        The residual stream after the changed layer.

    Raises:
        UsageError: several matrices of a half write to the residual stream, so that none has a target of its own.
    """
    changed_BTD = streams.changed
    for half, full_BTD, after_BTD in zip(
        NORMS, (streams.full, between_BTD), (between_BTD, streams.target), strict=True
    ):
        groups = [group for group in input_groups(pair.config) if group[0].name.startswith(f"{half}.")]
        writers = [matrix.name for group in groups for matrix in group if adds_to_residual(pair.config, matrix)]
        if len(writers) > 1:
            raise UsageError(
                f"{' and '.join(writers) or half}: refit needs one matrix that writes to the residual stream; "
                "leave it out with --no-repair"
            )
        following: list[Tensor] | None = None
        for group in groups:
            following = _refit_group(pair, half, group, ResidualPair(full_BTD, changed_BTD, after_BTD), solve)
        if following is None:
            following = after_sublayer(pair.block, half, changed_BTD, pair.own_rope or pair.rope)
        changed_BTD = following
    return list(changed_BTD)


def _refit_group(
    pair: LayerPair, half: str, group: Sequence[Matrix], streams: ResidualPair, solve: Solve
) -> list[Tensor] | None:
    """Fit matrices of one half that read the same input.

    Returns:
        The residual stream after the half, where the last one writes it and what that reads was kept: attention need
        not be computed again. None elsewhere.
    """
    following: list[Tensor] | None = None

    def inputs(block: Block, states_BTD: Sequence[Tensor], rope: Rope) -> Iterator[Tensor]:
        return (matrix_input(block, half, group[0].name, x, rope) for x in states_BTD)

    shared: LeastSquares | None = None
    for matrix in sorted(group, key=lambda matrix: adds_to_residual(pair.config, matrix)):
        linear = cast(nn.Linear, pair.block.get_submodule(matrix.name))
        ours = inputs(pair.block, streams.changed, pair.own_rope or pair.rope)
        if adds_to_residual(pair.config, matrix):
            bias = 0.0 if linear.bias is None else linear.bias
            kept = list(ours) if matrix.columns <= _KEPT * pair.config.hidden_size else None
            ends = zip(streams.target, streams.changed, strict=True)
            targets = ((after if pair.into is None else after @ pair.into) - before - bias for after, before in ends)
            solve(matrix.name, linear, LeastSquares.over(zip(kept or ours, targets, strict=True)))
            if kept is not None:
                following = [before + linear(read) for before, read in zip(streams.changed, kept, strict=True)]
            continue
        if matrix.routed:
            # The full model sends other tokens here, so that there is nothing to be compared with: no fit.
            gram_II = LeastSquares.over((x, x) for x in ours).gram_II
            sums = LeastSquares(gram_II, linear.weight.detach().double() @ gram_II)
        else:
            # The wanted weights times the full layer's input: one sum of products serves all. Biases are the same.
            theirs = inputs(pair.source, streams.full, pair.rope)
            shared = shared or LeastSquares.over(zip(ours, theirs, strict=True))
            full_OI = pair.source.get_parameter(f"{matrix.name}.weight")
            weight_OI = full_OI if pair.wanted is None else pair.wanted[matrix.name]
            sums = LeastSquares(shared.gram_II, weight_OI.double() @ shared.cross_OI)
        solve(matrix.name, linear, sums)
    return following


def after_sublayer(block: Block, half: str, states_BTD: Sequence[Tensor], rope: Rope) -> list[Tensor]:
    """The residual stream after one of `NORMS` of a layer."""
    return [block.add_half(half, x, first_positions(rope, x)) for x in states_BTD]


class _InputFound(Exception):
    """Ends a forward pass whose rest is not needed."""


def matrix_input(block: Block, half: str, matrix: str, x_BTD: Tensor, rope: Rope) -> Tensor:
    """What a matrix of a block reads, where its half of the block reads the residual stream x."""
    found: list[Tensor] = []

    def stop(_module: nn.Module, args: Any) -> None:
        found.append(args[0])
        raise _InputFound

    with block.get_submodule(matrix).register_forward_pre_hook(stop), suppress(_InputFound):
        block.add_half(half, x_BTD, first_positions(rope, x_BTD))
    return found[0]
