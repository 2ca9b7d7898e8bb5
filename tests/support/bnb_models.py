"""Checkpoints as `transformers` saves them from models that bitsandbytes packed."""

from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import transformers
from safetensors.torch import save_file

from tests.support.checkpoint_files import edit_json

CONFIG = transformers.LlamaConfig(
    vocab_size=384, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
KINDS = ("nf4", "nf4-double", "fp4", "fp4-double", "int8")


def quantization(kind: str) -> dict[str, Any]:
    """The quantization_config of config.json."""
    found: dict[str, Any] = {"quant_method": "bitsandbytes"}
    if kind == "int8":
        return found | {"load_in_8bit": True, "load_in_4bit": False, "bnb_4bit_quant_type": "fp4"}
    four = {"bnb_4bit_quant_type": kind[:3], "bnb_4bit_use_double_quant": "double" in kind}
    return found | {"load_in_8bit": False, "load_in_4bit": True, **four}


def dense_model(dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, large enough that every part of the model shows in the logits."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1) if parameter.ndim == 2 else parameter.normal_(1, 0.1)
    return model


def pack_linears(model: Any, kind: str) -> Any:
    """Put bitsandbytes' layers in the place of all matrices but embedding and head, as `transformers` does.

    Args:
        model: changed, and returned.
        kind: one of KINDS.
    """
    for name, module in list(model.model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        sizes, weight = (module.in_features, module.out_features), module.weight.data
        if kind == "int8":
            layer: Any = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, quant_type=kind[:3])
            layer.weight = bitsandbytes.nn.Params4bit(
                weight, requires_grad=False, quant_type=kind[:3], compress_statistics="double" in kind
            )
            layer.support_avx512bf16_for_cpu = False  # computes in the model's own type, as the others do
        parent, _, leaf = name.rpartition(".")
        setattr(model.model.get_submodule(parent), leaf, layer.to("cpu").eval())
    return model


def dequantize(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The library's numbers of 4 bits, asked for as one long row.

    Asked for row by row, its AVX512 kernel (0.50) gives wrong numbers where a block runs from one row into the next.
    """
    shape = state.shape
    state.shape = torch.Size([shape.numel()])
    try:
        return bitsandbytes.functional.dequantize_4bit(packed, state).reshape(shape)
    finally:
        state.shape = shape


def with_numbers_of(model: Any, packed: Any) -> Any:
    """`model`, changed to multiply with the numbers that `packed`'s layers of 4 bits stand for."""
    for name, layer in packed.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            model.get_submodule(name).weight.data = dequantize(layer.weight.data, layer.weight.quant_state)
    return model


def save(directory: Path, model: Any, kind: str, tokenizer_from: Path | None = None) -> Path:
    """Write such a model's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, str(directory / "model.safetensors"))
    model.config.save_pretrained(directory)
    edit_json(directory / "config.json", quantization_config=quantization(kind))
    if tokenizer_from is not None:
        (directory / "tokenizer.json").write_bytes((tokenizer_from / "tokenizer.json").read_bytes())
    return directory
