"""NF4: bitsandbytes' own codes and products as oracles, and the runtime's operator against float64."""

import json
import shutil
from pathlib import Path
from typing import Any

import bitsandbytes.functional as peer
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from compress.quantization.nf4 import nf4_weight
from compress.quantization.packed_checkpoint import Precision
from compress.quantization.run import quantize
from export.export import ExportOptions, export_checkpoint
from export.runtime.decoder import open as open_export
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.storage.checkpoint import load_checkpoint, save_checkpoint
from sportsllm.storage.packed_weights import Nf4Weight
from sportsllm.storage.quantized_layers import QuantizedLinear
from sportsllm.storage.safetensors_files import WEIGHTS
from tests.support.bnb_models import dense_model, dequantize, pack_linears, save
from tests.support.models import tiny_model

SHAPES = [(48, 128), (24, 112), (10, 86), (5, 37)]  # whole blocks a row; whole in all; a short last block; odd


def random(shape: tuple[int, int]) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight.view(-1)[64:128] = 0  # a block without any number
    return weight


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_those_of_the_library(shape: tuple[int, int], block: int) -> None:
    weight = random(shape)
    packed, (codes, state) = nf4_weight(weight, block), peer.quantize_4bit(weight, blocksize=block, quant_type="nf4")
    assert np.array_equal(packed.packed, codes.flatten().numpy())
    # Where the last block is short, the library keeps 1e-38 for a block of zeros; no number depends on it.
    assert np.allclose(packed.scales, state.absmax.numpy(), rtol=0, atol=1e-37)
    assert np.array_equal(packed.dequantize(), dequantize(codes, state).numpy())


def run_operator(packed: Nf4Weight, x: np.ndarray) -> np.ndarray:
    sizes = {"K": packed.in_features, "N": packed.out_features, "block_size": packed.block_size, "quant_type": 1}
    node = onnx.helper.make_node("MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft", **sizes)
    constants = {"b": packed.packed, "s": packed.scales}
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("rows", [(1, 1), (2, 9)])
def test_the_runtime_multiplies_by_the_dequantized_matrix(
    shape: tuple[int, int], block: int, rows: tuple[int, int]
) -> None:
    packed = nf4_weight(random(shape), block)
    x = np.random.default_rng(2).normal(size=(*rows, shape[1])).astype(np.float32)
    wanted = x.astype(np.float64) @ packed.dequantize().astype(np.float64).T
    assert np.allclose(run_operator(packed, x), wanted, rtol=0, atol=1e-5 * np.sqrt(shape[1]))  # float32 sums


# Whole blocks a row; blocks that run on from row to row (48 columns); gate and up that end within a block (256).
STAGES = [{}, {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}, {"intermediate_size": 86}]


@pytest.mark.parametrize("changes", STAGES)
@pytest.mark.parametrize("head_bits", [8, 32])
def test_the_line(checkpoint: Path, tmp_path: Path, changes: dict[str, Any], head_bits: int) -> None:
    """quantize, load and export agree; the gate's exact pass is within float32 sums."""
    model = tiny_model(tie_word_embeddings=False, attention_bias=True, attention_output_bias=True, **changes)
    (tmp_path / "in").mkdir()
    save_checkpoint(tmp_path / "in", model, checkpoint)
    block = 256 if "intermediate_size" in changes else 64
    precision = Precision(4, block, head_bits)
    result = quantize(checkpoint=tmp_path / "in", out=tmp_path / "nf4", precision=precision, method="nf4")
    assert result["bits_per_weight"] == pytest.approx(4 + 32 / block, abs=0.02)
    loaded = load_checkpoint(tmp_path / "nf4")
    for name, module in loaded.model.layers.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = model.model.layers.get_submodule(name).weight.detach()
            assert np.array_equal(module.weight.numpy(), nf4_weight(weight, block).dequantize()), name
    assert export_checkpoint(tmp_path / "nf4", tmp_path / "onnx", ExportOptions(threads=2))["precision"] == "nf4"
    parity = json.loads((tmp_path / "onnx" / "parity.json").read_text(encoding="utf-8"))
    exact = next(item for item in parity["passes"] if item["name"] == "exact")
    assert max(item["relative_error"] for item in exact["comparisons"]) < 3e-5
    graph = onnx.load(str(tmp_path / "onnx" / "model.onnx"), load_external_data=False)
    counts = [node.op_type for node in graph.graph.node].count("MatMulBnb4")
    assert counts >= 2 * 4 and "load_in_4bit" not in (tmp_path / "onnx" / "config.json").read_text(encoding="utf-8")
    ids = [0, 40, 70, 100, 200]
    with torch.inference_mode():
        wanted = loaded(torch.tensor([ids]))[0].numpy()
    # Eight-bit heads round activations; nothing else does.
    close = 1e-4 if head_bits == 32 else 0.05
    assert np.abs(open_export(tmp_path / "onnx", 2).logits(ids) - wanted).max() < close * wanted.std()


def test_what_the_library_packed_is_kept_bit_by_bit(tmp_path: Path, tokenizer_directory: Path) -> None:
    source = save(tmp_path / "in", pack_linears(dense_model(), "nf4", 64), "nf4", tokenizer_directory)
    result = quantize(checkpoint=source, out=tmp_path / "out", precision=Precision(4, 64, 32), method="nf4")
    assert result["regrid_relative_error"] == 0
    before, after = load_file(str(source / WEIGHTS)), load_file(str(tmp_path / "out" / WEIGHTS))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(before[name].flatten(), after[f"{name}_packed"])
    assert torch.equal(before[f"{name}.absmax"], after[f"{name}_scale"])


def test_what_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path, corpus_file: Path) -> None:
    out = tmp_path / "nf4"
    for precision, settings, message in [
        (Precision(8, 64), {}, "has 4 bits in every matrix"),
        (Precision(4, 64), {"size_mb": 1.0}, "has 4 bits in every matrix"),
        (Precision(4, 64), {"calibration": [corpus_file]}, "reads no calibration text"),
    ]:
        with pytest.raises(UsageError, match=message):
            quantize(checkpoint=checkpoint, out=out, precision=precision, method="nf4", **settings)
    quantize(checkpoint=checkpoint, out=out, precision=Precision(4, 64), method="nf4")
    with pytest.raises(ArtifactError, match="quantized already"):
        quantize(checkpoint=out, out=tmp_path / "again", precision=Precision())
    name = "model.layers.0.mlp.up_proj"
    for change, message in [
        ({"block_size": 48}, "NF4 block_size of 'model.layers.0.mlp.up_proj' is 48"),
        ({"block_size": 128}, r"weight_scale' has shape \(96,\), config.json asks for \(48,\)"),
        ({"codes": "fp4"}, "does not fit shape"),
    ]:
        damaged = tmp_path / message[:9]
        shutil.copytree(out, damaged)
        data = json.loads((out / "config.json").read_text(encoding="utf-8"))
        data["quantization_config"]["modules"][name] |= change
        (damaged / "config.json").write_text(json.dumps(data), encoding="utf-8")
        (damaged / "manifest.json").unlink()
        with pytest.raises(ArtifactError, match=message):
            load_checkpoint(damaged)
        shutil.rmtree(damaged)
