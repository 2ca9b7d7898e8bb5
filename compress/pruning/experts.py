"""Fewer experts: alike ones become one, or only the strongest stay; then the rest is fitted to the whole mixture.

    merge   Experts whose outputs for the calibration tokens x differ least are joined, two groups at a time, none to
            more than its even share of experts, since every group keeps the neurons of one. With use
            u_e = sum over x of w_e^2 (w_e the router's weights) and outputs f_e, joining groups A and B costs, by
            Ward's rule, u_A u_B / (u_A + u_B) * sum over x of |mean_A f - mean_B f|^2, means weighted by use.
            Clustering by outputs is HC-SMoE's (https://arxiv.org/abs/2410.08589), the weighting by use M-SMoE's
            (https://arxiv.org/abs/2310.01334). A group's neurons are chosen out of its members'
            (`compress.pruning.expert_neurons`), and its router's row is fitted to the logarithm of the sum of the
            members' scores; where scores are independent (`sigmoid`), to the member's logit that would be chosen.
    use     Those stay whose energy, sum over the tokens sent to e of |w_e f_e(x)|^2, is highest: what leaves the
            residual stream with the expert, apart from what the others make of its tokens (NAEE and REAP,
            https://arxiv.org/abs/2402.14800, https://arxiv.org/abs/2510.13999).

Every layer keeps the same number; recovery is the caller's.
Shape suffixes: X tokens, D hidden_size, K experts of a token, N experts, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.least_squares import RIDGE, LeastSquares
from compress.pruning.expert_neurons import FeedForwards, feed_forwards, fit_experts, joined_neurons, parts_of
from compress.pruning.kept_units import top_indices
from sportsllm.console import log
from sportsllm.models.config import ModelConfig
from sportsllm.models.experts import MixtureOfExperts, route, run_expert
from sportsllm.models.feed_forward_kinds import ROUTER, routed_names, unused_line
from sportsllm.models.language_model import SportsLLM

_COMPARED, _AT_ONCE = 4_096, 256  # tokens whose outputs are compared, and held at once
_LEAST_USE = 1e-6  # of all, so that experts that nobody chose can be joined


@torch.no_grad()
def reduce_experts(
    model: SportsLLM, smaller: ModelConfig, samples: Sequence[Tensor], by: str, refit: bool = True
) -> SportsLLM:
    """A float32 model with the experts of `smaller`, which comes from `fewer_experts`.

    Args:
        model: never changed.
        smaller: how many experts there will be.
        samples: calibration token ids, (B, T) each.
        by: one of `EXPERTS_BY`.
        refit: whether what is left is fitted to what the whole mixture makes.
    """
    reduced = SportsLLM(smaller).eval()
    state, routed = reduced.state_dict(), (f".mlp.{ROUTER}.", ".mlp.experts.")
    same = {name: t for name, t in model.state_dict().items() if not any(part in name for part in routed)}
    reduced.load_state_dict({**state, **same})
    unused: dict[int, list[int]] = {}
    for number, layer in enumerate(feed_forwards(model, reduced, samples)):
        if not isinstance(layer.full, MixtureOfExperts):
            continue
        unused[number] = _unused(layer.full, layer.full_XD)
        count = smaller.chosen_experts.count
        groups = alike_groups(layer.full, layer.full_XD, count) if by == "merge" else None
        if groups is None:
            groups = [[number] for number in top_indices(expert_energy(layer.full, layer.full_XD), count).tolist()]
        _join(layer, groups)
        if refit:
            fit_experts(layer.changed, layer.changed_XD, layer.target_XD)
    if (line := unused_line(unused)) is not None:
        log(f"calibration text: {line}")
    return reduced


def _unused(half: Any, x_XD: Tensor) -> list[int]:
    """The experts that no token is sent to."""
    _, chosen_XK, _ = route(half, x_XD)
    return sorted(set(range(half.config.chosen_experts.count)) - set(chosen_XK.flatten().tolist()))


def expert_energy(half: Any, x_XD: Tensor) -> Tensor:
    """The energy of each expert over the tokens that a mixture reads, (N,) float64; see the module."""
    _, chosen_XK, weights_XK = route(half, x_XD)
    found = []
    for number, name in enumerate(routed_names(half.config.chosen_experts)):
        rows, place = (chosen_XK == number).nonzero(as_tuple=True)
        output_CD = run_expert(half, name, x_XD[rows]) * weights_XK[rows, place][:, None]
        found.append(output_CD.double().square().sum())
    return torch.stack(found)


def alike_groups(half: Any, x_XD: Tensor, count: int) -> list[list[int]]:
    """The experts of a mixture in `count` groups of alike ones, by what they make of the tokens that it reads."""
    experts = half.config.chosen_experts
    use_N = _use(half, x_XD)
    gram_NN = torch.zeros(experts.count, experts.count, dtype=torch.float64)
    for few_XD in torch.split(x_XD[:: max(1, len(x_XD) // _COMPARED)], _AT_ONCE):
        outputs = torch.stack([run_expert(half, name, few_XD).flatten() for name in routed_names(experts)])
        gram_NN += outputs @ outputs.T
    return ward_groups(gram_NN, use_N, count)


def _use(half: Any, x_XD: Tensor) -> Tensor:
    """(N,) sum over tokens of the router's squared weight for each expert, float64."""
    _, chosen_XK, weights_XK = route(half, x_XD)
    use_N = torch.zeros(half.config.chosen_experts.count, dtype=torch.float64)
    use_N.index_add_(0, chosen_XK.flatten(), weights_XK.double().square().flatten())
    return use_N + _LEAST_USE * use_N.sum()


