"""Decoders written byte by byte: what `onnx` reads, the exporter's own nodes, and logits against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from benchmarks.predict.model_size import ModelFormat
from benchmarks.predict.onnx_writer import OnnxGraph
from benchmarks.predict.small_models import write_small_model
from export.runtime.decoder import OnnxDecoder
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.models.config import ModelConfig
from tests.support.untrained import make_checkpoint, make_export

Array = npt.NDArray[np.float64]
CONFIG = ModelConfig(
    vocab_size=160,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)
FORMATS = (
    ModelFormat("fp32"),
    ModelFormat("int8", 128),
    ModelFormat("int4", 128),
    ModelFormat("int8", 128, per_row=True),
    ModelFormat("int4", 32),
)
INT8_CACHE = ModelFormat("int4", 128, cache="int8")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CONFIG, tmp_path_factory.mktemp("untrained") / "checkpoint")


def _nodes(directory: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Operator, domain and attributes of each node, in an order that does not depend on where it stands."""
    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    found = [
        (node.op_type, node.domain, {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute})
        for node in graph.node
    ]
    return sorted(found, key=str)


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
def test_the_graph_has_the_nodes_of_the_exporters(stored: ModelFormat, untrained: Path, tmp_path: Path) -> None:
    write_small_model(tmp_path / "small", CONFIG, stored)
    make_export(untrained, stored, tmp_path / "exported")
    model = onnx.load(str(tmp_path / "small" / "model.onnx"))
    onnx.checker.check_model(model)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 21, "com.microsoft": 1}
    assert _nodes(tmp_path / "small") == _nodes(tmp_path / "exported")
    sizes = [(tmp_path / name / "model.onnx.data").stat().st_size for name in ("small", "exported")]
    # Each tensor may begin on a page of its own.
    assert sizes[0] == pytest.approx(sizes[1], abs=40 * 4_096)
    assert load_config(tmp_path / "small") == CONFIG


def test_calls_are_those_of_the_exporters(untrained: Path, tmp_path: Path) -> None:
    """Operators, their attributes and inputs: which are there, of what type and shape."""
    for stored in (ModelFormat("int4", 128), ModelFormat("int8", 32)):
        write_small_model(tmp_path / f"small-{stored.name}", CONFIG, stored, kernels=True)
        make_export(untrained, stored, tmp_path / f"exported-{stored.name}", inline=False)
        found = [_calls(tmp_path / f"{name}-{stored.name}") for name in ("small", "exported")]
        assert found[0] == found[1]
        assert [call[0] for call in found[0]] == ["DecoderLayer", "DecoderLayer", "DecoderHead"]


def _calls(directory: Path) -> list[tuple[str, dict[str, Any], list[tuple[int, list[int]] | bool]]]:
    """Kernel, attributes, and of each input type and shape of its weight, or whether there is one."""
    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    weights = {each.name: (each.data_type, list(each.dims)) for each in graph.initializer}
    return [
        (
            node.op_type.rstrip("0123456789"),
            {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute},
            [weights.get(name, name != "") for name in node.input],
        )
        for node in graph.node
        if node.domain == "sportsllm"
    ]


@pytest.mark.parametrize("kernels", [False, True], ids=["portable", "kernels"])
@pytest.mark.parametrize("stored", [*FORMATS, INT8_CACHE], ids=lambda stored: stored.name)
def test_the_logits_are_those_of_its_weights(stored: ModelFormat, kernels: bool, tmp_path: Path) -> None:
    """A prompt and two steps against float64 by hand."""
    if kernels and not stored.in_kernels:
        pytest.skip("not in blocks")
    write_small_model(tmp_path / "small", CONFIG, stored, kernels)
    tokens = [3, 141, 59, 26, 5, 35, 89]
    decoder = OnnxDecoder(tmp_path / "small", 1)
    found = [decoder.prefill([tokens[:-2]], max_length=16)[0], *(decoder.step([token])[0] for token in tokens[-2:])]
    expected = _logits(_tensors(tmp_path / "small" / "model.onnx"), stored, tokens)[-3:]
    # The quantized products round their inputs to 8 bits, 1/254 of the largest, seven times a layer; the int8 cache
    # rounds keys and values, which are about 1, to steps of 0.02.
    tolerance = 1e-4 if stored.precision == "fp32" else 0.1
    assert np.abs(np.array(found) - expected).max() <= tolerance * np.abs(expected).max()
    assert 0.3 < np.abs(expected).std() < 3  # neither vanishes nor explodes


