"""Families with a mixture of experts: Mixtral, Qwen3-MoE, and DeepSeek, whose attention is latent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip
from sportsllm.formats.families.family import Family, Fields
from sportsllm.formats.families.llama import LLAMA, MISTRAL, QWEN3, read_llama, read_mistral
from sportsllm.models.config import LATENT, Experts, ModelConfig


def _read_mixtral(rest: Fields) -> JsonObject:
    experts = Experts(
        count=int(rest.pop("num_local_experts", 8)),
        active=int(rest.pop("num_experts_per_tok", 2)),
        balance_loss=float(rest.pop("router_aux_loss_coef", 0.001)),
    )
    return read_mistral(rest) | {"experts": experts}


def _write_mixtral(config: ModelConfig) -> JsonObject | None:
    if (experts := config.experts) is None:
        return None
    return {
        "sliding_window": config.sliding_window,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "router_aux_loss_coef": experts.balance_loss,
    }


def _read_qwen3_moe(rest: Fields) -> JsonObject:
    """Experts in all layers but the first ones."""
    layers, dense = rest.layers(), list(rest.pop("mlp_only_layers", None) or [])
    if dense != list(range(len(dense))) or len(dense) >= max(1, layers):
        raise ArtifactError(f"{rest.where}: mlp_only_layers is {clip(repr(dense))}; only the first layers can be dense")
    values = read_llama(rest)
    values["experts"] = Experts(
        count=int(rest.pop("num_experts", 128)),
        active=int(rest.pop("num_experts_per_tok", 8)),
        weights="sum" if rest.pop("norm_topk_prob", False) else "scores",
        balance_loss=float(rest.pop("router_aux_loss_coef", 0.001)),
    )
    if dense:
        values |= {"dense_layers": len(dense), "dense_intermediate_size": rest.get("intermediate_size")}
    rest["intermediate_size"] = rest.pop("moe_intermediate_size", 768)
    return values


def _write_qwen3_moe(config: ModelConfig) -> JsonObject | None:
    if (experts := config.experts) is None or experts.weights == "softmax":
        return None
    return {
        "mlp_only_layers": list(range(config.dense_layers)),
        "intermediate_size": config.dense_intermediate_size or config.intermediate_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "norm_topk_prob": experts.weights == "sum",
        "router_aux_loss_coef": experts.balance_loss,
    }


_DEEPSEEK_EXPERTS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)


def _read_deepseek(rest: Fields, version: int) -> JsonObject:
    """Experts in all layers but the first ones, or in none."""
    rest.full_only()
    layers, dense = rest.layers(), rest.pop("first_k_dense_replace", 3 if version == 3 else 0)
    given = {name: rest.pop(name, None) for name in _DEEPSEEK_EXPERTS}
    values: JsonObject = {name: rest.pop(name, None) for name in LATENT}
    rest["head_dim"] = rest.pop("qk_rope_head_dim", rest.get("head_dim"))
    rest["num_key_value_heads"] = 1
    if dense >= layers or not given["n_routed_experts"]:
        return values
    if dense:
        values |= {"dense_layers": dense, "dense_intermediate_size": rest.get("intermediate_size")}
    rest["intermediate_size"] = given["moe_intermediate_size"]
    common: JsonObject = {
        "count": given["n_routed_experts"],
        "active": given["num_experts_per_tok"] or 1,
        "shared": given["n_shared_experts"] or 0,
        "scale": float(given["routed_scaling_factor"] or 1.0),
    }
    if version == 2:
        return values | {"mlp_kind": "experts", "experts": Experts(**common, weights="scores")}
    experts = Experts(
        **common,
        router="sigmoid",
        weights="sum" if given["norm_topk_prob"] else "scores",
        choice_bias=True,
        groups=given["n_group"] or 1,
        active_groups=given["topk_group"] or 1,
    )
    return values | {"mlp_kind": "experts", "experts": experts}


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
