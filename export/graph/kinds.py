"""How each kind of attention and feed-forward is written to a graph: one line a kind."""

from __future__ import annotations

from collections.abc import Callable

from export.graph.feed_forward import Gated, Gelu, MixtureOfExperts
from export.graph.grouped_query import OrtGroupedQuery, StandardGroupedQuery
from export.graph.latent import LatentAttention
from export.graph.layer import HalfBuilder, LayerBuilder
from export.graph.lstm import LSTM
from export.graph.selected import SelectedAttention
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig


def _grouped_query(layers: LayerBuilder, half: str) -> HalfBuilder:
    return (StandardGroupedQuery if layers.standard else OrtGroupedQuery)(layers, half)


HALF_BUILDERS: dict[str, Callable[[LayerBuilder, str], HalfBuilder]] = {
    "grouped_query": _grouped_query,
    "latent": LatentAttention,
    "lstm": LSTM,
    "swiglu": Gated,
    "geglu": Gated,
    "gelu": Gelu,
    "experts": MixtureOfExperts,
    "selected": SelectedAttention,
}
# Kinds of attention whose builder has such a cache in a graph that computes in float32.
CACHE_KINDS = {"fp16": ("grouped_query",), "int8": ("grouped_query", "latent")}


def half_builders(layers: LayerBuilder) -> list[list[HalfBuilder]]:
    """For each layer the builders of its halves, in their order, those of one kind the same in all layers.

    Raises as `check_kinds` does.
    """
    config, made = layers.config, dict[tuple[str, str], HalfBuilder]()
    check_kinds(config)
    for part, _ in config.runs():
        for half, kind in _kinds(part).items():
            if (half, kind) not in made:
                made[half, kind] = HALF_BUILDERS[kind](layers.with_config(part), half)
    return [[made[each] for each in _kinds(config.of_layer(n)).items()] for n in range(config.num_hidden_layers)]


def check_kinds(config: ModelConfig, cache: str = "fp32") -> None:
    """Refuse what cannot be exported.

    Raises:
        UsageError: a kind has no builder here, or none with such a cache.
    """
    for half, kind in (each for part, _ in config.runs() for each in _kinds(part).items()):
        if kind not in HALF_BUILDERS:
            name = "attention" if half == "self_attn" else "feed-forward"
            raise UsageError(f"{name} of kind {kind!r} has no ONNX graph; these do: {', '.join(HALF_BUILDERS)}")
    if config.attention_kind not in CACHE_KINDS.get(cache, (config.attention_kind,)):
        raise UsageError(f"--kv-cache {cache}: attention of kind {config.attention_kind!r} has none; leave it out")


def _kinds(config: ModelConfig) -> dict[str, str]:
    return {"self_attn": config.attention_kind, "mlp": config.mlp_kind}


def computes_in_half(config: ModelConfig) -> bool:
    """Whether all parts of a model are written in float16: LLaMA's, and sliding and unrotated attention."""
    parts = (config.attention_kind, config.mlp_kind, config.norm_kind, config.output_norms, config.embedding_scale)
    return parts == ("grouped_query", "swiglu", "rms", False, 1.0)
