"""The whole cut of a model in memory: `prune` cuts to a shape, `distill` cuts a student's config out of its teacher.

Shape suffixes: B samples, T tokens of one, D hidden_size, K channels that stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import layer_fit, layerwise
from compress.layer_fit import LayerPair, LeastSquares, ResidualPair
from compress.layerwise import KnownStates
from compress.pruning.experts import dense_config, dense_model
from compress.pruning.heads import HEADS, reduce_heads
from compress.pruning.hidden import rotate
from compress.pruning.scores import Scores, choose_in_layer, measure_scores
from compress.pruning.shapes import Shape, unit_span
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import DIMENSIONS, ModelConfig
from sportsllm.models.description import (
    EMBEDDING,
    HEAD,
    adds_to_residual,
    block_matrices,
    block_tensors,
    block_units,
    end_tensors,
    joint_vectors,
)
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.models.sublayer import HIDDEN, Matrix
from sportsllm.process_memory import give_back
from sportsllm.training.loss import cross_entropy

SAMPLE_LENGTH = 512
"""Tokens of a calibration sample."""
_RUNS_TRIED, _RUN_SAMPLES = 3, 8  # all runs read the same text: 32 samples chose no other run at 20 depths of 7 models
# Fields in which a student may differ from the model that it is cut out of; a cut keeps all others.
_FREE = {
    *DIMENSIONS.values(), "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "tie_word_embeddings", "dropout", "bos_token_id", "eos_token_id", "pad_token_id", "layer_types",
    "dense_intermediate_size",
}  # fmt: skip


class LayerRun(NamedTuple):
    """A run of layers left out on trial: its `distance` (see `Scores`), and nats a token without it."""

    first_dropped: int
    distance: float
    loss: float


class PrunedModel(NamedTuple):
    """A smaller model, the layers that were kept, and the runs of layers that were left out on trial."""

    model: SportsLLM
    layers: list[int]
    tried: list[LayerRun]


@dataclass(frozen=True)
class KeptUnits:
    """What stays of a model, as indices into the full one. Of the residual stream the first channels stay.

    Attributes:
        full, config: configs of the full model and of what stays.
        layers: rising.
        units: for each kept layer its units by name.
    """

    full: ModelConfig
    config: ModelConfig
    layers: list[int]
    units: list[dict[str, Tensor]]

    def of_matrix(self, matrix: Matrix, layer: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of a matrix of kept layer number `layer` that stay."""
        units = block_units(self.full.of_layer(self.layers[layer]))

        def side(name: str, length: int) -> Tensor:
            span = unit_span(matrix, units[name], length)
            hidden = torch.arange(self.config.hidden_size)
            kept = hidden if name == HIDDEN else self.units[layer][name]
            return (kept[:, None] * span + torch.arange(span)).flatten()

        return side(matrix.row_unit, matrix.rows), side(matrix.column_unit, matrix.columns)


def prune_model(
    model: SportsLLM,
    scores: Scores,
    smaller: ModelConfig,
    samples: Sequence[Tensor],
    refit: bool = True,
    chosen: tuple[list[int], list[LayerRun]] | None = None,
    known: KnownStates | None = None,
) -> PrunedModel:
    """Cut a float32 model, which is not changed: choose layers and units, make heads, rotate, slice, refit.

    `smaller` comes from `Shape.applied_to`; `samples` are calibration token ids, (B, T) each; `chosen` is what
    `kept_layers` returns for its depth, if that is known; `known` has states of the model at some samples.
    """
    known = known or KnownStates(model)
    layers, tried = chosen or kept_layers(model, scores, smaller.num_hidden_layers, samples, known)
    reduced, full = None, model.config
    merged = Shape.of(smaller).merges_kv_heads(full)
    if merged or any(getattr(full, name) != getattr(smaller, name) for name in HEADS[2:]):
        reduced = reduce_heads(model, smaller, scores, samples)
        alike = torch.ones(smaller.num_attention_heads)
        every = {("query_head", layer): alike for layer in range(full.num_hidden_layers)}
        scores = dataclasses.replace(scores, units=scores.units | every)
    source = model if reduced is None else reduced
    kept = choose_units(source.config, scores, smaller, layers)
    hidden, into = smaller.hidden_size, None
    if hidden < full.hidden_size:
        into = scores.directions.into(hidden).to(model.head_weight.device)
        source = rotate(source, scores.directions, hidden)
    pruned = slice_model(source, kept)
    if refit:
        refit_layers(pruned, model, kept, samples, reduced, into, known=known)
    return PrunedModel(pruned, layers, tried)


