"""The families of models that Hugging Face's config.json may name, and the fields that each adds to LLaMA's.

Tensors that are stored in another way are the business of `sportsllm.formats.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import JsonObject, clip
from sportsllm.models.config import FULL, SLIDING, UNROTATED, ModelConfig
from sportsllm.models.config_records import Experts


class Fields(dict[str, Any]):
    """The fields of a config.json that are not read yet; `where` names the file in errors."""

    def __init__(self, data: JsonObject, where: str) -> None:
        super().__init__(data)
        self.where = where

    def require(self, **allowed: tuple[object, ...]) -> None:
        """Take fields out that are harmless only with these values; the first is the meaning of absence."""
        for key, values in allowed.items():
            value = self.pop(key, values[0])
            if value not in values:
                raise ArtifactError(f"{self.where}: {key} is {clip(repr(value))}; only {values[0]!r} is supported")

    def drop(self, *names: str) -> None:
        """Take fields out that say nothing of the model's output."""
        for name in names:
            self.pop(name, None)

    def layers(self) -> int:
        """`num_hidden_layers`, which stays; 0 if it is missing."""
        return int(self.get("num_hidden_layers", 0))

    def biases(self) -> JsonObject:
        """`attention_bias` of all of attention's matrices."""
        bias = bool(self.pop("attention_bias", False))
        return {"attention_bias": bias, "attention_output_bias": bias}

    def full_only(self) -> None:
        """Take `layer_types` out, which may name full attention alone."""
        types = self.pop("layer_types", None)
        if types is not None and set(types) != {"full_attention"}:
            raise ArtifactError(f"{self.where}: layer_types has {sorted(set(types))}; give 'full_attention' alone")


_HF_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING}
_HF_NAMES = {ours: theirs for theirs, ours in _HF_TYPES.items()}

# Fields of `ModelConfig` that are off in a LLaMA model; a family lists those that it has.
_SWITCHES = (
    "attention_kind", "mlp_kind", "qk_norm", "attention_bias", "attention_output_bias", "mlp_bias", "layer_types",
    "sliding_window", "rope_local_theta", "attention_scale", "embedding_scale", "output_norms", "norm_kind",
    "position_kind", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "experts",
    "dense_layers", "dense_intermediate_size", "selection",
)  # fmt: skip
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


class Family(NamedTuple):
    """How a model type's config.json differs from LLaMA's.

    Attributes:
        architecture: the class of `transformers`.
        read: takes the family's fields out of those of a file and returns fields of `ModelConfig`.
        fits: whether a model can be written as one of the family.
        written: the family's fields of a model that fits; None for one of LLaMA's that the family has not.
        ties: whether embedding and head are one where the file does not say.
    """

    architecture: str
    read: Callable[[Fields], JsonObject]
    fits: Callable[[ModelConfig], bool]
    written: Callable[[ModelConfig], JsonObject]
    ties: bool = False


def _only(config: ModelConfig, *allowed: str) -> bool:
    """Whether all switches but the allowed ones are as in a LLaMA model."""
    return all(getattr(config, name) == _DEFAULTS[name] for name in _SWITCHES if name not in allowed)


def _one_bias(config: ModelConfig) -> bool:
    """Whether all of attention has biases, or none of it."""
    return config.attention_bias == config.attention_output_bias


def _read_llama(rest: Fields) -> JsonObject:
    """The fields of a model without anything of its own."""
    rest.require(hidden_act=("silu",), use_sliding_window=(False,))
    rest.pop("sliding_window", None)
    rest.full_only()
    return rest.biases()


def _read_qwen2(rest: Fields) -> JsonObject:
    """Biases of q, k and v."""
    bias = bool(rest.pop("attention_bias", True))
    return _read_llama(rest) | {"attention_bias": bias, "attention_output_bias": False}


def _read_qwen3(rest: Fields) -> JsonObject:
    """Norms of query and key heads."""
    rest.setdefault("head_dim", 128)
    return _read_llama(rest) | {"qk_norm": True}


def _read_mistral(rest: Fields) -> JsonObject:
    """A window in all layers, or in those that `layer_types` names."""
    window, types = rest.pop("sliding_window", None), rest.pop("layer_types", None)
    values = _read_llama(rest)
    if window is None or window >= rest.get("max_position_embeddings", 0):  # it hides nothing
        return values
    types = types or ["sliding_attention"] * rest.layers()
    return values | {"sliding_window": int(window), "layer_types": _layer_types(types, rest.where)}


