"""Families with experts or latent attention in Hugging Face's config.json: Mixtral, DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

from sportsllm.formats.huggingface.fields import LATENT, Fields, full_only, only, read_mistral, require, write_mistral
from sportsllm.models.config import SLIDING, ModelConfig
from sportsllm.models.feed_forward_kinds import Experts

_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip
_UNUSED = (
    "rope_interleave",
    "qk_head_dim",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "num_nextn_predict_layers",
    "router_aux_loss_coef",
)


def read_mixtral(rest: Fields, where: str) -> Fields:
    """Experts that are all routed; attention is Mistral's."""
    require(rest, where, router_jitter_noise=(0.0, None))
    loss = float(rest.pop("router_aux_loss_coef", 0.001))
    experts = Experts(int(rest.pop("num_local_experts", 8)), int(rest.pop("num_experts_per_tok", 2)), balance_loss=loss)
    return read_mistral(rest, where) | {"mlp_kind": "experts", "experts": experts}


def write_mixtral(config: ModelConfig) -> Fields:
    """The way back."""
    experts = config.chosen_experts
    return write_mistral(config) | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.active,
        "router_aux_loss_coef": experts.balance_loss,
    }


def fits_mixtral(config: ModelConfig) -> bool:
    """Whether a model is one of the family."""
    if config.experts is None or not only(config, "mlp_kind", "experts", "layer_types", "sliding_window"):
        return False
    experts = config.experts
    known = Experts(experts.count, experts.active, balance_loss=experts.balance_loss)
    return set(config.layer_types or (SLIDING,)) == {SLIDING} and experts == known


def read_deepseek(rest: Fields, where: str, version: int) -> Fields:
    """Latent attention; experts in all layers but the first ones, or in none."""
    require(
        rest, where, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,),
        topk_method=("greedy", "noaux_tc"), moe_layer_freq=(1,),
        scoring_func=("sigmoid" if version == 3 else "softmax",),
    )  # fmt: skip
    full_only(rest, where)
    layers, dense = int(rest.get("num_hidden_layers", 0)), rest.pop("first_k_dense_replace", 3 if version == 3 else 0)
    given = {name: rest.pop(name, None) for name in _EXPERTS}
    values: Fields = {"attention_kind": "latent", **{name: rest.pop(name, None) for name in LATENT}}
    rest["head_dim"] = rest.pop("qk_rope_head_dim", rest.get("head_dim"))
    rest["num_key_value_heads"] = 1
    for key in _UNUSED:
        rest.pop(key, None)
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


def write_deepseek(config: ModelConfig) -> Fields:
    """The way back."""
    latent: Fields = {
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


def fits_deepseek(config: ModelConfig, version: int) -> bool:
    """Whether a model is one of the family; dense ones count as version 3."""
    allowed = ("attention_kind", "mlp_kind", "experts", "dense_layers", "dense_intermediate_size", *LATENT)
    if config.attention_kind != "latent" or not only(config, *allowed):
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
