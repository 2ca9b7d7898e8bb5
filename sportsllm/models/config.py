"""The shape of a model: frozen records. `sportsllm.formats.huggingface` reads and writes it as config.json.

Imports neither torch nor any other large library: the device install reads it too.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from sportsllm.errors import UsageError
from sportsllm.models import description
from sportsllm.models.field_checks import check_choice, check_field, check_size
from sportsllm.models.kinds import ATTENTION, FEED_FORWARD
from sportsllm.models.rope import RopeScaling

FULL, SLIDING, UNROTATED = "full", "sliding", "unrotated"
"""What a layer's attention does: see all tokens, see the last `sliding_window`, or see all without their positions."""
LAYER_TYPES = (FULL, SLIDING, UNROTATED)
DIMENSIONS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "layers": "num_hidden_layers",
    "head_dim": "head_dim",
}
"""Each dimension of a shape, as flags and files name it, and the field of `ModelConfig` that it is."""
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_ROTARY_NUMBERS = 2**29  # of the cosine and sine tables together
_WHOLE = {"layer_types": None, "rotary_dim": None, "attention_softcap": None}
_PLAIN = {"qk_norm": False, "attention_bias": False, "attention_output_bias": False, **_WHOLE}
_REQUIRED: dict[str, dict[str, object]] = {
    "latent": {"position_kind": "rotary", "num_key_value_heads": 1, **_PLAIN},
    "selected": {"position_kind": "rotary", "joint_qk_norm": False, **_WHOLE},
    "lstm": {
        "position_kind": "none", "num_attention_heads": 1, "num_key_value_heads": 1, "rope_scaling": None, **_PLAIN,
    },
}  # fmt: skip
"""By kind of attention, the values that fields must have."""
_CHOICES = {"norm_kind": ("rms", "layer"), "position_kind": ("rotary", "learned", "none")}


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
            raise UsageError(
                f"config: experts: scale is {self.scale}, balance_loss {self.balance_loss}; both must be finite, and "
                "balance_loss at least 0"
            )
        if not 1 <= self.active <= self.count:
            raise UsageError(f"config: {self.active} of {self.count} experts per token; choose 1 to {self.count}")
        each = self.count // self.groups
        possible = self.active_groups <= self.groups and self.active <= self.active_groups * each
        if self.count % self.groups or not possible or (self.groups > 1 and each < 2):
            raise UsageError(
                f"config: {self.count} experts in {self.groups} groups, {self.active_groups} of them open for a "
                f"token's {self.active}: each group needs two experts, and the open groups together {self.active}"
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
        for name, value in vars(self).items():
            if name != "pairs" or value is not None:
                check_size(f"selection: {name}", value)
        if self.tokens % self.block or self.blocks < 4:  # the first, two of the newest, and one to choose
            least = f"choose a multiple of {self.block}, at least {4 * self.block}"
            raise UsageError(f"config: selection: {self.tokens} tokens in blocks of {self.block}; {least}")

    @property
    def blocks(self) -> int:
        """Blocks that a query attends to at most."""
        return self.tokens // self.block

    @property
    def newest(self) -> int:
        """Newest blocks that are always kept, the query's own included: a quarter."""
        return max(2, self.blocks // 4)


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a decoder. Names are Hugging Face's.

    `attention_bias` is a bias on q, k and v; `attention_output_bias` one on o (Llama sets both with
    one field, Qwen2 has only the first). `qk_norm` normalises each query and key head (Qwen3).
    `attention_kind` and `mlp_kind` name the two sublayers of a block, see `sportsllm.models.kinds`.

    The rest is off in a LLaMA model:

        layer_types         one of `LAYER_TYPES` for each layer; all are full if None (Gemma 3, Mistral, SmolLM3)
        sliding_window      tokens that a sliding layer sees, the newest included
        rope_local_theta    rotary base of sliding layers, without `rope_scaling`; `rope_theta` if None (Gemma 3)
        attention_scale     what scores are multiplied by; head_dim ** -0.5 if None (Gemma 3)
        attention_softcap, logit_softcap
                            c of c * tanh(x / c), which bounds scores of attention, and logits; none if None (Gemma 2)
        embedding_scale     what embeddings are multiplied by before the first layer (Gemma 3)
        input_norms         whether a norm precedes each sublayer of a block; not in OLMo 2
        output_norms        whether a norm follows each sublayer of a block, before the sum (Gemma 3, OLMo 2)
        joint_qk_norm       whether `qk_norm` normalises all query heads together, and all key heads (OLMo 2)
        rotary_dim          channels of each head that are rotated, its first; all if None (StableLM, GPT-NeoX)
        parallel_residual   whether the feed-forward reads the same residual stream as attention (GPT-NeoX)
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
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    input_norms: bool = True
    output_norms: bool = False
    joint_qk_norm: bool = False
    rotary_dim: int | None = None
    parallel_residual: bool = False
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
        for field in fields(self):
            check_field(field.name, getattr(self, field.name), str(field.type))
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
        for name in ("rms_norm_eps", "rope_theta", "rope_local_theta", "attention_softcap", "logit_softcap"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UsageError(f"config: {name} is {value}; it must be greater than 0")
        known = {"attention_kind": tuple(ATTENTION), "mlp_kind": tuple(FEED_FORWARD)}
        for name in ("attention_kind", "mlp_kind", "norm_kind", "position_kind"):
            check_choice(name, getattr(self, name), (known | _CHOICES)[name])
        self._check_layers()
        self._check_kinds()

    def _check_layers(self) -> None:
        types = self.layer_types or ()
        if self.layer_types is not None and len(types) != self.num_hidden_layers:
            raise UsageError(f"config: layer_types has {len(types)} entries for {self.num_hidden_layers} layers")
        if set(types) - set(LAYER_TYPES):
            raise UsageError(f"config: layer_types has {sorted(set(types))}; use {', '.join(LAYER_TYPES)}")
        if SLIDING in types and self.sliding_window is None:
            raise UsageError("config: sliding_window is None; sliding layers need one")
        if self.dense_layers or self.dense_intermediate_size is not None:
            most = self.num_hidden_layers - 1
            if self.experts is None or not 1 <= self.dense_layers <= most:
                raise UsageError(
                    f"config: dense_layers is {self.dense_layers}; only a mixture of experts has such layers, its "
                    f"first 1 to {most}"
                )
            check_size("dense_intermediate_size", self.dense_intermediate_size)

    def _check_kinds(self) -> None:
        for name, wanted in _REQUIRED.get(self.attention_kind, {}).items():
            if (value := getattr(self, name)) != wanted:
                raise UsageError(
                    f"config: {name} is {value!r}; with attention_kind {self.attention_kind!r} it must be {wanted!r}"
                )
        if self.attention_kind != "lstm" and self.position_kind == "none":
            raise UsageError(f"config: position_kind is 'none'; attention_kind {self.attention_kind!r} needs positions")
        if self.joint_qk_norm > self.qk_norm or not (self.input_norms or self.output_norms):
            raise UsageError("config: joint_qk_norm needs qk_norm, and every model input_norms or output_norms")
        if self.rotary_size not in range(2, self.head_dim + 1, 2):
            raise UsageError(f"config: rotary_dim is {self.rotary_dim}; give an even number up to {self.head_dim}")
        factors, pairs = len(self.rope_scaling.short_factor) if self.rope_scaling else 0, self.rotary_size // 2
        if factors not in (0, pairs):
            raise UsageError(f"config: longrope has {factors} factors; {pairs} rotary pairs need one each")
        if self.parallel_residual and self.experts is not None:
            raise UsageError("config: parallel_residual is true, which a mixture of experts does not support")
        if self.attention_kind == "latent":
            for name in LATENT[self.q_lora_rank is None :]:
                check_size(name, getattr(self, name))
        for sublayer, its_kind, field in (("mlp", "experts", "experts"), ("attention", "selected", "selection")):
            named, value = getattr(self, f"{sublayer}_kind"), getattr(self, field)
            if (named == its_kind) != (value is not None):
                raise UsageError(f"config: {sublayer}_kind {named!r} with {field} {value}; give both or none")

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
    def score_scale(self) -> float:
        """What scores of attention are multiplied by."""
        if self.attention_scale is not None:
            return float(self.attention_scale)
        scale = float((self.unrotated_dim + self.head_dim) ** -0.5)
        stretched = self.rope_scaling if self.attention_kind == "latent" else None
        return scale if stretched is None else scale * stretched.score_factor

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
    def rotary_size(self) -> int:
        """Channels of each head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def cells(self) -> int:
        """Cells of an LSTM's layer."""
        return self.query_size

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def positions(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_position_embeddings if self.position_kind == "learned" else 0

    @property
    def norm_parameters(self) -> int:
        """Values of a norm of the residual stream."""
        return self.hidden_size * (2 if self.norm_kind == "layer" else 1)

    def window(self, layer: int) -> int | None:
        """How many tokens a layer's attention sees, the newest included; None for all."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == SLIDING else None

    def rotates(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated by their positions."""
        return self.position_kind == "rotary" and not (self.layer_types and self.layer_types[layer] == UNROTATED)

    def of_layer(self, layer: int) -> ModelConfig:
        """The config of a model whose layers are all like this one, which kinds read; itself if they are alike."""
        return _of_layer(self, layer < self.dense_layers) if self.dense_layers else self

    def runs(self) -> list[tuple[ModelConfig, int]]:
        """`of_layer` of each run of like layers, and how many they are."""
        dense, layers = self.dense_layers, self.num_hidden_layers
        found = [(self.of_layer(0), dense), (self.of_layer(layers - 1), layers - dense)]
        return [run for run in found if run[1]]

    def parameters_by_component(self) -> dict[str, int]:
        """Exact number of parameters in each part; they add up to `parameters`. A tied head counts once."""
        found = Counter(dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0))
        for part, layers in self.runs():
            for item in description.block_tensors(part):
                found[item.component] += layers * item.numel
        for item in description.end_tensors(self):
            found[item.component] += item.numel
        return dict(found)

    @property
    def parameters(self) -> int:
        """Exact number of parameters; a tied head counts once."""
        return sum(self.parameters_by_component().values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is computed with: of a mixture the router, the chosen and the shared experts."""
        sublayers = [(each, layers) for part, layers in self.runs() for each in description.sublayers(part).values()]
        unused = sum(n * (sum(m.numel for m in each.matrices) - each.active_parameters) for each, n in sublayers)
        return self.parameters - unused

    @property
    def block_parameters(self) -> int:
        """Parameters that are neither embedding nor head."""
        parts = self.parameters_by_component()
        return parts["attention"] + parts["feed_forward"] + parts["norms"]

    @property
    def has_large_vocabulary(self) -> bool:
        """Whether embedding and head have a quarter of the parameters or more, so that a smaller one is worth a try."""
        return 4 * (self.parameters - self.block_parameters) >= self.parameters

    def with_changes(self, **changes: object) -> ModelConfig:
        """A copy with some fields replaced, validated again; with fewer layers the first ones' types stay."""
        layers = changes.get("num_hidden_layers")
        if self.layer_types is not None and isinstance(layers, int):
            changes = {"layer_types": self.layer_types[:layers]} | changes
        return replace(self, **changes)  # type: ignore[arg-type]  # __post_init__ checks types


@lru_cache(maxsize=64)  # asked for every layer
def _of_layer(config: ModelConfig, dense: bool) -> ModelConfig:
    alike = replace(config, dense_layers=0, dense_intermediate_size=None)
    width = config.dense_intermediate_size
    if not dense or width is None:
        return alike
    return replace(alike, mlp_kind=ModelConfig.mlp_kind, experts=None, intermediate_size=width)
