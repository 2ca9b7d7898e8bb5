"""How a rotary table is stretched for longer texts, as a config says; `sportsllm.models.rope` computes the table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sportsllm.errors import UsageError

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip
"""Ways to stretch the rotary table, and what each reads of a `RopeScaling` beside the factor."""


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary table: `linear`, `llama3` (Llama 3.1, by wavelength) or `yarn`.

    Names and defaults are Hugging Face's. `attention_factor` None follows from the factor and the two `mscale`.
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

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UsageError(f"rope_scaling type {self.rope_type!r} is not supported; use none or {_TYPES}")
        if not 1 <= self.factor < math.inf:
            raise UsageError(f"rope_scaling: factor is {self.factor}; it must be at least 1")
        if self.original_max_position_embeddings < 1:
            raise UsageError("rope_scaling: original_max_position_embeddings must be at least 1")
        if not 0 < self.beta_slow < self.beta_fast or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UsageError("rope_scaling: needs 0 < beta_slow < beta_fast and 0 < low_freq_factor < high_freq_factor")
        if any(value is not None and value <= 0 for value in (self.attention_factor, self.mscale, self.mscale_all_dim)):
            raise UsageError("rope_scaling: attention_factor, mscale and mscale_all_dim must be above 0")

    @property
    def score_factor(self) -> float:
        """YaRN's factor of scores of latent attention, (1 + 0.1 mscale_all_dim ln(factor)) ** 2 (DeepSeek)."""
        if self.rope_type != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return (1 + 0.1 * self.mscale_all_dim * math.log(self.factor)) ** 2

    def fields_used(self) -> dict[str, Any]:
        """The fields that this type reads, without those that are None: a config.json's `rope_scaling`."""
        names = ("rope_type", "factor", *ROPE_TYPES[self.rope_type])
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_TYPES = ", ".join(ROPE_TYPES)
