"""llama.cpp judges what `export --format gguf` writes: every family and every type, loaded and run by its engine."""

from pathlib import Path
from typing import Any

import gguf
import pytest

import sportsllm
from export.gguf.mixes import block_types
from export.gguf.write import GGUF_FILE
from export.request import BLOCK_DTYPES
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.convert import convert_gguf
from sportsllm.models.config import FULL, SLIDING, UNROTATED, Experts
from tests.support import llama_cpp
from tests.support.models import saved, tiny_config, tiny_model

ROUNDING = 0.06
"""Of the inputs of up to four layers to 8 bits; a wrong nibble or row gives about 1."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
GEMMA3 = {
    "mlp_kind": "geglu", "qk_norm": True, "output_norms": True, "embedding_scale": 16.0, "attention_scale": 64**-0.5,
    "layer_types": (SLIDING, FULL), "sliding_window": 8, "rope_local_theta": 10_000.0,
}  # fmt: skip
GEMMA2 = GEMMA3 | {"qk_norm": False, "rope_local_theta": None, "attention_softcap": 2.0, "logit_softcap": 3.0}
LARGEST = {"num_hidden_layers": 46, "layer_types": (SLIDING, FULL) * 23, "head_dim": 8, "attention_scale": 8**-0.5}
LARGEST |= {"hidden_size": 64, "embedding_scale": 8.0}  # llama.cpp has hidden_size / heads in place of head_dim
GPT2 = {
    "mlp_kind": "gelu",
    "norm_kind": "layer",
    "position_kind": "learned",
    "num_key_value_heads": 4,
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True),
}
OLMO2 = {
    "qk_norm": True, "joint_qk_norm": True, "input_norms": False, "output_norms": True, "tie_word_embeddings": False,
}  # fmt: skip
NEOX = GPT2 | {
    "mlp_kind": "gelu_erf", "position_kind": "rotary", "rotary_dim": 16, "parallel_residual": True,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {"qk_norm": True, "mlp_kind": "experts", "experts": Experts(4, 4)}
MIXTRAL = {"mlp_kind": "experts", "experts": Experts(4, 4), "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen2, pruned heads": {"attention_bias": True, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": False},
    "smollm3": {"num_hidden_layers": 4, "layer_types": (FULL, FULL, FULL, UNROTATED)},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "olmo2": OLMO2,
    "stablelm": {"norm_kind": "layer", "rotary_dim": 32, "attention_bias": True, "tie_word_embeddings": False},
    "gptneox": NEOX,
    "qwen3moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "granite": {"embedding_scale": 12.0, "attention_scale": 0.2},
    "gptneox-serial": NEOX | {"parallel_residual": False},
}


def exported(directory: Path, tokenizer: Path, out: str, changes: dict[str, Any], **options: Any) -> Path:
    """A tiny model's GGUF file; its checkpoint is `directory / "model"`."""
    model = directory / "model"
    if not model.exists():
        saved(model, tiny_model(std=0.08, **WIDE | changes), tokenizer)
    sportsllm.export(model, out=directory / out, format="gguf", **options)
    return directory / out / GGUF_FILE


def judge(file: Path, rounding: float) -> None:
    convert_gguf(file, file.parent / "back")
    llama_cpp.assert_same(file, load_checkpoint(file.parent / "back"), rounding)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_read_by_llama_cpp_as_it_is_meant(family: str, tokenizer_directory: Path, tmp_path: Path) -> None:
    llama_cpp.engine()
    dense = exported(tmp_path, tokenizer_directory, "dense", FAMILIES[family])
    llama_cpp.assert_same(dense, load_checkpoint(tmp_path / "model"), 2e-3)  # its cache is in float16
    dtype = "q4_k_m" if family in ("gemma3", "gptneox", "qwen3moe") else "q8_0"
    judge(exported(tmp_path, tokenizer_directory, dtype, FAMILIES[family], dtype=dtype), ROUNDING)


@pytest.mark.parametrize("family", [QWEN3_MOE, MIXTRAL], ids=["qwen3moe", "mixtral"])
def test_llama_cpp_chooses_the_same_experts(family: dict[str, Any], tokenizer_directory: Path, tmp_path: Path) -> None:
    """In float32: with inputs in 8 bits a token may be sent to another expert that is nearly as good."""
    llama_cpp.engine()
    file = exported(tmp_path, tokenizer_directory, "dense", family | {"experts": Experts(8, 2)})
    llama_cpp.assert_same(file, load_checkpoint(tmp_path / "model"), 2e-3)


@pytest.mark.parametrize(("family", "exact"), [(QWEN3_MOE, "ffn_gate_inp"), (GPT2, "position_embd")])
def test_float16_leaves_routers_and_positions_exact(
    family: dict[str, Any], exact: str, tokenizer_directory: Path, tmp_path: Path
) -> None:
    tensors = gguf.GGUFReader(exported(tmp_path, tokenizer_directory, "half", family, dtype="fp16")).tensors
    wide = {each.name.split(".")[-2] for each in tensors if len(each.shape) > 1 and each.tensor_type.name == "F32"}
    assert wide == {exact}


