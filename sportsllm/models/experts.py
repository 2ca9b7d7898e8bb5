"""Mixture of experts: a router sends each token to a few of many feed-forward parts
(https://arxiv.org/abs/1701.06538; Mixtral, https://arxiv.org/abs/2401.04088; DeepSeek, https://arxiv.org/abs/2412.19437).

    scores  = softmax(router(x)) or sigmoid(router(x))
    chosen  = the highest `active` of scores + bias, in the best groups of experts
    weights = the chosen scores: as they are, divided by their sum, or their softmax; times `scale`
    y       = sum over chosen e of weights_e * expert_e(x)  +  shared(x)

An expert is down(silu(gate(x)) * up(x)), or down(silu(up(x))) with biases where it has no gate.
Shape suffixes: B sequences, T tokens, D hidden_size, X = B * T, N experts, K active ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sportsllm.errors import UsageError
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from sportsllm.models.config import ModelConfig

ROUTER = "gate"
SHARED = "shared_experts"
ROUTERS, ROUTER_WEIGHTS = ("softmax", "sigmoid"), ("scores", "sum", "softmax")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: what a config says of it.

    Attributes:
        count, active: routed experts, and how many of them a token is sent to.
        shared: experts that every token is sent to.
        router: `softmax` or `sigmoid`, how scores are made.
        weights: of the chosen: their `scores`, these divided by their `sum`, or their `softmax`.
        scale: what the weights are multiplied by.
        groups, active_groups: into how many groups experts are divided, and how many of them are open to a token.
        choice_bias: whether the router has a bias for the choice alone, not for the weights.
        gated: whether an expert is SwiGLU; else silu between two matrices with biases.
        balance_loss: factor of the load-balancing loss in training.
    """

    count: int
    active: int
    shared: int = 0
    router: str = "softmax"
    weights: str = "sum"
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    choice_bias: bool = False
    gated: bool = True
    balance_loss: float = 0.01

    def __post_init__(self) -> None:
        for name in ("count", "active", "shared", "groups", "active_groups"):
            value, least = getattr(self, name), 0 if name == "shared" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"config: experts: {name} is {value!r}; it must be a whole number of at least {least}")
        if not (math.isfinite(self.scale) and 0 <= self.balance_loss < math.inf):
            raise UsageError(f"config: experts: scale is {self.scale}, balance_loss {self.balance_loss}; correct them")
        if not 1 <= self.active <= self.count:
            raise UsageError(f"config: {self.active} experts a token of {self.count}; choose 1 to {self.count}")
        if self.router not in ROUTERS or self.weights not in ROUTER_WEIGHTS:
            raise UsageError(
                f"config: router {self.router!r} with weights {self.weights!r} is not known; use "
                f"{' or '.join(ROUTERS)} with {', '.join(ROUTER_WEIGHTS)}"
            )
        each = self.count // self.groups
        possible = self.active_groups <= self.groups and self.active <= self.active_groups * each
        if self.count % self.groups or not possible or (self.groups > 1 and each < 2):
            raise UsageError(
                f"config: {self.count} experts in {self.groups} groups, {self.active_groups} of them open for "
                f"{self.active} a token: groups need two experts each, and the open ones as many as a token is sent to"
            )


