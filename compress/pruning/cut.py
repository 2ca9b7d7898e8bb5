"""Cut any smaller model of the same kind out of a full one: where a student of a given shape starts from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compress.pruning.expert_neurons import dense_config, dense_model
from compress.pruning.run import PruneConfig, PrunedModel, cut_model, measure_scores
from compress.pruning.shapes import Shape
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.shape import DIMENSIONS

# Fields that decide which tensors there are, or what a token is; the cut cannot change them.
_SAME = (
    "vocab_size",
    "attention_kind",
    "mlp_kind",
    "qk_norm",
    "attention_bias",
    "attention_output_bias",
    "mlp_bias",
    "attention_scale",
    "embedding_scale",
    "norm_kind",
    "output_norms",
    "position_kind",
    "rope_local_theta",
    "sliding_window",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "experts",
    "dense_layers",
    "selection",
)


def cut_to_config(
    model: SportsLLM, config: ModelConfig, prune_config: PruneConfig, samples: Sequence[Tensor]
) -> PrunedModel:
    """The most important part of a full model that has a student's config, refitted to the full model.

    A mixture whose student has no experts is made dense first, see `compress.pruning.expert_neurons`. Layers, hidden
    channels, neurons and heads are chosen as `prune` chooses them; heads of another size or with another rotary table
    are made as `compress.pruning.heads` says; the context may be shorter, and a tied head may get untied.

    Args:
        model: the full model, float32, never changed.
        config: the student's, with the same tokenizer.
        prune_config: how units are chosen, and whether they are refitted.
        samples: calibration token ids, (B, T) each; what lies past the student's context is not read.

    Raises:
        UsageError: a dimension that grows or cannot be cut, by name.
    """
    check_cut(model.config, config)
    pieces = [tokens[:, : config.max_position_embeddings] for tokens in samples]
    if model.config.experts is not None and config.experts is None:
        model = dense_model(model, config.intermediate_size, pieces)
    scores = measure_scores(model, prune_config, pieces)
    return cut_model(model, scores, config, prune_config, pieces)


def check_cut(full: ModelConfig, smaller: ModelConfig) -> None:
    """UsageError, naming the first field in the way, where `smaller` cannot be cut out of a full model."""
    if full.experts is not None and smaller.experts is None:
        full = dense_config(full, smaller.intermediate_size)
    for name in _SAME:
        ours, theirs = getattr(full, name), getattr(smaller, name)
        if ours != theirs:
            raise UsageError(f"{name} is {theirs}, the full model's is {ours}; a cut keeps it")
    if smaller.tie_word_embeddings and not full.tie_word_embeddings:
        raise UsageError("tie_word_embeddings is true; the full model has a head of its own, which a cut cannot tie")
    for name in (*DIMENSIONS.values(), "max_position_embeddings", "dense_intermediate_size"):
        ours, theirs = getattr(full, name) or 0, getattr(smaller, name) or 0
        if theirs > ours:
            raise UsageError(f"{name} is {theirs}, more than the full model's {ours}; a cut makes nothing larger")
    Shape.of(smaller).applied_to(full)
