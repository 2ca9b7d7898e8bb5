"""Rounded caches. The INT8 one has a scale per channel of what each layer caches, keys and values as
GroupQueryAttention reads them; a float16 one needs none.

The operator stores round(x / scale), from -128 to 127, and attends to that times the scale, in the prompt too. Keys are
stored after rotation. Scales are per channel because channels differ far more from each other than tokens do, most of
all in keys (https://arxiv.org/abs/2402.02750). Latent vectors are stored the same way.
Shape suffixes: L layers, B sequences, K key/value heads, S tokens, E head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import StoredModel, check_names
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.inference.calibration import CalibrationText
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, block_state
from sportsllm.models.language_model import first_positions, rope_of
from sportsllm.models.layers import KVCache
from sportsllm.process_memory import give_back

SAMPLES = 16
# Ranges to try, as shares of the largest number seen; those above 1 leave room for larger ones.
_SHARES = torch.linspace(0.4, 1.2, 33).tolist()
_TOP = 127.0


@dataclass(frozen=True)
class CacheScales:
    """Scales of an INT8 cache.

    Attributes:
        states: one tensor for each that is cached, in its order: (L, ..., E) float32, above 0, the shape of a token's
            part; keys and values, (L, K, E), or one of latent vectors, (L, E).
        moved: share of its size by which each value is moved at random before it is rounded; see `export.parity`.
    """

    states: tuple[Tensor, ...]
    moved: float = 0.0

    def rounded(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """A layer's new states, (B, ..., S, E) each, as an INT8 cache returns them."""
        if self.moved:
            random = torch.Generator().manual_seed(layer)
            new = tuple(x * (1 + self.moved * torch.randn(x.shape, generator=random)) for x in new)
        return tuple(_rounded(x, scale[layer][..., None, :]) for x, scale in zip(new, self.states, strict=True))


@dataclass(frozen=True)
class HalfCache:
    """A float16 cache."""

    def rounded(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """A layer's new states as a float16 cache returns them."""
        return tuple(x.half().float() for x in new)


Rounding = CacheScales | HalfCache
"""How a cache rounds the states that are written into it."""


class RoundedCache(KVCache):
    """A float32 cache that returns what a rounded one would: the reference of the exported graph."""

    def __init__(self, config: ModelConfig, length: int, rounding: Rounding) -> None:
        super().__init__(config, 1, length)
        self._rounding = rounding

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        return super().append(layer, *self._rounding.rounded(layer, *new))


class LayerCache(KVCache):
    """The cache of a single layer that reads one text at once, for layers that are in memory one by one.

    Attributes:
        states: what the layer caches of each token; keys and values, (1, K, S, E), of grouped-query attention.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.length = 0

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        self.states = new
        return new


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), -_TOP - 1, _TOP) * scale


def cache_scales(checkpoint: Path, text: CalibrationText) -> CacheScales:
    """Scales for a checkpoint, packed or not, measured on its own keys and values, one layer at a time in memory.

    Raises:
        ArtifactError: there is no text in the files.
    """
    model = StoredModel(TensorFiles(checkpoint), config := load_config(checkpoint))
    check_names(model.tensors, config)
    samples = text.read(checkpoint, config, SAMPLES)
    states = list(model.first_states(model.table(EMBEDDING), samples))
    return measure_scales(config, map(model.block, range(config.num_hidden_layers)), states)


@torch.inference_mode()
def measure_scales(config: ModelConfig, blocks: Iterable[nn.Module], states: list[Tensor]) -> CacheScales:
    """The scales of least squared error over what each layer caches of sample texts, a channel at a time.

    Args:
        config, blocks: the model's shape and its layers, one of which is in use at a time.
        states: the embedded samples, (1, S, D) each; overwritten.

    Raises:
        ArtifactError: there are no samples.
    """
    if not states:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    rope = rope_of(config)
    found: list[list[Tensor]] = [[] for _ in block_state(config)]
    for block in blocks:
        seen = []
        for place, x_1SD in enumerate(states):
            cache = LayerCache()
            states[place] = block(x_1SD, first_positions(rope, x_1SD), None, cache)
            seen.append(cache)
        for part, scales in enumerate(found):
            kept = torch.cat([cache.states[part][0] for cache in seen], dim=-2)  # (K, S, E) or (S, E)
            heads = kept.view(-1, *kept.shape[-2:])
            scale_KE = torch.stack([_best_scales(head_SE) for head_SE in heads])  # few copies at once
            scales.append(scale_KE.view(*kept.shape[:-2], -1))
        give_back()
    return CacheScales(tuple(torch.stack(layers) for layers in found))


def _best_scales(x_SE: Tensor) -> Tensor:
    """(E,) the scales of least squared error."""
    largest_E = x_SE.abs().amax(dim=0)
    full_E = torch.where(largest_E == 0, 1.0, largest_E) / _TOP
    best_E, least_E = full_E, torch.full_like(full_E, torch.inf)
    for share in _SHARES:
        tried_E = full_E * share
        error_E = (_rounded(x_SE, tried_E) - x_SE).square().sum(dim=0)
        best_E = torch.where(error_E < least_E, tried_E, best_E)
        least_E = torch.minimum(least_E, error_E)
    return best_E
