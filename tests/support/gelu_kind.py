"""A kind of feed-forward that the program does not have, gelu by the error function: what adding one takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.nn.functional as F

from sportsllm.models.kinds import FEED_FORWARD, feed_forward
from sportsllm.models.language_model import FEED_FORWARD_MODULES
from sportsllm.models.layers import FeedForward
from sportsllm.models.sublayer import Sublayer

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

NAME = "erf_gelu"


def erf_gelu(config: ModelConfig) -> Sublayer:
    """Two matrices, always with biases."""
    found = feed_forward(config, "gelu", gated=False)
    up, down = (matrix._replace(bias=True) for matrix in found.matrices)
    return replace(found, matrices=(up, down), tensors=(up, *found.tensors[1:3], down))


@contextmanager
def registered() -> Iterator[str]:
    """The kind's name, known to the registries inside the `with` alone."""
    FEED_FORWARD[NAME] = erf_gelu
    FEED_FORWARD_MODULES[NAME] = lambda config: FeedForward(
        config.hidden_size, config.intermediate_size, F.gelu, True, gated=False
    )
    try:
        yield NAME
    finally:
        del FEED_FORWARD[NAME], FEED_FORWARD_MODULES[NAME]