def cut_to_config(model: SportsLLM, config: ModelConfig, samples: Sequence[Tensor]) -> PrunedModel:
    """The most important part of a full model that has a student's config, refitted to the full model.

    If the student of a mixture has no experts, the mixture is made dense first, see `compress.pruning.experts`. Heads
    of another size or with another rotary table are made as `compress.pruning.heads` says. The context may be shorter,
    and a tied head may get untied.

    Args and errors are those of `prune_model` and `check_cut`; samples are no longer than the student's context.
    """
    check_cut(model.config, config)
    if model.config.experts is not None and config.experts is None:
        model = dense_model(model, config.intermediate_size, samples)
    scores = measure_scores(model, samples, known := KnownStates(model))
    return prune_model(model, scores, config, samples, known=known)


def check_cut(full: ModelConfig, smaller: ModelConfig) -> None:
    """UsageError, naming the first field in the way, if `smaller` cannot be cut out of a full model."""
    if full.experts is not None and smaller.experts is None:
        full = dense_config(full, smaller.intermediate_size)
    for name in (field.name for field in dataclasses.fields(full) if field.name not in _FREE):
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
def kept_layers(
    model: SportsLLM, scores: Scores, count: int, samples: Sequence[Tensor], known: KnownStates | None = None
) -> tuple[list[int], list[LayerRun]]:
    """Indices of the `count` layers that stay when a contiguous run is dropped, and the runs that were tried.

    Distance alone can mislead. So the three runs that move the residual stream least are left out on trial, and the one
    that costs a few calibration samples the least loss is dropped. A mixture's first layers without experts stay.
    """
    layers = list(range(model.config.num_hidden_layers))
    dropped = len(layers) - count
    if dropped == 0:
        return layers, []
    starts = range(model.config.dense_layers, count + 1)
    distances = {start: float(scores.layer_distance[start, start + dropped]) for start in starts}
    close = sorted(starts, key=distances.__getitem__)[:_RUNS_TRIED]
    few, known, losses = samples[:_RUN_SAMPLES], known or KnownStates(model), dict[int, float]()
    states_BTD = layerwise.embedded(model, few)
    for layer in range(max(close) + 1):
        states_BTD = states_BTD if layer == 0 else known.of(layer - 1, few, states_BTD).end
        if layer in close:
            losses[layer] = loss_per_token(model, few, layers[layer + dropped :], states_BTD)
    best = min(close, key=losses.__getitem__)
    tried = [LayerRun(start, distances[start], losses[start]) for start in close]
    return layers[:best] + layers[best + dropped :], tried


@torch.no_grad()
def loss_per_token(
    model: SportsLLM,
    samples: Sequence[Tensor],
    layers: Iterable[int] | None = None,
    states_BTD: Sequence[Tensor] | None = None,
) -> float:
    """Mean next-token cross-entropy in nats over samples of token ids, each (1, T).

    If given, of `layers` that read `states_BTD`.
    """
    states_BTD = layerwise.embedded(model, samples) if states_BTD is None else states_BTD
    for layer in range(len(model.model.layers)) if layers is None else layers:
        states_BTD = layerwise.run_layer(layerwise.block_of(model, layer), states_BTD, model.rope)
    head, cap = model.head_weight, model.config.logit_softcap
    losses = (
        cross_entropy(model.model.norm(x_BTD)[:, :-1], head, tokens[:, 1:], softcap=cap)
        for x_BTD, tokens in zip(states_BTD, samples, strict=True)
    )
    return sum(map(float, losses)) / sum(tokens[:, 1:].numel() for tokens in samples)


def choose_units(config: ModelConfig, scores: Scores, smaller: ModelConfig, layers: list[int]) -> KeptUnits:
    """The most important units of a model that fill a smaller config, in the given layers."""
    units = [
        choose_in_layer(config.of_layer(layer), smaller.of_layer(new), scores.of_layer(layer))
        for new, layer in enumerate(layers)
    ]
    return KeptUnits(config, with_types(smaller, config, layers), layers, units)


