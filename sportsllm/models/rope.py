"""Rotary position table, shared by the PyTorch model and the ONNX graph (numpy only).

Source: RoFormer (https://arxiv.org/abs/2104.09864); llama3 scaling as published with Llama 3.1.
"""

import math

import numpy as np
import numpy.typing as npt

from sportsllm.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig, local: bool = False) -> npt.NDArray[np.float32]:
    """Angle per position of each pair of channels, shape (head_dim / 2,), float32 as `transformers` has it.

    `local` are those of sliding layers, in a model that has a base for them.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base, scaling = config.rope_theta, config.rope_scaling
    if local and config.rope_local_theta is not None:
        base, scaling = config.rope_local_theta, None
    inverse = 1.0 / base**exponent
    if scaling is not None and scaling.rope_type == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        wavelength = 2 * math.pi / inverse
        context = scaling.original_max_position_embeddings
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # Long waves are stretched by the whole factor, short ones not at all, those between in part.
        blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
        inverse = (1 - blend) * inverse / scaling.factor + blend * inverse
    return inverse.astype(np.float32)


def rope_tables(
    config: ModelConfig, length: int, local: bool = False
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosine and sine tables, each (length, head_dim / 2) float32, for half-split (Hugging Face) rotation.

    `local` as in `inverse_frequencies`.
    """
    positions = np.arange(length, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(config, local)[None, :]
    return np.cos(angles), np.sin(angles)