def _layer_types(given: list[str], where: str) -> tuple[str, ...]:
    """`ModelConfig.layer_types` of Hugging Face's."""
    unknown = sorted(set(given) - _HF_TYPES.keys())
    if unknown:
        raise ArtifactError(f"{where}: layer_types has {unknown[0]!r}; use {', '.join(_HF_TYPES)}")
    return tuple(_HF_TYPES[name] for name in given)


def _write_llama(config: ModelConfig) -> JsonObject:
    """What LLaMA's files have beside the common fields."""
    return {"hidden_act": "silu"}


def _write_qwen(config: ModelConfig) -> JsonObject:
    """The same of Qwen2 and Qwen3."""
    return {"hidden_act": "silu", "mlp_bias": None, "use_sliding_window": False}


def _write_mistral(config: ModelConfig) -> JsonObject:
    """The same of Mistral."""
    own = {"sliding_window": config.sliding_window, "attention_bias": None, "mlp_bias": None}
    return {"hidden_act": "silu", **own}


_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip
_UNUSED = (
    "rope_interleave", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers",
    "router_aux_loss_coef",
)  # fmt: skip


def _read_mixtral(rest: Fields) -> JsonObject:
    """Experts that are all routed; attention is Mistral's."""
    rest.require(router_jitter_noise=(0.0, None))
    loss = float(rest.pop("router_aux_loss_coef", 0.001))
    experts = Experts(int(rest.pop("num_local_experts", 8)), int(rest.pop("num_experts_per_tok", 2)), balance_loss=loss)
    return _read_mistral(rest) | {"mlp_kind": "experts", "experts": experts}


def _write_mixtral(config: ModelConfig) -> JsonObject:
    experts = config.chosen_experts
    return _write_mistral(config) | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "router_aux_loss_coef": experts.balance_loss,
    }


def _fits_mixtral(config: ModelConfig) -> bool:
    """Whether a model is one of the family."""
    if config.experts is None or not _only(config, "mlp_kind", "experts", "layer_types", "sliding_window"):
        return False
    experts = config.experts
    known = Experts(experts.count, experts.active, balance_loss=experts.balance_loss)
    return set(config.layer_types or (SLIDING,)) == {SLIDING} and experts == known


def _read_deepseek(rest: Fields, version: int) -> JsonObject:
    """Latent attention; experts in all layers but the first ones, or in none."""
    rest.require(
        hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,), topk_method=("greedy", "noaux_tc"),
        moe_layer_freq=(1,), scoring_func=("sigmoid" if version == 3 else "softmax",),
    )  # fmt: skip
    rest.full_only()
    layers, dense = rest.layers(), rest.pop("first_k_dense_replace", 3 if version == 3 else 0)
    given = {name: rest.pop(name, None) for name in _EXPERTS}
    values: JsonObject = {"attention_kind": "latent", **{name: rest.pop(name, None) for name in LATENT}}
    rest["head_dim"] = rest.pop("qk_rope_head_dim", rest.get("head_dim"))
    rest["num_key_value_heads"] = 1
    rest.drop(*_UNUSED)
    if dense >= layers or not given["n_routed_experts"]:
        return values
    if dense:
        values |= {"dense_layers": dense, "dense_intermediate_size": rest.get("intermediate_size")}
    rest["intermediate_size"] = given["moe_intermediate_size"]
    common: dict[str, Any] = {"count": given["n_routed_experts"], "active": given["num_experts_per_tok"] or 1}
    common |= {"shared": given["n_shared_experts"] or 0, "scale": float(given["routed_scaling_factor"] or 1.0)}
    if version == 3:
        common |= {"router": "sigmoid", "weights": "sum" if given["norm_topk_prob"] else "scores", "choice_bias": True}
        common |= {"groups": given["n_group"] or 1, "active_groups": given["topk_group"] or 1}
    else:
        common |= {"weights": "scores"}
    return values | {"mlp_kind": "experts", "experts": Experts(**common)}


