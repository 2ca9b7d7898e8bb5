"""The parity gate: what passes, what must not, and that nothing is published when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import commands
from export import export as export_module
from export.export import ExportOptions, export_checkpoint
from export.graph.decoder import WrittenGraph, write_graph
from export.loader_files import genai_config
from export.parity.check import check_parity
from export.parity.comparison import compare
from export.parity.limits import DEPLOYED, EXACT
from export.paths import GRAPH_FILE
from export.runtime.decoder import OnnxDecoder
from sportsllm.errors import ArtifactError, ConflictError, GateError, UsageError
from sportsllm.inference.decoder import Logits, open_decoder
from sportsllm.storage.artifact import verify_directory
from sportsllm.storage.packed_weights import ROW_BITS
from sportsllm.text.tokenizer import train_tokenizer
from tests.support.export_models import TINY, edit_tensor, pack_model, save, tiny_model

CONTEXT = 320  # the longest sequence of the gate fits


def make(directory: Path, bits: int | None = None, half: bool = False, standard: bool = False, **changes: Any) -> Path:
    """A checkpoint and its graph in one directory."""
    model = tiny_model(max_position_embeddings=CONTEXT, **changes)
    ends = {"embed_tokens": 8, "lm_head": 8} if bits == ROW_BITS else {}
    packing = pack_model(model, bits, bits_of=lambda name: ends.get(name.rpartition(".")[2])) if bits else None
    save(directory, model, packing)
    write_graph(directory, directory, half, standard=standard)
    return directory


@pytest.mark.parametrize(
    ("head_dim", "standard"),
    [(16, False), (8, False), (8, True)],
    ids=["rotary inside", "rotary outside", "standard operators"],
)
@pytest.mark.parametrize(
    ("precision", "bits"), [("fp32", None), ("fp16", None), ("int8", 8), ("int8", ROW_BITS), ("int4", 4)]
)
def test_a_faithful_export_passes(
    precision: str, bits: int | None, head_dim: int, standard: bool, tmp_path: Path
) -> None:
    if standard and bits == ROW_BITS:
        pytest.skip("rows have no standard operators")
    make(tmp_path, bits, precision == "fp16", standard, head_dim=head_dim)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report = check_parity(tmp_path, tmp_path, threads=1)
    assert report.failures() == [] and report.passed
    assert report.precision == precision
    assert [item.name for item in report.passes] == (["exact"] if precision == "fp32" else ["exact", "deployed"])
    assert [c.kind for c in report.passes[0].comparisons] == ["prefill", "decode", "ragged batch"]
    # The limits leave room, but not much more than an order of magnitude: see the constants.
    assert max(c.relative_error for c in report.passes[0].comparisons) < EXACT.error / 4
    figures = json.loads(json.dumps(report.to_dict()))
    assert figures["passed"] is True and figures["greedy_match"] <= 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def add_to_one(index: tuple[int, ...], amount: float) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[index] += amount

    return change


def flip_one_number(array: np.ndarray) -> None:
    """The lowest bit of one packed number: a single step of the grid."""
    array[3, 1, 2] ^= 1


FAULTS: dict[str, tuple[int | None, str, Callable[[np.ndarray], None]]] = {
    "a weight": (None, "model.layers.0.mlp.down_proj.weight", add_to_one((5, 7), 0.02)),
    "a stacked weight": (None, "model.layers.1.self_attn.qkv_proj.weight", add_to_one((100, 7), 0.02)),
    "an embedding, by a millionth": (None, "model.embed_tokens.weight", add_to_one((95, 0), 1e-6)),
    "the cosine table": (None, "cos_cache", add_to_one((4, 1), 0.01)),
    "the sine table, beyond the prompts": (None, "sin_cache", add_to_one((CONTEXT - 1, 0), 1e-6)),
    "an 8-bit number": (8, "model.layers.1.mlp.down_proj.weight_packed", flip_one_number),
    "a 4-bit number": (4, "model.layers.0.self_attn.qkv_proj.weight_packed", flip_one_number),
    "a number of a whole row": (ROW_BITS, "model.layers.1.mlp.down_proj.weight_rows", add_to_one((3, 2), 4)),
    "a 4-bit scale": (4, "model.layers.0.mlp.gate_up_proj.weight_scale", add_to_one((3, 1), 1e-3)),
}


@pytest.mark.parametrize(("bits", "tensor", "change"), FAULTS.values(), ids=FAULTS)
def test_one_wrong_number_fails(
    bits: int | None, tensor: str, change: Callable[[np.ndarray], None], tmp_path: Path
) -> None:
    make(tmp_path, bits)
    edit_tensor(tmp_path, tensor, change)
    report = check_parity(tmp_path, tmp_path, threads=1)
    assert not report.passed
    assert report.failures()


@pytest.mark.parametrize("bits", [None, 4])
def test_one_wrong_cache_entry_fails(bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(OnnxDecoder):
        def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
            logits = super().prefill(rows, max_length)
            assert self._cache is not None
            self._cache.buffers["1.value"][0, 1, 0, 3] += 0.2
            return logits

    make(tmp_path, bits)
    monkeypatch.setattr("export.parity.check.OnnxDecoder", Forgetful)
    failures = check_parity(tmp_path, tmp_path, threads=1).failures()
    assert any("exact pass, decode" in line for line in failures)
    assert any("exact pass, ragged batch" in line for line in failures)
    assert not any("prefill" in line for line in failures)


def test_rotary_table_fault_shows_in_the_logits_too(tmp_path: Path) -> None:
    make(tmp_path)
    edit_tensor(tmp_path, "cos_cache", lambda table: np.copyto(table, 1.0))
    failures = check_parity(tmp_path, tmp_path, threads=1).failures()
    assert any("exact pass, prefill" in line for line in failures)


def test_figures_by_hand() -> None:
    """Two positions, three tokens: error 1 of spread 0.8165; KL worked out from the two distributions."""
    expected = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], np.float32)
    found = np.array([[0.0, 1.0, 2.0], [0.0, 2.0, 2.0]], np.float32)
    figures = compare(expected, found)
    p = np.exp(expected[1]) / np.exp(expected[1]).sum()
    q = np.exp(found[1]) / np.exp(found[1]).sum()
    assert figures.max_abs_logit_error == 1.0
    assert figures.relative_error == pytest.approx(1 / np.sqrt(2 / 3), rel=1e-6)
    assert figures.kl == pytest.approx(float((p * np.log(p / q)).sum()) / 2, rel=1e-5)
    assert figures.greedy_match == 0.5


def test_not_a_number_fails(tmp_path: Path) -> None:
    make(tmp_path)
    edit_tensor(tmp_path, "model.layers.1.mlp.down_proj.weight", add_to_one((0, 0), float("nan")))
    assert not check_parity(tmp_path, tmp_path, threads=1).passed


def test_limits_are_ordered() -> None:
    for limits in DEPLOYED.values():
        assert limits.error > EXACT.error and limits.kl > EXACT.kl
        assert limits.greedy_match < EXACT.greedy_match


def test_short_contexts_are_checked(tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=4)
    save(tmp_path, model)
    write_graph(tmp_path, tmp_path)
    assert check_parity(tmp_path, tmp_path, threads=1).passed


def test_an_export_of_another_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "one")
    save(tmp_path / "other", tiny_model())
    with pytest.raises(ArtifactError, match=r"config\.json"):
        check_parity(tmp_path / "other", tmp_path / "one", threads=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With a tokenizer, as a stage writes it."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    train_tokenizer(["the ball is out of play " * 50, "Zoë scores again " * 50], 280, directory)
    return save(directory, tiny_model(vocab_size=280, max_position_embeddings=CONTEXT))


def test_run_export_writes_a_finished_directory(checkpoint: Path, tmp_path: Path) -> None:
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
    assert result["parity"].keys() == {"max_abs_logit_error", "kl", "greedy_match", "passed", "tokenizer_changes"}
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
    with pytest.raises(UsageError, match=r"--dtype fp16.*packed"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "other", ExportOptions(dtype="fp16", threads=1))


@pytest.mark.parametrize(("precision", "stored"), [("fp32", 4), ("fp16", 2)])
def test_export_command(precision: str, stored: int, checkpoint: Path, tmp_path: Path) -> None:
    result = commands.export(checkpoint, tmp_path / "out", precision, threads=1)
    assert json.loads(json.dumps(result))["precision"] == precision
    assert result["size_bytes"] == pytest.approx(stored * result["parameters"], rel=0.6)


def test_a_failed_gate_leaves_nothing_behind(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_wrongly(source: Path, directory: Path, *settings: Any) -> WrittenGraph:
        written = write_graph(source, directory, *settings)
        edit_tensor(directory, "model.layers.0.mlp.down_proj.weight", add_to_one((0, 0), 1.0))
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


def test_genai_settings_name_what_the_graph_has() -> None:
    settings = genai_config(TINY.with_changes(eos_token_id=(1, 5), pad_token_id=None), "llama")
    assert settings["model"]["decoder"]["filename"] == GRAPH_FILE
    assert settings["model"]["decoder"]["inputs"]["past_key_names"] % 1 == "past_key_values.1.key"
    assert settings["model"]["eos_token_id"] == [1, 5] and "pad_token_id" not in settings["model"]
    assert settings["search"]["max_length"] == 64
    longer = genai_config(TINY.with_changes(max_position_embeddings=131_072), "llama")
    assert longer["model"]["context_length"] == 131_072
    assert longer["search"]["max_length"] == 1_024