def with_types(smaller: ModelConfig, full: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The config of a pruned model whose layers are these of the full one, each of its own type."""
    return smaller.with_changes(layer_types=full.layer_types and tuple(full.layer_types[layer] for layer in layers))


def slice_model(model: SportsLLM, kept: KeptUnits) -> SportsLLM:
    """A new model of the kept units of a float32 model; keeping everything changes nothing.

    Matrices of blocks lose the rows and columns of units that go. Of every other tensor the first entries stay:
    `compress.pruning.hidden` makes the first channels of the residual stream the ones that hold most.
    """
    ends = layerwise.ends_of(model)
    if not kept.config.tie_word_embeddings:
        ends.setdefault(f"{HEAD}.weight", ends[f"{EMBEDDING}.weight"])

    def sliced(new: int) -> Block:
        old = kept.layers[new]
        chosen: dict[str, tuple[Tensor, ...]] = {}
        for matrix in block_matrices(kept.full.of_layer(old)):
            rows, columns = kept.of_matrix(matrix, new)
            chosen |= {f"{matrix.name}.weight": (rows, columns), f"{matrix.name}.bias": (rows,)}
        for vector, matrix_name in joint_vectors(kept.config).items():
            chosen[f"{vector}.weight"] = chosen[f"{matrix_name}.bias"]
        state = layerwise.block_of(model, old).state_dict()
        for name, indices in chosen.items():
            for dimension, index in enumerate(indices if name in state else ()):
                state[name] = state[name].index_select(dimension, index.to(state[name].device))
        for item in block_tensors(kept.config.of_layer(new)):
            state[item.name] = state[item.name][tuple(map(slice, item.shape))]
        return layerwise.block_from(kept.config, new, state)

    ends = {item.name: ends[item.name][tuple(map(slice, item.shape))] for item in end_tensors(kept.config)}
    return layerwise.derived(model, kept.config, ends, sliced)


@torch.no_grad()
def refit_layers(
    pruned: SportsLLM,
    model: SportsLLM,
    kept: KeptUnits,
    samples: Sequence[Tensor],
    reduced: SportsLLM | None = None,
    into: Tensor | None = None,
    known: KnownStates | None = None,
) -> None:
    """Fit the matrices of `pruned`, which has the units `kept`, to the full model in place, without gradients.

    Each matrix is fitted by least squares to what the full model computes (`compress.layer_fit.fit_block`): those that
    write to the residual stream to the full model's stream at the next kept layer, the others to the rows that stay. So
    each layer makes up for the layers before it, and the layer before a dropped one for that one. The structured form
    of optimal brain compression's update (https://arxiv.org/abs/2208.11580). Embedding, norms and biases stay.

    Args:
        pruned, model, kept: the cut model, the full one and what stays.
        samples: calibration token ids, (B, T) each, several times more than the widest input.
        reduced: `model` with other heads, if they were changed before; `kept` counts its units.
        into: (D, K) map of the full model's residual stream to the cut one's, if they differ.
        known: states of the full model at some samples.
    """
    known = known or KnownStates(model)

    def solve(_name: str, linear: nn.Linear, sums: LeastSquares) -> None:
        linear.weight.data = sums.solve(linear.weight)

    rope, cut_rope, count = model.rope, pruned.rope, model.config.num_hidden_layers
    full_BTD, cut_BTD = layerwise.embedded(model, samples), layerwise.embedded(pruned, samples)
    for layer in range(kept.layers[0]):
        full_BTD = known.of(layer, samples, full_BTD).end
    with progress_bar("refit", len(kept.layers)) as bar:
        for new, (layer, after) in enumerate(pairwise([*kept.layers, count])):
            source, block = layerwise.block_of(model, layer), layerwise.block_of(pruned, new)
            between_BTD, target_BTD = known.of(layer, samples, full_BTD, source)
            for dropped in range(layer + 1, after):
                target_BTD = known.of(dropped, samples, target_BTD).end
            own = kept.full.of_layer(layer)
            given = source if reduced is None else layerwise.block_of(reduced, layer)
            wanted = {
                matrix.name: full.get_parameter(f"{matrix.name}.weight")[kept.of_matrix(matrix, new)[0]]
                for matrix in block_matrices(own)
                for full in [given if matrix.column_unit == HIDDEN else source]  # o_proj reads all heads
                if not adds_to_residual(own, matrix)
            }
            pair = LayerPair(block, source, own, rope, wanted, into, cut_rope)
            cut_BTD = layer_fit.fit_block(pair, ResidualPair(full_BTD, cut_BTD, target_BTD), between_BTD, solve)
            layerwise.replace_block(pruned, new, block)
            full_BTD = target_BTD
            del source, block, given, wanted, pair, between_BTD
            give_back()
            bar.advance()
