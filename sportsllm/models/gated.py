"""Gated feed-forward: down(f(gate(x)) * up(x)), SwiGLU with f = silu and GeGLU with f = gelu, its tanh form
(https://arxiv.org/abs/2002.05202).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.config import ModelConfig


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

    def forward(self, half: Any, x_BTD: Tensor, rope: Any, documents: Any, cache: Any) -> Tensor:
        from torch.nn.functional import gelu, silu

        gate = half.gate_proj(x_BTD)
        gate = silu(gate) if self.activation == "silu" else gelu(gate, approximate="tanh")
        return cast("Tensor", half.down_proj(gate * half.up_proj(x_BTD)))
