"""Attention to selected tokens in the graph, against PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sportsllm
from export.layout import GRAPH_FILE
from export.parity.check import check_parity
from export.runtime.decoder import OnnxDecoder
from sportsllm.models.config import Selection
from sportsllm.models.language_model import SportsLLM
from tests.support.export_models import TINY, Exports, edit_tensor, logits_of, save

SELECTION = Selection(tokens=24, block=4, heads=3, parts=2, pairs=4)
SELECTED: dict[str, Any] = {"attention_kind": "selected", "selection": SELECTION, "max_position_embeddings": 350}
ROW: list[int] = np.random.default_rng(3).integers(0, 96, 130).tolist()  # longer than what is selected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"qk_norm": True, "attention_bias": True},
        {"head_dim": 24, "num_key_value_heads": 4, "attention_scale": 0.3},
        {"selection": Selection(tokens=24, block=4, heads=4, parts=1), "dtype": "fp16-weights"},
        {"bits": 4},
        {"bits": 8, "block": 64, "attention_bias": True},
    ],
    ids=str,
)
def test_the_gate_finds_what_pytorch_computes(settings: dict[str, Any], exports: Exports) -> None:
    """Its first sequence is longer than what is selected, read in pieces and token by token."""
    export = exports(**SELECTED | settings)
    assert export.report.failures() == []
    exact = export.report.passes[0]
    assert max(found.relative_error for found in exact.comparisons) < 3e-4, "the limit of every other kind"


def test_as_many_as_are_selected_and_one_more(exports: Exports) -> None:
    """Around the step at which the graph begins to choose."""
    export = exports(**SELECTED)
    decoder, expected = OnnxDecoder(export.directory, 1), logits_of(export.model, ROW)
    decoder.prefill([ROW[:20]], max_length=150)
    for place in range(20, 40):
        np.testing.assert_allclose(decoder.step([ROW[place]])[0], expected[place], atol=3e-4 * np.std(expected), rtol=0)


def test_a_step_reads_the_rows_of_the_chosen_tokens_alone(exports: Exports) -> None:
    """Numbers that are no numbers, where nothing is chosen, must not be seen."""
    decoder = OnnxDecoder(exports(**SELECTED).directory, 1)
    decoder.prefill([ROW[:-1]], max_length=140)
    cache = decoder._cache
    assert cache is not None
    keys = {name: buffer for name, buffer in cache.buffers.items() if not name.endswith("selected_index")}
    seen = 0
    for start in range(SELECTION.block, 100, SELECTION.block):
        before = {name: buffer[..., start : start + 4, :].copy() for name, buffer in keys.items()}
        for buffer in keys.values():
            buffer[..., start : start + 4, :] = np.nan
        logits = decoder.step([ROW[-1]])
        cache.lengths[:] = [len(ROW) - 1]
        seen += bool(np.isnan(logits).any())
        for name, buffer in keys.items():
            buffer[..., start : start + 4, :] = before[name]
    chosen_freely = SELECTION.blocks - SELECTION.newest - 1
    assert 0 < seen <= chosen_freely * 2, "of two layers"


def test_a_wrong_indexer_does_not_pass_the_gate(exports: Exports, tmp_path: Path) -> None:
    directory = exports(**SELECTED).copy_to(tmp_path / "export")
    graph = onnx.load(str(directory / GRAPH_FILE), load_external_data=False)
    (name,) = {item.name for item in graph.graph.initializer if "layers.1" in item.name and "index_k" in item.name}
    size = SELECTION.heads * 16

    def change(matrix: Any) -> None:
        assert len(matrix) == 128 + size + 16
        matrix[128 + size :] *= -1  # q, k, v and index q come before

    edit_tensor(directory, name, change)
    assert check_parity(directory, directory, 1).failures()


def test_a_fresh_indexer_passes_the_gate(tmp_path: Path) -> None:
    """Its scores are nearly level: choices turn with the order of additions, and limits are what that costs."""
    model = SportsLLM(TINY.with_changes(**SELECTED))
    model.initialize(0)
    save(tmp_path / "checkpoint", model.eval())
    result = sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1)
    assert result.parity["passed"]
