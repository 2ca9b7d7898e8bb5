"""Small models of `transformers` of every family, with random weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_GEMMA3 = {
    "head_dim": 32,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GPT2 = {"n_positions": 320, "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
_LATENT = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 4,
}  # fmt: skip
_EXPERTS = {
    "first_k_dense_replace": 0, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.9,
}  # fmt: skip
_ALL_HEADS = SIZES | {"num_key_value_heads": 4}
_NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **_GEMMA3),
    "gemma3-stretched": transformers.Gemma3TextConfig(
        **SIZES, **_GEMMA3, rope_scaling={"rope_type": "linear", "factor": 4.0}
    ),
    "phi3": transformers.Phi3Config(**SIZES),
    "phi3-longrope": transformers.Phi3Config(
        **SIZES | {"max_position_embeddings": 1280}, original_max_position_embeddings=320,
        rope_scaling={
            "type": "longrope", "short_factor": [1.0 + pair / 8 for pair in range(8)], "long_factor": [4.0] * 8,
        },
    ),
    "phi3-sliding": transformers.Phi3Config(**SIZES, sliding_window=WINDOW),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "smollm3": transformers.SmolLM3Config(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=384, **_GPT2),
    "deepseek-v3": transformers.DeepseekV3Config(**_ALL_HEADS, **_LATENT, q_lora_rank=32),
    "deepseek-v3-halves": transformers.DeepseekV3Config(
        **_ALL_HEADS, **_LATENT, q_lora_rank=None, rope_interleave=False, tie_word_embeddings=True
    ),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "stablelm": transformers.StableLmConfig(**SIZES, use_qkv_bias=True),
    "stablelm-16": transformers.StableLmConfig(**_ALL_HEADS | {"hidden_size": 128}, partial_rotary_factor=0.5),
    "gpt-neox": transformers.GPTNeoXConfig(**_NEOX),
    "gpt-neox-serial": transformers.GPTNeoXConfig(
        **_NEOX, use_parallel_residual=False, hidden_act="gelu_new", rotary_pct=1.0, rotary_emb_base=500.0
    ),
    "granite": transformers.GraniteConfig(
        **SIZES, embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=6.0
    ),
    "opt": transformers.OPTConfig(
        vocab_size=384, hidden_size=64, ffn_dim=96, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=320, word_embed_proj_dim=64, dropout=0.0, bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen3-moe-mixed": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0]
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3-experts": transformers.DeepseekV3Config(**_ALL_HEADS, **_LATENT | _EXPERTS, q_lora_rank=32),
    "deepseek-v2-experts": transformers.DeepseekV2Config(
        **_ALL_HEADS, **_LATENT | _EXPERTS | {"n_group": 1, "topk_group": 1}, q_lora_rank=None, head_dim=8
    ),
    "deepseek-v3-mixed": transformers.DeepseekV3Config(
        **_ALL_HEADS, **_LATENT | _EXPERTS | {"first_k_dense_replace": 1}, q_lora_rank=32
    ),
    "deepseek-v2-mixed": transformers.DeepseekV2Config(
        **_ALL_HEADS,
        **_LATENT | _EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
        q_lora_rank=None,
        head_dim=8,
    ),
    "deepseek-v3-yarn": transformers.DeepseekV3Config(
        **_ALL_HEADS, **_LATENT | _EXPERTS, q_lora_rank=32, rope_scaling=_YARN, output_router_logits=True
    ),
    "deepseek-v2-yarn": transformers.DeepseekV2Config(
        **_ALL_HEADS,
        **_LATENT | _EXPERTS | {"n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        head_dim=8,
        rope_scaling=_YARN | {"mscale_all_dim": 0},
    ),
    "deepseek-v2": transformers.DeepseekV2Config(**_ALL_HEADS, **_LATENT, q_lora_rank=None, head_dim=8),
}  # fmt: skip
PLAIN: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=24, rope_theta=500_000.0, rms_norm_eps=1e-5),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-bias": transformers.LlamaConfig(**_ALL_HEADS, attention_bias=True, mlp_bias=True),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
}
"""Families whose layers are alike and have no parts of their own."""


def peer(name: str) -> Any:
    """A model of one of `CONFIGS` or `PLAIN`, norms and biases random too."""
    return peer_of((CONFIGS | PLAIN)[name])


def peer_of(config: transformers.PretrainedConfig) -> Any:
    """A model of any shape."""
    torch.manual_seed(0)
    found = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in found.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return found


def save(name: str, directory: Path) -> Any:
    """Write `peer(name)` as `transformers` does; returns it."""
    found = peer(name)
    found.save_pretrained(directory)
    return found
