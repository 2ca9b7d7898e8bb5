"""A second kind of feed-forward, down(gelu(up(x))) with biases: what adding one takes, for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from sportsllm.models.kinds import FEED_FORWARD
from sportsllm.models.parts import HIDDEN, Activation, Matrix, Processor, State, Unit, Vector

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.config import ModelConfig

NAME = "erf_gelu"


class Gelu:
    """Two matrices with biases, as in GPT-2; see `sportsllm.models.parts.Kind`."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        hidden, inner = config.hidden_size, config.intermediate_size
        return (
            Matrix("up_proj", inner, hidden, "neuron", HIDDEN, HIDDEN, bias=True),
            Matrix("down_proj", hidden, inner, HIDDEN, "neuron", "inner", writes_residual=True, bias=True),
        )

    def vectors(self, config: ModelConfig) -> tuple[Vector, ...]:
        return ()

    def units(self, config: ModelConfig) -> tuple[Unit, ...]:
        return (Unit("neuron", "intermediate_size", config.intermediate_size),)

    def state(self, config: ModelConfig) -> tuple[State, ...]:
        return ()

    def mixing_macs(self, config: ModelConfig, depth: int) -> int:
        return 0

    def activation_bytes(self, config: ModelConfig, mixed: bool, processor: Processor) -> int:
        """up and gelu(up)."""
        return 2 * (2 if mixed else 4) * config.intermediate_size

    def tensors(self, config: ModelConfig) -> tuple[Matrix | Activation, ...]:
        up, down = self.matrices(config)
        inner = (config.intermediate_size,)
        return up, Activation("up", inner), Activation("gelu(up)", inner), down

    def forward(self, half: Any, x_BTD: Tensor, rope: Any, documents: Any, cache: Any) -> Tensor:
        from torch.nn.functional import gelu

        return cast("Tensor", half.down_proj(gelu(half.up_proj(x_BTD))))


@contextmanager
def registered() -> Iterator[str]:
    """The kind's name, known to the registry inside the `with` alone."""
    FEED_FORWARD[NAME] = Gelu()
    try:
        yield NAME
    finally:
        del FEED_FORWARD[NAME]
