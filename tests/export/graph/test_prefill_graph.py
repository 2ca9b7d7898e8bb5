"""The latency profile: prompts read by a graph of their own, the rest by the other, one cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export.export import ExportOptions, export_checkpoint
from export.graph.prefill_graph import PerRowWeights
from export.parity.check import check_parity
from export.paths import DATA_FILE, GRAPH_FILE, PROMPT_FILE, prompt_files
from export.runtime.decoder import OnnxDecoder
from sportsllm.errors import ArtifactError, ConflictError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.packed_weights import ROW_BITS
from sportsllm.inference.decoder import log_softmax
from tests.support.export_models import CONTEXT, Exports, pack_model, save, tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied, biases": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    "norms, rotated outside": {"qk_norm": True, "head_dim": 8},
    "one layer, odd widths": {"num_hidden_layers": 1, "hidden_size": 72, "intermediate_size": 100},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_both_graphs_compute_what_pytorch_computes(bits: int, name: str, exports: Exports) -> None:
    report = exports(bits, latency=True, **SHAPES[name]).report
    assert report.failures() == []
    assert [item.name for item in report.passes if item.name != "native"] == ["exact", "exact prompts", "deployed"]
    assert report.passes[1].comparisons[0].relative_error < report.passes[1].limits.error / 4


def test_with_an_int8_cache(exports: Exports) -> None:
    assert exports(4, latency=True, int8_cache=True).report.failures() == []


def test_rows_are_the_nearest_numbers(exports: Exports) -> None:
    directory = exports(4, latency=True).directory
    weights, name = PerRowWeights(directory), "model.layers.1.mlp.down_proj"
    packing = weights.packing(name, (64, 112))
    assert packing is not None and packing.bits == ROW_BITS
    rows_KN, scales_N = weights.read_per_row([name]), weights.read_per_row_scales([name])
    dense = load_checkpoint(directory).get_submodule(name).weight.double().numpy()
    assert rows_KN.shape == (112, 64) and np.abs(rows_KN).max() == 63
    missed_NK = np.abs(rows_KN.T * scales_N[:, None].astype(np.float64) - dense)
    assert (missed_NK <= scales_N[:, None] / 2 * (1 + 1e-5)).all()


def test_what_both_graphs_read_is_stored_once(exports: Exports) -> None:
    directory = exports(4, latency=True).directory
    tensors = onnx.load(str(directory / PROMPT_FILE), load_external_data=False).graph.initializer
    where = {t.name: {entry.value for entry in t.external_data if entry.key == "location"} for t in tensors}
    assert where["model.embed_tokens.weight_packed_flat"] == where["cos_cache"] == {DATA_FILE}
    assert where["model.layers.0.mlp.gate_up_proj.weight_rows"] == {f"{PROMPT_FILE}.data"}
    assert not any(name.startswith(("lm_head", "model.layers.1.mlp")) for name in where)  # nothing would read them


def test_a_tied_matrix_is_stored_once_in_two_shapes(exports: Exports) -> None:
    """ONNX Runtime would fold a Reshape of it into a copy in memory."""
    directory = exports(4, latency=True).directory
    graph = onnx.load(str(directory / GRAPH_FILE), load_external_data=False).graph
    both = [t for t in graph.initializer if t.name.startswith("model.embed_tokens.weight_packed")]
    assert [list(t.dims) for t in both] == [[96, 2, 16], [96, 32]]
    places = [{entry.key: entry.value for entry in t.external_data} for t in both]
    assert places[0] == places[1]
    read = {name for node in graph.node for name in node.input}
    assert {t.name for t in graph.initializer} <= read | {"num_logits_to_keep"}


def test_one_wrong_number_in_a_row_fails(exports: Exports, tmp_path: Path) -> None:
    exports(4, latency=True).copy_to(tmp_path)
    path = prompt_files(tmp_path).data
    tensors = onnx.load(str(tmp_path / PROMPT_FILE), load_external_data=False).graph.initializer
    (tensor,) = [t for t in tensors if t.name == "model.layers.0.self_attn.qkv_proj.weight_rows"]
    offset = int(next(entry.value for entry in tensor.external_data if entry.key == "offset"))
    data = bytearray(path.read_bytes())
    data[offset + 500] ^= 8
    path.write_bytes(data)
    assert any("exact prompts" in line for line in check_parity(tmp_path, tmp_path, threads=1).failures())


def test_scores_are_those_of_text_behind_a_prompt(exports: Exports) -> None:
    """The first piece is scored as ever; the next one behind the cache that the prompt graph leaves."""
    decoder = OnnxDecoder(exports(4, latency=True).directory, threads=1)
    tokens = np.random.default_rng(1).integers(0, 96, 200).tolist()
    with_prompts = decoder.score([tokens])[0]
    decoder.use_prompt_graph = False
    without = decoder.score([tokens])[0]
    assert np.array_equal(with_prompts[:128], without[:128])
    assert not np.array_equal(with_prompts[128:], without[128:])
    decoder.use_prompt_graph = True
    # The token after the first piece, read as a prompt of 129 tokens: its last one goes through the other graph.
    expected = log_softmax(decoder.prefill([tokens[:129]]))[0, tokens[129]]
    assert abs(float(with_prompts[128]) - float(expected)) < 0.05


def test_stage_and_bad_requests(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=CONTEXT)
    save(tmp_path / "dense", model)
    save(tmp_path / "packed", model, pack_model(model, 4) | {"bits": 4})
    save(tmp_path / "rows", tiny_model(), {"per_row": True})
    result = export_checkpoint(tmp_path / "packed", tmp_path / "out", ExportOptions(threads=1, profile="latency"))
    assert result["profile"] == "latency" and prompt_files(tmp_path / "out").data.stat().st_size > 0
    with pytest.raises(ConflictError):
        export_checkpoint(tmp_path / "packed", tmp_path / "out", ExportOptions(threads=1))
    for checkpoint, profile, message in (
        ("dense", "latency", "quantize it first"),
        ("rows", "latency", "stored per row already"),
        ("packed", "quick", "choose memory or latency"),
    ):
        with pytest.raises(UsageError, match=message):
            export_checkpoint(tmp_path / checkpoint, tmp_path / "other", ExportOptions(threads=1, profile=profile))
    data, graph = prompt_files(tmp_path / "out").data, prompt_files(tmp_path / "out").graph
    kept = graph.read_bytes()
    graph.unlink()
    with pytest.raises(ArtifactError, match=r"prompt\.onnx.*not found"):
        OnnxDecoder(tmp_path / "out", threads=1)
    graph.write_bytes(kept)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"prompt\.onnx\.data.*damaged"):
        OnnxDecoder(tmp_path / "out", threads=1)
