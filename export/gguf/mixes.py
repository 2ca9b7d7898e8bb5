"""The type of each matrix in a quantized GGUF file, as `llama-quantize` chooses it.

Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` in src/llama-quant.cpp of
https://github.com/ggml-org/llama.cpp. One rule is left out: with an importance matrix it stores the first layers' down
projections as Q4_1 or Q5_1 in files of Q4_0 or Q5_0, since importances alone round them badly.
"""

from __future__ import annotations

from sportsllm.formats.gguf.blocks import BLOCK_TYPES
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import EMBEDDING, HEAD, matrix_shapes
from sportsllm.models.kinds import ROUTER

FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""For rows that are no multiple of 256."""


def block_types(config: ModelConfig, mix: str, calibrated: bool) -> dict[str, str]:
    """By module the type of its matrix in a file such as `q4_k_m`; F16 for rows that are no multiple of 32."""
    return {
        module: _fitting(_wanted(module, columns, config, mix, calibrated), columns)
        for module, (_, columns) in matrix_shapes(config).items()
    }


def _wanted(module: str, columns: int, config: ModelConfig, mix: str, calibrated: bool) -> str:
    """The type for rows of any width; `q4_k_m` and `q4_k_s` differ in the layers that get more than Q4_K."""
    main = mix.upper().removesuffix("_M").removesuffix("_S")
    if module == HEAD or (config.tie_word_embeddings and module == EMBEDDING):
        return "Q8_0" if main == "Q8_0" or columns % BLOCK_TYPES[main].width else "Q6_K"
    if module == EMBEDDING:
        return main
    if module.endswith(f".{ROUTER}"):
        return "F32"
    if config.experts is not None and config.experts.count == 8:
        if module.endswith((".k_proj", ".v_proj")):
            return "Q8_0"
        if module.endswith(".o_proj") and main in ("Q4_K", "IQ4_NL", "IQ4_XS"):
            return "Q5_K"
    layer, layers = int(module.split(".")[2]), config.num_hidden_layers
    first = layer < layers // 8
    important = first or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    groups = config.num_attention_heads // config.num_key_value_heads
    fused = config.positions or config.mlp_kind == "gelu_erf"  # in GPT-2 and GPT-NeoX they are one matrix
    values = (".q_proj", ".k_proj", ".v_proj") if fused else (".v_proj",)
    if module.endswith(values):
        if mix in ("q4_k_m", "q5_k_m") and important:
            return "Q6_K"
        if (mix == "q4_k_s" and layer < 4) or (main.startswith("IQ4") and groups >= 4):
            return "Q5_K"
    elif module.endswith(".down_proj"):
        if mix in ("q4_k_m", "q5_k_m") and important:
            return "Q6_K"
        if first and (mix == "q4_k_s" or (main.startswith("IQ4") and not calibrated)):
            return "Q5_K"
    return main


def _fitting(kind: str, columns: int) -> str:
    """The type, or the one that its rows fit."""
    if kind != "F32" and columns % BLOCK_TYPES[kind].width:
        kind = FALLBACKS.get(kind, kind)
    return kind if kind == "F32" or columns % BLOCK_TYPES[kind].width == 0 else "F16"