def _write_deepseek(config: ModelConfig) -> JsonObject:
    latent: JsonObject = {
        "hidden_act": "silu",
        "mlp_bias": None,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_interleave": True,
    }
    experts = config.experts
    if experts is None:
        return latent | {"first_k_dense_replace": config.num_hidden_layers}
    return latent | {
        "first_k_dense_replace": config.dense_layers,
        "intermediate_size": config.dense_intermediate_size or config.intermediate_size,
        "moe_intermediate_size": config.intermediate_size,
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared,
        "num_experts_per_tok": experts.active,
        "n_group": experts.groups,
        "topk_group": experts.active_groups,
        "norm_topk_prob": experts.weights == "sum",
        "routed_scaling_factor": experts.scale,
    }


def _fits_deepseek(config: ModelConfig, version: int) -> bool:
    """Whether a model is one of the family; dense ones count as version 3."""
    allowed = ("attention_kind", "mlp_kind", "experts", "dense_layers", "dense_intermediate_size", *LATENT)
    if config.attention_kind != "latent" or not _only(config, *allowed):
        return False
    experts = config.experts
    if experts is None:
        return version == 3 and config.mlp_kind == ModelConfig.mlp_kind
    if not experts.gated or not experts.shared:
        return False
    if version == 3:
        return experts.choice_bias and experts.router == "sigmoid" and experts.weights != "softmax"
    plain = not experts.choice_bias and experts.groups == 1
    return plain and (experts.router, experts.weights) == ("softmax", "scores")


def _read_phi3(rest: Fields) -> JsonObject:
    rest.drop("resid_pdrop", "embd_pdrop", "original_max_position_embeddings")
    return _read_mistral(rest)


def _read_smollm3(rest: Fields) -> JsonObject:
    layers = rest.layers()
    every = rest.pop("no_rope_layer_interval", 4)
    rotated = rest.pop("no_rope_layers", None) or [(layer + 1) % every != 0 for layer in range(layers)]
    types = tuple(FULL if rotates else UNROTATED for rotates in rotated)
    return _read_llama(rest) | {"layer_types": types if UNROTATED in types else None}


def _read_gemma3(rest: Fields) -> JsonObject:
    rest.require(
        hidden_activation=("gelu_pytorch_tanh",), hidden_act=("gelu_pytorch_tanh",),
        attn_logit_softcapping=(None,), final_logit_softcapping=(None,), use_bidirectional_attention=(False, None),
    )  # fmt: skip
    layers = rest.layers()
    every = rest.pop("_sliding_window_pattern", None) or rest.pop("sliding_window_pattern", None) or 6
    rest.pop("sliding_window_pattern", None)
    _by_type_of_layer(rest)
    given = rest.pop("layer_types", None)
    types = given or ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    rest.setdefault("head_dim", 256)
    rest.setdefault("rope_theta", 1e6)
    local = rest.pop("rope_local_base_freq", 10_000.0)
    return rest.biases() | {
        "mlp_kind": "geglu",
        "qk_norm": True,
        "output_norms": True,
        "embedding_scale": float(rest["hidden_size"]) ** 0.5 if "hidden_size" in rest else 1.0,
        "attention_scale": float(rest.pop("query_pre_attn_scalar", 256)) ** -0.5,
        "layer_types": _layer_types(types, rest.where),
        "sliding_window": rest.pop("sliding_window", 4096),
        "rope_local_theta": float(local),
    }


def _by_type_of_layer(rest: Fields) -> None:
    """The rotary bases of full and of sliding layers, which `transformers` 5 keeps apart."""
    rope = rest.get("rope_parameters") or {}
    if "full_attention" in rope:
        rest["rope_parameters"] = rope["full_attention"]
        rest["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta", 10_000.0)


def _read_gpt2(rest: Fields) -> JsonObject:
    rest.require(
        activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
    )  # fmt: skip
    rest.drop("reorder_and_upcast_attn", "n_ctx", "attn_pdrop", "embd_pdrop")
    rest.drop(*[key for key in rest if key.startswith("summary_")])
    inner = rest.pop("n_inner", None)
    names = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
        "resid_pdrop": "dropout",
    }
    for theirs, ours in names.items():
        if theirs in rest:
            rest[ours] = rest.pop(theirs)
    if "hidden_size" in rest:
        rest["intermediate_size"] = inner or 4 * rest["hidden_size"]
    rest.setdefault("rms_norm_eps", 1e-5)
    biases = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True)
    return {"mlp_kind": "gelu", "norm_kind": "layer", "position_kind": "learned", **biases}


