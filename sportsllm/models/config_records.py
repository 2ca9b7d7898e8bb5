"""Records inside a `ModelConfig`: rotary scaling, experts and token selection. Imports no large library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

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


def check_size(name: str, value: object, least: int = 1, most: int = 2**20) -> None:
    """Refuse what is no whole number in a range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"config: {name} is {value!r}; it must be a whole number from {least} to {most:,}")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse what is none of the known values."""
    if value not in known:
        raise UsageError(f"config: {name} is {value!r}; use one of {', '.join(known)}")


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
            known = ", ".join(ROPE_TYPES)
            raise UsageError(f"rope_scaling type {self.rope_type!r} is not supported; use none or {known}")
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

    def fields_used(self) -> dict[str, object]:
        """The fields that this type reads, without those that are None: a config.json's `rope_scaling`."""
        names = ("rope_type", "factor", *ROPE_TYPES[self.rope_type])
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes:
        count, active: routed experts, and how many of them a token is sent to.
        shared: experts that every token is sent to.
        router: `softmax` or `sigmoid`, how scores are made.
        weights: of the chosen: their `scores`, these divided by their `sum`, or their `softmax`.
        scale: what the weights are multiplied by.
        groups, active_groups: into how many groups experts are divided, and how many of them are open to a token.
        choice_bias: whether the router has a bias for the choice alone, not for the weights.
        gated: whether an expert is SwiGLU; else silu between two matrices with biases.
        balance_loss: factor of the load-balancing loss in training.
    """

    count: int
    active: int
    shared: int = 0
    router: str = "softmax"
    weights: str = "sum"
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    choice_bias: bool = False
    gated: bool = True
    balance_loss: float = 0.01

    def __post_init__(self) -> None:
        for name in ("count", "active", "shared", "groups", "active_groups"):
            check_size(f"experts: {name}", getattr(self, name), int(name != "shared"), 2**12)
        check_choice("experts: router", self.router, ("softmax", "sigmoid"))
        check_choice("experts: weights", self.weights, ("scores", "sum", "softmax"))
        if not (math.isfinite(self.scale) and 0 <= self.balance_loss < math.inf):
            raise UsageError(f"config: experts: scale is {self.scale}, balance_loss {self.balance_loss}; correct them")
        if not 1 <= self.active <= self.count:
            raise UsageError(f"config: {self.active} experts a token of {self.count}; choose 1 to {self.count}")
        each = self.count // self.groups
        possible = self.active_groups <= self.groups and self.active <= self.active_groups * each
        if self.count % self.groups or not possible or (self.groups > 1 and each < 2):
            raise UsageError(
                f"config: {self.count} experts in {self.groups} groups, {self.active_groups} of them open for "
                f"{self.active} a token: groups need two experts each, and the open ones as many as a token is sent to"
            )


@dataclass(frozen=True)
class Selection:
    """How many tokens attention selects (experimental), in blocks of what size, and by what indexer.

    Attributes:
        tokens: that a query attends to at most, itself included.
        block: consecutive tokens that are chosen as a whole.
        heads: of the indexer.
        parts: of the index key, and of each of these heads.
        pairs: rotary pairs of a part, the slowest of a head's; all if None.
    """

    tokens: int = 512
    block: int = 16
    heads: int = 4
    parts: int = 1
    pairs: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "pairs" or value is not None:
                check_size(f"selection: {field.name}", value)
        if self.tokens % self.block or self.blocks < 4:  # the first, two of the newest, and one to choose
            raise UsageError(
                f"config: selection: {self.tokens} tokens in blocks of {self.block}; choose whole blocks, at least 4"
            )

    @property
    def blocks(self) -> int:
        """Blocks that a query attends to at most."""
        return self.tokens // self.block

    @property
    def newest(self) -> int:
        """Newest blocks that are always kept, the query's own included: a quarter."""
        return max(2, self.blocks // 4)
