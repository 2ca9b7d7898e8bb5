"""A checkpoint directory in, a finished export out, or nothing at all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sportsllm
from export.graph.decoder import WrittenGraph, write_graph
from export.request import ExportRequest, refuse
from sportsllm.errors import ConflictError, GateError, UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import verify_directory
from sportsllm.inference.calibration import CalibrationText
from sportsllm.inference.decoder import open_decoder
from sportsllm.models.config import Experts, Selection
from tests.support import families
from tests.support.export_models import edit_tensor, pack_model, save, tiny_model
from tests.support.lstm_models import LSTM


def test_export_writes_a_finished_directory(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = sportsllm.export(checkpoint, out=out, threads=1)
    assert {path.name for path in out.iterdir()} == {
        "model.onnx", "model.onnx.data", "config.json", "generation_config.json", "genai_config.json",
        "tokenizer.json", "tokenizer_config.json", "parity.json", "manifest.json", "README.md",
    }  # fmt: skip
    assert verify_directory(out)[1] == []
    assert (out / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert result.precision == "fp32" and not result.cached
    assert result.parameters == load_config(checkpoint).parameters
    assert result.size_bytes == sum((out / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    figures = {"max_abs_logit_error", "kl", "greedy_match", "passed", "input_rounding", "tokenizer_changes"}
    assert result.parity.keys() == figures
    saved = json.loads((out / "parity.json").read_text())
    assert {key: saved[key] for key in result.parity} == result.parity
    assert saved["tokenizer_changes"] == []
    open_decoder(out, 1).prefill([[1, 2, 3]])

    again = sportsllm.export(checkpoint, out=out, threads=1)
    assert again.cached and again.to_json() == {**result.to_json(), "cached": True}
    with pytest.raises(ConflictError):
        sportsllm.export(checkpoint, out=out, dtype="fp16", threads=1)


def test_packed_checkpoints_keep_their_precision(tmp_path: Path) -> None:
    model = tiny_model(mlp_kind="experts", experts=Experts(3, 1))  # whose matrices are in branches
    save(tmp_path / "checkpoint", model, pack_model(model, 8, bits_of=lambda name: 4 if ".experts." in name else None))
    assert sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1).precision == "int4"
    for dtype in ("fp32", "fp16-weights"):
        with pytest.raises(UsageError, match=rf"`dtype` {dtype}.*packed already"):
            sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "other", dtype=dtype, threads=1)


def test_a_failed_gate_leaves_nothing_behind(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_wrongly(source: Path, directory: Path, *settings: Any) -> WrittenGraph:
        written = write_graph(source, directory, *settings)
        edit_tensor(directory, "model.layers.0.mlp.down_proj.weight", lambda array: np.add.at(array, (0, 0), 1))
        return written

    monkeypatch.setattr("export.graph.decoder.write_graph", write_wrongly)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(GateError, match="exact pass") as caught:
        sportsllm.export(checkpoint, out=tmp_path / "out", threads=1)
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


HALF, WEB, STANDARD, INT8 = {"dtype": "fp16"}, {"format": "web"}, {"format": "standard"}, {"kv_cache": "int8"}
SELECTED = {"attention_kind": "selected", "selection": Selection(tokens=24, block=4, heads=3, parts=2, pairs=4)}
REFUSED: list[tuple[str | dict[str, Any], dict[str, Any], str]] = [
    *((model, HALF, "`dtype` fp16: .* no graph in float16") for model in ("gemma3", "gpt2", "mixtral", LSTM, SELECTED)),
    *((model, HALF, "no graph in float16") for model in ({"embedding_scale": 3.0}, {"rotary_dim": 8})),
    ("deepseek-v3", WEB, "`format` web: .* browsers give a latent cache no room"),
    ("deepseek-v3", {"rope_scaling": "yarn:2"}, "`rope_scaling` yarn:2: latent attention cannot be stretched"),
    ("gpt2", {"rope_scaling": "yarn:2"}, "learned positions, which cannot be stretched"),
    (SELECTED, WEB, "`format` web: .* a cache with room"),
    ({"head_dim": 12}, {}, "heads of 12 channels.*use `format` standard"),
    (SELECTED | {"head_dim": 12}, {}, "heads of 12 channels.* multiples of 8$"),
    (SELECTED, STANDARD, "`format` standard: .* joining the cache"),
    (SELECTED, {"kv_cache": "fp16"}, "`kv_cache` fp16: attention of kind 'selected' has none"),
    (LSTM, WEB, "`format` web: .* browsers pass on"),
    (LSTM, INT8, "attention of kind 'lstm' has none"),
    (LSTM | {"bits": 8}, STANDARD, "`format` standard: .* ONNX Runtime loads no packed LSTM"),
    *(({}, HALF | other, "`dtype` fp16 with .*for CPUs") for other in (INT8, STANDARD)),
    ({"mlp_kind": "erf_gelu"}, {}, "'erf_gelu' has no ONNX graph; these do: grouped_query, latent, "),
    ({}, {"kv_cache": "int4"}, "`kv_cache` 'int4'"),
    ({}, {"dtype": "fp64"}, "fp32, fp16 or fp16-weights"),
    ({}, WEB | {"kv_cache": "fp16"}, "`format` web with `kv_cache` fp16"),
    ({}, STANDARD | INT8, "`format` standard with `kv_cache` int8.*leave one"),
    ({}, {"format": "gguf", "settings": {"inline": True}}, "`settings` inline is for ONNX graphs"),
    ({}, STANDARD | {"kv_cache": "fp16"}, "no standard operator reads such a cache"),
]


@pytest.mark.parametrize(("model", "options", "said"), REFUSED, ids=str)
def test_forms_that_a_model_has_not_are_refused(
    model: str | dict[str, Any], options: dict[str, Any], said: str, gelu: str, tmp_path: Path
) -> None:
    """Of a family of `transformers`, or a tiny model with these changes, packed if they name bits; `gelu` is a kind
    without a builder."""
    if isinstance(model, str):
        families.save(model, tmp_path / "checkpoint")
    else:
        bits = model.get("bits")
        tiny = tiny_model(**{name: change for name, change in model.items() if name != "bits"})
        save(tmp_path / "checkpoint", tiny, {**pack_model(tiny, bits), "bits": bits} if bits else None)
    with pytest.raises(UsageError, match=said) as caught:
        sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("bits", "changes", "options", "cache"),
    [
        (4, {}, {}, "fp16"),
        (8, {"qk_norm": True}, {}, "fp16"),
        (None, {}, {}, "fp32"),
        (None, {}, {"dtype": "fp16"}, "fp16"),
        (4, {}, {"kv_cache": "fp32"}, "fp32"),
        (4, {}, WEB, "fp32"),
        (4, {}, STANDARD, "fp32"),
        (4, {}, {"inline": True}, "fp32"),  # slower over a float16 cache, as whatever has no kernels
        (4, {"attention_softcap": 50.0}, {}, "fp32"),
        (4, {"rotary_dim": 8}, {}, "fp32"),
    ],
)
def test_what_an_export_caches_in_by_default(
    bits: int | None, changes: dict[str, Any], options: dict[str, Any], cache: str, tmp_path: Path
) -> None:
    model = tiny_model(**changes)
    save(tmp_path / "checkpoint", model, {**pack_model(model, bits), "bits": bits} if bits else None)
    given = {"format": "onnx", "dtype": None, "kv_cache": None, "inline": False, "threads": 1, "provider": "cpu"}
    request = ExportRequest(checkpoint=tmp_path / "checkpoint", given=CalibrationText(()), **given | options)
    refuse(request)
    assert request.cache == cache
