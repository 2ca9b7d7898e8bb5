"""One feed-forward out of the neurons of several experts, and experts fitted to what a whole mixture makes.

Experts that read the same tokens, side by side, are one wide expert. Of its neurons those stay that explain its outputs
best after a least-squares fit (`compress.pruning.output_selection`), so that experts need not be alike to be joined:
what they share is kept once. With the neurons' values a and the outputs y that are wanted,

    B = argmin sum over tokens |y - B a|^2        then the neurons S that B a is best explained by, and B_S again

Shape suffixes: X tokens, D hidden_size, N experts, M neurons of all, F neurons that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from compress.layerwise import after_sublayer
from compress.least_squares import RIDGE, LeastSquares
from compress.pruning.kept_units import top_indices
from compress.pruning.output_selection import pick_order
from sportsllm.console import progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.experts import MixtureOfExperts, expert_neurons, route
from sportsllm.models.feed_forward_kinds import SHARED, expert_names, routed_names
from sportsllm.models.kinds import NORMS
from sportsllm.models.language_model import Block, SportsLLM

_PASSES = 2  # over all experts, each fitted to what the others leave
_PIECE = 4_096  # tokens whose neurons are in memory at once
_PARTS = ("gate_proj", "up_proj", "down_proj")


class FeedForwards(NamedTuple):
    """The feed-forward of one layer in the full and in the changed model.

    `full_XD` and `changed_XD` are what they read of all calibration text; `target_XD` is what the changed one should
    add for its residual stream to become the full model's.
    """

    full: Any
    changed: Any
    full_XD: Tensor
    changed_XD: Tensor
    target_XD: Tensor


def feed_forwards(model: SportsLLM, changed: SportsLLM, samples: Sequence[Tensor]) -> Iterator[FeedForwards]:
    """Layer by layer the feed-forwards of two models that differ in nothing else.

    The changed one must have its weights when the next is asked for.
    """
    rope = model.rope
    full_BTD = [model.embedded(tokens) for tokens in samples]
    changed_BTD = list(full_BTD)
    attention, half = NORMS
    blocks = zip(*(cast("list[Block]", list(one.model.layers)) for one in (model, changed)), strict=True)
    with progress_bar("experts", len(model.model.layers)) as bar:
        for source, block in blocks:
            full_BTD, changed_BTD = (
                after_sublayer(one, attention, states, rope)
                for one, states in ((source, full_BTD), (block, changed_BTD))
            )
            full_XD, changed_XD = (
                torch.cat([one.get_submodule(NORMS[half])(x).flatten(0, 1) for x in states])
                for one, states in ((source, full_BTD), (block, changed_BTD))
            )
            following = after_sublayer(source, half, full_BTD, rope)
            if model.config.output_norms:  # a norm follows: the half's own output is what is wanted
                target = source.get_submodule(half)(full_XD[None])[0]
            else:
                ends = zip(following, changed_BTD, strict=True)
                target = torch.cat([(after - before).flatten(0, 1) for after, before in ends])
            yield FeedForwards(source.get_submodule(half), block.get_submodule(half), full_XD, changed_XD, target)
            full_BTD, changed_BTD = following, after_sublayer(block, half, changed_BTD, rope)
            bar.advance()


def parts_of(half: Any, name: str) -> dict[str, Tensor]:
    """The tensors of an expert, or of a feed-forward that is one (name ``)."""
    module = half.get_submodule(name)
    return {key: tensor.detach() for key, tensor in module.named_parameters() if key.split(".")[0] in _PARTS}


def joined_neurons(
    half: Any, names: Sequence[str], count: int, inputs_XD: Tensor, outputs_XD: Tensor
) -> dict[str, Tensor]:
    """One expert of `count` neurons out of those of several, `parts_of` it.

    Args:
        half: that they are in; a name may be `` for the half itself.
        names: the experts.
        count: at most the number of their neurons.
        inputs_XD: what the new expert reads.
        outputs_XD: what it should make of it.

    """
    found = [parts_of(half, name) for name in names]
    whole = {key: torch.cat([parts[key] for parts in found]) for key in found[0] if not key.startswith("down_proj")}
    down_DM = torch.cat([parts["down_proj.weight"] for parts in found], dim=1)
    sums = LeastSquares.over(
        (torch.cat([neurons_of(half, name, x) for name in names], dim=-1), y)
        for x, y in zip(torch.split(inputs_XD, _PIECE), torch.split(outputs_XD, _PIECE), strict=True)
    )
    down_DM = sums.solve(torch.zeros_like(down_DM), RIDGE)
    kept = torch.arange(count) if not sums.gram_II.any() else top_indices(pick_order(sums.gram_II, down_DM, 1), count)
    own = LeastSquares(sums.gram_II[kept][:, kept], sums.cross_OI[:, kept])
    joined = {key: tensor[kept] for key, tensor in whole.items()}
    joined["down_proj.weight"] = own.solve(down_DM[:, kept], RIDGE)
    if "down_proj.bias" in found[0]:
        joined["down_proj.bias"] = torch.zeros(len(down_DM))  # the neurons make it up
    return joined


def neurons_of(half: Any, name: str, x_XD: Tensor) -> Tensor:
    """The neurons' values of an expert, or of a feed-forward without experts (name ``)."""
    if name:
        return expert_neurons(half, name, x_XD)
    values: Tensor = silu(half.gate_proj(x_XD)) * half.up_proj(x_XD)
    return values


