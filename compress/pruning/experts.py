"""Experts: the strongest of a mixture kept and fitted to the whole one, or all their neurons joined to a dense model.

    fewer   Those experts stay whose energy, sum over the tokens sent to e of |w_e f_e(x)|^2, is highest: what leaves
            the residual stream with the expert (NAEE and REAP, https://arxiv.org/abs/2402.14800,
            https://arxiv.org/abs/2510.13999). Every layer keeps the same number. Then each down_proj is fitted to what
            the other experts leave of the full mixture's output.
    dense   Experts that read the same tokens, side by side, are one wide expert. Of its neurons those stay that explain
            the outputs best after a least-squares fit (`compress.pruning.greedy`). With the neurons' values
            a and the mixture's outputs y

                B = argmin sum over tokens |y - B a|^2  then the neurons S that B a is best explained by, and B_S again

Shape suffixes: X tokens, D hidden_size, K experts of a token, N experts, M neurons of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import layerwise
from compress.layer_fit import LeastSquares
from compress.layerwise import LayerStates
from compress.pruning.greedy import pick_order
from compress.pruning.scores import top_indices
from sportsllm.console import log, progress_bar
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import NORMS
from sportsllm.models.experts import MixtureOfExperts, named_expert, route
from sportsllm.models.kinds import ROUTER, SHARED, expert_names, routed_names, unused_line
from sportsllm.models.language_model import Block, SportsLLM
from sportsllm.models.layers import FeedForward

_PASSES = 2  # over all experts, each fitted to what the others leave
_AT_ONCE = 4_096  # tokens whose neurons are in memory at once
_ATTENTION, _FEED_FORWARD = NORMS


class FeedForwards(NamedTuple):
    """The feed-forward of one layer in the full and in the changed model.

    `full_XD` and `changed_XD` are their inputs over all calibration text; `target_XD` is what the changed one should
    add for its residual stream to become the full model's.
    """

    full: nn.Module
    changed: nn.Module
    full_XD: Tensor
    changed_XD: Tensor
    target_XD: Tensor


def feed_forwards(model: SportsLLM, changed: SportsLLM, samples: Sequence[Tensor]) -> Iterator[FeedForwards]:
    """Layer by layer the feed-forwards of two models that differ in nothing else.

    The changed one must have its weights when the next is asked for, and then is the model's.
    """
    full_BTD = changed_BTD = layerwise.embedded(model, samples)
    norm = NORMS[_FEED_FORWARD]
    with progress_bar("experts", len(model.model.layers)) as bar:
        for layer in range(len(model.model.layers)):
            source, block = layerwise.block_of(model, layer), layerwise.block_of(changed, layer)
            between_BTD, following = LayerStates.of(source, full_BTD, model.rope)
            changed_BTD = layerwise.after_sublayer(block, _ATTENTION, changed_BTD, model.rope)
            full_XD = torch.cat([source.get_submodule(norm)(x).flatten(0, 1) for x in between_BTD])
            changed_XD = torch.cat([block.get_submodule(norm)(x).flatten(0, 1) for x in changed_BTD])
            full, own = source.get_submodule(_FEED_FORWARD), block.get_submodule(_FEED_FORWARD)
            if model.config.output_norms:  # a norm follows: the sublayer's own output is wanted
                target = full(full_XD[None])[0]
            else:
                ends = zip(following, changed_BTD, strict=True)
                target = torch.cat([(after - before).flatten(0, 1) for after, before in ends])
            yield FeedForwards(full, own, full_XD, changed_XD, target)
            layerwise.replace_block(changed, layer, block)
            full_BTD, changed_BTD = following, layerwise.after_sublayer(block, _FEED_FORWARD, changed_BTD, model.rope)
            bar.advance()


@torch.no_grad()
def reduce_experts(model: SportsLLM, smaller: ModelConfig, samples: Sequence[Tensor]) -> SportsLLM:
    """A float32 model with the experts of `smaller`, which comes from `fewer_experts`.

    `samples` are calibration token ids, (B, T) each; what is left is fitted to the whole mixture.
    """
    reduced = _without(model, smaller, (f"mlp.{ROUTER}.", "mlp.experts."))
    unused: dict[int, list[int]] = {}
    for number, layer in enumerate(feed_forwards(model, reduced, samples)):
        full, changed = layer.full, layer.changed
        if not isinstance(full, MixtureOfExperts) or not isinstance(changed, MixtureOfExperts):
            continue
        _, chosen_XK, _ = route(full, layer.full_XD)
        unused[number] = sorted(set(range(len(full.experts))) - set(chosen_XK.flatten().tolist()))
        kept = top_indices(expert_energy(full, layer.full_XD), len(changed.experts)).tolist()
        changed.gate.load_state_dict({name: tensor[kept] for name, tensor in full.gate.state_dict().items()})
        for place, expert in enumerate(kept):
            changed.experts[place].load_state_dict(full.experts[expert].state_dict())
        fit_experts(changed, layer.changed_XD, layer.target_XD)
    if (line := unused_line(unused)) is not None:
        log(f"calibration text: {line}")
    return reduced


def expert_energy(mixture: MixtureOfExperts, x_XD: Tensor) -> Tensor:
    """The energy of each expert over the tokens that a mixture reads, (N,) float64; see the module."""
    _, chosen_XK, weights_XK = route(mixture, x_XD)
    found = []
    for number, name in enumerate(routed_names(mixture.config.chosen_experts)):
        rows, place = (chosen_XK == number).nonzero(as_tuple=True)
        output_XD = named_expert(mixture, name)(x_XD[rows]) * weights_XK[rows, place][:, None]
        found.append(output_XD.double().square().sum())
    return torch.stack(found)


@torch.no_grad()
def fit_experts(mixture: MixtureOfExperts, inputs_XD: Tensor, target_XD: Tensor) -> None:
    """Fit every expert's down_proj, in place, so that the mixture makes `target_XD` of its inputs.

    Each expert in turn gets what the others leave, on the tokens that are sent to it, weighted as they weigh it.
    """
    experts = {name: named_expert(mixture, name) for name in expert_names(mixture.config.chosen_experts)}
    _, chosen_XK, weights_XK = route(mixture, inputs_XD)
    sent: dict[str, tuple[Tensor, Tensor]] = {}  # rows and weights of an expert's tokens
    for number, name in enumerate(routed_names(mixture.config.chosen_experts)):
        rows, place = (chosen_XK == number).nonzero(as_tuple=True)
        sent[name] = rows, weights_XK[rows, place][:, None]
    if SHARED in experts:
        sent[SHARED] = torch.arange(len(inputs_XD), device=inputs_XD.device), inputs_XD.new_ones(len(inputs_XD), 1)
    left_XD = target_XD.clone()

    def chunks(name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, weights and the neurons' weighted values of some of an expert's tokens at a time."""
        for rows, weight in zip(*(torch.split(each, _AT_ONCE) for each in sent[name]), strict=True):
            yield rows, weight, weight * experts[name].neurons(inputs_XD[rows])

    def add(name: str, sign: int) -> None:
        """Add an expert's part to what is left, or take it out."""
        down = experts[name].down_proj
        for rows, weight, values in chunks(name):
            left_XD[rows] += sign * (values @ down.weight.T)
            if down.bias is not None:
                left_XD[rows] += sign * weight * down.bias

    for name in experts:
        add(name, -1)
    for _ in range(_PASSES):
        for name, expert in experts.items():
            bias = 0.0 if expert.down_proj.bias is None else expert.down_proj.bias
            add(name, 1)
            sums = LeastSquares.over((values, left_XD[rows] - weight * bias) for rows, weight, values in chunks(name))
            expert.down_proj.weight.data = sums.solve(expert.down_proj.weight)
            add(name, -1)


