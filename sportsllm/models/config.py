"""The shape of a model: one frozen record. `sportsllm.models.hf_config` reads and writes it as config.json.

Imports neither torch nor any other large library: the device install reads it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.models import kinds
from sportsllm.models.selected import Selection

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
class Experts:
    """A mixture of experts; see `sportsllm.models.experts`.

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
            value, least = getattr(self, name), 0 if name == "shared" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"config: experts: {name} is {value!r}; it must be a whole number of at least {least}")
        if not (math.isfinite(self.scale) and 0 <= self.balance_loss < math.inf):
            raise UsageError(f"config: experts: scale is {self.scale}, balance_loss {self.balance_loss}; correct them")
        if not 1 <= self.active <= self.count:
            raise UsageError(f"config: {self.active} experts a token of {self.count}; choose 1 to {self.count}")
        if self.router not in ROUTERS or self.weights not in ROUTER_WEIGHTS:
            raise UsageError(
                f"config: router {self.router!r} with weights {self.weights!r} is not known; use "
                f"{' or '.join(ROUTERS)} with {', '.join(ROUTER_WEIGHTS)}"
            )
        each = self.count // self.groups
        possible = self.active_groups <= self.groups and self.active <= self.active_groups * each
        if self.count % self.groups or not possible or (self.groups > 1 and each < 2):
            raise UsageError(
                f"config: {self.count} experts in {self.groups} groups, {self.active_groups} of them open for "
                f"{self.active} a token: groups need two experts each, and the open ones as many as a token is sent to"
            )


