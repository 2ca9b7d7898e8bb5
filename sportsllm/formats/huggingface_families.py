"""The families of models that Hugging Face's config.json may name, and the fields that each adds to LLaMA's.

Tensors that are stored in another way are the business of `sportsllm.formats.layouts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip
from sportsllm.models.config import FULL, LATENT, SLIDING, UNROTATED, Experts, ModelConfig


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


class Family(NamedTuple):
    """How a model type's config.json differs from LLaMA's.

    A model is written as the first family whose file reads back as the same model.

    Attributes:
        architecture: the class of `transformers`.
        read: takes the family's fields out of those of a file and returns fields of `ModelConfig`.
        written: the family's fields of a model, None for one of LLaMA's that the family has not; None for a model that
            cannot be one.
        ties: whether embedding and head are one if the file does not say.
    """

    architecture: str
    read: Callable[[Fields], JsonObject]
    written: Callable[[ModelConfig], JsonObject | None]
    ties: bool = False


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


def _read_olmo2(rest: Fields) -> JsonObject:
    """Norms of all query and key heads together, and behind sublayers instead of before."""
    return _read_llama(rest) | {"qk_norm": True, "joint_qk_norm": True, "input_norms": False, "output_norms": True}


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


def _write_qwen(config: ModelConfig) -> JsonObject:
    return {"hidden_act": "silu", "mlp_bias": None, "use_sliding_window": False}


def _write_mistral(config: ModelConfig) -> JsonObject:
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


def _write_mixtral(config: ModelConfig) -> JsonObject | None:
    if (experts := config.experts) is None:
        return None
    return _write_mistral(config) | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "router_aux_loss_coef": experts.balance_loss,
    }


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
    common: JsonObject = {"count": given["n_routed_experts"], "active": given["num_experts_per_tok"] or 1}
    common |= {"shared": given["n_shared_experts"] or 0, "scale": float(given["routed_scaling_factor"] or 1.0)}
    if version == 3:
        common |= {"router": "sigmoid", "weights": "sum" if given["norm_topk_prob"] else "scores", "choice_bias": True}
        common |= {"groups": given["n_group"] or 1, "active_groups": given["topk_group"] or 1}
    else:
        common |= {"weights": "scores"}
    return values | {"mlp_kind": "experts", "experts": Experts(**common)}


def _write_deepseek(config: ModelConfig) -> JsonObject | None:
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
    if not experts.shared:  # its code always has some
        return None
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


CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
"""Fields of Gemma 2 that bound scores and logits, here and in GGUF files."""


def _read_gemma2(rest: Fields) -> JsonObject:
    """Gemma 3's without norms of heads and with one rotary base; scores and logits are bounded."""
    caps = {ours: rest.pop(theirs, cap) for (ours, theirs), cap in zip(CAPS.items(), (50.0, 30.0), strict=True)}
    rest.setdefault("sliding_window_pattern", 2)
    rest.setdefault("rope_theta", 10_000.0)
    return _read_gemma3(rest) | caps | {"qk_norm": False, "rope_local_theta": None}


def _by_type_of_layer(rest: Fields) -> None:
    """The rotary bases of full and of sliding layers, which `transformers` 5 keeps apart."""
    rope = rest.get("rope_parameters") or {}
    if "full_attention" in rope:
        rest["rope_parameters"] = rope["full_attention"]
        rest["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta", 10_000.0)


_GPT2_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "resid_pdrop": "dropout",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps",
}  # fmt: skip


def _read_gpt2(rest: Fields) -> JsonObject:
    rest.require(
        activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
    )  # fmt: skip
    rest.drop("reorder_and_upcast_attn", "n_ctx", "attn_pdrop", "embd_pdrop")
    rest.drop(*[key for key in rest if key.startswith("summary_")])
    inner = rest.pop("n_inner", None)
    for theirs, ours in _GPT2_NAMES.items():
        if theirs in rest:
            rest[ours] = rest.pop(theirs)
    if "hidden_size" in rest:
        rest["intermediate_size"] = inner or 4 * rest["hidden_size"]
    rest.setdefault("rms_norm_eps", 1e-5)
    biases = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True)
    return {"mlp_kind": "gelu", "norm_kind": "layer", "position_kind": "learned", **biases}


def _read_granite(rest: Fields) -> JsonObject:
    """Scales of embedding and scores; `layouts` multiplies those of sublayers and logits into the weights."""
    rest.drop("residual_multiplier", "logits_scaling")
    scales = {ours: float(rest.pop(theirs, 1.0)) for ours, theirs in _GRANITE.items()}
    return _read_llama(rest) | scales


_GRANITE = {"embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier"}


