"""Feed-forward without a gate, as in GPT-2: down(gelu(up(x))), gelu in its tanh form (https://arxiv.org/abs/1606.08415)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sportsllm.models.parts import HIDDEN, Activation, Kind, Matrix, Processor, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.config import ModelConfig


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

    def forward(self, half: Any, x_BTD: Tensor, rope: Any, documents: Any, cache: Any) -> Tensor:
        from torch.nn.functional import gelu

        return cast("Tensor", half.down_proj(gelu(half.up_proj(x_BTD), approximate="tanh")))
