"""Width and depth pruning: cut whole units and stay a plain Llama, the same width in every layer.

Shape suffixes: D hidden_size, F intermediate_size, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.pruning.scores import Scores
from compress.pruning.shapes import Shape
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.training.chunked_loss import cross_entropy

_LAYER_CANDIDATES = 3


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, in their old order; ties keep the lower index."""
    return torch.sort(torch.argsort(scores, descending=True, stable=True)[:count]).values


def _kept_heads(scores_H: Tensor, config: ModelConfig, shape: Shape) -> tuple[Tensor, Tensor]:
    """Query heads and key/value heads to keep: the strongest groups, and in each the strongest heads."""
    groups = scores_H.view(config.num_key_value_heads, -1)
    kept_groups = _top(groups.sum(dim=1), shape.kv_heads)
    per_group = shape.heads // shape.kv_heads
    queries = [int(g) * groups.shape[1] + _top(groups[g], per_group) for g in kept_groups]
    return torch.cat(queries), kept_groups


def kept_layers(
    model: SportsLLM, scores: Scores, count: int, samples: Sequence[Tensor]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Which layers stay when a contiguous run is dropped.

    The runs that move the residual stream least are candidates; of the best three the one with the lowest loss on
    the calibration samples is dropped, since distance alone can mislead.

    Returns:
        Indices kept, and what was tried: first dropped layer, distance, loss in nats a token.
    """
    layers = model.config.num_hidden_layers
    drop = layers - count
    if drop == 0:
        return list(range(layers)), []
    distances = {start: float(scores.layer_distance[start, start + drop]) for start in range(count + 1)}
    tried = []
    for start in sorted(distances, key=lambda key: distances[key])[:_LAYER_CANDIDATES]:
        keep = [layer for layer in range(layers) if not start <= layer < start + drop]
        tried.append(
            {
                "first_dropped": start,
                "distance": distances[start],
                "loss": _loss_with_layers(model, keep, samples),
            }
        )
    best = min(tried, key=lambda item: float(item["loss"]))
    start = int(best["first_dropped"])
    return [layer for layer in range(layers) if not start <= layer < start + drop], tried


@torch.inference_mode()
def _loss_with_layers(model: SportsLLM, keep: Sequence[int], samples: Sequence[Tensor]) -> float:
    blocks = model.model.layers
    model.model.layers = torch.nn.ModuleList(blocks[layer] for layer in keep)
    try:
        total = sum(
            float(cross_entropy(model.hidden(tokens[:, :-1]), model.head_weight, tokens[:, 1:])) for tokens in samples
        )
    finally:
        model.model.layers = blocks
    return total / sum(tokens[:, 1:].numel() for tokens in samples)


@dataclass(frozen=True)
class Kept:
    """What stays of a model, as indices into the full one.

    Attributes:
        hidden: (D',) channels of the residual stream.
        layers: layers, rising.
        neurons: (F',) for each kept layer.
        queries: (H',) query heads for each kept layer.
        groups: (K',) key/value heads for each kept layer.
    """

    hidden: Tensor
    layers: list[int]
    neurons: list[Tensor]
    queries: list[Tensor]
    groups: list[Tensor]


def choose(config: ModelConfig, scores: Scores, shape: Shape, layers: Sequence[int] | None = None) -> Kept:
    """The most important units that fill a shape.

    Args:
        config: of the full model.
        scores: from `importance_scores`.
        shape: what is left; no key/value heads to merge (`kv_merge.convert_kv_heads` does that first).
        layers: indices of the layers to keep; the first `shape.layers` if None.

    Raises:
        UsageError: an impossible shape.
    """
    shape.applied_to(config)
    assert not shape.merges_kv_heads(config)
    kept = list(range(config.num_hidden_layers))[: shape.layers] if layers is None else list(layers)
    heads = [_kept_heads(scores.heads[layer], config, shape) for layer in kept]
    return Kept(
        hidden=_top(scores.hidden, shape.hidden),
        layers=kept,
        neurons=[_top(scores.intermediate[layer], shape.intermediate) for layer in kept],
        queries=[queries for queries, _ in heads],
        groups=[groups for _, groups in heads],
    )


def cut(model: SportsLLM, kept: Kept) -> SportsLLM:
    """A new model of the kept units; keeping everything changes nothing.

    One set of hidden channels slices every tensor, the tied embedding once. RMSNorm divides by the root mean
    square of the channels that are left; `reconstruct` and the recovery run adapt to that.

    Args:
        model: float32 and unquantized; read, never changed.
        kept: from `choose`.
    """
    config = model.config
    shape = Shape(len(kept.hidden), len(kept.neurons[0]), len(kept.queries[0]), len(kept.groups[0]), len(kept.layers))
    pruned = SportsLLM(shape.applied_to(config))
    state = model.state_dict()
    result: dict[str, Tensor] = {"model.norm.weight": state["model.norm.weight"][kept.hidden]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            result[name] = state[name][:, kept.hidden]
    for new, old in enumerate(kept.layers):
        rows, columns = unit_rows(kept, new, config.head_dim)
        prefix = f"model.layers.{old}."
        for name, tensor in state.items():
            if not name.startswith(prefix):
                continue
            module, leaf = name.split(".")[-2:]
            if module in ("q_norm", "k_norm"):
                part = tensor
            elif module in rows:
                part = tensor[rows[module]]
                if leaf == "weight":
                    part = part[:, columns[module]]
            else:
                part = tensor[kept.hidden]
            result[f"model.layers.{new}.{name.removeprefix(prefix)}"] = part
    pruned.load_state_dict({name: tensor.clone().contiguous() for name, tensor in result.items()})
    return pruned.eval()


def unit_rows(kept: Kept, layer: int, head_dim: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows and columns of each projection of kept layer number `layer` that stay."""
    queries = _head_rows(kept.queries[layer], head_dim)
    groups = _head_rows(kept.groups[layer], head_dim)
    neurons, hidden = kept.neurons[layer], kept.hidden
    rows = {"q_proj": queries, "k_proj": groups, "v_proj": groups, "gate_proj": neurons, "up_proj": neurons}
    columns = dict.fromkeys(rows, hidden) | {"o_proj": queries, "down_proj": neurons}
    return rows | {"o_proj": hidden, "down_proj": hidden}, columns


def prune(model: SportsLLM, scores: Scores, shape: Shape, layers: Sequence[int] | None = None) -> SportsLLM:
    """`choose`, then `cut`: a new model of the most important units."""
    return cut(model, choose(model.config, scores, shape, layers))


def _head_rows(heads: Tensor, head_dim: int) -> Tensor:
    """Rows of a projection that belong to whole heads."""
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