@pytest.fixture(scope="module")
def llama(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    exported(directory, tokenizer_directory, "dense", {})
    return directory


@pytest.mark.parametrize("dtype", sorted(set(BLOCK_DTYPES) - {"q4_k_m", "q5_k_m"}))
def test_a_type_is_read_by_llama_cpp_as_it_is_meant(dtype: str, llama: Path, texts: list[str], tmp_path: Path) -> None:
    llama_cpp.engine()
    short = tmp_path / "calibration.txt"
    short.write_text(texts[0], encoding="utf-8")
    calibration = [short] if dtype in ("q4_k", "iq4_xs") else None
    result = sportsllm.export(
        llama / "model", out=tmp_path / "out", format="gguf", dtype=dtype, calibration=calibration
    )
    file = tmp_path / "out" / GGUF_FILE
    stored = {"q4_k": "Q4_K_M", "q5_k": "Q5_K_M"}.get(dtype, dtype.upper())
    assert gguf.GGUFReader(file).fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{stored}"]
    assert stored.removesuffix("_M").removesuffix("_S") in result.formats
    judge(file, ROUNDING)


def test_types_are_those_of_llama_quantize() -> None:
    """By its own log for models of these shapes: SmolLM2-135M, and Gemma 3 270M."""
    smollm2 = tiny_config(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                          num_key_value_heads=3, head_dim=64)  # fmt: skip
    found = block_types(smollm2, "q4_k_m", calibrated=False)
    down = [found[f"model.layers.{layer}.mlp.down_proj"] for layer in range(30)]
    most = [layer for layer, kind in enumerate(down) if kind == "Q6_K"]
    assert most == [0, 1, 2, *range(5, 27, 3), 27, 28, 29]
    assert set(down) == {"Q6_K", "Q4_K"} and found["model.embed_tokens"] == "Q8_0"
    assert found["model.layers.0.self_attn.v_proj"] == "Q8_0" and found["model.layers.3.self_attn.v_proj"] == "Q5_0"
    assert block_types(smollm2, "iq4_xs", calibrated=False)["model.layers.2.mlp.down_proj"] == "Q5_K"
    assert block_types(smollm2, "iq4_xs", calibrated=True)["model.layers.2.mlp.down_proj"] == "IQ4_XS"
    assert set(block_types(smollm2, "q5_k_s", calibrated=True).values()) == {"Q5_1", "Q5_K", "Q8_0"}
    eight = tiny_config(**WIDE | QWEN3_MOE | {"experts": Experts(8, 2), "num_hidden_layers": 8})
    found = {module[15:]: kind for module, kind in block_types(eight, "q4_k_s", calibrated=False).items()}
    attention = {
        f"self_attn.{part}_proj": kind for part, kind in zip("qkvo", ("Q4_K", "Q8_0", "Q8_0", "Q5_K"), strict=True)
    }
    assert found.items() >= (attention | {"mlp.gate": "F32", "mlp.experts.7.down_proj": "Q4_K"}).items()
    shared = block_types(tiny_config(**WIDE, num_key_value_heads=1), "iq4_nl", calibrated=True)  # by four heads
    assert shared["model.layers.1.self_attn.v_proj"] == "Q5_K" and shared["model.layers.1.mlp.down_proj"] == "IQ4_NL"
    plain = tiny_config(**WIDE, num_hidden_layers=8, tie_word_embeddings=False)
    for mix, part, more in (("q4_k_m", "mlp.down", [0, 3, 6, 7]), ("q4_k_s", "self_attn.v", [0, 1, 2, 3]),
                            ("q4_k_s", "mlp.down", [0])):  # fmt: skip
        found = block_types(plain, mix, calibrated=True)
        assert [n for n in range(8) if found[f"model.layers.{n}.{part}_proj"] != "Q4_K"] == more
    assert (found["model.embed_tokens"], found["lm_head"]) == ("Q4_K", "Q6_K")
    assert set(block_types(plain, "q8_0", calibrated=True).values()) == {"Q8_0"}
    fused = block_types(tiny_config(**WIDE | GPT2), "q4_k_s", calibrated=True)
    assert fused["model.layers.1.self_attn.q_proj"] == "Q5_K"
    odd = block_types(tiny_config(hidden_size=48, intermediate_size=80, head_dim=12), "q4_0", calibrated=False)
    assert set(odd.values()) == {"F16"}


def test_what_llama_cpp_does_not_know_is_refused(tokenizer_directory: Path, tmp_path: Path) -> None:
    uneven = (FULL, SLIDING, SLIDING, FULL)
    for number, (changes, message) in enumerate(
        (
            ({"num_hidden_layers": 4, "layer_types": (UNROTATED, FULL, FULL, FULL)}, "every fourth layer"),
            (OLMO2 | {"tie_word_embeddings": True}, "olmo2 models only with an untied head"),
            (OLMO2 | {"num_attention_heads": 2}, "olmo2 models only if heads x head_dim is the hidden size"),
            (GEMMA2 | {"tie_word_embeddings": False}, "gemma2 models only with a tied head"),
            *(
                (changes | {"attention_bias": True, "attention_output_bias": True}, "models only without biases")
                for changes in (OLMO2, GEMMA2, GEMMA3)
            ),
            (NEOX | {"attention_bias": False, "attention_output_bias": False}, "gptneox models only with biases"),
            (MIXTRAL | {"layer_types": (SLIDING,) * 2, "sliding_window": 8}, "mixtral is not supported"),
            (QWEN3_MOE | {"experts": Experts(4, 2, weights="scores")}, "Qwen3-MoE only with experts in all layers"),
            (GEMMA2 | {"logit_softcap": None}, "Gemma 2 only with every second layer full"),
            (GEMMA2 | LARGEST, "query_pre_attn_scalar"),
            (GEMMA3 | {"attention_scale": 0.3}, "query_pre_attn_scalar"),
            (GEMMA3 | {"num_hidden_layers": 4, "layer_types": uneven}, "Gemma 3 only with full layers"),
            (GEMMA3 | {"layer_types": (FULL,) * 2, "sliding_window": None}, "Gemma 3 only with full layers"),
        )
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(UsageError, match=message):
            exported(directory, tokenizer_directory, "out", changes)
        assert not (directory / "out").exists()
