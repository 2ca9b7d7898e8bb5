"""The families of models that Hugging Face's config.json may name, and the fields that each adds to LLaMA's.

A family reads its own fields into `ModelConfig`'s and writes them back; `sportsllm.models.hf_config` does the common
ones. Tensors that are stored in another way are the business of `sportsllm.storage.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from sportsllm.errors import ArtifactError
from sportsllm.models.config import FULL, SLIDING, UNROTATED, ModelConfig

Fields = dict[str, Any]
_HF_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING}
_HF_NAMES = {ours: theirs for theirs, ours in _HF_TYPES.items()}

# Fields of `ModelConfig` that are off in a LLaMA model; a family lists those that it has.
_SWITCHES = (
    "attention_kind", "mlp_kind", "qk_norm", "attention_bias", "attention_output_bias", "mlp_bias", "layer_types",
    "sliding_window", "rope_local_theta", "attention_scale", "embedding_scale", "output_norms", "norm_kind",
    "position_kind", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


class Family(NamedTuple):
    """How a model type's config.json differs from LLaMA's.

    Attributes:
        architecture: the class of `transformers`.
        read: takes the family's fields out of those of a file, given with its name, and returns what they mean.
        fits: whether a model can be written as one of the family.
        written: the family's fields of a model that fits; None for one of LLaMA's that the family has not.
        ties: whether embedding and head are one where the file does not say.
    """

    architecture: str
    read: Callable[[Fields, str], Fields]
    fits: Callable[[ModelConfig], bool]
    written: Callable[[ModelConfig], Fields]
    ties: bool = False


def _only(config: ModelConfig, *allowed: str) -> bool:
    """Whether all switches but the allowed ones are as in a LLaMA model."""
    return all(getattr(config, name) == _DEFAULTS[name] for name in _SWITCHES if name not in allowed)


def _one_bias(config: ModelConfig) -> bool:
    return config.attention_bias == config.attention_output_bias


def _require(rest: Fields, where: str, **allowed: tuple[Any, ...]) -> None:
    """Take fields out that are harmless only with these values; the first is what absence means."""
    for key, values in allowed.items():
        value = rest.pop(key, values[0])
        if value not in values:
            raise ArtifactError(f"{where}: {key} is {value!r}; only {values[0]!r} is supported")


def _biases(rest: Fields, default: bool = False) -> Fields:
    bias = bool(rest.pop("attention_bias", default))
    return {"attention_bias": bias, "attention_output_bias": bias}


def _full_only(rest: Fields, where: str) -> None:
    types = rest.pop("layer_types", None)
    if types is not None and set(types) != {"full_attention"}:
        raise ArtifactError(f"{where}: layer_types has {sorted(set(types))}; only 'full_attention' is supported")


def _window(rest: Fields, context: int) -> int | None:
    """A sliding window that hides anything of the context."""
    window = rest.pop("sliding_window", None)
    return None if window is None or window >= context else int(window)


def _read_llama(rest: Fields, where: str) -> Fields:
    _require(rest, where, hidden_act=("silu",), use_sliding_window=(False,))
    rest.pop("sliding_window", None)
    _full_only(rest, where)
    return _biases(rest)


def _read_qwen2(rest: Fields, where: str) -> Fields:
    bias = bool(rest.pop("attention_bias", True))
    return _read_llama(rest, where) | {"attention_bias": bias, "attention_output_bias": False}


def _read_qwen3(rest: Fields, where: str) -> Fields:
    rest.setdefault("head_dim", 128)
    return _read_llama(rest, where) | {"qk_norm": True}


def _read_mistral(rest: Fields, where: str) -> Fields:
    window = _window(rest, rest.get("max_position_embeddings", 0))
    types = rest.pop("layer_types", None)
    values = _read_llama(rest, where)
    if window is None:
        return values
    layers = int(rest["num_hidden_layers"])
    return values | {"sliding_window": window, "layer_types": _types(types or ["sliding_attention"] * layers, where)}


def _read_phi3(rest: Fields, where: str) -> Fields:
    for key in ("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"):
        rest.pop(key, None)
    return _read_mistral(rest, where)


def _read_smollm3(rest: Fields, where: str) -> Fields:
    layers = int(rest.get("num_hidden_layers", 0))
    every = rest.pop("no_rope_layer_interval", 4)
    rotated = rest.pop("no_rope_layers", None) or [(layer + 1) % every != 0 for layer in range(layers)]
    types = tuple(FULL if rotates else UNROTATED for rotates in rotated)
    return _read_llama(rest, where) | {"layer_types": types if UNROTATED in types else None}


def _read_gemma3(rest: Fields, where: str) -> Fields:
    _require(
        rest, where, hidden_activation=("gelu_pytorch_tanh",), hidden_act=("gelu_pytorch_tanh",),
        attn_logit_softcapping=(None,), final_logit_softcapping=(None,), use_bidirectional_attention=(False, None),
    )  # fmt: skip
    layers = int(rest.get("num_hidden_layers", 0))
    every = rest.pop("_sliding_window_pattern", None) or rest.pop("sliding_window_pattern", None) or 6
    rest.pop("sliding_window_pattern", None)
    _by_type_of_layer(rest)
    given = rest.pop("layer_types", None)
    types = given or ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    rest.setdefault("head_dim", 256)
    rest.setdefault("rope_theta", 1e6)
    local = rest.pop("rope_local_base_freq", 10_000.0)
    return _biases(rest) | {
        "mlp_kind": "geglu",
        "qk_norm": True,
        "output_norms": True,
        "embedding_scale": float(rest["hidden_size"]) ** 0.5 if "hidden_size" in rest else 1.0,
        "attention_scale": float(rest.pop("query_pre_attn_scalar", 256)) ** -0.5,
        "layer_types": _types(types, where),
        "sliding_window": rest.pop("sliding_window", 4096),
        "rope_local_theta": float(local),
    }


def _by_type_of_layer(rest: Fields) -> None:
    """The rotary bases of full and of sliding layers, which `transformers` 5 keeps apart."""
    rope = rest.get("rope_parameters") or {}
    if "full_attention" in rope:
        rest["rope_parameters"] = rope["full_attention"]
        rest["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta", 10_000.0)


def _read_gpt2(rest: Fields, where: str) -> Fields:
    _require(
        rest, where, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,),
    )  # fmt: skip
    for key in ("reorder_and_upcast_attn", "n_ctx", *(key for key in rest if key.startswith("summary_"))):
        rest.pop(key, None)
    for key in ("attn_pdrop", "embd_pdrop", "task_specific_params"):
        rest.pop(key, None)
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


def _read_deepseek(rest: Fields, where: str) -> Fields:
    _require(
        rest, where, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,), rope_scaling=(None,),
        topk_method=("greedy", "noaux_tc", "group_limited_greedy"),
    )  # fmt: skip
    _full_only(rest, where)
    layers, experts = int(rest.get("num_hidden_layers", 0)), rest.get("n_routed_experts")
    if experts and rest.get("first_k_dense_replace", 0) < layers:
        raise ArtifactError(f"{where}: n_routed_experts is {experts}; only dense models of this family are supported")
    for key in (*_EXPERTS, "rope_interleave", "qk_head_dim"):
        rest.pop(key, None)
    values = {name: rest.pop(name, None) for name in _LATENT}
    rest["head_dim"] = rest.pop("qk_rope_head_dim", rest.get("head_dim"))
    rest["num_key_value_heads"] = 1
    return {"attention_kind": "latent", **values}


_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
    "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "aux_loss_alpha", "seq_aux", "scoring_func",
    "moe_layer_freq", "ep_size", "num_nextn_predict_layers",
)  # fmt: skip


def _write_deepseek(config: ModelConfig) -> Fields:
    """As a dense model: no layer has experts, of which the file must name some all the same."""
    return {
        "hidden_act": "silu",
        "mlp_bias": None,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.head_dim,
        "v_head_dim": config.v_head_dim,
        "first_k_dense_replace": config.num_hidden_layers,
        "rope_interleave": True,
    }


def _types(given: list[str], where: str) -> tuple[str, ...]:
    unknown = sorted(set(given) - _HF_TYPES.keys())
    if unknown:
        raise ArtifactError(f"{where}: layer_types has {unknown[0]!r}; use {', '.join(_HF_TYPES)}")
    return tuple(_HF_TYPES[name] for name in given)


def _hf_types(config: ModelConfig) -> list[str]:
    return [_HF_NAMES[name] for name in config.layer_types or ()]


def _write_llama(config: ModelConfig) -> Fields:
    return {"hidden_act": "silu"}


def _write_qwen(config: ModelConfig) -> Fields:
    return {"hidden_act": "silu", "mlp_bias": None, "use_sliding_window": False}


def _write_mistral(config: ModelConfig) -> Fields:
    own = {"sliding_window": config.sliding_window, "attention_bias": None, "mlp_bias": None}
    return {"hidden_act": "silu", **own}


def _write_smollm3(config: ModelConfig) -> Fields:
    rotated = [int(kind != UNROTATED) for kind in config.layer_types or ()]
    types = ["full_attention"] * config.num_hidden_layers
    return {"hidden_act": "silu", "no_rope_layers": rotated, "layer_types": types, "use_sliding_window": False}


def _write_gemma3(config: ModelConfig) -> Fields:
    assert config.attention_scale is not None, "the family's models have one"
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "mlp_bias": None,
        "query_pre_attn_scalar": _whole(config.attention_scale**-2),
        "layer_types": _hf_types(config),
        "sliding_window": config.sliding_window,
        "rope_local_base_freq": config.rope_local_theta,
    }


def _write_gpt2(config: ModelConfig) -> Fields:
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
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _read_deepseek,
        lambda c: c.attention_kind == "latent" and _only(c, "attention_kind", *_LATENT),
        _write_deepseek,
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _read_deepseek, lambda _: False, _write_deepseek),
    "phi3": Family("Phi3ForCausalLM", _read_phi3, lambda _: False, _write_llama),
}
"""By model type. Phi-3 and DeepSeek-V2 are read alone, and written as the LLaMA, Mistral or DeepSeek-V3 model that they
are when their tensors are put in order."""