class MixtureOfExperts(Kind):
    """The router, every expert's matrices and those of the shared ones; see `sportsllm.models.parts.Kind`."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        experts = config.chosen_experts
        router = Matrix(ROUTER, experts.count, config.hidden_size, "expert", HIDDEN, HIDDEN, bias=experts.choice_bias)
        found = [router]
        for name in expert_names(experts):
            found += self._expert(config, name)
        return tuple(found)

    def _expert(self, config: ModelConfig, name: str) -> tuple[Matrix, ...]:
        """One expert's matrices; all shared ones are one expert that is wider."""
        experts, hidden, unit = config.chosen_experts, config.hidden_size, _unit(name)
        inner, routed = config.intermediate_size, name != SHARED
        if not routed:
            inner *= experts.shared
        read, bias = HIDDEN, not experts.gated
        up = Matrix(f"{name}.up_proj", inner, hidden, unit, HIDDEN, read, bias=bias)
        source = up.name if experts.gated else None
        down = Matrix(f"{name}.down_proj", hidden, inner, HIDDEN, unit, f"{name}.inner", True, bias, source, routed)
        gate = (Matrix(f"{name}.gate_proj", inner, hidden, unit, HIDDEN, read),) if experts.gated else ()
        return (*gate, up, down)

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        """The neurons of each expert, which are cut to the same number; the experts themselves stay."""
        experts, inner = config.chosen_experts, config.intermediate_size
        found = [Unit("expert", "experts", experts.count)]
        for name in expert_names(experts):
            found.append(Unit(_unit(name), "intermediate_size", inner, experts.shared if name == SHARED else 1))
        return tuple(found)

    def active_parameters(self, config: ModelConfig) -> int:
        experts = config.chosen_experts
        router, *others = self.matrices(config)
        routed = sum(m.numel for m in others if not m.name.startswith(SHARED)) // experts.count * experts.active
        return router.numel + routed + sum(m.numel for m in others if m.name.startswith(SHARED))

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """Of each chosen expert its input, inner tensors and output, and the scores of all."""
        experts, a = config.chosen_experts, (2 if mixed else 4)
        inner = (4 if experts.gated else 2) * a * config.intermediate_size
        return experts.active * (2 * a * config.hidden_size + inner) + experts.shared * inner + 3 * 4 * experts.count

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        experts = config.chosen_experts
        router, *others = self.matrices(config)
        scores = Activation("scores of experts", (experts.count,))
        weights = Activation("weights of the chosen", (experts.active,))
        inner = Activation("inner, of each chosen", (experts.active, config.intermediate_size))
        read, made = ([m for m in others if m.writes_residual == last] for last in (False, True))
        return (router, scores, weights, *read, inner, *made)

    def forward(self, half: Any, x_BTD: Tensor, rope: Any, documents: Any, cache: Any) -> Tensor:
        import torch

        experts = half.config.chosen_experts
        x_XD = x_BTD.flatten(0, 1)
        scores_XN, chosen_XK, weights_XK = route(half, x_XD)
        if half.training and experts.balance_loss:
            half.auxiliary_loss = experts.balance_loss * imbalance(scores_XN, chosen_XK)
        # Tokens in the order of their experts, so that each expert reads one piece.
        order = torch.argsort(chosen_XK.flatten(), stable=True)
        used_N = torch.bincount(chosen_XK.flatten(), minlength=experts.count)
        if half.training:
            half.step_N = used_N + getattr(half, "step_N", 0)
        rows = order // experts.active
        pieces = torch.split(x_XD[rows], used_N.tolist())
        made = [run_expert(half, name, piece) for name, piece in zip(routed_names(experts), pieces, strict=True)]
        weighted = torch.cat(made) * weights_XK.flatten()[order][:, None]
        y_XD = torch.zeros_like(x_XD, dtype=weighted.dtype).index_add(0, rows, weighted)
        if experts.shared:
            y_XD = y_XD + run_expert(half, SHARED, x_XD)
        return y_XD.view(x_BTD.shape).to(x_BTD.dtype)


def expert_names(experts: Experts) -> list[str]:
    """The modules of the routed experts, then of the shared ones."""
    return routed_names(experts) + [SHARED] * (experts.shared > 0)


def unused_line(unused: Mapping[int, Sequence[int]]) -> str | None:
    """The experts that no token was sent to, by layer, in a line; None where all were used."""
    where = "; ".join(f"layer {layer}: {', '.join(map(str, experts))}" for layer, experts in unused.items() if experts)
    return f"experts that no token was sent to: {where}" if where else None


def least_bits(name: str) -> int:
    """The fewest bits that a matrix is rounded to, by its name in a feed-forward.

    A choice that rounding turns is another model, and what every token reads is a small part of a mixture.
    """
    return 8 if name == ROUTER or name.startswith(f"{SHARED}.") else 0


