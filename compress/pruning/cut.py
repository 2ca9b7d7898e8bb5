"""The whole cut of a model in memory: `prune` cuts to a shape, `distill` cuts a student's config out of its teacher.

Shape suffixes: B samples, T tokens of one, D hidden_size, K channels that stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.layerwise import LayerPair, LayerStates, ResidualPair, blocks_of, fit_block, run_layer
from compress.least_squares import RIDGE, LeastSquares
from compress.pruning.experts import dense_config, dense_model
from compress.pruning.heads import heads_change, reduce_heads
from compress.pruning.hidden import rotate
from compress.pruning.scores import IMPORTANCES, Scores, measure_scores
from compress.pruning.shapes import Shape
from compress.pruning.units import KeptUnits, LayerRun, choose_units, kept_layers, slice_model
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import DIMENSIONS, ModelConfig
from sportsllm.models.kinds import adds_to_residual, block_matrices
from sportsllm.models.language_model import SportsLLM

SAMPLE_LENGTH = 512
"""Tokens of a calibration sample."""
# Fields that decide which tensors there are, or what a token is; a cut cannot change them.
_SAME = (
    "vocab_size", "attention_kind", "mlp_kind", "qk_norm", "attention_bias", "attention_output_bias", "mlp_bias",
    "attention_scale", "embedding_scale", "norm_kind", "output_norms", "position_kind", "rope_local_theta",
    "sliding_window", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "experts", "dense_layers",
    "selection",
)  # fmt: skip


@dataclass(frozen=True)
class PruneConfig:
    """How units are chosen (`importance`, one of `IMPORTANCES`), and whether the kept weights are refitted.

    `samples` is the number of calibration samples: None takes up to 256, fewer for a large model.
    """

    importance: str = "output"
    refit: bool = True
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise UsageError(f"--importance {self.importance!r} is not known; use one of {', '.join(IMPORTANCES)}")


class PrunedModel(NamedTuple):
    """A smaller model, the layers that were kept, and the runs of layers that were left out on trial."""

    model: SportsLLM
    layers: list[int]
    tried: list[LayerRun]


def prune_model(
    model: SportsLLM, scores: Scores, smaller: ModelConfig, samples: Sequence[Tensor], refit: bool = True
) -> PrunedModel:
    """Cut a float32 model, which is not changed: choose layers and units, make heads, rotate, slice, refit.

    `smaller` comes from `Shape.applied_to`; `samples` are calibration token ids, (B, T) each.
    """
    layers, tried = kept_layers(model, scores, smaller.num_hidden_layers, samples)
    reduced = model
    if heads_change(model.config, smaller):
        reduced = reduce_heads(model, smaller, scores, samples)
        every = [torch.ones(smaller.num_attention_heads)] * model.config.num_hidden_layers
        scores = dataclasses.replace(scores, units={**scores.units, "query_head": every})
    kept = choose_units(reduced.config, scores, smaller, layers)
    hidden, into, source = smaller.hidden_size, None, reduced
    if hidden < model.config.hidden_size:
        into, source = scores.directions.into(hidden), rotate(reduced, scores.directions, hidden)
    pruned = slice_model(source, kept)
    if refit:
        refit_layers(pruned, model, kept, samples, reduced, into)
    return PrunedModel(pruned, layers, tried)


def cut_to_config(
    model: SportsLLM, config: ModelConfig, prune_config: PruneConfig, samples: Sequence[Tensor]
) -> PrunedModel:
    """The most important part of a full model that has a student's config, refitted to the full model.

    If the student of a mixture has no experts, the mixture is made dense first, see `compress.pruning.experts`. Heads
    of another size or with another rotary table are made as `compress.pruning.heads` says. The context may be shorter,
    and a tied head may get untied.

    Args and errors are those of `prune_model` and `check_cut`; samples are used up to the student's context.
    """
    check_cut(model.config, config)
    samples = [tokens[:, : config.max_position_embeddings] for tokens in samples]
    if model.config.experts is not None and config.experts is None:
        model = dense_model(model, config.intermediate_size, samples)
    scores = measure_scores(model, samples, prune_config.importance)
    return prune_model(model, scores, config, samples, prune_config.refit)


def check_cut(full: ModelConfig, smaller: ModelConfig) -> None:
    """UsageError, naming the first field in the way, if `smaller` cannot be cut out of a full model."""
    if full.experts is not None and smaller.experts is None:
        full = dense_config(full, smaller.intermediate_size)
    for name in _SAME:
        ours, theirs = getattr(full, name), getattr(smaller, name)
        if ours != theirs:
            raise UsageError(f"{name} is {theirs}, the full model's is {ours}; a cut keeps it")
    if smaller.tie_word_embeddings and not full.tie_word_embeddings:
        raise UsageError("tie_word_embeddings is true; the full model has an untied head, which a cut cannot tie")
    for name in (*DIMENSIONS.values(), "max_position_embeddings", "dense_intermediate_size"):
        ours, theirs = getattr(full, name) or 0, getattr(smaller, name) or 0
        if theirs > ours:
            raise UsageError(f"{name} is {theirs}, more than the full model's {ours}; a cut makes nothing larger")
    Shape.of(smaller).applied_to(full)


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
    """Fit the matrices of `pruned`, which has the units `kept`, to the full model in place, without gradients.

    Each matrix is fitted by least squares to what the full model computes (`compress.layerwise.fit_block`): those that
    write to the residual stream to the full model's stream at the next kept layer, the others to the rows that stay. So
    each layer makes up for the layers before it, and the layer before a dropped one for that one. The structured form
    of optimal brain compression's update (https://arxiv.org/abs/2208.11580). Embedding, norms and biases stay.

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
