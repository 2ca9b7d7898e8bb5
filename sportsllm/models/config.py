"""The shape of a model: one frozen record. `sportsllm.formats.huggingface` reads and writes it as config.json.

Imports neither torch nor any other large library: the device install reads it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from sportsllm.errors import UsageError
from sportsllm.models import kinds
from sportsllm.models.attention_kinds import Selection
from sportsllm.models.feed_forward_kinds import Experts
from sportsllm.models.rope_scaling import RopeScaling

FULL, SLIDING, UNROTATED = "full", "sliding", "unrotated"
"""What a layer's attention does: see all tokens, see the last `sliding_window`, or see all without their positions."""
LAYER_TYPES = (FULL, SLIDING, UNROTATED)
_BOUNDS = {
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (2, 2**24),
    "num_hidden_layers": (1, 2**12),
    "dense_layers": (0, 2**12),
}
"""Least and most of a size, 1 to 2**20 if not given, so that a damaged file ends in a line and not in a full memory."""
_ROTARY_NUMBERS = 2**29  # of the cosine and sine tables together
NORM_KINDS, POSITION_KINDS = ("rms", "layer"), ("rotary", "learned", "none")


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a decoder. Names are Hugging Face's.

    `attention_bias` is a bias on q, k and v; `attention_output_bias` one on o (Llama sets both with
    one field, Qwen2 has only the first). `qk_norm` normalises each query and key head (Qwen3).
    `attention_kind` and `mlp_kind` name the two sublayers of a block, as `sportsllm.models.kinds` lists them.

    The rest is off in a LLaMA model:

        layer_types         one of `LAYER_TYPES` for each layer; all are full if None (Gemma 3, Mistral, SmolLM3)
        sliding_window      tokens that a sliding layer sees, the newest included
        rope_local_theta    rotary base of sliding layers, without `rope_scaling`; `rope_theta` if None (Gemma 3)
        attention_scale     what scores are multiplied by; head_dim ** -0.5 if None (Gemma 3)
        embedding_scale     what embeddings are multiplied by before the first layer (Gemma 3)
        output_norms        whether a norm follows each sublayer of a block, before the sum (Gemma 3)
        norm_kind           `rms`, or `layer`: LayerNorm with a bias (GPT-2)
        position_kind       `rotary`, or `learned`: a table of positions is added to the embedding (GPT-2); or `none`,
                            of an LSTM, which has one head: `head_dim` counts its cells
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, v_head_dim
                            of latent attention (DeepSeek), where `head_dim` is the rotated part of a query or key, and
                            `num_key_value_heads` is 1, that part being shared; low-rank queries are optional
        experts             of a mixture, each `intermediate_size` wide
        dense_layers, dense_intermediate_size
                            how many of the first layers of a mixture have SwiGLU instead, and its width (DeepSeek)
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
    dense_layers: int = 0
    dense_intermediate_size: int | None = None
    selection: Selection | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type == "int"):  # the sizes
            value = getattr(self, name)
            least, most = _BOUNDS.get(name, (1, 2**20))
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UsageError(f"config: {name} is {value!r}; it must be a whole number from {least} to {most:,}")
        if self.max_position_embeddings * self.head_dim > _ROTARY_NUMBERS:
            raise UsageError(
                f"config: max_position_embeddings is {self.max_position_embeddings:,}; with head_dim {self.head_dim} "
                f"at most {_ROTARY_NUMBERS // self.head_dim:,} are supported"
            )
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
        for kind in kinds.sublayers(self).values():
            kind.check(self)
        if (self.attention_kind == "lstm") != (self.position_kind == "none"):
            raise UsageError(
                f"config: attention_kind {self.attention_kind!r} with position_kind {self.position_kind!r}; an LSTM "
                "has no positions, all others have some"
            )
        for sublayer, its_kind, field in (("mlp", "experts", "experts"), ("attention", "selected", "selection")):
            named, value = getattr(self, f"{sublayer}_kind"), getattr(self, field)
            if (named == its_kind) != (value is not None):
                raise UsageError(f"config: {sublayer}_kind {named!r} with {field} {value}; give both or none")
        if self.dense_layers or self.dense_intermediate_size is not None:
            self._check_dense_layers()

    def _check_dense_layers(self) -> None:
        width, most = self.dense_intermediate_size, self.num_hidden_layers - 1
        if self.experts is None or not 1 <= self.dense_layers <= most:
            raise UsageError(
                f"config: dense_layers is {self.dense_layers}; of a mixture of experts the first 1 to {most} layers "
                "can be without"
            )
        if not isinstance(width, int) or isinstance(width, bool) or not 1 <= width <= 2**20:
            raise UsageError(f"config: dense_intermediate_size is {width!r}; dense layers need 1 to {2**20:,}")

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
    def score_scale(self) -> float:
        """What scores of attention are multiplied by."""
        if self.attention_scale is not None:
            return float(self.attention_scale)
        scale = float((self.unrotated_dim + self.head_dim) ** -0.5)
        stretched = self.rope_scaling if self.attention_kind == "latent" else None
        return scale if stretched is None else scale * stretched.score_factor

    @property
    def chosen_selection(self) -> Selection:
        """`selection` of a model that has one."""
        assert self.selection is not None, "only attention to selected tokens asks for it"
        return self.selection

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is computed with: of a mixture the router, the chosen and the shared experts."""
        unused = 0
        for part, layers in self.runs():
            matrices = [(kind.matrices(part), kind.active_parameters(part)) for kind in kinds.sublayers(part).values()]
            unused += layers * sum(sum(matrix.numel for matrix in found) - active for found, active in matrices)
        return self.parameters - unused

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
    def cells(self) -> int:
        """Cells of an LSTM's layer."""
        return self.query_size

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

    def of_layer(self, layer: int) -> ModelConfig:
        """The config of a model whose layers are all like this one, which kinds read; itself where they are alike."""
        return _of_layer(self, layer < self.dense_layers) if self.dense_layers else self

    def runs(self) -> list[tuple[ModelConfig, int]]:
        """`of_layer` of each run of like layers, and how many they are."""
        firsts = [0, self.dense_layers] if self.dense_layers else [0]
        ends = [*firsts[1:], self.num_hidden_layers]
        return [(self.of_layer(first), end - first) for first, end in zip(firsts, ends, strict=True)]

    def parameters_by_component(self) -> dict[str, int]:
        """Exact number of trained numbers in each part; they add up to `parameters`."""
        hidden, a_norm = self.hidden_size, self.norm_parameters
        sizes, norms = dict.fromkeys(kinds.NORMS, 0), a_norm
        for part, layers in self.runs():
            for sublayer, kind in kinds.sublayers(part).items():
                sizes[sublayer] += layers * sum(m.numel + m.bias * m.rows for m in kind.matrices(part))
                norms += layers * sum(vector.size for vector in kind.vectors(part))
            norms += layers * kinds.norms_of_block(part) * a_norm
        return {
            "embedding": (self.vocab_size + self.positions) * hidden,
            "attention": sizes["self_attn"],
            "feed_forward": sizes["mlp"],
            "norms": norms,
            "head": 0 if self.tie_word_embeddings else self.vocab_size * hidden,
        }

    @property
    def positions(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_position_embeddings if self.position_kind == "learned" else 0

    @property
    def norm_parameters(self) -> int:
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

    @property
    def has_large_vocabulary(self) -> bool:
        """Whether embedding and head have a quarter of the parameters or more, so that a smaller one is worth a try."""
        return 4 * (self.parameters - self.block_parameters) >= self.parameters

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with some fields replaced, validated again; with fewer layers the first ones' types stay."""
        if self.layer_types is not None and "num_hidden_layers" in changes:
            changes = {"layer_types": self.layer_types[: changes["num_hidden_layers"]]} | changes
        return replace(self, **changes)

    def with_layers(self, layers: Sequence[int]) -> ModelConfig:
        """A copy with some of the layers, each with its own type."""
        types = None if self.layer_types is None else tuple(self.layer_types[layer] for layer in layers)
        dense = sum(layer < self.dense_layers for layer in layers)
        width = self.dense_intermediate_size if dense else None
        return replace(
            self, num_hidden_layers=len(layers), layer_types=types, dense_layers=dense, dense_intermediate_size=width
        )


@lru_cache(maxsize=64)  # asked for every layer
def _of_layer(config: ModelConfig, dense: bool) -> ModelConfig:
    alike = replace(config, dense_layers=0, dense_intermediate_size=None)
    width = config.dense_intermediate_size
    if not dense or width is None:
        return alike
    return replace(alike, mlp_kind=ModelConfig.mlp_kind, experts=None, intermediate_size=width)
