"""A kind of feed-forward that the program does not have, gelu by the error function: what adding one takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from sportsllm.models.gelu import Gelu
from sportsllm.models.kinds import FEED_FORWARD
from sportsllm.models.parts import Matrix

if TYPE_CHECKING:
    from torch import Tensor

    from sportsllm.models.config import ModelConfig

NAME = "erf_gelu"


class ErfGelu(Gelu):
    """Two matrices, always with biases."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        return tuple(matrix._replace(bias=True) for matrix in super().matrices(config))

    def forward(self, half: Any, x_BTD: Tensor, rope: Any, documents: Any, cache: Any) -> Tensor:
        from torch.nn.functional import gelu

        return cast("Tensor", half.down_proj(gelu(half.up_proj(x_BTD))))


@contextmanager
def registered() -> Iterator[str]:
    """The kind's name, known to the registry inside the `with` alone."""
    FEED_FORWARD[NAME] = ErfGelu()
    try:
        yield NAME
    finally:
        del FEED_FORWARD[NAME]
