"""Exports in other people's loaders, where those are installed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from export.kernels.library import VERSION, library_of
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.decoder import Sampling, generate, open_decoder
from sportsllm.inference.torch_decoder import TorchDecoder

PROMPT = [0, 40, 70, 100, 200]


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loaders") / "onnx"
    sportsllm.export(checkpoint, out=directory, dtype="fp32", threads=2)
    return directory


def greedy(checkpoint: Path, count: int = 20) -> list[int]:
    return list(generate(TorchDecoder(load_checkpoint(checkpoint)), PROMPT, count, Sampling(temperature=0)))


def test_plain_onnxruntime_reads_the_documented_names(exported: Path, checkpoint: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported / "model.onnx"), providers=["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    assert {"input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.1.value"} <= names
    feeds = {"input_ids": np.array([PROMPT]), "attention_mask": np.ones((1, 5), dtype=np.int64)}
    feeds |= {
        f"past_key_values.{i}.{part}": np.zeros((1, 2, 0, 16), np.float32) for i in (0, 1) for part in ("key", "value")
    }
    logits, first_key = session.run(["logits", "present.0.key"], feeds)
    assert first_key.shape == (1, 2, 5, 16)
    with torch.inference_mode():
        expected = load_checkpoint(checkpoint)(torch.tensor([PROMPT])).numpy()
    assert np.allclose(logits, expected, atol=1e-4)


def test_optimum_generates_the_same_tokens(exported: Path, checkpoint: Path) -> None:
    optimum = pytest.importorskip("optimum.onnxruntime", reason="needs the extra [optimum]")
    model = optimum.ORTModelForCausalLM.from_pretrained(str(exported), provider="CPUExecutionProvider")
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert out[0, 5:].tolist() == greedy(checkpoint)


def test_optimum_inlines_layers_that_are_functions(checkpoint: Path, tmp_path: Path) -> None:
    optimum = pytest.importorskip("optimum.onnxruntime", reason="needs the extra [optimum]")
    quantize_checkpoint(checkpoint=checkpoint, out=tmp_path / "int4", config=QuantizationConfig())
    assert sportsllm.export(tmp_path / "int4", out=tmp_path / "out", threads=2).kernels
    model = optimum.ORTModelForCausalLM.from_pretrained(str(tmp_path / "out"), provider="CPUExecutionProvider")
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    ours = generate(open_decoder(tmp_path / "out", 2, "portable"), PROMPT, 20, Sampling(temperature=0))
    assert out[0, 5:].tolist() == list(ours)


def test_optimum_runs_standard_operators_with_padding_on_the_left(checkpoint: Path, tmp_path: Path) -> None:
    """Each row as if it were alone, packed or not."""
    optimum = pytest.importorskip("optimum.onnxruntime", reason="needs the extra [optimum]")
    quantize_checkpoint(checkpoint=checkpoint, out=tmp_path / "int4", config=QuantizationConfig())
    long, short = PROMPT, [0, 99]
    for source in (checkpoint, tmp_path / "int4"):
        directory = tmp_path / f"{source.name}-onnx"
        sportsllm.export(source, out=directory, threads=2, format="standard")
        model = optimum.ORTModelForCausalLM.from_pretrained(str(directory), provider="CPUExecutionProvider")
        padded = torch.tensor([long, [0] * 3 + short])
        mask = torch.tensor([[1] * 5, [0] * 3 + [1] * 2])
        settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(padded, attention_mask=mask, **settings)[:, 5:].tolist()
        decoder = open_decoder(directory, 2)
        assert found == [list(generate(decoder, row, 20, Sampling(temperature=0))) for row in (long, short)]
        if source == checkpoint:
            assert found[0] == greedy(checkpoint)


@pytest.mark.parametrize("registered", [False, True])
def test_onnxruntime_genai_runs_either_kernels(registered: bool, checkpoint: Path, tmp_path: Path) -> None:
    """The same logits as ours with the library registered in its settings, bit for bit, and without.

    ONNX Runtime's own operators divide a sum among threads as it pleases: float32 in another order of additions.
    """
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra [genai]")
    library = library_of(VERSION)
    if registered and library is None:
        pytest.skip("the kernels are not built")
    quantize_checkpoint(checkpoint=checkpoint, out=tmp_path / "int4", config=QuantizationConfig())
    sportsllm.export(tmp_path / "int4", out=tmp_path / "out", threads=2)
    config = genai.Config(str(tmp_path / "out"))
    if registered:
        options = {"custom_ops_library": str(library)}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    parameters = genai.GeneratorParams(model := genai.Model(config))
    parameters.set_search_options(max_length=15, min_length=15, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    decoder = open_decoder(tmp_path / "out", 2, "native" if registered else "portable")
    logits = decoder.prefill([PROMPT], 15)
    for _ in range(5):
        atol = 0.0 if registered else 1e-5
        np.testing.assert_allclose(generator.get_logits().reshape(-1), logits[0], atol=atol, rtol=0)
        generator.generate_next_token()
        logits = decoder.step([int(generator.get_next_tokens()[0])])


def test_onnxruntime_genai_generates_the_same_tokens(exported: Path, checkpoint: Path, tmp_path: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra [genai]")
    quantize_checkpoint(checkpoint=checkpoint, out=tmp_path / "int4", config=QuantizationConfig())
    sportsllm.export(tmp_path / "int4", out=tmp_path / "int4-onnx", threads=2)
    sportsllm.export(checkpoint, out=tmp_path / "standard-onnx", threads=2, format="standard")
    sportsllm.export(tmp_path / "int4", out=tmp_path / "half-onnx", dtype="fp16", threads=2)
    for directory in (exported, *(tmp_path / f"{name}-onnx" for name in ("int4", "standard", "half"))):
        parameters = genai.GeneratorParams(model := genai.Model(str(directory)))
        parameters.set_search_options(max_length=25, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(PROMPT)
        tokens: list[int] = []
        while not generator.is_done() and len(tokens) < 20:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        from export.runtime.decoder import open as open_export

        ours = list(generate(open_export(directory, 2, "portable"), PROMPT, 20, Sampling(temperature=0)))
        assert tokens == ours[: len(tokens)] and tokens
