"""LLaMA and the families with its parts: RMSNorm, rotary positions and SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from sportsllm.files import JsonObject
from sportsllm.formats.families.family import ORIGINAL_CONTEXT, Family, Fields, layer_types
from sportsllm.models.config import FULL, UNROTATED, ModelConfig
from sportsllm.models.rope import RopeScaling, attention_factor


def read_llama(rest: Fields) -> JsonObject:
    """Full attention in all layers, and one field for all of its biases."""
    rest.full_only()
    return rest.biases()


LLAMA = Family(
    "LlamaForCausalLM",
    read_llama,
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    ignored=("sliding_window", ORIGINAL_CONTEXT),
    constants={"hidden_act": "silu"},
)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    fixed={"qk_norm": True},
    constants={"hidden_act": "silu", "use_sliding_window": False},
    unwritten=("mlp_bias",),
)


def read_mistral(rest: Fields) -> JsonObject:
    """A window in all layers, or in those that `layer_types` names."""
    window, types = rest.pop("sliding_window", None), rest.pop("layer_types", None)
    if window is None or window >= rest.get("max_position_embeddings", 0):  # it hides nothing
        return rest.biases()
    types = types or ["sliding_attention"] * rest.layers()
    return rest.biases() | {"sliding_window": int(window), "layer_types": layer_types(types, rest.where)}


MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    read=read_mistral,
    ignored=(ORIGINAL_CONTEXT,),
    unwritten=("attention_bias", "mlp_bias"),
    write=lambda config: {"sliding_window": config.sliding_window},
)


def _read_smollm3(rest: Fields) -> JsonObject:
    every = rest.pop("no_rope_layer_interval", 4)
    rotated = rest.pop("no_rope_layers", None) or [(layer + 1) % every != 0 for layer in range(rest.layers())]
    types = tuple(FULL if rotates else UNROTATED for rotates in rotated)
    return read_llama(rest) | {"layer_types": types if UNROTATED in types else None}


def _write_smollm3(config: ModelConfig) -> JsonObject:
    return {
        "no_rope_layers": [int(kind != UNROTATED) for kind in config.layer_types or ()],
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "use_sliding_window": False,
    }


def _read_granite(rest: Fields) -> JsonObject:
    return read_llama(rest) | {name: float(rest.pop(name)) for name in ("embedding_scale", "attention_scale")}


def _read_phi3(rest: Fields) -> JsonObject:
    """With longrope (Phi-3.5, Phi-4-mini) the context becomes the original one, which `--rope-scaling` lengthens."""
    own = read_mistral(rest) | {"rotary_dim": rest.rotary_dim("partial_rotary_factor", 1.0)}
    original, scaling = rest.pop(ORIGINAL_CONTEXT, 4096), rest.get("rope_scaling") or rest.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) in ("longrope", "su") and "attention_factor" not in scaling:
        factor = rest.get("max_position_embeddings", original) / original
        short, long = (tuple(scaling[name]) for name in ("short_factor", "long_factor"))
        found = RopeScaling(
            "longrope", factor, original_max_position_embeddings=original, short_factor=short, long_factor=long
        )
        rest["rope_scaling"] = replace(found, attention_factor=attention_factor(found)).fields_used()
        rest["max_position_embeddings"] = original
    return own


LLAMA_LIKE = {
    "llama": LLAMA,
    "qwen2": replace(
        LLAMA,
        architecture="Qwen2ForCausalLM",
        defaults={"attention_bias": True},
        fixed={"attention_output_bias": False},
        constants=QWEN3.constants,
        unwritten=("attention_bias", "mlp_bias"),
    ),
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "smollm3": replace(
        LLAMA,
        architecture="SmolLM3ForCausalLM",
        read=_read_smollm3,
        defaults={"rope_theta": 2e6},
        ties=True,
        write=_write_smollm3,
    ),
    # Norms behind sublayers instead of before, and of all query and key heads together.
    "olmo2": replace(
        LLAMA,
        architecture="Olmo2ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        fixed={"qk_norm": True, "joint_qk_norm": True, "input_norms": False, "output_norms": True},
        unwritten=("mlp_bias",),
    ),
    # Scales of sublayers and logits are multiplied into the weights, see `sportsllm.formats.layouts`.
    "granite": replace(
        LLAMA,
        architecture="GraniteForCausalLM",
        read=_read_granite,
        names={"embedding_multiplier": "embedding_scale", "attention_multiplier": "attention_scale"},
        defaults={"embedding_scale": 1.0, "attention_scale": 1.0},
        ignored=("sliding_window", "residual_multiplier", "logits_scaling"),
    ),
    # Read alone: written as the LLaMA or Mistral model that it is when its fused matrices are apart.
    "phi3": replace(
        MISTRAL,
        architecture="Phi3ForCausalLM",
        read=_read_phi3,
        defaults={"rms_norm_eps": 1e-5},
        ignored=("resid_pdrop", "embd_pdrop"),
        write=lambda config: None,
    ),
}
