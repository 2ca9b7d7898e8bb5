"""A checkpoint directory in, a finished export out, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import commands
from export import export as export_module
from export.export import ExportOptions, export_checkpoint
from export.graph.decoder import WrittenGraph, write_graph
from sportsllm.errors import ArtifactError, ConflictError, GateError, UsageError
from sportsllm.formats.artifact import verify_directory
from sportsllm.inference.decoder import open_decoder
from sportsllm.text.tokenizer import train_tokenizer
from tests.support.export_models import CONTEXT, TINY, edit_tensor, pack_model, save, tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With a tokenizer, as a stage writes it."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    train_tokenizer(["the ball is out of play " * 50, "Zoë scores again " * 50], 280, directory)
    return save(directory, tiny_model(vocab_size=280, max_position_embeddings=CONTEXT))


def test_export_writes_a_finished_directory(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export_checkpoint(checkpoint, out, ExportOptions(threads=1))
    assert {path.name for path in out.iterdir()} == {
        "model.onnx", "model.onnx.data", "config.json", "generation_config.json", "genai_config.json",
        "tokenizer.json", "tokenizer_config.json", "parity.json", "manifest.json", "README.md",
    }  # fmt: skip
    assert verify_directory(out)[1] == []
    assert (out / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert result["precision"] == "fp32" and not result["cached"]
    assert result["parameters"] == TINY.with_changes(vocab_size=280).parameters
    assert result["size_bytes"] == sum((out / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    figures = {"max_abs_logit_error", "kl", "greedy_match", "passed", "input_rounding", "tokenizer_changes"}
    assert result["parity"].keys() == figures
    saved = json.loads((out / "parity.json").read_text())
    assert {key: saved[key] for key in result["parity"]} == result["parity"]
    assert saved["tokenizer_changes"] == []
    open_decoder(out, 1).prefill([[1, 2, 3]])

    again = export_checkpoint(checkpoint, out, ExportOptions(threads=1))
    assert again == {**result, "cached": True}
    with pytest.raises(ConflictError):
        export_checkpoint(checkpoint, out, ExportOptions(dtype="fp16", threads=1))


def test_packed_checkpoints_keep_their_precision(tmp_path: Path) -> None:
    model = tiny_model()
    save(tmp_path / "checkpoint", model, pack_model(model, 4, bits_of=lambda name: 8 if "embed" in name else None))
    assert export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(threads=1))["precision"] == "int4"
    for dtype in ("fp32", "fp16-weights"):
        with pytest.raises(UsageError, match=rf"--dtype {dtype}.*packed already"):
            export_checkpoint(tmp_path / "checkpoint", tmp_path / "other", ExportOptions(dtype=dtype, threads=1))


@pytest.mark.parametrize(("precision", "stored"), [("fp32", 4), ("fp16", 2)])
def test_export_command(precision: str, stored: int, checkpoint: Path, tmp_path: Path) -> None:
    result = commands.export(checkpoint, tmp_path / "out", precision, threads=1)
    assert json.loads(json.dumps(result))["precision"] == precision
    assert result["size_bytes"] == pytest.approx(stored * result["parameters"], rel=0.6)


def add_one(array: np.ndarray) -> None:
    array[0, 0] += 1.0


def test_a_failed_gate_leaves_nothing_behind(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_wrongly(source: Path, directory: Path, *settings: Any) -> WrittenGraph:
        written = write_graph(source, directory, *settings)
        edit_tensor(directory, "model.layers.0.mlp.down_proj.weight", add_one)
        return written

    monkeypatch.setattr(export_module, "write_graph", write_wrongly)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(GateError, match="exact pass") as caught:
        export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(threads=1))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_requests(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out", ExportOptions())
    with pytest.raises(UsageError, match="fp32 or fp16"):
        export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(dtype="fp64"))
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"no model\.safetensors"):
        export_checkpoint(checkpoint, tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()