def _write_smollm3(config: ModelConfig) -> JsonObject:
    rotated = [int(kind != UNROTATED) for kind in config.layer_types or ()]
    types = ["full_attention"] * config.num_hidden_layers
    return {"hidden_act": "silu", "no_rope_layers": rotated, "layer_types": types, "use_sliding_window": False}


def _write_gemma3(config: ModelConfig) -> JsonObject:
    assert config.attention_scale is not None, "the family's models have one"
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "mlp_bias": None,
        "query_pre_attn_scalar": _whole(config.attention_scale**-2),
        "layer_types": [_HF_NAMES[name] for name in config.layer_types or ()],
        "sliding_window": config.sliding_window,
        "rope_local_base_freq": config.rope_local_theta,
    }


def _write_gpt2(config: ModelConfig) -> JsonObject:
    gone = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "attention_bias", "mlp_bias",
    )  # fmt: skip
    return dict.fromkeys(gone) | {
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.rms_norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _whole(value: float) -> float | int:
    """Without the last digits of a power."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _fits_gemma3(config: ModelConfig) -> bool:
    allowed = (
        "mlp_kind", "qk_norm", "output_norms", "embedding_scale", "attention_scale", "layer_types", "sliding_window",
        "rope_local_theta", "attention_bias", "attention_output_bias",
    )  # fmt: skip
    own = config.mlp_kind == "geglu" and config.qk_norm and config.output_norms and config.attention_scale is not None
    scaled = abs(config.embedding_scale**2 - config.hidden_size) < 1e-6 * config.hidden_size
    known = config.layer_types is not None and UNROTATED not in config.layer_types
    return own and scaled and known and _one_bias(config) and _only(config, *allowed)


def _fits_gpt2(config: ModelConfig) -> bool:
    biased = config.attention_bias and config.attention_output_bias and config.mlp_bias
    whole = config.num_key_value_heads == config.num_attention_heads and config.query_size == config.hidden_size
    own = (config.mlp_kind, config.norm_kind, config.position_kind) == ("gelu", "layer", "learned")
    allowed = ("mlp_kind", "norm_kind", "position_kind", "attention_bias", "attention_output_bias", "mlp_bias")
    return biased and whole and own and _only(config, *allowed)


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        _read_llama,
        lambda c: _one_bias(c) and _only(c, "attention_bias", "attention_output_bias", "mlp_bias"),
        _write_llama,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _read_qwen2,
        lambda c: c.attention_bias and _only(c, "attention_bias"),
        lambda c: _write_qwen(c) | {"attention_bias": None},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _read_qwen3,
        lambda c: c.qk_norm and _one_bias(c) and _only(c, "qk_norm", "attention_bias", "attention_output_bias"),
        _write_qwen,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _read_mistral,
        lambda c: set(c.layer_types or ()) == {SLIDING} and _only(c, "layer_types", "sliding_window"),
        _write_mistral,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _read_smollm3,
        lambda c: (
            UNROTATED in (c.layer_types or ())
            and SLIDING not in (c.layer_types or ())
            and _one_bias(c)
            and _only(c, "layer_types", "attention_bias", "attention_output_bias", "mlp_bias")
        ),
        _write_smollm3,
        ties=True,
    ),
    "gemma3_text": Family("Gemma3ForCausalLM", _read_gemma3, _fits_gemma3, _write_gemma3, ties=True),
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _fits_gpt2, _write_gpt2, ties=True),
    "mixtral": Family("MixtralForCausalLM", _read_mixtral, _fits_mixtral, _write_mixtral),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        lambda rest: _read_deepseek(rest, 3),
        lambda c: _fits_deepseek(c, 3),
        _write_deepseek,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        lambda rest: _read_deepseek(rest, 2),
        lambda c: _fits_deepseek(c, 2),
        lambda c: _write_deepseek(c) | {"head_dim": c.head_dim},
    ),
    "phi3": Family("Phi3ForCausalLM", _read_phi3, lambda _: False, _write_llama),
}
"""By model type. Phi-3 is read alone, and written as the LLaMA or Mistral model that it is when its fused matrices are
apart; a dense DeepSeek-V2 model is written as one of version 3."""
