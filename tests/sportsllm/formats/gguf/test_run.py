"""GGUF files against `transformers`: the same logits from the model that a file was written from."""

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import sportsllm
from benchmarks.model_size import stored_format
from compress.distillation.starts import Checkpoint, choose_start
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.commands import find_model
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.gguf.convert import convert_gguf
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import directory_bytes, read_manifest, source_gguf, verify_directory
from sportsllm.formats.safetensors import TensorFiles
from sportsllm.text.tokenizer import load_tokenizer
from tests.support import llama_cpp_converter
from tests.support.gguf_files import (
    SIZES,
    byte_level,
    random_weights,
    refused,
    settings_of,
    tensors_of,
    write_file,
    write_model,
)
from tests.support.models import saved, tiny_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": True,
}  # fmt: skip


def model_of(kind: str, **changes: Any) -> Any:
    shape = {"head_dim": 16, "tie_word_embeddings": False} | SIZES | changes
    config = transformers.AutoConfig.for_model(kind, **shape)
    return random_weights(transformers.AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of("llama")


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = model(ids)
    return found if isinstance(found, torch.Tensor) else found.logits


def same_logits(directory: Path, model: Any) -> None:
    """Float32 sums in another order: a few units of the last place of logits of size 100."""
    torch.testing.assert_close(logits(load_checkpoint(directory)), logits(model), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_logits_are_those_of_the_model_that_was_written(
    kind: str, changes: dict[str, Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    model = model_of(kind, **changes)
    file = write_model(tmp_path / "model.gguf", model, byte_level(tokenizer_directory))
    result = convert_gguf(file, tmp_path / "out")
    same_logits(tmp_path / "out", model)
    same_logits(tmp_path / "out", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (result["name"], result["architecture"], result["formats"]) == ("Tiny", kind, ["F32"])
    assert result["parameters"] == model.num_parameters()
    assert verify_directory(tmp_path / "out")[1] == []
    config = load_config(tmp_path / "out")
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 50_000.0, 128)


def test_tensors_are_those_of_transformers_own_reader(llama: Any, tokenizer_directory: Path, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", llama, byte_level(tokenizer_directory), ["Q8_0", "F16", "BF16"])
    convert_gguf(file, tmp_path / "out")
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=llama)["tensors"]
    ours = TensorFiles(tmp_path / "out")
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.float()), name


def test_a_file_or_its_directory_stands_for_a_checkpoint(
    llama: Any, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SPORTSLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    file = write_model(tmp_path / "model" / "model.gguf", llama, byte_level(tokenizer_directory))
    out = find_model(file)
    assert out.parent == tmp_path / "cache" / "gguf" and out.name.startswith("model-")
    same_logits(out, llama)
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert find_model(str(file.parent)) == out and (out / "model.safetensors").stat().st_mtime_ns == written
    moved = file.rename(tmp_path / file.name)
    assert find_model(moved) == out and source_gguf(out) == moved
    (tmp_path / "text.txt").write_text("The ball", encoding="utf-8")
    sportsllm.eval(moved, text=tmp_path / "text.txt", against=moved)
    said = capsys.readouterr().out
    assert said.startswith(f"{moved}: perplexity ") and f"\nagainst {moved}: " in said
    assert sportsllm.report([moved], tmp_path / "report.md", sample=["The ball"]).stages == ["model.gguf"]
    moved.rename(file)
    assert source_gguf(out) is None
    file.with_name("second.gguf").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"holds 2 GGUF files; give one of them, for example model\.gguf"):
        find_model(file.parent)
    with pytest.raises(ArtifactError, match=r"none\.gguf: not found"):
        find_model(tmp_path / "none.gguf")


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}, YARN])
def test_stretched_rotary_angles(scaling: dict[str, Any], tokenizer_directory: Path, tmp_path: Path) -> None:
    model = model_of("llama", rope_scaling=scaling, max_position_embeddings=16_384)
    tensors, settings = tensors_of(model), settings_of(model.config)
    if scaling is LLAMA3:  # as the converter does: the factor of each pair
        plain = 50_000.0 ** -(np.arange(0, 16, 2) / 16)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    else:
        settings |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": 4.0}
    if scaling is YARN:
        settings["rope.scaling.original_context_length"] = 4_096
    file = write_file(tmp_path / "model.gguf", "llama", settings, byte_level(tokenizer_directory), tensors)
    convert_gguf(file, tmp_path / "out")
    same_logits(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == scaling


def test_the_weights_of_a_large_model_stay_in_the_file(
    llama: Any, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_model(tmp_path / "model.gguf", llama, byte_level(tokenizer_directory), ["Q8_0", "F16"])
    convert_gguf(file, tmp_path / "whole")
    monkeypatch.setattr("sportsllm.formats.gguf.convert._LARGE", 0)
    convert_gguf(file, out := tmp_path / "linked")
    assert not list(out.glob("*.safetensors")) and verify_directory(out)[1] == []
    whole, linked = TensorFiles(tmp_path / "whole"), TensorFiles(out)
    assert set(whole) == set(linked) and all(torch.equal(whole[name], linked[name]) for name in whole)
    quantize_checkpoint(out, tmp_path / "int8", QuantizationConfig(8), "rtn")
    quantize_checkpoint(tmp_path / "whole", tmp_path / "same", QuantizationConfig(8), "rtn")
    one, other = (tmp_path / name / "model.safetensors" for name in ("int8", "same"))
    assert one.read_bytes() == other.read_bytes()
    (moved := tmp_path / "elsewhere").mkdir()
    file.rename(moved / file.name)
    with pytest.raises(ArtifactError, match="not found, it holds the weights"):
        TensorFiles(out)
    convert_gguf(moved / file.name, out)
    same_logits(out, load_checkpoint(tmp_path / "whole"))


def test_a_file_that_weights_stay_in_may_be_a_link_but_not_another(
    llama: Any, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache links `model.gguf` to a file without a suffix."""
    monkeypatch.setattr("sportsllm.formats.gguf.convert._LARGE", 0)
    file = write_model(tmp_path / "blob", llama, byte_level(tokenizer_directory))
    (tmp_path / "model.gguf").symlink_to(file)
    convert_gguf(tmp_path / "model.gguf", out := tmp_path / "out")
    same_logits(shutil.copytree(out, tmp_path / "copy"), llama)
    assert choose_start(str(out), None, out) == Checkpoint(load_config(out), [out], weights="trained weights")
    assert stored_format(out).file_bytes is None and directory_bytes(out) == file.stat().st_size
    whole = file.read_bytes()
    for changed, age in ((whole[:-1] + b"\x01", 60), (whole + b"\x01", -60)):
        file.write_bytes(changed)
        os.utime(file, (time.time() + age,) * 2)
        with pytest.raises(ArtifactError, match=r"model\.gguf: its content was changed, it holds the weights of"):
            TensorFiles(out)
        assert verify_directory(out)[1] == [f"{tmp_path / 'model.gguf'}: its content was changed"]
    file.write_bytes(whole)
    convert_gguf(tmp_path / "model.gguf", out)
    file.unlink()
    assert verify_directory(out)[1] == [f"{tmp_path / 'model.gguf'}: not found"]
    replace(read_manifest(out), parents=()).write(out)
    with pytest.raises(ArtifactError, match="names no GGUF file"):
        TensorFiles(out)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attention.key_length": 16, "rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"rope.scaling.type": "longrope"}, "'longrope'"),
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5}, "factor is 0.5"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast is not known"),
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
        ({"expert_count": 8, "expert_used_count": 2}, "tensor 'blk.0.ffn_gate_inp.weight' is missing"),
        ({"logit_scale": 2.0}, "llama.logit_scale is not known"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"block_count": 1}, "tensor 'blk.1.attn_k.weight' belongs to no part"),
        ({"feed_forward_length": 97}, "the header asks for (97, 64)"),
        ({"attention.head_count": "four"}, "is a str, not a int"),
        ({"attention.head_count_kv": 3}, "not a multiple"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(
    settings: dict[str, Any], message: str, llama: Any, tokenizer_directory: Path, tmp_path: Path
) -> None:
    file = write_model(tmp_path / "model.gguf", llama, byte_level(tokenizer_directory), **settings)
    refused(file, message, tmp_path / "out")


def test_other_architectures_are_refused_by_name(llama: Any, tokenizer_directory: Path, tmp_path: Path) -> None:
    settings, tensors = settings_of(llama.config), tensors_of(llama)
    file = write_file(tmp_path / "model.gguf", "falcon", settings, byte_level(tokenizer_directory), tensors)
    refused(file, "architecture 'falcon' is not supported; use one of llama, qwen2, qwen3", tmp_path / "out")


def test_damaged_tensors_are_refused(llama: Any, tokenizer_directory: Path, tmp_path: Path) -> None:
    tokenizer, settings, tensors = byte_level(tokenizer_directory), settings_of(llama.config), tensors_of(llama)
    factors = np.full(8, 2.0, np.float32)
    for name, values, message in (
        ("output_norm.weight", np.full(64, np.nan, np.float32), "holds NaN"),
        ("output_norm.weight", np.empty(0, np.float32), "shape"),
        ("rope_freqs.weight", np.concatenate([factors[:4], factors[:4] / 2]), "in another way than Llama 3"),
        ("blk.0.attn_q_norm.weight", factors, "belongs to no part of a llama model"),
    ):
        file = write_file(tmp_path / f"{name}.gguf", "llama", settings, tokenizer, tensors | {name: values})
        refused(file, message, tmp_path / "out")


def test_a_file_cut_anywhere_is_refused(llama: Any, tokenizer_directory: Path, tmp_path: Path) -> None:
    whole = write_model(tmp_path / "model.gguf", llama, byte_level(tokenizer_directory)).read_bytes()
    lengths = [0, 3, 4, 11, 30, *range(100, len(whole) - 1, len(whole) // 16), len(whole) - 1]
    for length in lengths:
        file = tmp_path / "cut.gguf"
        file.write_bytes(whole[:length])
        refused(file, "not a GGUF file" if length < 4 else "cut short", tmp_path / "out")


@pytest.mark.skipif("LLAMA_CPP_CONVERTER" not in os.environ, reason="set it to llama.cpp's convert_hf_to_gguf.py")
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"attention_bias": True}])
def test_a_checkpoint_comes_back_from_llama_cpps_converter(
    changes: dict[str, Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Bit for bit; with LLAMA_CPP_PYTHON, an interpreter that has what the converter needs."""
    before, file = tmp_path / "before", tmp_path / "model.gguf"
    saved(before, tiny_model(**changes), tokenizer_directory)
    converter = [os.environ["LLAMA_CPP_PYTHON"], llama_cpp_converter.__file__, os.environ["LLAMA_CPP_CONVERTER"]]
    subprocess.run([*converter, str(before), "--outfile", str(file), "--outtype", "f32"], check=True)
    convert_gguf(file, tmp_path / "after")
    old, new = TensorFiles(before), TensorFiles(tmp_path / "after")
    assert set(old) == set(new) and all(torch.equal(old[name], new[name]) for name in old)
    assert load_config(tmp_path / "after") == load_config(before)
    text = "The home side won 3-1.\n Zoë ran 57½ metres! ⚽ <|end|>"
    assert load_tokenizer(tmp_path / "after").encode(text) == load_tokenizer(before).encode(text)
