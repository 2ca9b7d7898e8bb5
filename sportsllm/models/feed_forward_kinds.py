"""The kinds of feed-forward: their matrices and the units that pruning may cut. Imports no torch.

The modules are in `layers.py` and `experts.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sportsllm.errors import UsageError
from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sportsllm.models.config import ModelConfig

ROUTER = "gate"
SHARED = "shared_experts"
_MOST = 2**12  # of experts, or their groups
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
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
                raise UsageError(
                    f"config: experts: {name} is {value!r}; it must be a whole number from {least} to {_MOST:,}"
                )
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


class Gated(Kind):
    """Three matrices around a gate; see `sportsllm.models.parts.Kind`."""

    def __init__(self, activation: Literal["silu", "gelu"]) -> None:
        self.activation = activation

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        return (
            Matrix("gate_proj", inner, hidden, "neuron", HIDDEN, HIDDEN, bias=bias),
            Matrix("up_proj", inner, hidden, "neuron", HIDDEN, HIDDEN, bias=bias),
            Matrix("down_proj", hidden, inner, HIDDEN, "neuron", "inner", True, bias, scale_source="up_proj"),
        )

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        return (Unit("neuron", "intermediate_size", config.intermediate_size),)

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """gate, f(gate), up and their product."""
        return 4 * (2 if mixed else 4) * config.intermediate_size

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        gate, up, down = self.matrices(config)
        inner = (config.intermediate_size,)
        product = Activation(f"{self.activation}(gate) * up", inner)
        return gate, up, Activation("gate", inner), Activation("up", inner), product, down


class Gelu(Kind):
    """Two matrices; see `sportsllm.models.parts.Kind`."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        return (
            Matrix("up_proj", inner, hidden, "neuron", HIDDEN, HIDDEN, bias=bias),
            Matrix("down_proj", hidden, inner, HIDDEN, "neuron", "inner", True, bias),
        )

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        return (Unit("neuron", "intermediate_size", config.intermediate_size),)

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """up and gelu(up)."""
        return 2 * (2 if mixed else 4) * config.intermediate_size

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        up, down = self.matrices(config)
        inner = (config.intermediate_size,)
        return up, Activation("up", inner), Activation("gelu(up)", inner), down


class Mixture(Kind):
    """The router, every expert's matrices and those of the shared ones; see `sportsllm.models.parts.Kind`."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        experts = config.chosen_experts
        router = Matrix(
            ROUTER, experts.count, config.hidden_size, "expert", HIDDEN, HIDDEN, bias=experts.choice_bias, router=True
        )
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
