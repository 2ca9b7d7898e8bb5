"""The families of models that Hugging Face's config.json may name, and the fields that each adds to LLaMA's.

Tensors that are stored in another way are the business of `sportsllm.formats.layouts`.
"""

from __future__ import annotations

from sportsllm.formats.huggingface import experts
from sportsllm.formats.huggingface.fields import (
    Family,
    Fields,
    biases,
    hf_types,
    layer_types,
    one_bias,
    only,
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    require,
    write_llama,
    write_mistral,
    write_qwen,
)
from sportsllm.models.config import FULL, SLIDING, UNROTATED, ModelConfig


def _read_phi3(rest: Fields, where: str) -> Fields:
    for key in ("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"):
        rest.pop(key, None)
    return read_mistral(rest, where)


def _read_smollm3(rest: Fields, where: str) -> Fields:
    layers = int(rest.get("num_hidden_layers", 0))
    every = rest.pop("no_rope_layer_interval", 4)
    rotated = rest.pop("no_rope_layers", None) or [(layer + 1) % every != 0 for layer in range(layers)]
    types = tuple(FULL if rotates else UNROTATED for rotates in rotated)
    return read_llama(rest, where) | {"layer_types": types if UNROTATED in types else None}


def _read_gemma3(rest: Fields, where: str) -> Fields:
    require(
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
    return biases(rest) | {
        "mlp_kind": "geglu",
        "qk_norm": True,
        "output_norms": True,
        "embedding_scale": float(rest["hidden_size"]) ** 0.5 if "hidden_size" in rest else 1.0,
        "attention_scale": float(rest.pop("query_pre_attn_scalar", 256)) ** -0.5,
        "layer_types": layer_types(types, where),
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
    require(
        rest, where, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,), 
    )  # fmt: skip
    for key in ("reorder_and_upcast_attn", "n_ctx", *(key for key in rest if key.startswith("summary_"))):
        rest.pop(key, None)
    for key in ("attn_pdrop", "embd_pdrop"):
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
        "layer_types": hf_types(config),
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
    return own and scaled and known and one_bias(config) and only(config, *allowed)


def _fits_gpt2(config: ModelConfig) -> bool:
    biased = config.attention_bias and config.attention_output_bias and config.mlp_bias
    whole = config.num_key_value_heads == config.num_attention_heads and config.query_size == config.hidden_size
    own = (config.mlp_kind, config.norm_kind, config.position_kind) == ("gelu", "layer", "learned")
    allowed = ("mlp_kind", "norm_kind", "position_kind", "attention_bias", "attention_output_bias", "mlp_bias")
    return biased and whole and own and only(config, *allowed)


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        read_llama,
        lambda c: one_bias(c) and only(c, "attention_bias", "attention_output_bias", "mlp_bias"),
        write_llama,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        read_qwen2,
        lambda c: c.attention_bias and only(c, "attention_bias"),
        lambda c: write_qwen(c) | {"attention_bias": None},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        read_qwen3,
        lambda c: c.qk_norm and one_bias(c) and only(c, "qk_norm", "attention_bias", "attention_output_bias"),
        write_qwen,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        read_mistral,
        lambda c: set(c.layer_types or ()) == {SLIDING} and only(c, "layer_types", "sliding_window"),
        write_mistral,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _read_smollm3,
        lambda c: (
            UNROTATED in (c.layer_types or ())
            and SLIDING not in (c.layer_types or ())
            and one_bias(c)
            and only(c, "layer_types", "attention_bias", "attention_output_bias", "mlp_bias")
        ),
        _write_smollm3,
        ties=True,
    ),
    "gemma3_text": Family("Gemma3ForCausalLM", _read_gemma3, _fits_gemma3, _write_gemma3, ties=True),
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _fits_gpt2, _write_gpt2, ties=True),
    "mixtral": Family("MixtralForCausalLM", experts.read_mixtral, experts.fits_mixtral, experts.write_mixtral),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        lambda rest, where: experts.read_deepseek(rest, where, 3),
        lambda c: experts.fits_deepseek(c, 3),
        experts.write_deepseek,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        lambda rest, where: experts.read_deepseek(rest, where, 2),
        lambda c: experts.fits_deepseek(c, 2),
        lambda c: experts.write_deepseek(c) | {"head_dim": c.head_dim},
    ),
    "phi3": Family("Phi3ForCausalLM", _read_phi3, lambda _: False, write_llama),
}
"""By model type. Phi-3 is read alone, and written as the LLaMA or Mistral model that it is when its fused matrices are
apart; a dense DeepSeek-V2 model is written as one of version 3."""
