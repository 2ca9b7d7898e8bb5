"""Fewer experts: those stay whose outputs are strongest, each weighted as the router weights it.

The energy of expert e over the calibration tokens t that are sent to it,

    sum over t of |w_et expert_e(x_t)|^2

counts how often it is used and what it then adds; it is what leaves the residual stream with the expert, apart from
what the others make of its tokens (as in NAEE and REAP, https://arxiv.org/abs/2402.14800,
https://arxiv.org/abs/2510.13999). Every layer keeps the same number; recovery is the caller's.
Shape suffixes: B sequences, T tokens, X = B * T, D hidden_size, K experts of a token, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.pruning.kept_units import top_indices
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.experts import ROUTER, route, routed_names, run_expert
from sportsllm.models.language_model import SportsLLM


def fewer_experts(config: ModelConfig, count: int | None, active: int | None) -> ModelConfig:
    """The config with `count` experts, `active` of them a token; as many as there are where one is not given.

    Raises:
        UsageError: the model has no experts or fewer, or divides them into groups.
    """
    flag = "--experts" if count is not None else "--experts-per-token"
    experts = config.experts
    if experts is None:
        raise UsageError(f"{flag}: the model has no experts; leave it out")
    if count is not None and not 1 <= count <= experts.count:
        raise UsageError(f"--experts is {count}; the model has {experts.count}, choose 1 to {experts.count}")
    kept = count or experts.count
    if kept != experts.count and experts.groups > 1:
        raise UsageError(f"--experts: the router chooses among {experts.groups} groups, which stay whole; leave it out")
    most = min(experts.active, kept)
    if active is not None and not 1 <= active <= most:
        raise UsageError(f"--experts-per-token is {active}; choose 1 to {most}")
    return config.with_changes(experts=replace(experts, count=kept, active=active or most))


@torch.no_grad()
def keep_experts(model: SportsLLM, smaller: ModelConfig, samples: Sequence[Tensor]) -> SportsLLM:
    """A float32 model with the strongest experts of every layer, as many as `smaller` has.

    `samples` are calibration token ids, (B, T) each; `smaller` comes from `fewer_experts`.
    """
    kept = [top_indices(energy, smaller.chosen_experts.count) for energy in expert_energies(model, samples)]
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        place, found = _renamed(name, kept)
        if place is not None:
            state[place] = tensor if found is None else tensor[found]
    reduced = SportsLLM(smaller)
    reduced.load_state_dict(state)
    return reduced.eval()


def _renamed(name: str, kept: Sequence[Tensor]) -> tuple[str | None, Tensor | None]:
    """A tensor's new name, None if it goes; and its rows that stay, None for all."""
    if ".mlp." not in name:
        return name, None
    _, _, layer, _, part, *rest = name.split(".")
    chosen = kept[int(layer)]
    if part == ROUTER:
        return name, chosen
    if part != "experts":
        return name, None
    number, places = int(rest[0]), chosen.tolist()
    if number not in places:
        return None, None
    return ".".join(["model", "layers", layer, "mlp", "experts", str(places.index(number)), *rest[1:]]), None


def expert_energies(model: SportsLLM, samples: Sequence[Tensor]) -> list[Tensor]:
    """For each layer the energy of its experts, (N,) float64."""
    names = routed_names(model.config.chosen_experts)
    energies = [torch.zeros(len(names), dtype=torch.float64) for _ in model.model.layers]

    def add(layer: int, half: Any, x_BTD: Tensor) -> None:
        x_XD = x_BTD.flatten(0, 1)
        _, chosen_XK, weights_XK = route(half, x_XD)
        for number, name in enumerate(names):
            rows, place = (chosen_XK == number).nonzero(as_tuple=True)
            output_CD = run_expert(half, name, x_XD[rows]) * weights_XK[rows, place][:, None]
            energies[layer][number] += output_CD.double().square().sum()

    halves = [block.get_submodule("mlp") for block in model.model.layers]
    handles = [
        half.register_forward_pre_hook(lambda module, given, layer=layer: add(layer, module, given[0]))
        for layer, half in enumerate(halves)
    ]
    try:
        for tokens_BT in samples:
            model.hidden(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    return energies
