"""Families with LayerNorm: GPT-2, OPT, GPT-NeoX (Pythia) and StableLM."""

from __future__ import annotations

import math

from sportsllm.files import JsonObject
from sportsllm.formats.families.family import Family, Fields
from sportsllm.formats.families.llama import LLAMA, read_llama
from sportsllm.models.config import ModelConfig


def _read_gpt2(rest: Fields) -> JsonObject:
    rest.drop(*[key for key in rest if key.startswith("summary_")])
    inner = rest.pop("n_inner", None)
    if "hidden_size" in rest:
        rest["intermediate_size"] = inner or 4 * rest["hidden_size"]
    return {}


def _write_gpt2(config: ModelConfig) -> JsonObject:
    return {
        "n_inner": config.intermediate_size,
        "activation_function": "gelu_new",
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _read_opt(rest: Fields) -> JsonObject:
    rest.require(word_embed_proj_dim=(None, rest.get("hidden_size")))
    rest.setdefault("intermediate_size", 4 * rest.get("hidden_size", 0))
    return dict.fromkeys(("attention_bias", "attention_output_bias"), rest["mlp_bias"])


def _write_opt(config: ModelConfig) -> JsonObject:
    return {"activation_function": "relu", "word_embed_proj_dim": config.hidden_size, "dropout": config.dropout}


def _rotary_share(config: ModelConfig) -> float:
    """The share that `Fields.rotary_dim`, and `transformers`, make the same channels of: 44 * (30 / 44) is below 30."""
    share = config.rotary_size / config.head_dim
    return share if int(config.head_dim * share) == config.rotary_size else math.nextafter(share, 1)


_GELU = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}


def _read_gpt_neox(rest: Fields) -> JsonObject:
    kind = _GELU.get(rest.get("hidden_act", "gelu"))
    rest.require(hidden_act=tuple(_GELU))
    return rest.biases() | {"mlp_kind": kind, "rotary_dim": rest.rotary_dim("rotary_pct")}


def _write_gpt_neox(config: ModelConfig) -> JsonObject:
    act = next((name for name, kind in _GELU.items() if kind == config.mlp_kind), None)
    return {"rotary_pct": _rotary_share(config), "hidden_act": act}


def _read_stablelm(rest: Fields) -> JsonObject:
    rest["attention_bias"] = rest.pop("use_qkv_bias", False)  # a field attention_bias means nothing in this family
    return read_llama(rest) | {"rotary_dim": rest.rotary_dim("partial_rotary_factor")}


def _write_stablelm(config: ModelConfig) -> JsonObject | None:
    if config.parallel_residual:  # one norm for both sublayers, where ours has two
        return None
    return {"partial_rotary_factor": _rotary_share(config), "use_qkv_bias": config.attention_bias}


_PARTIAL_NAMES = {
    "layer_norm_eps": "rms_norm_eps",
    "hidden_dropout": "dropout",
    "use_parallel_residual": "parallel_residual",
}
LAYER_NORM = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _read_gpt2,
        names={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "resid_pdrop": "dropout",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={"rms_norm_eps": 1e-5},
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        ignored=("reorder_and_upcast_attn", "n_ctx", "attn_pdrop", "embd_pdrop"),
        fixed={
            "mlp_kind": "gelu",
            "norm_kind": "layer",
            "position_kind": "learned",
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
        },
        ties=True,
        unwritten=("intermediate_size", "num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "mlp_bias"),
        write=_write_gpt2,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        _read_stablelm,
        names=_PARTIAL_NAMES,
        defaults={"rms_norm_eps": 1e-5},
        only=LLAMA.only | {"qk_layernorm": (False,)},
        ignored=LLAMA.ignored,
        fixed={"norm_kind": "layer", "attention_output_bias": False},
        constants=LLAMA.constants,
        unwritten=("head_dim", "attention_bias", "mlp_bias"),
        write=_write_stablelm,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        _read_gpt_neox,
        names=_PARTIAL_NAMES | {"rotary_emb_base": "rope_theta"},
        defaults={"rms_norm_eps": 1e-5, "parallel_residual": True, "attention_bias": True},
        ignored=("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
        fixed={"norm_kind": "layer", "mlp_bias": True},
        unwritten=("num_key_value_heads", "head_dim", "mlp_bias"),
        write=_write_gpt_neox,
    ),
    "opt": Family(
        "OPTForCausalLM",
        _read_opt,
        names={"ffn_dim": "intermediate_size", "enable_bias": "mlp_bias"},
        defaults={"mlp_bias": True},
        only={
            "activation_function": ("relu",),
            "do_layer_norm_before": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
        },
        ignored=("layerdrop", "init_std", "activation_dropout"),
        fixed={"mlp_kind": "relu", "norm_kind": "layer", "position_kind": "learned", "rms_norm_eps": 1e-5},
        ties=True,
        unwritten=("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "attention_bias"),
        write=_write_opt,
    ),
}