def _write_granite(config: ModelConfig) -> JsonObject | None:
    if config.attention_scale is None:
        return None
    return {"hidden_act": "silu", **{theirs: getattr(config, ours) for ours, theirs in _GRANITE.items()}}


def _read_qwen3_moe(rest: Fields) -> JsonObject:
    """Qwen 3's attention; experts in all layers but the first ones."""
    layers, dense = rest.layers(), list(rest.pop("mlp_only_layers", None) or [])
    rest.require(decoder_sparse_step=(1,))
    if dense != list(range(len(dense))) or len(dense) >= max(1, layers):
        raise ArtifactError(f"{rest.where}: mlp_only_layers is {clip(repr(dense))}; only the first layers can be dense")
    weights = "sum" if rest.pop("norm_topk_prob", False) else "scores"
    loss = float(rest.pop("router_aux_loss_coef", 0.001))
    count, active = int(rest.pop("num_experts", 128)), int(rest.pop("num_experts_per_tok", 8))
    values = _read_llama(rest) | {"qk_norm": True, "mlp_kind": "experts"}
    if dense:
        values |= {"dense_layers": len(dense), "dense_intermediate_size": rest.get("intermediate_size")}
    rest["intermediate_size"] = rest.pop("moe_intermediate_size", 768)
    return values | {"experts": Experts(count, active, weights=weights, balance_loss=loss)}


def _write_qwen3_moe(config: ModelConfig) -> JsonObject | None:
    if (experts := config.experts) is None or experts.weights == "softmax":
        return None
    return _write_qwen(config) | {
        "mlp_only_layers": list(range(config.dense_layers)),
        "intermediate_size": config.dense_intermediate_size or config.intermediate_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "norm_topk_prob": experts.weights == "sum",
        "router_aux_loss_coef": experts.balance_loss,
    }


def _read_partial(rest: Fields, share: str) -> JsonObject:
    """LayerNorm, and the rotation of a `share` of each head's channels; the residual may be parallel."""
    size = rest.get("head_dim") or rest.get("hidden_size", 0) // (rest.get("num_attention_heads") or 1)
    factor = float(rest.pop(share, rest.get("partial_rotary_factor", 0.25)))
    rest.drop("partial_rotary_factor", "rotary_pct")
    rest["rms_norm_eps"] = rest.pop("layer_norm_eps", 1e-5)
    rest["dropout"] = rest.pop("hidden_dropout", 0.0)
    return {"norm_kind": "layer", "rotary_dim": None if factor == 1.0 else int(size * factor)}


def _write_partial(config: ModelConfig, share: str) -> JsonObject:
    none = dict.fromkeys(("rms_norm_eps", "head_dim", "mlp_bias", "attention_bias"))
    own = {share: config.rotary_size / config.head_dim, "layer_norm_eps": config.rms_norm_eps}
    return none | own | {"hidden_dropout": config.dropout, "use_parallel_residual": config.parallel_residual}


def _read_stablelm(rest: Fields) -> JsonObject:
    """LLaMA's with LayerNorm and partial rotation; one norm serves both sublayers if they are parallel."""
    rest.require(qk_layernorm=(False,))
    parallel, bias = bool(rest.pop("use_parallel_residual", False)), bool(rest.pop("use_qkv_bias", False))
    own = _read_partial(rest, "partial_rotary_factor") | {"parallel_residual": parallel, "attention_bias": bias}
    return _read_llama(rest) | own


def _write_stablelm(config: ModelConfig) -> JsonObject | None:
    if config.parallel_residual:  # with norms of their own
        return None
    return _write_partial(config, "partial_rotary_factor") | {
        "hidden_act": "silu",
        "use_qkv_bias": config.attention_bias,
    }


_GELU = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}


