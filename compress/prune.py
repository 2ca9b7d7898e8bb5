"""Width and depth pruning: cut whole units and stay a plain Llama, the same width in every layer.

Shape suffixes: D hidden_size, F intermediate_size, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from compress.importance import Scores
from sportsllm.config import ModelConfig
from sportsllm.errors import UsageError
from sportsllm.losses import cross_entropy
from sportsllm.model import SportsLLM

_WIDTH_STEP = 32  # widths are multiples of this, the smallest block of the integer kernels
_LAYER_CANDIDATES = 3


@dataclass(frozen=True)
class Shape:
    """The dimensions that pruning can change."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """A model's own shape."""
        return Shape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            layers=config.num_hidden_layers,
        )

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """The config of the pruned model.

        Raises:
            UsageError: a dimension grows, falls below 1, or breaks the key/value grouping.
        """
        for name, value in asdict(self).items():
            limit = asdict(Shape.of(config))[name]
            if not 1 <= value <= limit:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; the model has {limit}, choose 1 to {limit}")
        per_group, old_per_group = (
            self.heads / self.kv_heads,
            config.num_attention_heads // config.num_key_value_heads,
        )
        if self.heads % self.kv_heads or per_group > old_per_group:
            raise UsageError(
                f"--heads {self.heads} with --kv-heads {self.kv_heads} breaks the grouping: each key/value head has "
                f"{old_per_group} query heads, so keep a multiple of --kv-heads, at most {old_per_group} each"
            )
        return config.with_changes(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=self.layers,
        )


def shape_for_share(config: ModelConfig, share: float) -> Shape:
    """The shape whose non-embedding parameters come closest to `share` without going over; depth is kept.

    Hidden size and FFN shrink together, by the same factor as nearly as multiples of 32 allow; heads follow the
    hidden size in whole key/value groups (width before depth: Minitron).

    Raises:
        UsageError: share is not in (0, 1], or no shape is that small.
    """
    if not 0 < share <= 1:
        raise UsageError(f"--params is {share}; it must be above 0 and at most 1")
    full = Shape.of(config)
    target = share * config.block_parameters
    per_group = full.heads // full.kv_heads
    best: tuple[float, int, Shape] | None = None
    for hidden in _widths(full.hidden):
        for kv_heads in range(1, full.kv_heads + 1):
            for intermediate in _widths(full.intermediate):
                shape = Shape(hidden, intermediate, kv_heads * per_group, kv_heads, full.layers)
                size = shape.applied_to(config).block_parameters
                if size > target:
                    continue
                ratios = (hidden / full.hidden, intermediate / full.intermediate, kv_heads / full.kv_heads)
                # Near the target first (within 2%), then an even cut.
                rank = (max(0.0, 1 - size / target - 0.02) + 0.2 * (max(ratios) - min(ratios)), -size, shape)
                if best is None or rank[:2] < best[:2]:
                    best = rank
    if best is None:
        raise UsageError(f"--params {share}: no width that small is left; cut --layers too")
    return best[2]


def _widths(full: int) -> list[int]:
    return [*range(_WIDTH_STEP, full, _WIDTH_STEP), full]


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


def prune(model: SportsLLM, scores: Scores, shape: Shape, layers: Sequence[int] | None = None) -> SportsLLM:
    """A new model with the most important units of `model`; pruning to the full shape changes nothing.

    One set of hidden channels slices every tensor, the tied embedding once. RMSNorm divides by the root mean
    square of the channels that are left, so each norm's weight is scaled by nothing: the recovery run adapts it.

    Args:
        model: float32 and unquantized; read, never changed.
        scores: from `importance_scores`.
        shape: what is left.
        layers: indices of the layers to keep; the first `shape.layers` if None.

    Raises:
        UsageError: an impossible shape.
    """
    config = model.config
    pruned = SportsLLM(shape.applied_to(config))
    kept = list(range(config.num_hidden_layers))[: shape.layers] if layers is None else list(layers)
    hidden_D = _top(scores.hidden, shape.hidden)
    state = model.state_dict()
    result: dict[str, Tensor] = {"model.norm.weight": state["model.norm.weight"][hidden_D]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            result[name] = state[name][:, hidden_D]
    for new, old in enumerate(kept):
        neurons_F = _top(scores.intermediate[old], shape.intermediate)
        queries_H, groups_K = _kept_heads(scores.heads[old], config, shape)
        rows = {
            "q_proj": _head_rows(queries_H, config.head_dim),
            "k_proj": _head_rows(groups_K, config.head_dim),
            "gate_proj": neurons_F,
            "o_proj": hidden_D,
        }
        rows |= {"v_proj": rows["k_proj"], "up_proj": neurons_F, "down_proj": hidden_D}
        columns = {"o_proj": rows["q_proj"], "down_proj": neurons_F}
        prefix = f"model.layers.{old}."
        for name, tensor in state.items():
            if not name.startswith(prefix):
                continue
            module, leaf = name.split(".")[-2:]
            if module in ("q_norm", "k_norm"):
                cut = tensor
            elif module in rows:
                cut = tensor[rows[module]]
                if leaf == "weight":
                    cut = cut[:, columns.get(module, hidden_D)]
            else:
                cut = tensor[hidden_D]
            result[f"model.layers.{new}.{name.removeprefix(prefix)}"] = cut
    pruned.load_state_dict({name: tensor.clone().contiguous() for name, tensor in result.items()})
    return pruned.eval()


def _head_rows(heads: Tensor, head_dim: int) -> Tensor:
    """Rows of a projection that belong to whole heads."""
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
