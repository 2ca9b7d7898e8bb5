"""The shape of a model: one frozen record. `sportsllm.models.hf_config` reads and writes it as config.json.

Imports neither torch nor any other large library: the device install reads it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.models import kinds

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

    def fields_used(self) -> dict[str, Any]:
        """The fields that this type reads, without those that are None: a config.json's `rope_scaling`."""
        names = ("rope_type", "factor", *ROPE_TYPES[self.rope_type])
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_TYPES = ", ".join(ROPE_TYPES)


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a LLaMA-family decoder. Names are Hugging Face's.

    `attention_bias` is a bias on q, k and v; `attention_output_bias` one on o (Llama sets both with
    one field, Qwen2 has only the first). `qk_norm` normalises each query and key head (Qwen3).
    `attention_kind` and `mlp_kind` name the two halves of a block, as `sportsllm.models.kinds` lists them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 2
    attention_kind: str = "grouped_query"
    mlp_kind: str = "swiglu"

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type == "int"):  # the sizes
            value = getattr(self, name)
            least = 2 if name == "max_position_embeddings" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"config: {name} is {value!r}; it must be a whole number of at least {least}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise UsageError(f"config: head_dim is {self.head_dim}; rotary embedding needs an even number")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"config: dropout is {self.dropout}; it must be in [0, 1)")
        if not (0 < self.rms_norm_eps < math.inf and 0 < self.rope_theta < math.inf):
            raise UsageError("config: rms_norm_eps and rope_theta must be greater than 0")
        for field, known in (("attention_kind", kinds.ATTENTION), ("mlp_kind", kinds.FEED_FORWARD)):
            if getattr(self, field) not in known:
                raise UsageError(f"config: {field} is {getattr(self, field)!r}; use one of {', '.join(known)}")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    def parameters_by_component(self) -> dict[str, int]:
        """Exact number of trained numbers in each part; they add up to `parameters`."""
        layers, hidden = self.num_hidden_layers, self.hidden_size
        sizes = {
            half: sum(matrix.numbers + matrix.bias * matrix.rows for matrix in kind.matrices(self))
            for half, kind in kinds.halves(self).items()
        }
        norms = sum(hidden + sum(v.size for v in kind.vectors(self)) for kind in kinds.halves(self).values())
        return {
            "embedding": self.vocab_size * hidden,
            "attention": layers * sizes["self_attn"],
            "feed_forward": layers * sizes["mlp"],
            "norms": layers * norms + hidden,
            "head": 0 if self.tie_word_embeddings else self.vocab_size * hidden,
        }

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        return sum(self.parameters_by_component().values())

    @property
    def block_parameters(self) -> int:
        """Parameters that are neither embedding nor head."""
        parts = self.parameters_by_component()
        return parts["attention"] + parts["feed_forward"] + parts["norms"]

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with some fields replaced, validated again."""
        return replace(self, **changes)