def ward_groups(gram_NN: Tensor, use_N: Tensor, count: int) -> list[list[int]]:
    """Groups of items with these products and weights, joined by Ward's rule until `count` are left.

    None gets more than an even share of the items, rounded up, as long as others can be joined.

    Source: https://doi.org/10.1080/01621459.1963.10500845.
    """
    groups, most = [[number] for number in range(len(use_N))], -(-len(use_N) // count)
    while len(groups) > count:
        share_GN = torch.zeros(len(groups), len(use_N), dtype=torch.float64)
        for row, group in enumerate(groups):
            share_GN[row, group] = use_N[group] / use_N[group].sum()
        use_G = torch.stack([use_N[group].sum() for group in groups])
        means_GG = share_GN @ gram_NN @ share_GN.T
        squares_G = means_GG.diagonal()
        cost_GG = use_G[:, None] * use_G / (use_G[:, None] + use_G) * (squares_G[:, None] + squares_G - 2 * means_GG)
        cost_GG = cost_GG.masked_fill(torch.ones_like(cost_GG).tril().bool(), torch.inf)
        size_G = torch.tensor([len(group) for group in groups])
        small_GG = cost_GG.masked_fill(size_G[:, None] + size_G > most, torch.inf)
        cost_GG = small_GG if small_GG.isfinite().any() else cost_GG
        first, second = divmod(int(cost_GG.argmin()), len(groups))
        groups[first] = sorted(groups[first] + groups.pop(second))
    return groups


def _join(layer: FeedForwards, groups: Sequence[Sequence[int]]) -> None:
    """Give the changed mixture an expert, and a row of its router, for each group of the full one's."""
    full, changed = layer.full, layer.changed
    old, new = full.get_submodule(ROUTER), changed.get_submodule(ROUTER)
    use_N = _use(full, layer.full_XD)
    logits_XN = layer.changed_XD @ old.weight.T
    for number, group in enumerate(groups):
        members = list(group)
        share = (use_N[members] / use_N[members].sum()).float()
        row_1D = (share @ old.weight[members])[None]
        if len(members) > 1:
            own = logits_XN[:, members]
            wanted_X1 = own.logsumexp(-1, keepdim=True)
            if full.config.chosen_experts.router == "sigmoid":
                ranked = own.sigmoid() if old.bias is None else own.sigmoid() + old.bias[members]
                wanted_X1 = own.gather(1, ranked.argmax(-1, keepdim=True))
            row_1D = LeastSquares.over([(layer.changed_XD, wanted_X1)]).solve(row_1D, RIDGE)
        new.weight[number] = row_1D[0]
        if old.bias is not None:
            new.bias[number] = share @ old.bias[members]
    scores_XN, chosen_XK, _ = route(full, layer.changed_XD)
    scores_XN = scores_XN * torch.zeros_like(scores_XN).fill_(_LEAST_USE).scatter(1, chosen_XK, 1.0)
    _, sent_XK, _ = route(changed, layer.changed_XD)
    for number, group in enumerate(groups):
        names = [f"experts.{member}" for member in group]
        if len(names) == 1:
            parts = parts_of(full, names[0])
        else:
            x_CD = layer.changed_XD[(sent_XK == number).any(-1)]
            share_CM = scores_XN[(sent_XK == number).any(-1)][:, list(group)]
            share_CM = share_CM / share_CM.sum(-1, keepdim=True)
            made = torch.stack([run_expert(full, name, x_CD) for name in names], dim=1)
            wanted = (share_CM[..., None] * made).sum(1)
            parts = joined_neurons(full, names, full.config.intermediate_size, x_CD, wanted)
        changed.get_submodule(f"experts.{number}").load_state_dict(parts)