ROUTERS, ROUTER_WEIGHTS = ("softmax", "sigmoid"), ("scores", "sum", "softmax")
FULL, SLIDING, UNROTATED = "full", "sliding", "unrotated"
"""What a layer's attention does: see all tokens, see the last `sliding_window`, or see all without their positions."""
LAYER_TYPES = (FULL, SLIDING, UNROTATED)
NORM_KINDS, POSITION_KINDS = ("rms", "layer"), ("rotary", "learned")


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a decoder. Names are Hugging Face's.

    `attention_bias` is a bias on q, k and v; `attention_output_bias` one on o (Llama sets both with
    one field, Qwen2 has only the first). `qk_norm` normalises each query and key head (Qwen3).
    `attention_kind` and `mlp_kind` name the two halves of a block, as `sportsllm.models.kinds` lists them.

    The rest is off in a LLaMA model:

        layer_types         one of `LAYER_TYPES` for each layer; all are full if None (Gemma 3, Mistral, SmolLM3)
        sliding_window      tokens that a sliding layer sees, the newest included
        rope_local_theta    rotary base of sliding layers, without `rope_scaling`; `rope_theta` if None (Gemma 3)
        attention_scale     what scores are multiplied by; head_dim ** -0.5 if None (Gemma 3)
        embedding_scale     what embeddings are multiplied by before the first layer (Gemma 3)
        output_norms        whether a norm follows each half of a block, before the sum (Gemma 3)
        norm_kind           `rms`, or `layer`: LayerNorm with a bias (GPT-2)
        position_kind       `rotary`, or `learned`: a table of positions is added to the embedding (GPT-2)
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, v_head_dim
                            of latent attention (DeepSeek), where `head_dim` is the rotated part of a query or key, and
                            `num_key_value_heads` is 1, that part being shared; low-rank queries are optional
        experts             of a mixture, each `intermediate_size` wide
        selection           of the tokens that attention of kind `selected` sees
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
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    rope_local_theta: float | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    output_norms: bool = False
    norm_kind: str = "rms"
    position_kind: str = "rotary"
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    experts: Experts | None = None
    selection: Selection | None = None

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
        for field, known in (
            ("attention_kind", tuple(kinds.ATTENTION)),
            ("mlp_kind", tuple(kinds.FEED_FORWARD)),
            ("norm_kind", NORM_KINDS),
            ("position_kind", POSITION_KINDS),
        ):
            if getattr(self, field) not in known:
                raise UsageError(f"config: {field} is {getattr(self, field)!r}; use one of {', '.join(known)}")
        self._check_layers()
        if self.attention_kind == "latent":
            self._check_latent()
        if (self.mlp_kind == "experts") != (self.experts is not None):
            raise UsageError(f"config: mlp_kind {self.mlp_kind!r} with experts {self.experts}; give both or none")
        if (self.attention_kind == "selected") != (self.selection is not None):
            kind = self.attention_kind
            raise UsageError(f"config: attention_kind {kind!r} with selection {self.selection}; give both or none")
        if self.selection is not None and (self.layer_types is not None or self.position_kind != "rotary"):
            named = "layer_types" if self.layer_types is not None else "position_kind"
            raise UsageError(
                f"config: {named} is {getattr(self, named)!r}; attention to selected tokens is for rotary layers that "
                "are all alike"
            )

    def _check_latent(self) -> None:
        if self.position_kind != "rotary":
            raise UsageError(f"config: position_kind is {self.position_kind!r}; latent attention is rotary")
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name == "q_lora_rank"):
                raise UsageError(f"config: {name} is {value!r}; latent attention needs at least 1")
        for name in ("num_key_value_heads", "qk_norm", "attention_bias", "attention_output_bias", "layer_types"):
            if getattr(self, name) not in (1, False, None):
                raise UsageError(f"config: {name} is {getattr(self, name)!r}; latent attention has none")

    def _check_layers(self) -> None:
        types = self.layer_types or ()
        if self.layer_types is not None and len(types) != self.num_hidden_layers:
            raise UsageError(f"config: layer_types has {len(types)} entries for {self.num_hidden_layers} layers")
        if set(types) - set(LAYER_TYPES):
            raise UsageError(f"config: layer_types has {sorted(set(types))}; use {', '.join(LAYER_TYPES)}")
        if SLIDING in types and (self.sliding_window is None or self.sliding_window < 1):
            raise UsageError(f"config: sliding_window is {self.sliding_window}; sliding layers need at least 1")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def chosen_experts(self) -> Experts:
        """`experts` of a model that has some."""
        assert self.experts is not None, "only a mixture of experts is asked for them"
        return self.experts

    @property
    def chosen_selection(self) -> Selection:
        """`selection` of a model that has one."""
        assert self.selection is not None, "only attention to selected tokens asks for it"
        return self.selection

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is computed with: of a mixture the router, the chosen and the shared experts."""
        matrices = [(kind.matrices(self), kind.active_numbers(self)) for kind in kinds.halves(self).values()]
        unused = sum(sum(matrix.numbers for matrix in found) - active for found, active in matrices)
        return self.parameters - self.num_hidden_layers * unused

    @property
    def kv_rank(self) -> int:
        """`kv_lora_rank` of latent attention."""
        return self.kv_lora_rank or 0

    @property
    def unrotated_dim(self) -> int:
        """`qk_nope_head_dim` of latent attention."""
        return self.qk_nope_head_dim or 0

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.v_head_dim or self.head_dim

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """How many tokens a layer's attention sees, the newest included; None for all."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == SLIDING else None

    def rotates(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated by their positions."""
        return self.position_kind == "rotary" and not (self.layer_types and self.layer_types[layer] == UNROTATED)

    def parameters_by_component(self) -> dict[str, int]:
        """Exact number of trained numbers in each part; they add up to `parameters`."""
        layers, hidden = self.num_hidden_layers, self.hidden_size
        sizes = {
            half: sum(matrix.numbers + matrix.bias * matrix.rows for matrix in kind.matrices(self))
            for half, kind in kinds.halves(self).items()
        }
        inner_norms = sum(vector.size for kind in kinds.halves(self).values() for vector in kind.vectors(self))
        return {
            "embedding": (self.vocab_size + self.positions) * hidden,
            "attention": layers * sizes["self_attn"],
            "feed_forward": layers * sizes["mlp"],
            "norms": layers * (inner_norms + kinds.norms_of_block(self) * self.norm_numbers) + self.norm_numbers,
            "head": 0 if self.tie_word_embeddings else self.vocab_size * hidden,
        }

    @property
    def positions(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_position_embeddings if self.position_kind == "learned" else 0

    @property
    def norm_numbers(self) -> int:
        """Numbers of a norm of the residual stream."""
        return self.hidden_size * (2 if self.norm_kind == "layer" else 1)

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
        """A copy with some fields replaced, validated again; with fewer layers the first ones' types stay."""
        if self.layer_types is not None and "num_hidden_layers" in changes:
            changes = {"layer_types": self.layer_types[: changes["num_hidden_layers"]]} | changes
        return replace(self, **changes)

    def with_layers(self, layers: Sequence[int]) -> ModelConfig:
        """A copy with some of the layers, each with its own type."""
        types = None if self.layer_types is None else tuple(self.layer_types[layer] for layer in layers)
        return replace(self, num_hidden_layers=len(layers), layer_types=types)
