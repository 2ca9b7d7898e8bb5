"""Families beside LLaMA's all the way: pruned, recovered, quantized, exported, and read as in PyTorch."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sportsllm
from compress.prune import prune_checkpoint
from compress.pruning.job import PruneJob
from compress.pruning.shapes import Shape
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.calibration import CalibrationText
from sportsllm.inference.decoder import open_decoder
from sportsllm.inference.sampling import Sampling, generate
from tests.support import families

PROMPT = [0, 40, 70, 100, 200]
NAMES = [
    "gemma3", "smollm3", "gpt2", "deepseek-v2", "deepseek-v3-mixed", "granite", "gemma2", "olmo2", "stablelm",
    "gpt-neox", "qwen3-moe", "opt",
]  # fmt: skip
SIBLINGS = ["phi3-sliding", "mixtral", "stablelm-16"]
"""Families whose layers have the parts of another one's."""


@pytest.fixture(scope="module", params=NAMES + SIBLINGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path) -> Path:
    directory = tmp_path_factory.mktemp("family") / str(request.param)
    families.save(request.param, directory)
    shutil.copy(tokenizer_directory / "tokenizer.json", directory)
    return directory


def greedy(directory: Path) -> list[int]:
    return list(generate(open_decoder(directory, threads=1), PROMPT, 24, Sampling(temperature=0)))


def test_the_graph_writes_the_same_text(model: Path, tmp_path: Path) -> None:
    """The gate's sequences go beyond the window, and its ragged batch is padded."""
    expected = greedy(model)
    for form in ("onnx",) if model.name in SIBLINGS else ("onnx", "standard"):
        result = sportsllm.export(model, out=tmp_path / form, threads=1, format=form)
        assert result.parity["kl"] < 1e-6
        assert greedy(tmp_path / form) == expected


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(["goal", "match", "win", "the", "a", "late", "keeper", "saves"], 600)
    file.write_text(" ".join(words), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "granite"])
def test_int8_passes_the_gate_in_kernels(
    name: str, tokenizer_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 8-bit inputs of all but the head; the gate's native pass runs whole layers."""
    families.save(name, tmp_path / "checkpoint")
    shutil.copy(tokenizer_directory / "tokenizer.json", tmp_path / "checkpoint")
    quantize_checkpoint(tmp_path / "checkpoint", tmp_path / "int8", QuantizationConfig(8), "mse")
    result = sportsllm.export(tmp_path / "int8", out=tmp_path / "out", threads=1)
    assert result.parity["passed"] and result.wide_inputs in (["lm_head"], ["model.embed_tokens"])
    assert "kernels: called for all 4 layers and the head" in capsys.readouterr().err


@pytest.mark.parametrize("model", NAMES, indirect=True)
def test_pruned_quantized_and_over_an_int8_cache(model: Path, text: Path, tmp_path: Path) -> None:
    config = load_config(model)
    full, layers = Shape.of(config), 3 if config.layer_types or config.dense_layers else 2
    heads, kv_heads = full.heads // 2, max(1, full.kv_heads // 2)
    shape = Shape(full.hidden, 2 * full.intermediate // 3, heads, kv_heads, layers, full.head_dim)
    prune_checkpoint(PruneJob(model, [text], samples=5), shape, tmp_path / "pruned")
    smaller = load_config(tmp_path / "pruned")
    found = smaller.num_hidden_layers, smaller.intermediate_size, smaller.num_attention_heads
    assert found == (layers, shape.intermediate, 2)
    assert smaller.output_norms == config.output_norms and smaller.position_kind == config.position_kind
    fitted = ("gpt2", "qwen3-moe", "deepseek-v2", "gemma2")
    calibration, method = CalibrationText((text,), 5), "gptq" if model.name in fitted else "balance"
    quantize_checkpoint(tmp_path / "pruned", tmp_path / "int4", QuantizationConfig(), method, text=calibration)
    # Random experts are chosen by hairs, which a rounded latent tips over: a float32 cache for these.
    int8 = config.attention_kind == "grouped_query" or config.experts is None
    options: dict[str, Any] = {"kv_cache": "int8", "calibration": [text]} if int8 else {}
    sportsllm.export(tmp_path / "int4", out=tmp_path / "out", threads=1, **options)  # the gate compares with PyTorch


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_a_hidden_size_that_norms_hold_is_not_cut(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path)
    config = load_config(tmp_path)
    with pytest.raises(UsageError, match=r"--hidden cannot be cut in a model of .*[Nn]orm"):
        Shape(32, 96, 4, config.num_key_value_heads, 4, config.head_dim).applied_to(config)


@pytest.mark.parametrize("name", ["phi3-sliding", "smollm3"])
def test_sliding_and_unrotated_layers_in_float16(name: str, tmp_path: Path) -> None:
    families.save(name, tmp_path / "checkpoint")
    result = sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", dtype="fp16", threads=1)
    assert result.parity["kl"] < 1e-3  # the gate's own limit: activations have 11 bits
