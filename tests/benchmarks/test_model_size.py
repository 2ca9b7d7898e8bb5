"""The parts of a stored model against the graph that `export` writes, and formats that do not exist."""

import dataclasses
import json
from pathlib import Path

import onnx
import pytest

from benchmarks.measure.summary import bytes_read_per_token
from benchmarks.model_size import ModelFormat, file_bytes, layer_activations, mixing_macs, sizes, stored_format
from benchmarks.predict.calibrate import FORMATS, INT8_CACHE, export_untrained
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.huggingface import to_hf
from sportsllm.formats.packed import QUANT_METHOD
from sportsllm.models.config import Experts
from tests.support.lstm_models import LSTM
from tests.support.models import tiny_config

PRODUCTS = {"MatMulNBits", "DynamicQuantizeMatMul", "FusedMatMul", "MatMul", "DequantizeLinear"}
# Large enough for the tensors to lie in the data file.
SHAPE = tiny_config(vocab_size=500, hidden_size=256, intermediate_size=384, head_dim=64, max_position_embeddings=256)


def _sizes_on_disk(graph: onnx.GraphProto) -> tuple[int, int]:
    """Bytes of a graph's large tensors, and of those that no product reads."""
    stored: dict[str, int] = {}
    seen = set()
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries and not tensor.name.endswith("_cache") and entries["offset"] not in seen:
            seen.add(entries["offset"])  # the same bytes may have two names and shapes
            stored[tensor.name] = int(entries["length"])
    scales = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    reads = {scales.get(name, name) for node in graph.node if node.op_type in PRODUCTS for name in node.input}
    unread = sum(size for name, size in stored.items() if "embed_tokens" in name and not reads & {name})
    return sum(stored.values()), unread


OTHERS = (INT8_CACHE, ModelFormat("int4", 32, cache="fp16"), ModelFormat("int4", 128, standard=True))
TYPES = {"fp32": onnx.TensorProto.FLOAT, "fp16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}


@pytest.mark.parametrize("stored", [*FORMATS, *OTHERS], ids=lambda stored: stored.name)
def test_the_parts_of_a_format_are_those_of_its_graph(stored: ModelFormat, tmp_path: Path) -> None:
    directory = tmp_path / stored.name
    export_untrained(SHAPE, stored, directory, inline=True)
    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    pasts = {each.type.tensor_type.elem_type for each in graph.input if each.name.startswith("past_key_values")}
    norms = {each.data_type for each in graph.initializer if each.name == "model.norm.weight"}
    assert (pasts, norms) == ({TYPES[stored.cache]}, {onnx.TensorProto.FLOAT})  # computed in float32 in any case
    parts, (everything, by_rows) = sizes(SHAPE, stored), _sizes_on_disk(graph)
    weights = parts.layers.bytes + parts.head.bytes + parts.embedding
    assert weights == pytest.approx(everything, rel=0.01)  # tensors below 1 KiB stay in the graph
    export_untrained(SHAPE, stored, tmp_path / "called")  # a small model, of which the graph is a good part
    files = sum(path.stat().st_size for path in (tmp_path / "called").glob("*.onnx*"))
    assert file_bytes(SHAPE, stored) == pytest.approx(files, rel=0.02)
    if stored.standard:  # the tied matrix by rows, for the embedding alone: a token reads one row of it
        assert parts.embedding == pytest.approx(by_rows, rel=0.01) and by_rows > 0.05 * everything
        manifest = {"format": 1, "command": "export", "settings": {"format": "standard"}, "files": {}}
        (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        assert bytes_read_per_token(directory, SHAPE)["weight_bytes"] == pytest.approx(everything - by_rows, rel=0.02)
    else:
        assert parts.embedding == 0


def test_counts_by_hand(tmp_path: Path) -> None:
    """Two layers: q and o 256 x 256, k and v 128 x 256, gate, up and down 384 x 256."""
    layers = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 384 * 256)
    parts = sizes(SHAPE, ModelFormat("int4"))
    assert (parts.layers.macs, parts.head.macs) == (layers, 500 * 256)
    assert mixing_macs(SHAPE, 7) == 7 * 2 * 2 * 256
    attention = 2 * (256 + 256) + 2 * (256 + 128)
    assert layer_activations(SHAPE) == attention + 3 * (256 + 384)
    mixture = SHAPE.with_changes(mlp_kind="experts", experts=Experts(8, 2))  # a token reads the router and two of them
    assert layer_activations(mixture) == attention + (256 + 8) + 2 * 3 * (256 + 384)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(SHAPE)), encoding="utf-8")
    read = bytes_read_per_token(tmp_path, mixture)["weight_bytes"]  # and norms
    assert read == pytest.approx(4 * (layers + 2 * (3 * 384 * 256 + 8 * 256) + 500 * 256), rel=0.005)
    lstm = tiny_config(**LSTM)
    parts, states = sizes(lstm, ModelFormat("fp32")), 2 * 2 * 48 * 4
    assert bytes_read_per_token(tmp_path, lstm)["weight_bytes"] == parts.layers.bytes + parts.head.bytes + states


def test_the_stored_format_follows_the_configuration(tmp_path: Path) -> None:
    def read(**quantization: object) -> ModelFormat:
        config = to_hf(SHAPE) | ({"quantization_config": quantization} if quantization else {})
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return stored_format(tmp_path)

    stored = read(quant_method=QUANT_METHOD, bits=4, block_size=64, symmetric=False)
    assert (stored.precision, stored.block_size, stored.head_bits, stored.zero_points) == ("int4", 64, 8, True)
    assert read().precision == read(quant_method="bitsandbytes", load_in_4bit=True).precision == "fp32"
    with pytest.raises(ArtifactError, match="quant_method 'fp8' is not supported"):
        read(quant_method="fp8")
    assert stored.name == "int4-b64-asym" and dataclasses.replace(stored, cache="int8").name == "int4-b64-asym-kv8"
    assert ModelFormat("int4", head_bits=4).name == "int4-b32-h4" and ModelFormat("int4").name == "int4-b32"
    with pytest.raises(UsageError, match="no export has a cache of 'bf16'"):
        ModelFormat("int4", cache="bf16")
