"""A kind of feed-forward that the program does not have, gelu by the error function: what adding one takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.nn.functional as F

from sportsllm.models.feed_forward_kinds import Gelu
from sportsllm.models.kinds import FEED_FORWARD
from sportsllm.models.language_model import FEED_FORWARD_MODULES
from sportsllm.models.layers import PlainMLP
from sportsllm.models.parts import Matrix

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

NAME = "erf_gelu"


class ErfGelu(Gelu):
    """Two matrices, always with biases."""

    def matrices(self, config: ModelConfig) -> tuple[Matrix, ...]:
        return tuple(matrix._replace(bias=True) for matrix in super().matrices(config))


@contextmanager
def registered() -> Iterator[str]:
    """The kind's name, known to the registries inside the `with` alone."""
    FEED_FORWARD[NAME] = ErfGelu()
    FEED_FORWARD_MODULES[NAME] = lambda config: PlainMLP(config.hidden_size, config.intermediate_size, F.gelu, True)
    try:
        yield NAME
    finally:
        del FEED_FORWARD[NAME], FEED_FORWARD_MODULES[NAME]
