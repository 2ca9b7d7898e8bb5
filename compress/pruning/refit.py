"""Refit after a cut, without gradients: `compress.layerwise.fit_block` for every layer that stays.

Each matrix of the pruned model is fitted by least squares to what the full model computes: those that write to the
residual stream to the full model's stream at the next kept layer, the others to the rows that stay. So each layer makes
up for the layers before it, and the layer before a dropped one for that one. The structured form of optimal brain
compression's update (https://arxiv.org/abs/2208.11580).
Shape suffixes: B samples, T tokens of one, D hidden_size, K channels that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from compress.layerwise import LayerPair, LayerStates, ResidualPair, blocks_of, fit_block, run_layer
from compress.least_squares import RIDGE, LeastSquares
from compress.pruning.units import KeptUnits
from sportsllm.console import progress_bar
from sportsllm.models.kinds import adds_to_residual, block_matrices
from sportsllm.models.language_model import SportsLLM


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
        ridge: the pull towards the pruned weights, as a share of the inputs' mean square.
    """

    def solve(_name: str, linear: nn.Linear, sums: LeastSquares) -> None:
        linear.weight.data = sums.solve(linear.weight, ridge)

    rope, cut_rope = model.rope, pruned.rope
    blocks, cut_blocks, wanted_blocks = map(blocks_of, (model, pruned, reduced or model))
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
            cut_BTD = fit_block(pair, ResidualPair(full_BTD, cut_BTD, target_BTD), between_BTD, solve)
            full_BTD = target_BTD
            bar.advance()