def dense_config(config: ModelConfig, width: int) -> ModelConfig:
    """A mixture's config with dense feed-forwards of `width` neurons.

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

    `samples` are calibration token ids, (B, T) each. Errors are those of `dense_config`.
    """
    dense = _without(model, dense_config(model.config, width), ("mlp.",))
    for layer in feed_forwards(model, dense, samples):
        parts = expert_names(model.config.chosen_experts) if isinstance(layer.full, MixtureOfExperts) else [""]
        experts = [named_expert(layer.full, name) for name in parts]
        layer.changed.load_state_dict(joined_neurons(experts, width, layer.changed_XD, layer.target_XD))
    return dense


def _without(model: SportsLLM, config: ModelConfig, changed: tuple[str, ...]) -> SportsLLM:
    """A model of a config with the tensors of another, except the layers' tensors whose names begin with `changed`."""

    def made(layer: int) -> Block:
        state = Block(config, layer).to(model.head_weight.device).state_dict()
        same = layerwise.block_of(model, layer).state_dict().items()
        state |= {name: tensor for name, tensor in same if not name.startswith(changed)}
        return layerwise.block_from(config, layer, state)

    return layerwise.derived(model, config, layerwise.ends_of(model), made)


def joined_neurons(
    experts: Sequence[FeedForward], count: int, inputs_XD: Tensor, outputs_XD: Tensor
) -> dict[str, Tensor]:
    """The state of a feed-forward of the `count` neurons of several that best make the outputs of the inputs."""
    found = [expert.state_dict() for expert in experts]
    whole = {key: torch.cat([parts[key] for parts in found]) for key in found[0] if not key.startswith("down_proj")}
    down_DM = torch.cat([parts["down_proj.weight"] for parts in found], dim=1)
    sums = LeastSquares.over(
        (torch.cat([expert.neurons(x) for expert in experts], dim=-1), y)
        for x, y in zip(torch.split(inputs_XD, _AT_ONCE), torch.split(outputs_XD, _AT_ONCE), strict=True)
    )
    down_DM = sums.solve(torch.zeros_like(down_DM))
    kept = torch.arange(count) if not sums.gram_II.any() else top_indices(pick_order(sums.gram_II, down_DM, 1), count)
    own = LeastSquares(sums.gram_II[kept][:, kept], sums.cross_OI[:, kept])
    joined = {key: tensor[kept] for key, tensor in whole.items()}
    joined["down_proj.weight"] = own.solve(down_DM[:, kept])
    if "down_proj.bias" in found[0]:
        joined["down_proj.bias"] = down_DM.new_zeros(len(down_DM))  # the neurons make it up
    return joined
