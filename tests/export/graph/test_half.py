"""Graphs that compute and cache in float16, for GPUs: run here on the CPU provider, which has all their operators."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import sportsllm
from benchmarks.devices.load import load_device
from benchmarks.model_size import stored_format
from benchmarks.predict.latency import predict_directory
from export.layout import GRAPH_FILE
from sportsllm.errors import ArtifactError
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import Experts
from tests.support.export_models import Exports, save, tiny_model

FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "rotary outside, untied": {"head_dim": 8, "tie_word_embeddings": False},
    "int4, zero points, norms of heads": {"bits": 4, "asymmetric": True, "qk_norm": True},
    "int8, biases": {"bits": 8, "attention_bias": True},
}


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_the_gate_passes(settings: dict[str, Any], exports: Exports) -> None:
    """Widened to float32, the graph computes what PyTorch does with the weights that it stores."""
    export = exports(dtype="fp16", **settings)
    report, graph = export.report, onnx.load(str(export.directory / GRAPH_FILE), load_external_data=False).graph
    assert report.failures() == [] and [item.name for item in report.passes] == ["exact", "deployed"]
    assert report.precision == (f"int{settings['bits']}" if "bits" in settings else "fp16")
    assert "FusedMatMul" not in {node.op_type for node in graph.node}  # it runs on fewer GPUs
    assert not export.written.wide_inputs


def test_everything_is_float16_but_the_logits(exports: Exports) -> None:
    graph = onnx.load(str(exports(4, dtype="fp16").directory / GRAPH_FILE), load_external_data=False).graph
    types = {item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.output)}
    cached = {kind for name, kind in types.items() if name.startswith(("past_key_values.", "present."))}
    assert cached == {HALF} and types["logits"] == FLOAT
    wide = {item.name for item in graph.initializer if item.data_type == FLOAT}
    assert wide <= {"norm/two", "norm/epsilon"}  # of the first norm, whose squares are float32's


@pytest.mark.parametrize(
    ("name", "dtype", "changes"),
    [
        ("model.norm.weight", "fp16", {}),
        ("model.layers.0.mlp.gate.weight", "fp16-weights", {"mlp_kind": "experts", "experts": Experts(4, 2)}),
    ],
)
def test_numbers_beyond_float16_are_refused(name: str, dtype: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**changes)
    model.get_parameter(name).data.view(-1)[0] = 70_000
    save(tmp_path / "wide", model)
    with pytest.raises(ArtifactError, match=f"{name}.*beyond float16"):
        sportsllm.export(tmp_path / "wide", out=tmp_path / "out", dtype=dtype, threads=1)


def test_the_command_and_the_loaders_files(int4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = sportsllm.export(int4, out=tmp_path / "out", dtype="fp16", threads=1)
    assert (result.precision, result.kv_cache, result.kernels) == ("int4", "fp16", None)
    said = capsys.readouterr()
    assert "for GPUs" in said.out + said.err
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert (settings["computed_in"], settings["kv_cache"]) == ("fp16", "fp16")
    stored = stored_format(tmp_path / "out")
    assert (stored.precision, stored.cache) == ("int4", "fp16")
    figures = predict_directory(load_device("rtx-3060"), load_config(tmp_path / "out"), tmp_path / "out").figures
    assert figures["peak_memory_mb"] is not None
    web = sportsllm.export(int4, out=tmp_path / "web", dtype="fp16", threads=1, format="web")
    assert web.parity["passed"] and (tmp_path / "web" / "onnx" / "model_q4f16.onnx").exists()
    loader = json.loads((tmp_path / "web" / "config.json").read_text())["transformers.js_config"]
    assert loader["dtype"] == "q4f16" and loader["kv_cache_dtype"] == {"q4f16": "float16"}
