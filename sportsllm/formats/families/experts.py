"""Families with a mixture of experts: Mixtral, Qwen3-MoE, and DeepSeek, whose attention is latent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip
from sportsllm.formats.families.family import Family, Fields
from sportsllm.formats.families.llama import LLAMA, MISTRAL, QWEN3, read_llama, read_mistral
from sportsllm.models.config import LATENT, Experts, ModelConfig

Names = Mapping[str, tuple[str, float]]
"""By the names in a family's files, fields of `Experts` and the meanings of absence."""
_MIXTRAL: Names = {
    "num_local_experts": ("count", 8),
    "num_experts_per_tok": ("active", 2),
    "router_aux_loss_coef": ("balance_loss", 0.001),
}
_QWEN3: Names = {
    "num_experts": ("count", 128),
    "num_experts_per_tok": ("active", 8),
    "router_aux_loss_coef": ("balance_loss", 0.001),
}
_DEEPSEEK: Names = {
    "n_routed_experts": ("count", 0),
    "n_shared_experts": ("shared", 0),
    "num_experts_per_tok": ("active", 1),
    "n_group": ("groups", 1),
    "topk_group": ("active_groups", 1),
    "routed_scaling_factor": ("scale", 1.0),
}


def _pop_experts(rest: Fields, names: Names) -> JsonObject:
    """Fields of `Experts` by our names; null is as good as absent."""
    found: JsonObject = {}
    for theirs, (ours, usual) in names.items():
        value = rest.pop(theirs, None)
        found[ours] = usual if value is None else float(value) if isinstance(usual, float) else value
    return found


def _written(experts: Experts, names: Names) -> JsonObject:
    return {theirs: getattr(experts, ours) for theirs, (ours, _) in names.items()}


def _split_width(rest: Fields, dense: int, usual: int | None = None) -> JsonObject:
    """`intermediate_size` is the width of the first layers, the `dense` ones without experts, which have their own."""
    width, rest["intermediate_size"] = rest.get("intermediate_size"), rest.pop("moe_intermediate_size", usual)
    return {"dense_layers": dense, "dense_intermediate_size": width} if dense else {}


def _written_apart(config: ModelConfig, experts: Experts) -> JsonObject:
    """What Qwen3-MoE and DeepSeek say of experts by the same names."""
    return {
        "intermediate_size": config.dense_intermediate_size or config.intermediate_size,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": experts.weights == "sum",
    }


def _read_mixtral(rest: Fields) -> JsonObject:
    return {"experts": Experts(**_pop_experts(rest, _MIXTRAL))} | read_mistral(rest)


def _write_mixtral(config: ModelConfig) -> JsonObject | None:
    if config.experts is None:
        return None
    return {"sliding_window": config.sliding_window} | _written(config.experts, _MIXTRAL)


def _read_qwen3_moe(rest: Fields) -> JsonObject:
    """Experts in all layers but the first ones."""
    layers, dense = rest.layers(), list(rest.pop("mlp_only_layers", None) or [])
    if dense != list(range(len(dense))) or len(dense) >= max(1, layers):
        raise ArtifactError(f"{rest.where}: mlp_only_layers is {clip(repr(dense))}; only the first layers can be dense")
    weights = "sum" if rest.pop("norm_topk_prob", False) else "scores"
    experts = Experts(**_pop_experts(rest, _QWEN3), weights=weights)
    return read_llama(rest) | _split_width(rest, len(dense), 768) | {"experts": experts}


def _write_qwen3_moe(config: ModelConfig) -> JsonObject | None:
    if (experts := config.experts) is None or experts.weights == "softmax":
        return None
    dense = {"mlp_only_layers": list(range(config.dense_layers))}
    return dense | _written_apart(config, experts) | _written(experts, _QWEN3)


def _read_deepseek(rest: Fields, version: int) -> JsonObject:
    """Experts in all layers but the first ones, or in none."""
    rest.full_only()
    layers, dense = rest.layers(), rest.pop("first_k_dense_replace", 3 if version == 3 else 0)
    common, normed = _pop_experts(rest, _DEEPSEEK), rest.pop("norm_topk_prob", None)
    values: JsonObject = {name: rest.pop(name, None) for name in LATENT}
    rest["head_dim"] = rest.pop("qk_rope_head_dim", rest.get("head_dim"))
    rest["num_key_value_heads"] = 1
    if dense >= layers or not common["count"]:
        rest.drop("moe_intermediate_size")
        return values
    if version == 2:
        experts = Experts(**common | {"groups": 1, "active_groups": 1}, weights="scores")
    else:
        experts = Experts(**common, router="sigmoid", weights="sum" if normed else "scores", choice_bias=True)
    return values | _split_width(rest, dense) | {"mlp_kind": "experts", "experts": experts}


def _write_deepseek(config: ModelConfig) -> JsonObject | None:
    latent: JsonObject = {
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
    dense = {"first_k_dense_replace": config.dense_layers}
    return latent | dense | _written_apart(config, experts) | _written(experts, _DEEPSEEK)


_DEEPSEEK_ONLY: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "topk_method": ("greedy", "noaux_tc"),
    "moe_layer_freq": (1,),
}
_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    partial(_read_deepseek, version=3),
    only=_DEEPSEEK_ONLY | {"scoring_func": ("sigmoid",)},
    ignored=(
        "rope_interleave",
        "qk_head_dim",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "num_nextn_predict_layers",
        "router_aux_loss_coef",
    ),
    fixed={"attention_kind": "latent"},
    constants=LLAMA.constants,
    unwritten=("mlp_bias",),
    write=_write_deepseek,
)
WITH_EXPERTS = {
    "mixtral": replace(
        MISTRAL,
        architecture="MixtralForCausalLM",
        read=_read_mixtral,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        only=MISTRAL.only | {"router_jitter_noise": (0.0, None)},
        fixed={"mlp_kind": "experts"},
        write=_write_mixtral,
    ),
    "qwen3_moe": replace(
        QWEN3,
        architecture="Qwen3MoeForCausalLM",
        read=_read_qwen3_moe,
        defaults={},
        only=QWEN3.only | {"decoder_sparse_step": (1,)},
        fixed={"qk_norm": True, "mlp_kind": "experts"},
        write=_write_qwen3_moe,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    # A dense model is written as one of version 3.
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        read=partial(_read_deepseek, version=2),
        only=_DEEPSEEK_ONLY | {"scoring_func": ("softmax",)},
    ),
}
