"""Gemma 2 and 3: GeGLU, norms around sublayers, scaled embeddings and sliding layers."""

from __future__ import annotations

import math
from dataclasses import replace

from sportsllm.files import JsonObject
from sportsllm.formats.families.family import HF_NAMES, Family, Fields, layer_types
from sportsllm.models.config import UNROTATED, ModelConfig

CAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}
"""Gemma 2's bounds of scores and logits, here and in GGUF files, and our names of them."""


def _read_gemma3(rest: Fields) -> JsonObject:
    every = rest.pop("_sliding_window_pattern", None) or rest.get("sliding_window_pattern") or 6
    rest.drop("sliding_window_pattern")
    rope = rest.get("rope_parameters") or {}
    if "full_attention" in rope:  # transformers 5 keeps the bases of full and of sliding layers apart
        rest["rope_parameters"] = rope["full_attention"]
        rest["rope_local_base_freq"] = rope.get("sliding_attention", {}).get("rope_theta", 10_000.0)
    types = rest.pop("layer_types", None) or [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(rest.layers())
    ]
    return rest.biases() | {
        "embedding_scale": float(rest["hidden_size"]) ** 0.5 if "hidden_size" in rest else 1.0,
        "attention_scale": float(rest.pop("query_pre_attn_scalar", 256)) ** -0.5,
        "layer_types": layer_types(types, rest.where),
        "sliding_window": rest.pop("sliding_window", 4096),
        "rope_local_theta": float(rest.pop("rope_local_base_freq", 10_000.0)),
    }


def _write_gemma3(config: ModelConfig) -> JsonObject | None:
    types = config.layer_types or ()
    if config.attention_scale is None or UNROTATED in types:
        return None
    scalar = config.attention_scale**-2
    return {
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-6) else scalar,
        "layer_types": [HF_NAMES[name] for name in types],
        "sliding_window": config.sliding_window,
        "rope_local_base_freq": config.rope_local_theta,
    }


def _write_gemma2(config: ModelConfig) -> JsonObject | None:
    if (written := _write_gemma3(config)) is None or written.pop("rope_local_base_freq") is not None:
        return None
    return written


_GELU: dict[str, tuple[object, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False, None),
}
_PARTS: JsonObject = {"mlp_kind": "geglu", "output_norms": True}
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _read_gemma3,
    defaults={"head_dim": 256, "rope_theta": 1e6},
    only=_GELU | dict.fromkeys(CAPS, (None,)),
    fixed=_PARTS | {"qk_norm": True},
    ties=True,
    constants={"hidden_activation": "gelu_pytorch_tanh"},
    unwritten=("mlp_bias",),
    write=_write_gemma3,
)
GEMMA = {
    "gemma3_text": _GEMMA3,
    "gemma2": replace(
        _GEMMA3,
        architecture="Gemma2ForCausalLM",
        names=CAPS,
        defaults={
            "head_dim": 256,
            "rope_theta": 10_000.0,
            "sliding_window_pattern": 2,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
        },
        only=_GELU,
        fixed=_PARTS | {"rope_local_theta": None},
        write=_write_gemma2,
    ),
}
