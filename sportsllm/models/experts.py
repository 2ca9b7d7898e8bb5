"""Mixture of experts: a router sends each token to a few of many feed-forward parts
(https://arxiv.org/abs/1701.06538; Mixtral, https://arxiv.org/abs/2401.04088; DeepSeek, https://arxiv.org/abs/2412.19437).

    scores  = softmax(router(x)) or sigmoid(router(x))
    chosen  = the highest `active` of scores + bias, in the best groups of experts
    weights = the chosen scores: as they are, divided by their sum, or their softmax; times `scale`
    y       = sum over chosen e of weights_e * expert_e(x)  +  shared(x)

An expert is down(silu(gate(x)) * up(x)), or down(silu(up(x))) with biases if it has no gate.
Shape suffixes: B sequences, T tokens, D hidden_size, X = B * T, N experts, K active ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sportsllm.models.config import ModelConfig
from sportsllm.models.layers import FeedForward

BIAS_STEP = 1e-3
"""Step of a router's bias in balancing experts without a loss (https://arxiv.org/abs/2408.15664)."""


class MixtureOfExperts(nn.Module):
    """The router, the routed experts, and the shared experts as a single wider one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, experts = config, config.chosen_experts
        hidden, inner = config.hidden_size, config.intermediate_size

        def expert(width: int) -> FeedForward:
            return FeedForward(hidden, width, F.silu, bias=not experts.gated, gated=experts.gated)

        self.gate = nn.Linear(hidden, experts.count, bias=experts.choice_bias)
        self.experts = nn.ModuleList(expert(inner) for _ in range(experts.count))
        if experts.shared:
            self.shared_experts = expert(inner * experts.shared)
        self.auxiliary_loss: Tensor | None = None
        self.step_tokens_per_expert: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D). In training it leaves `auxiliary_loss` and counts the choices of a step."""
        experts, x_XD = self.config.chosen_experts, x_BTD.flatten(0, 1)
        scores_XN, chosen_XK, weights_XK = route(self, x_XD)
        if self.training and experts.balance_loss:
            self.auxiliary_loss = experts.balance_loss * imbalance(scores_XN, chosen_XK)
        # Tokens in the order of their experts, so that each expert reads one piece.
        order = torch.argsort(chosen_XK.flatten(), stable=True)
        tokens_per_expert = torch.bincount(chosen_XK.flatten(), minlength=experts.count)
        if self.training:
            before = self.step_tokens_per_expert
            self.step_tokens_per_expert = tokens_per_expert if before is None else tokens_per_expert + before
        rows = order // experts.active
        pieces = torch.split(x_XD[rows], tokens_per_expert.tolist())
        made = [expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)]
        weighted = torch.cat(made) * weights_XK.flatten()[order][:, None]
        y_XD = torch.zeros_like(x_XD, dtype=weighted.dtype).index_add(0, rows, weighted)
        if experts.shared:
            y_XD = y_XD + self.shared_experts(x_XD)
        return y_XD.view(x_BTD.shape).to(x_BTD.dtype)


def named_expert(mixture: nn.Module, name: str) -> FeedForward:
    """The expert of a name, see `sportsllm.models.kinds.expert_names`."""
    expert = mixture.get_submodule(name)
    assert isinstance(expert, FeedForward), "an expert is a feed-forward"
    return expert


def route(mixture: MixtureOfExperts, x_XD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (X, N) of the experts, the chosen ones (X, K) and their weights (X, K), in float32."""
    experts, router = mixture.config.chosen_experts, mixture.gate
    with torch.autocast(x_XD.device.type, enabled=False):
        logits_XN: Tensor = router(x_XD.to(router.weight.dtype)).float()
        if router.bias is not None:  # it is of the choice alone
            logits_XN = logits_XN - router.bias
        scores_XN = logits_XN.softmax(-1) if experts.router == "softmax" else logits_XN.sigmoid()
        ranked_XN = scores_XN.detach() if router.bias is None else scores_XN.detach() + router.bias.float()
        if experts.groups > 1:
            by_group = ranked_XN.view(len(x_XD), experts.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(experts.active_groups, dim=-1).indices
            open_XG = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=x_XD.device).scatter(1, best, True)
            ranked_XN = by_group.masked_fill(~open_XG[..., None], -math.inf).flatten(1)
        chosen_XK = ranked_XN.topk(experts.active, dim=-1).indices
        weights_XK = scores_XN.gather(1, chosen_XK)
        if experts.weights == "softmax":
            weights_XK = weights_XK.softmax(-1)
        elif experts.weights == "sum":
            weights_XK = weights_XK / weights_XK.sum(-1, keepdim=True)
        return scores_XN, chosen_XK, weights_XK * experts.scale


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def balance_biases(model: nn.Module) -> None:
    """After a training step: experts that got less than their share of its tokens are chosen more easily, others less.

    The step's counts are added to those that `pop_expert_load` reads.
    """
    for mixture in mixtures(model):
        if (step_N := mixture.step_tokens_per_expert) is None:
            continue
        if mixture.gate.bias is not None:
            with torch.no_grad():
                mixture.gate.bias.add_(BIAS_STEP * torch.sign(step_N.float().mean() - step_N))
        before_N = mixture.tokens_per_expert
        mixture.tokens_per_expert = step_N if before_N is None else step_N + before_N
        mixture.step_tokens_per_expert = None


def pop_expert_load(model: nn.Module) -> list[list[float]]:
    """For each layer the share of choices that fell on each of its experts since the last call, in training."""
    shares = []
    for mixture in mixtures(model):
        if (tokens_per_expert := mixture.tokens_per_expert) is not None:
            shares.append([round(share, 4) for share in (tokens_per_expert / tokens_per_expert.sum()).tolist()])
            mixture.tokens_per_expert = None
    return shares


def imbalance(scores_XN: Tensor, chosen_XK: Tensor) -> Tensor:
    """N * sum over experts of f_i * p_i: 1 if all are used alike (https://arxiv.org/abs/2101.03961, section 2.2).

    f_i is the share of choices that fall on expert i, p_i its mean share of a token's scores.
    """
    count = scores_XN.shape[1]
    tokens_per_expert = torch.bincount(chosen_XK.flatten(), minlength=count) / chosen_XK.numel()
    share_N = (scores_XN / scores_XN.sum(-1, keepdim=True)).mean(dim=0)
    return count * (tokens_per_expert * share_N).sum()
