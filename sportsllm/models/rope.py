"""Rotary positions and how they are stretched: the table shared by the PyTorch model and the ONNX graph (numpy only).

Sources: RoFormer (https://arxiv.org/abs/2104.09864); llama3 scaling as published with Llama 3.1; YaRN
(https://arxiv.org/abs/2309.00071) and LongRoPE (https://arxiv.org/abs/2402.13753), as `transformers` computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
"""Ways to stretch the rotary table, and what each reads of a `RopeScaling` beside the factor."""
LONGEST = 2**24
"""Positions are float32, which counts up to here."""
_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary table: `linear`, `llama3` (Llama 3.1, by wavelength), `yarn` or `longrope`.

    Names and defaults are Hugging Face's. `attention_factor` None follows from the factor and the two `mscale`.
    longrope divides each pair's angle by its `long_factor` if the model's context exceeds the original one, else by its
    `short_factor`.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise UsageError(f"rope_scaling type {self.rope_type!r} is not supported; use none or {known}")
        if not 1 <= self.factor < math.inf:
            raise UsageError(f"rope_scaling: factor is {self.factor}; it must be at least 1")
        if self.original_max_position_embeddings < 2:  # as of every context; longrope divides by its logarithm
            raise UsageError("rope_scaling: original_max_position_embeddings must be at least 2")
        if not 0 < self.beta_slow < self.beta_fast or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UsageError("rope_scaling: needs 0 < beta_slow < beta_fast and 0 < low_freq_factor < high_freq_factor")
        factors = self.attention_factor, self.mscale, self.mscale_all_dim
        if any(value is not None and not 0 < value < math.inf for value in factors):
            raise UsageError("rope_scaling: attention_factor, mscale and mscale_all_dim must be above 0")
        divisors = self.short_factor, self.long_factor
        if self.rope_type == "longrope" and not (divisors[0] and len(divisors[0]) == len(divisors[1])):
            raise UsageError("rope_scaling: longrope needs short_factor and long_factor, a value for each rotary pair")
        if not all(0 < value < math.inf for each in divisors for value in each):
            raise UsageError("rope_scaling: short_factor and long_factor must be above 0")

    @property
    def score_factor(self) -> float:
        """YaRN's factor of scores of latent attention, (1 + 0.1 mscale_all_dim ln(factor)) ** 2 (DeepSeek)."""
        if self.rope_type != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return (1 + 0.1 * self.mscale_all_dim * math.log(self.factor)) ** 2

    def fields_used(self) -> dict[str, object]:
        """The fields that this type reads, without those that are None: a config.json's `rope_scaling`."""
        names = ("rope_type", "factor", *ROPE_TYPES[self.rope_type])
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def inverse_frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """Angle per position of each pair of channels, shape (rotary_size / 2,), float32 as `transformers` has it."""
    exponent = np.arange(0, config.rotary_size, 2, dtype=np.float64) / config.rotary_size
    inverse, scaling = 1.0 / config.rope_theta**exponent, config.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        longer = config.max_position_embeddings > scaling.original_max_position_embeddings
        inverse = inverse / np.asarray(scaling.long_factor if longer else scaling.short_factor)
    elif scaling is not None:
        kept = _share_kept(inverse, scaling, config)
        inverse = (1 - kept) * inverse / scaling.factor + kept * inverse
    return inverse.astype(np.float32)


