"""GGUF files of families beside LLaMA's, written as llama.cpp's converter does, against `transformers`."""

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.convert import convert_gguf
from sportsllm.models.config import SLIDING, UNROTATED
from tests.support import families
from tests.support.gguf_files import ARCHITECTURES, byte_level, refused, settings_of, tensors_of, write_file

_SIZES = families.SIZES | {"num_hidden_layers": 6}
_CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "gemma3": transformers.Gemma3TextConfig(**_SIZES, head_dim=32, sliding_window=8, query_pre_attn_scalar=32),
    "phi3": transformers.Phi3Config(**_SIZES),
    "phi3-sliding": transformers.Phi3Config(**_SIZES, sliding_window=8),
    "smollm3": transformers.SmolLM3Config(**_SIZES),
    "gpt2": families.CONFIGS["gpt2"],
    "gemma2": transformers.Gemma2Config(**_SIZES, head_dim=32, sliding_window=8, query_pre_attn_scalar=32),
    "olmo2": families.CONFIGS["olmo2"],
    "stablelm": families.CONFIGS["stablelm"],
    "gpt-neox": families.CONFIGS["gpt-neox"],
    "granite": families.CONFIGS["granite"],
    "qwen3-moe": families.CONFIGS["qwen3-moe"],
    "mixtral": families.CONFIGS["mixtral"],
}
_SCALES = {
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def settings(config: Any) -> dict[str, Any]:
    """The architecture's keys, as the converter writes them."""
    if config.model_type == "gpt2":
        return {
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "block_count": config.n_layer,
            "feed_forward_length": 4 * config.n_embd,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    if config.model_type in ("stablelm", "gpt_neox"):
        heads, epsilon = config.num_attention_heads, {"attention.layer_norm_epsilon": config.layer_norm_eps}
        config.head_dim, config.rms_norm_eps = config.hidden_size // heads, None
        config.num_key_value_heads = getattr(config, "num_key_value_heads", heads)
        rotated = {"rope.dimension_count": int(config.head_dim * config.partial_rotary_factor)}
        rotated["rope.freq_base"] = float(config.rope_theta)
        return settings_of(config) | epsilon | rotated | {"use_parallel_residual": config.use_parallel_residual}
    if not hasattr(config, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: getattr(config, name) for name in names} if config.model_type == "gemma2" else {}
    if config.model_type == "granite":
        caps = {theirs: getattr(config, ours) for theirs, ours in _SCALES.items()}
    if config.model_type == "mixtral":
        caps = {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if config.model_type == "qwen3_moe":
        caps = {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        caps["expert_feed_forward_length"] = config.moe_intermediate_size
    return settings_of(config) | caps | ({"attention.sliding_window": window} if window else {})


@cache
def model_of(name: str) -> Any:
    return families.peer_of(_CONFIGS[name])


def write(name: str, path: Path, tokenizer: Path, **changes: Any) -> Any:
    model = model_of(name)
    kind = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[model.config.model_type]]
    write_file(path, kind, settings(model.config) | changes, byte_level(tokenizer), tensors_of(model))
    return model


@pytest.mark.parametrize("name", _CONFIGS)
def test_logits_are_those_of_the_model_that_was_written(name: str, tokenizer_directory: Path, tmp_path: Path) -> None:
    model = write(name, tmp_path / "model.gguf", tokenizer_directory)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    ours = load_checkpoint(tmp_path / "out")
    tokens = torch.randint(0, 384, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(tokens).logits
        # Float32 sums in another order, as a share of the logits' spread.
        assert float((ours(tokens) - wanted).abs().max() / wanted.std()) < 1e-5
    types = ours.config.layer_types or ()
    assert (SLIDING in types) == (name in ("gemma2", "gemma3", "phi3-sliding")) and (UNROTATED in types) == (
        name == "smollm3"
    )


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma3", {"attention.sliding_window": None}, "sliding_window"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not known"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is missing"),
        ("gpt2", {"attention.layer_norm_epsilon": None}, "layer_norm_epsilon"),
        ("gpt2", {"attention.layer_norm_rms_epsilon": 1e-5}, "layer_norm_rms_epsilon is not known"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual is true, which is not supported"),
        ("gpt-neox", {"use_parallel_residual": None}, "use_parallel_residual is missing"),
        ("granite", {"logit_scale": None}, "logit_scale is missing"),
        ("granite", {"rope.scaling.finetuned": False}, "without rotary positions"),
        ("smollm3", {"expert_count": 8}, "a mixture of experts is not supported"),
        ("mixtral", {"expert_used_count": 5}, "5 of 4 experts per token"),
        ("qwen3-moe", {"expert_count": 9}, "ffn_gate_inp.weight' has shape (8, 64)"),
        ("qwen3-moe", {"expert_used_count": 9}, "9 of 8 experts per token"),
        ("qwen3-moe", {"expert_feed_forward_length": 48}, "ffn_gate_exps.weight' has shape (32, 64)"),
        ("phi3", {"feed_forward_length": 97}, "has 192 rows, the config asks for 194"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    write(name, tmp_path / "model.gguf", tokenizer_directory, **changes)
    refused(tmp_path / "model.gguf", said, tmp_path / "out")