def _tensors(path: Path) -> dict[str, Any]:
    return {
        each.name: onnx.numpy_helper.to_array(each, str(path.parent)) for each in onnx.load(str(path)).graph.initializer
    }


def _matrix(tensors: dict[str, Any], name: str, stored: ModelFormat, bits: int, columns: int) -> Array:
    if f"{name}.rows" in tensors:
        rows: Array = (tensors[f"{name}.rows"].astype(np.float64) * tensors[f"{name}.scale"]).T
        return rows
    weight = tensors[f"{name}.weight"]
    if bits == 32:
        dense: Array = weight.astype(np.float64)
        return dense
    packed = QuantizedWeight(weight, tensors[f"{name}.scale"], None, bits, stored.block_size, columns)
    return packed.dequantize().astype(np.float64)


def _logits(tensors: dict[str, Any], stored: ModelFormat, tokens: list[int]) -> Array:
    """(T, V) by the definition of the model: RMSNorm, rotary attention with shared keys, SwiGLU, a tied head."""
    layer_bits = {"int8": 8, "int4": 4}.get(stored.precision, 32)
    head_bits, hidden, inner, size = 8 if stored.quantized else 32, 128, 256, 32

    def norm(x_TD: Array) -> Array:
        return x_TD / np.sqrt((x_TD**2).mean(axis=-1, keepdims=True) + CONFIG.rms_norm_eps)

    def rotated(x_THE: Array) -> Array:
        angles = np.arange(len(tokens))[:, None] / CONFIG.rope_theta ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x_THE[..., : size // 2], x_THE[..., size // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def matrix(name: str, columns: int) -> Array:
        return _matrix(tensors, name, stored, layer_bits, columns)

    table = _matrix(tensors, "lm_head", stored, head_bits, hidden)
    x = table[tokens]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(2):
        qkv = norm(x) @ matrix(f"{layer}.qkv", hidden).T
        query, key, value = (part.reshape(len(tokens), -1, size) for part in np.split(qkv, [128, 192], axis=-1))
        query, key = rotated(query), rotated(key)
        heads = []
        for head in range(4):
            scores = np.where(causal, query[:, head] @ key[:, head // 2].T / size**0.5, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(weights / weights.sum(axis=-1, keepdims=True) @ value[:, head // 2])
        x = x + np.concatenate(heads, axis=-1) @ matrix(f"{layer}.o", hidden).T
        gate, up = np.split(norm(x) @ matrix(f"{layer}.gate_up", hidden).T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ matrix(f"{layer}.down", inner).T
    logits: Array = norm(x) @ table.T
    return logits


def test_attributes_of_every_kind_are_written(tmp_path: Path) -> None:
    graph = OnnxGraph(tmp_path / "m.onnx")
    x = graph.input("x", "float32", (2, "n"))
    graph.output(graph.node("Op", [x, ""], ["y", "", "z"], "com.microsoft", i=-3, f=0.25, s="text"), "float32", (2, 1))
    graph.write()
    (node,) = onnx.load(str(tmp_path / "m.onnx")).graph.node
    assert {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute} == {
        "i": -3,
        "f": 0.25,
        "s": b"text",
    }
    assert (list(node.input), list(node.output), node.domain) == (["x", ""], ["y", "", "z"], "com.microsoft")