def _share_kept(inverse: _Array, scaling: RopeScaling, config: ModelConfig) -> _Array:
    """How much of each pair's angle stays, 1 for short waves and 0, stretched by the whole factor, for long ones.

    With L the original context and r = L / wavelength the turns that a pair makes in it, the share is linear between
    two ends: for `llama3` in r, from `low_freq_factor` to `high_freq_factor`; for `yarn` in the pair's number, between
    those of `beta_fast` and `beta_slow` turns. `linear` keeps nothing.
    """
    if scaling.rope_type == "linear":
        return np.zeros_like(inverse)
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept: _Array = np.clip((context * inverse / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
        return kept
    if config.rope_theta <= 1:
        raise UsageError(f"config: rope_theta is {config.rope_theta}; YaRN needs one above 1")

    def pair_of(turns: float) -> float:
        return config.rotary_size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_size - 1)
    width = last - first or 0.001  # as `transformers` has it
    stretched: _Array = np.clip((np.arange(len(inverse)) - first) / width, 0.0, 1.0)
    return 1.0 - stretched


def attention_factor(scaling: RopeScaling | None) -> float:
    """What YaRN multiplies cosine and sine by, and so, squared, every attention score: 1 + 0.1 ln(factor) by default.

    With both `mscale` (of DeepSeek) it is the ratio of 1 + 0.1 mscale ln(factor) of the two. Of longrope it is
    sqrt(1 + ln(factor) / ln(original context)).
    """
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return (1 + scaling.mscale * growth) / (1 + scaling.mscale_all_dim * growth)
    return 1 + growth


def rope_constants(config: ModelConfig, local: bool = False) -> tuple[npt.NDArray[np.float32], np.float32]:
    """`inverse_frequencies`, and what cosine and sine are multiplied by.

    `local` are those of sliding layers, which are not stretched in a model that has a base for them.
    """
    if local and config.rope_local_theta is not None:
        config = config.with_changes(rope_theta=config.rope_local_theta, rope_scaling=None)
    return inverse_frequencies(config), np.float32(attention_factor(config.rope_scaling))


def rope_tables(config: ModelConfig, local: bool = False) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosine and sine tables, each (context, rotary_size / 2) float32, for half-split (Hugging Face) rotation.

    YaRN's attention factor is in them; `local` as in `rope_constants`.
    """
    positions = np.arange(config.max_position_embeddings, dtype=np.float32)
    frequencies, factor = rope_constants(config, local)
    angles = positions[:, None] * frequencies[None, :]
    return np.cos(angles) * factor, np.sin(angles) * factor


def with_rope_scaling(config: ModelConfig, scaling: str) -> ModelConfig:
    """The model with a context that is longer by a factor, `yarn:4`.

    `longrope:4` is for models trained with longrope, and multiplies the original context.

    Raises:
        UsageError: the text is something else, the model is stretched already, or the context would be too long.
    """
    kind, _, number = scaling.partition(":")
    example = "give TYPE:FACTOR, for example yarn:4; types are yarn and longrope"
    if kind not in ("yarn", "longrope"):
        raise UsageError(f"--rope-scaling {scaling}: {kind!r} is not a type; {example}")
    try:
        factor = float(number)
    except ValueError:
        raise UsageError(f"--rope-scaling {scaling}: no factor; {example}") from None
    if config.position_kind != "rotary":
        positions = "learned positions, which cannot be stretched" if config.positions else "no positions to stretch"
        raise UsageError(f"--rope-scaling {scaling}: the model has {positions}")
    if config.attention_kind not in ("grouped_query", "selected"):
        raise UsageError(
            f"--rope-scaling {scaling}: {config.attention_kind} attention cannot be stretched; leave it out"
        )
    context = config.max_position_embeddings
    if not 1 <= factor <= LONGEST / context:
        most = f"from 1 to {LONGEST // context:,}, for at most {LONGEST:,} positions of float32"
        raise UsageError(f"--rope-scaling {scaling}: the factor of a context of {context:,} tokens is {most}")
    if kind == "longrope":
        trained = config.rope_scaling
        if trained is None or trained.rope_type != kind:
            raise UsageError(f"--rope-scaling {scaling}: longrope is for models that were trained with it; use yarn")
        if not 1 <= factor <= trained.factor:
            raise UsageError(f"--rope-scaling {scaling}: the model's factor is from 1 to {trained.factor:g}")
        return config.with_changes(max_position_embeddings=int(factor * trained.original_max_position_embeddings))
    if config.rope_scaling is not None:
        old = f"{config.rope_scaling.rope_type}:{config.rope_scaling.factor:g}"
        raise UsageError(
            f"--rope-scaling {scaling}: the model is stretched by {old} already, to {context:,} tokens; start from the "
            "unstretched checkpoint"
        )
    found = RopeScaling(kind, factor, original_max_position_embeddings=context)
    return config.with_changes(max_position_embeddings=int(factor * context), rope_scaling=found)
