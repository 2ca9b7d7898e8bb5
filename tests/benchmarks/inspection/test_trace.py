"""`inspect --text`: what really passes, against the arithmetic of `plan --shapes` and against the graph's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sportsllm
from benchmarks.inspect import inspect
from benchmarks.inspection.trace import trace_model
from sportsllm.formats.checkpoint import save_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.size import tensor_shapes
from tests.support.models import tiny_model

TEXT = "The home side won 3-1 after extra time."
LAYERS = 5
COMPUTED = {
    "hidden": "model.embed_tokens",
    "input_layernorm": "model.layers.{}.input_layernorm",
    "attention output": "model.layers.{}.self_attn.o_proj, read",
    "post_attention_layernorm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "silu(gate) * up": "model.layers.{}.mlp.down_proj, read",
    "k, cached": "present.{}.key",
    "v, cached": "present.{}.value",
    "hidden + feed-forward": "model.layers.{}",
    "norm": "model.norm",
    "logits, whole": "logits",
}
"""Names of `tensor_shapes`, and of the same tensors in a checkpoint."""
IN_GRAPHS = {
    "gate": "model.layers.{}.mlp.gate_proj/part",
    "up": "model.layers.{}.mlp.up_proj/part",
    "silu(gate) * up": "model.layers.{}.mlp/inner",
    "k, cached": "present.{}.key",
    "v, cached": "present.{}.value",
    "logits, whole": "logits",
}
"""And in a graph, where gate and up are parts of one product."""


@pytest.fixture(scope="module")
def source(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, so that every third are two of them."""
    directory = tmp_path_factory.mktemp("trace") / "checkpoint"
    directory.mkdir()
    save_checkpoint(directory, tiny_model(num_hidden_layers=LAYERS), tokenizer_directory)
    return directory


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    """INT4 in blocks of 32, whose graph calls functions."""
    from compress.quantization.config import QuantizationConfig
    from compress.quantize import quantize_checkpoint

    quantize_checkpoint(source, source.parent / "packed", QuantizationConfig(4), method="rtn")
    return source.parent / "packed"


def agrees(trace: dict[str, Any], config: ModelConfig, names: dict[str, str]) -> None:
    """Shapes and sizes of `tensor_shapes` for the tokens that were read, of heads flat or not."""
    found = {one["name"]: one for one in trace["tensors"]}
    computed = {one.name: one for one in tensor_shapes(config, 1, trace["tokens"])}
    for name, place in names.items():
        for layer in range(LAYERS):
            one = found[place.format(layer)]
            shape = computed[name].shape
            assert one["bytes"] == computed[name].bytes, name
            assert one["shape"] == (shape if name != "attention output" else (*shape[:2], shape[2] * shape[3])), name
            assert one["block"] == (layer if "{}" in place else None)


def test_a_checkpoint_passes_what_is_computed(source: Path) -> None:
    trace = trace_model(source, TEXT, 128, every_block=True)
    config = load_config(source)
    agrees(trace, config, COMPUTED)
    assert trace["tensors"][0] == {
        "name": "token ids", "block": None, "shape": (1, trace["tokens"]), "type": "int64",
        "numbers": trace["tokens"], "bytes": 8 * trace["tokens"],
    }  # fmt: skip
    q_proj = next(one for one in trace["tensors"] if one["name"] == "model.layers.2.self_attn.q_proj")
    assert (q_proj["shape"], q_proj["type"], q_proj["block"]) == ((1, trace["tokens"], 64), "float32", 2)
    assert trace["count"] == len(trace["tensors"]) == 1 + 1 + LAYERS * 14 + 2
    assert trace["bytes"] == sum(one["bytes"] for one in trace["tensors"])
    assert trace["numbers"] == sum(one["numbers"] for one in trace["tensors"])
    assert trace["largest"]["name"] == "logits"


def test_a_packed_checkpoint_passes_the_same(source: Path, packed: Path) -> None:
    dense, found = (trace_model(directory, TEXT, 128, every_block=True) for directory in (source, packed))
    assert found["tensors"] == dense["tensors"]


@pytest.mark.parametrize("kind", ["functions", "int8 cache"])
def test_an_export_passes_what_is_computed(
    kind: str, source: Path, packed: Path, corpus_file: Path, tmp_path: Path
) -> None:
    int8 = {"kv_cache": "int8", "calibration": [corpus_file]}
    if kind == "functions":
        sportsllm.export(packed, out=tmp_path / "out", threads=1)
    else:
        sportsllm.export(source, out=tmp_path / "out", threads=1, **int8)
    trace = trace_model(tmp_path / "out", TEXT, 128, every_block=True, threads=1)
    config, names = load_config(tmp_path / "out"), dict(IN_GRAPHS)
    cached = [one for one in trace["tensors"] if one["name"].startswith("present.")]
    assert {one["type"] for one in cached} == {"int8" if kind == "int8 cache" else "float32"}
    if kind == "int8 cache":  # a quarter of the bytes
        for name in ("k, cached", "v, cached"):
            shape = next(one.shape for one in tensor_shapes(config, 1, trace["tokens"]) if one.name == name)
            assert {one["shape"] for one in cached} == {shape} and {one["bytes"] for one in cached} == {
                one["numbers"] for one in cached
            }
            del names[name]
    agrees(trace, config, names)
    listed = [one["name"] for one in trace["tensors"]]
    assert len(set(listed)) == len(listed) == trace["count"] and not any("__" in name for name in listed)


def test_the_command_lists_every_third_block(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = inspect(str(source), text=TEXT).trace
    said = capsys.readouterr().out
    assert "every third block (--all lists all)" in said
    assert "model.layers.3.mlp.up_proj" in said and "model.layers.1.mlp.up_proj" not in said
    every = inspect(str(source), text=TEXT, all=True).trace
    assert some is not None and every is not None
    blocks = [{one["block"] for one in trace["tensors"]} - {None} for trace in (some, every)]
    assert blocks == [{0, 3}, set(range(LAYERS))]
    for key in ("tokens", "count", "numbers", "bytes", "largest"):
        assert some[key] == every[key], key