def _read_gpt_neox(rest: Fields) -> JsonObject:
    """GPT-2's parts with partial rotation and a parallel residual."""
    kind = _GELU.get(rest.get("hidden_act", "gelu"))
    rest.require(hidden_act=tuple(_GELU))
    rest.drop("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
    rest["rope_theta"] = rest.pop("rotary_emb_base", rest.get("rope_theta"))
    parallel, bias = bool(rest.pop("use_parallel_residual", True)), bool(rest.pop("attention_bias", True))
    biases = {"attention_bias": bias, "attention_output_bias": bias, "mlp_bias": True}
    return _read_partial(rest, "rotary_pct") | {"mlp_kind": kind, "parallel_residual": parallel, **biases}


def _write_gpt_neox(config: ModelConfig) -> JsonObject:
    act = next((name for name, kind in _GELU.items() if kind == config.mlp_kind), None)
    own: JsonObject = {"num_key_value_heads": None, "rope_theta": None, "hidden_act": act}
    own |= {"rotary_emb_base": config.rope_theta, "attention_bias": config.attention_bias}
    return _write_partial(config, "rotary_pct") | own


_OPT_NAMES = {"ffn_dim": "intermediate_size", "enable_bias": "mlp_bias"}


def _read_opt(rest: Fields) -> JsonObject:
    """GPT-2's parts with ReLU."""
    rest.require(
        activation_function=("relu",), do_layer_norm_before=(True,), layer_norm_elementwise_affine=(True,),
        _remove_final_layer_norm=(False,), word_embed_proj_dim=(None, rest.get("hidden_size")),
    )  # fmt: skip
    rest.drop("layerdrop", "init_std", "activation_dropout")
    for theirs, ours in _OPT_NAMES.items():
        rest[ours] = rest.pop(theirs, True if theirs == "enable_bias" else 4 * rest.get("hidden_size", 0))
    biases = dict.fromkeys(("attention_bias", "attention_output_bias"), rest["mlp_bias"])
    return {"mlp_kind": "relu", "norm_kind": "layer", "position_kind": "learned", "rms_norm_eps": 1e-5, **biases}


def _write_opt(config: ModelConfig) -> JsonObject:
    others = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "attention_bias")
    own = {"activation_function": "relu", "word_embed_proj_dim": config.hidden_size, "dropout": config.dropout}
    names = {theirs: getattr(config, ours) for theirs, ours in _OPT_NAMES.items()}
    return dict.fromkeys((*_OPT_NAMES.values(), *others)) | names | own


def _write_smollm3(config: ModelConfig) -> JsonObject:
    rotated = [int(kind != UNROTATED) for kind in config.layer_types or ()]
    types = ["full_attention"] * config.num_hidden_layers
    return {"hidden_act": "silu", "no_rope_layers": rotated, "layer_types": types, "use_sliding_window": False}


def _write_gemma3(config: ModelConfig) -> JsonObject | None:
    types = config.layer_types or ()
    if config.attention_scale is None or UNROTATED in types:
        return None
    scalar = config.attention_scale**-2
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "mlp_bias": None,
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-6) else scalar,
        "layer_types": [_HF_NAMES[name] for name in types],
        "sliding_window": config.sliding_window,
        "rope_local_base_freq": config.rope_local_theta,
    }


def _write_gemma2(config: ModelConfig) -> JsonObject | None:
    if (written := _write_gemma3(config)) is None or written.pop("rope_local_base_freq") is not None:
        return None
    return written | {theirs: getattr(config, ours) for ours, theirs in CAPS.items()}


def _write_gpt2(config: ModelConfig) -> JsonObject:
    others = ("intermediate_size", "num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "mlp_bias")
    gone = {*_GPT2_NAMES.values(), *others} - {"dropout"}
    return dict.fromkeys(gone) | {
        **{theirs: getattr(config, ours) for theirs, ours in _GPT2_NAMES.items()},
        "n_inner": config.intermediate_size,
        "activation_function": "gelu_new",
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _read_llama, lambda config: {"hidden_act": "silu"}),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2, lambda config: _write_qwen(config) | {"attention_bias": None}),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen),
    "mistral": Family("MistralForCausalLM", _read_mistral, _write_mistral),
    "smollm3": Family("SmolLM3ForCausalLM", _read_smollm3, _write_smollm3, ties=True),
    "gemma3_text": Family("Gemma3ForCausalLM", _read_gemma3, _write_gemma3, ties=True),
    "gemma2": Family("Gemma2ForCausalLM", _read_gemma2, _write_gemma2, ties=True),
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _write_gpt2, ties=True),
    "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
    "olmo2": Family("Olmo2ForCausalLM", _read_olmo2, lambda config: {"hidden_act": "silu", "mlp_bias": None}),
    "stablelm": Family("StableLmForCausalLM", _read_stablelm, _write_stablelm),
    "gpt_neox": Family("GPTNeoXForCausalLM", _read_gpt_neox, _write_gpt_neox),
    "granite": Family("GraniteForCausalLM", _read_granite, _write_granite),
    "opt": Family("OPTForCausalLM", _read_opt, _write_opt, ties=True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", partial(_read_deepseek, version=3), _write_deepseek),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        partial(_read_deepseek, version=2),
        lambda config: (found := _write_deepseek(config)) and found | {"head_dim": config.head_dim},
    ),
    "phi3": Family("Phi3ForCausalLM", _read_phi3, lambda config: None),
}
"""By model type. Phi-3 is read alone, and written as the LLaMA or Mistral model that it is when its fused matrices are
apart; a dense DeepSeek-V2 model is written as one of version 3."""
