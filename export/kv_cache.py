"""The INT8 key/value cache: one scale a channel of a layer's keys and of its values, as GroupQueryAttention reads them.

The operator stores round(x / scale), from -128 to 127, and attends to what that stands for, in the prompt too.
Keys are stored after rotation. Channels differ far more from each other than tokens do, in keys above all, which is why
a scale belongs to a channel (https://arxiv.org/abs/2402.02750).
Shape suffixes: L layers, B sequences, K key/value heads, S tokens, E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sportsllm.calibration import calibration_samples
from sportsllm.checkpoint import load_checkpoint
from sportsllm.config import ModelConfig
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.model import KVCache, SportsLLM
from sportsllm.stages import manifest_setting
from sportsllm.tokenizer import load_tokenizer

PRECISIONS = ("fp32", "int8")
SAMPLES, SAMPLE_TOKENS = 16, 512
# Ranges that are tried, as shares of the largest number seen; more than all of it leaves room for what was not.
_SHARES = torch.linspace(0.4, 1.2, 33).tolist()
_TOP = 127.0


@dataclass(frozen=True)
class CacheScales:
    """What one step of a stored number is worth, each (L, K, E) float32, above 0."""

    keys: Tensor
    values: Tensor


class RoundedCache(KVCache):
    """A float32 cache that gives back what an INT8 one would have kept: the reference of the exported graph."""

    def __init__(self, config: ModelConfig, length: int, scales: CacheScales) -> None:
        super().__init__(config, 1, length)
        self._scales = scales

    def append(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._scales.keys[layer][None, :, None], self._scales.values[layer][None, :, None]
        return super().append(layer, _rounded(k_BKTE, keys), _rounded(v_BKTE, values))


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), -_TOP - 1, _TOP) * scale


def cache_scales(checkpoint: Path, calibration: Sequence[Path]) -> CacheScales:
    """Scales for a checkpoint.

    Args:
        checkpoint: packed or not; its own keys and values are what is stored.
        calibration: text files, never held-out ones; those that the checkpoint was made from if there are none.

    Raises:
        UsageError: no text is given, and the checkpoint does not name any.
        ArtifactError: there is no text in the files.
    """
    files = list(calibration) or [Path(name) for name in manifest_setting(checkpoint, "corpus") or []]
    if not files:
        raise UsageError(
            f"--kv-cache int8 needs calibration text, and {checkpoint} does not say what it was made from; "
            "give --calibration FILE"
        )
    model = load_checkpoint(checkpoint)
    samples = calibration_samples(files, load_tokenizer(checkpoint, model.config), model.config, None, SAMPLE_TOKENS)
    return measured_scales(model, samples[:SAMPLES])


@torch.inference_mode()
def measured_scales(model: SportsLLM, samples: Sequence[Tensor]) -> CacheScales:
    """The scales of least squared error over sample texts, a channel at a time.

    Args:
        model: read only.
        samples: token ids, each (1, S).

    Raises:
        ArtifactError: there are no samples.
    """
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    seen: list[tuple[Tensor, Tensor]] = []
    for tokens in samples:
        cache = KVCache(model.config, 1, tokens.shape[1])
        model.hidden(tokens, cache=cache)
        seen.append((cache.keys[:, 0], cache.values[:, 0]))
    layers = range(model.config.num_hidden_layers)
    keys, values = (
        torch.stack([_best_scales(torch.cat([pair[part][layer] for pair in seen], dim=1)) for layer in layers])
        for part in (0, 1)
    )
    return CacheScales(keys, values)


def _best_scales(x_KSE: Tensor) -> Tensor:
    """(K, E)."""
    largest_KE = x_KSE.abs().amax(dim=1)
    full_KE = torch.where(largest_KE == 0, torch.ones_like(largest_KE), largest_KE) / _TOP
    best_KE, least_KE = full_KE, torch.full_like(full_KE, torch.inf)
    for share in _SHARES:
        tried_KE = full_KE * share
        error_KE = (_rounded(x_KSE, tried_KE[:, None]) - x_KSE).square().sum(dim=1)
        best_KE = torch.where(error_KE < least_KE, tried_KE, best_KE)
        least_KE = torch.minimum(least_KE, error_KE)
    return best_KE