@torch.no_grad()
def fit_experts(half: Any, inputs_XD: Tensor, target_XD: Tensor) -> None:
    """Fit every expert's down_proj, in place, so that the mixture makes `target_XD` of its inputs.

    One expert after the other gets what the others leave, on the tokens that are sent to it, as these weigh it.
    """
    experts = half.config.chosen_experts
    _, chosen_XK, weights_XK = route(half, inputs_XD)
    sent = [(chosen_XK == number).nonzero(as_tuple=True) for number in range(experts.count)]
    weights = {
        name: (rows, weights_XK[rows, place][:, None])
        for name, (rows, place) in zip(routed_names(experts), sent, strict=True)
    }
    if experts.shared:
        weights[SHARED] = torch.arange(len(inputs_XD)), torch.ones(len(inputs_XD), 1)
    left_XD = target_XD.clone()

    def pieces(name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of some of an expert's tokens at a time the rows, the weights, and its neurons' weighted values."""
        for rows, weight in zip(*(torch.split(each, _PIECE) for each in weights[name]), strict=True):
            yield rows, weight, weight * expert_neurons(half, name, inputs_XD[rows])

    def add(name: str, sign: int) -> None:
        """Add an expert's part to what is left, or take it out."""
        down = half.get_submodule(name).down_proj
        for rows, weight, values in pieces(name):
            left_XD[rows] += sign * (values @ down.weight.T)
            if down.bias is not None:
                left_XD[rows] += sign * weight * down.bias

    for name in expert_names(experts):
        add(name, -1)
    for _ in range(_PASSES):
        for name in expert_names(experts):
            down = half.get_submodule(name).down_proj
            bias = 0.0 if down.bias is None else down.bias
            add(name, 1)
            sums = LeastSquares.over((values, left_XD[rows] - weight * bias) for rows, weight, values in pieces(name))
            down.weight.data = sums.solve(down.weight, RIDGE)
            add(name, -1)


def dense_config(config: ModelConfig, width: int) -> ModelConfig:
    """A mixture's config with feed-forwards of `width` neurons instead.

    Raises:
        UsageError: experts without a gate, or fewer neurons in a layer.
    """
    experts = config.chosen_experts
    if not experts.gated:
        raise UsageError("experts without a gate cannot be made into a dense feed-forward")
    most = min([(experts.count + experts.shared) * config.intermediate_size, config.dense_intermediate_size or width])
    if width > most:
        raise UsageError(f"intermediate_size is {width}, more than the {most} neurons of a layer of the mixture")
    changes = {"dense_layers": 0, "dense_intermediate_size": None, "intermediate_size": width}
    return config.with_changes(mlp_kind=ModelConfig.mlp_kind, experts=None, **changes)


@torch.no_grad()
def dense_model(model: SportsLLM, width: int, samples: Sequence[Tensor]) -> SportsLLM:
    """A float32 model without experts, whose feed-forwards are the best `width` neurons of all experts' of a layer.

    Args:
        model: a mixture of gated experts, never changed.
        width: neurons of each layer, at most as many as the experts of a layer have together.
        samples: calibration token ids, (B, T) each.

    Raises:
        UsageError: as `dense_config`.
    """
    experts = model.config.chosen_experts
    dense = SportsLLM(dense_config(model.config, width)).eval()
    same = {name: tensor for name, tensor in model.state_dict().items() if ".mlp." not in name}
    dense.load_state_dict({**dense.state_dict(), **same})
    for layer in feed_forwards(model, dense, samples):
        names = expert_names(experts) if isinstance(layer.full, MixtureOfExperts) else [""]
        parts = joined_neurons(layer.full, names, width, layer.changed_XD, layer.target_XD)
        layer.changed.load_state_dict(parts)
    return dense