def routed_names(experts: Experts) -> list[str]:
    """The modules of the routed experts."""
    return [f"experts.{number}" for number in range(experts.count)]


def _unit(name: str) -> str:
    return f"neuron of {name}"


def run_expert(half: Any, name: str, x_XD: Tensor) -> Tensor:
    """One expert's output for some tokens, perhaps none."""
    return cast("Tensor", half.get_submodule(name).down_proj(expert_neurons(half, name, x_XD)))


def expert_neurons(half: Any, name: str, x_XD: Tensor) -> Tensor:
    """What an expert's down_proj reads."""
    from torch.nn.functional import silu

    expert = half.get_submodule(name)
    if half.config.chosen_experts.gated:
        return silu(expert.gate_proj(x_XD)) * cast("Tensor", expert.up_proj(x_XD))
    return silu(expert.up_proj(x_XD))


def route(half: Any, x_XD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (X, N) of the experts, the chosen ones (X, K) and their weights (X, K), in float32."""
    import torch

    experts, router = half.config.chosen_experts, half.get_submodule(ROUTER)
    with torch.autocast(x_XD.device.type, enabled=False):
        logits_XN = router(x_XD.to(router.weight.dtype)).float()
        if router.bias is not None:  # it is of the choice alone
            logits_XN = logits_XN - router.bias
        scores_XN = logits_XN.softmax(-1) if experts.router == "softmax" else logits_XN.sigmoid()
        ranked_XN = scores_XN.detach() if router.bias is None else scores_XN.detach() + router.bias.float()
        if experts.groups > 1:
            by_group = ranked_XN.view(len(x_XD), experts.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(experts.active_groups, dim=-1).indices
            open_XG = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=x_XD.device).scatter(1, best, True)
            ranked_XN = by_group.masked_fill(~open_XG[..., None], 0.0).flatten(1)
        chosen_XK = ranked_XN.topk(experts.active, dim=-1).indices
        weights_XK = scores_XN.gather(1, chosen_XK)
        if experts.weights == "softmax":
            weights_XK = weights_XK.softmax(-1)
        elif experts.weights == "sum":
            weights_XK = weights_XK / weights_XK.sum(-1, keepdim=True)
        return scores_XN, chosen_XK, weights_XK * experts.scale


BIAS_STEP = 1e-3
"""Of the rule by which a router's bias moves (https://arxiv.org/abs/2408.15664)."""


def balance_biases(model: Any) -> None:
    """After a training step: experts that got less than their share of its tokens are chosen more easily, others less.

    The step's counts are added to those that `pop_expert_load` reads.
    """
    import torch

    for block in model.model.layers:
        if not hasattr(block.mlp, "step_N"):
            continue
        router, step_N = block.mlp.get_submodule(ROUTER), block.mlp.step_N
        if router.bias is not None:
            with torch.no_grad():
                router.bias += BIAS_STEP * torch.sign(step_N.float().mean() - step_N)
        block.mlp.used_N = step_N + getattr(block.mlp, "used_N", 0)
        del block.mlp.step_N


def pop_expert_load(model: Any) -> list[list[float]]:
    """For each layer the share of choices that fell on each of its experts since the last call, in training."""
    shares = []
    for block in model.model.layers:
        if hasattr(block.mlp, "used_N"):
            used_N = block.mlp.used_N
            shares.append([round(share, 4) for share in (used_N / used_N.sum()).tolist()])
            del block.mlp.used_N
    return shares


def imbalance(scores_XN: Tensor, chosen_XK: Tensor) -> Tensor:
    """N * sum over experts of f_i * p_i: 1 where all are used alike (https://arxiv.org/abs/2101.03961, section 2.2).

    f_i is the share of choices that fall on expert i, p_i its mean share of a token's scores.
    """
    import torch

    count = scores_XN.shape[1]
    used_N = torch.bincount(chosen_XK.flatten(), minlength=count) / chosen_XK.numel()
    share_N = (scores_XN / scores_XN.sum(-1, keepdim=True)).mean(dim=0)
    return count * (used_N * share_N).sum()
