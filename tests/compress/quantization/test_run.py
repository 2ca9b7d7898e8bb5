"""Round to nearest against a plain loop, and the packed layout against the runtime's own operator."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compress.quantization.config import METHODS, GridSpec, QuantizationConfig, resolve_method
from compress.quantization.packed_checkpoint import round_weight
from compress.quantize import quantize_checkpoint
from sportsllm.commands import load_command
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.calibration import CalibrationText
from sportsllm.simulator import simulate
from sportsllm.text.tokenizer import load_tokenizer
from tests.support.gelu_kind import registered
from tests.support.models import saved, tiny_model

GRIDS = [(bits, block, symmetric) for bits in (4, 8) for block in (32, 64, 128) for symmetric in (True, False)]


def brute_force(weight: np.ndarray, bits: int, block: int, symmetric: bool) -> np.ndarray:
    """One number at a time in float64; scales are stored in float16."""
    result = np.zeros_like(weight, dtype=np.float64)
    top = 2**bits - 1
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], block):
            part = [float(x) for x in weight[row, start : start + block]]
            padded = [*part, 0.0] if len(part) < block else part
            if symmetric:
                largest = max(padded, key=abs)
                scale, zero = float(np.float16(np.float32(largest / -(2 ** (bits - 1))))), 2 ** (bits - 1)
            else:
                low, high = min(0.0, *padded), max(0.0, *padded)
                scale = float(np.float16((np.float32(high) - np.float32(low)) / np.float32(top)))
                zero = min(top, max(0, round(-low / scale))) if scale else 0
            for column, value in enumerate(part, start=start):
                q = min(top, max(0, round(value / scale) + zero)) if scale else zero
                result[row, column] = (q - zero) * scale
    return result


@pytest.mark.parametrize(("bits", "block", "symmetric"), GRIDS)
@pytest.mark.parametrize("columns", [128, 172, 40])
def test_equals_a_plain_loop(bits: int, block: int, symmetric: bool, columns: int) -> None:
    weight = np.random.default_rng(0).normal(size=(6, columns)).astype(np.float32)
    weight[2, :32] = 0  # a block without any number
    packed = round_weight(torch.from_numpy(weight), GridSpec(bits, block, symmetric), search=False)
    expected = brute_force(weight, bits, block, symmetric)
    # A number within float32 rounding of a half may go either way; that is one step of its block, and rare.
    wrong = ~np.isclose(packed.dequantize(), expected, rtol=1e-5, atol=1e-7)
    assert wrong.mean() < 0.002
    padded = dataclasses.replace(packed, in_features=block * packed.scales.shape[1]).dequantize()
    assert packed.dequantize().shape == weight.shape and not padded[:, columns:].any()
    assert np.linalg.norm(packed.dequantize() - weight) < (0.2 if bits == 4 else 0.012) * np.linalg.norm(weight)


def calibration(method: str, file: Path, samples: int) -> CalibrationText | None:
    return CalibrationText((file,), samples) if METHODS[method] else None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("tied", "head_bits"), [(True, 4), (False, 32)])
def test_the_stage(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, method: str, tied: bool, head_bits: int
) -> None:
    """Every matrix is packed, biases and norms are kept, and what is loaded is what the runtime multiplies by."""
    model = tiny_model(tie_word_embeddings=tied, attention_bias=True, attention_output_bias=True, qk_norm=True)
    saved(tmp_path / "in", model, checkpoint)
    config = QuantizationConfig(4, 32, head_bits, False)
    text = calibration(method, corpus_file, 8)
    result = quantize_checkpoint(tmp_path / "in", tmp_path / "out", config, method, text=text)
    recorded = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert recorded["method"] == result.method == method and recorded["block_size"] == 32
    assert ("model.embed_tokens" in recorded["modules"]) == (head_bits == 4)
    assert ("lm_head" in recorded["modules"]) == (head_bits == 4 and not tied)
    loaded = load_checkpoint(tmp_path / "out")
    kept = {name: value for name, value in loaded.state_dict().items() if value.ndim == 1}
    assert len(kept) == 1 + 2 * (2 + 2 + 4)
    for name, value in kept.items():
        assert torch.equal(value, model.state_dict()[name]) or METHODS[method]  # which scale them
    tokens = torch.randint(0, 384, (1, 64), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        found, wanted = loaded(tokens), model(tokens)
    # On random tokens, which nothing was calibrated on: 0.16 to 0.21 over six corpora.
    assert 0 < float((found - wanted).square().mean() / wanted.square().mean()) < 0.25
    with pytest.raises(ArtifactError, match="quantized already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again")


def test_minding_the_inputs_beats_rounding(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    """On text that it was not fitted to, each method is nearer to the model than the one before it."""
    model, errors = load_checkpoint(checkpoint), []
    held_out = [load_tokenizer(checkpoint, model.config).encode(simulate(1, index).text)[:100] for index in range(20)]
    for method in ("rtn", "mse", "gptq"):
        quantize_checkpoint(checkpoint, tmp_path / method, method=method, text=calibration(method, corpus_file, 64))
        quantized = load_checkpoint(tmp_path / method)
        with torch.inference_mode():
            pairs = [(quantized(torch.tensor([ids])), model(torch.tensor([ids]))) for ids in held_out]
        errors.append(sum(float((found - wanted).square().mean()) for found, wanted in pairs))
    assert errors[2] < 0.8 * errors[1] and errors[1] < errors[0]


@pytest.mark.parametrize(("bits", "untrained", "method"), [(4, False, "gptq"), (8, False, "balance"), (4, True, "mse")])
def test_the_default_method(bits: int, untrained: bool, method: str) -> None:
    assert resolve_method(None, QuantizationConfig(bits), CalibrationText(), None, untrained) == method


def test_too_little_text_is_joined_by_the_models_own(
    narrow: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By 20 tokens GPTQ fits noise: it is worse than rounding without text."""
    few, held_out = tmp_path / "few.txt", tmp_path / "held_out.jsonl"
    few.write_text("Lily had a ball. She played with Tom all day long.", encoding="utf-8")
    CalibrationText((corpus_file,)).read(narrow, load_checkpoint(narrow).config, 16, 4_096)
    assert "too few" not in capsys.readouterr().err  # there is more of it, in short samples
    result = quantize_checkpoint(narrow, tmp_path / "few", text=CalibrationText((few,)))
    assert result.calibration_tokens > 200
    assert "are too few: adding 16 texts that the model" in capsys.readouterr().err.replace("\n", " ")
    asked = quantize_checkpoint(narrow, tmp_path / "asked", text=CalibrationText((few,), 1))
    assert asked.calibration_tokens < 100
    held_out.write_text(json.dumps({"text": few.read_text(encoding="utf-8")}) + "\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="all of it is held-out text"):
        quantize_checkpoint(narrow, tmp_path / "out", text=CalibrationText((few,), None, (held_out,)))


def test_a_model_without_known_text_writes_its_own(
    narrow: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = quantize_checkpoint(narrow, tmp_path / "own", text=CalibrationText((), 4))
    assert own.method == "gptq"
    assert "2 texts that the model writes itself and a general text" in capsys.readouterr().err
    again = quantize_checkpoint(narrow, tmp_path / "again", text=CalibrationText((), 4))
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("own", "again")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0]) and again.method == "gptq"
    gone = CalibrationText((), 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sportsllm.inference.calibration.manifest_setting", lambda *_: [str(tmp_path / "gone.txt")])
        assert gone.found(narrow) is gone
    assert "gone.txt: training text of" in capsys.readouterr().err.replace("\n", "")
    with pytest.raises(UsageError, match="uses no calibration text"):
        quantize_checkpoint(narrow, tmp_path / "out", method="rtn", text=CalibrationText((corpus_file,), 4))
    empty = tmp_path / "empty.txt"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(ArtifactError, match="no calibration text"):
        quantize_checkpoint(narrow, tmp_path / "out", text=CalibrationText((empty,)))
    assert not (tmp_path / "out").exists()


def test_blocks_that_pad_much_are_told(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = load_command("quantize")
    for block in (16, 256):
        result = command(checkpoint=checkpoint, out=tmp_path / str(block), group_size=block, method="rtn")
        stored = load_file(tmp_path / str(block) / "model.safetensors")
        packed = sum(tensor.numel() for name, tensor in stored.items() if name.endswith("proj.weight_packed"))
        own = sum(each.numel() for name, each in load_file(checkpoint / "model.safetensors").items() if "proj" in name)
        assert result.padding_percent == pytest.approx(100 * (2 * packed / own - 1))
        assert ("padding adds" in capsys.readouterr().out) == (block == 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "--bits is 3"),
        ({"block_size": 48}, "--group-size is 48"),
        ({"head_bits": 2}, "head_bits is 2"),
        ({"bits": 8, "symmetric": False}, "symmetric=false is for 4 bits"),
    ],
)
def test_grids_the_runtime_does_not_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizationConfig(**change)


@pytest.mark.parametrize("method", ["rtn", "gptq", "balance"])
def test_another_kind_of_layer_is_quantized(checkpoint: Path, corpus_file: Path, tmp_path: Path, method: str) -> None:
    """Two matrices with GELU and biases, described by their kind alone."""
    with registered() as kind:
        model = tiny_model(mlp_kind=kind, std=0.05)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
        saved(tmp_path / "in", model, checkpoint)
        text = calibration(method, corpus_file, 8)
        result = quantize_checkpoint(tmp_path / "in", tmp_path / "out", QuantizationConfig(8), method, text=text)
        loaded = load_checkpoint(tmp_path / "out")
        assert result.bits_per_weight == pytest.approx(8.5)  # a float16 scale for each block of 32
        assert type(loaded.get_submodule("model.layers.1.mlp.up_proj")).__name__ == "QuantizedLinear"
        tokens = torch.randint(0, 384, (1, 64), generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            found, wanted = loaded(tokens), model(tokens)
        # 8 bits leave about 1/127 of a block's largest number: 1e-4 of the square, a few times through two layers.
        assert 0 < float((found - wanted).square().mean() / wanted.square().mean()) < 1e-3
