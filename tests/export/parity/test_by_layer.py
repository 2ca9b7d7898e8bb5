"""The gate one layer at a time finds what the whole one finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sportsllm
from export.graph.decoder import write_graph
from export.parity.by_layer import check_parity_by_layer
from export.parity.check import check_parity
from sportsllm.errors import ArtifactError, ResourceError
from sportsllm.formats.packed import ROW_BITS
from tests.support.export_models import CONTEXT, Exports, edit_tensor, save, tiny_model


def add(array: np.ndarray) -> None:
    array[5, 7] += 0.02


@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": False},
        {"half": True},
        {"bits": 4, "head_dim": 8, "qk_norm": True},
        {"bits": ROW_BITS},
        {"bits": 8, "operators": "standard", "attention_bias": True},
        {"int8_cache": True},
        {"bits": 4, "int8_cache": True},
        {"bits": 4, "half_cache": True},
    ],
    ids=["fp32", "fp16", "int4", "per row", "standard operators", "INT8 cache", "int4, INT8 cache", "float16 cache"],
)
def test_agrees_with_the_whole_gate(settings: dict[str, Any], exports: Exports) -> None:
    export = exports(**settings)
    whole = export.report
    by_layer = check_parity_by_layer(export.directory, export.directory, export.written.residual, 1)
    assert by_layer.failures() == whole.failures() == []
    assert (by_layer.precision, by_layer.unequal_tables) == (whole.precision, ())
    assert [item.name for item in by_layer.passes] == [item.name for item in whole.passes if "plain" not in item.name]
    for one, other in zip(by_layer.passes, whole.passes, strict=False):
        largest, found = max(c.relative_error for c in other.comparisons), one.comparisons[0].relative_error
        # The same arithmetic in other pieces: rounded activations then round a little differently, and a number of an
        # INT8 cache may be rounded to the other of two neighbours.
        if export.scales is None:
            assert found < 2 * largest and largest < 2 * found
        else:
            assert found < 3 * largest + 1e-3


@pytest.mark.parametrize("extra", ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_tensors_that_nothing_reads_are_refused(extra: str, exports: Exports, tmp_path: Path) -> None:
    """As the whole gate refuses them: a head beside a declared tying, and a bias that config.json does not know."""
    exports().copy_to(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shape = (96, 64) if extra.startswith("lm_head") else (64,)
    save_file({**tensors, extra: torch.ones(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=extra):
        check_parity(tmp_path, tmp_path, 1)
    with pytest.raises(ArtifactError, match=extra):
        check_parity_by_layer(tmp_path, tmp_path, exports().written.residual, 1)


def test_bfloat16_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, tiny_model(max_position_embeddings=CONTEXT))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    written = write_graph(tmp_path, tmp_path)
    assert check_parity_by_layer(tmp_path, tmp_path, written.residual, 1).failures() == []


@pytest.mark.parametrize("tensor", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "cos_cache"])
def test_one_wrong_number_fails(tensor: str, exports: Exports, tmp_path: Path) -> None:
    edit_tensor(exports().copy_to(tmp_path), tensor, add)
    assert check_parity_by_layer(tmp_path, tmp_path, exports().written.residual, 1).failures()


@pytest.mark.parametrize("bits", [None, 4])
def test_wrong_numbers_over_an_int8_cache_fail(bits: int | None, exports: Exports, tmp_path: Path) -> None:
    def halve(array: np.ndarray) -> None:
        array[:] /= 2

    export = exports(bits, int8_cache=True)
    tensor = f"model.layers.1.self_attn.qkv_proj.weight{'_scale' if bits else ''}"
    edit_tensor(export.copy_to(tmp_path), tensor, halve)
    assert check_parity_by_layer(tmp_path, tmp_path, export.written.residual, 1).failures()


def test_the_bound(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", tiny_model(max_position_embeddings=CONTEXT))
    with pytest.raises(ResourceError, match=r"--max-ram 10: exporting .* takes about"):
        sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1, max_ram=10)
    assert not (tmp_path / "out").exists()
    result = sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1, max_ram=9_000)
    assert 0 < result.peak_rss_bytes < 9e9
    saved = json.loads((tmp_path / "out" / "parity.json").read_text(encoding="utf-8"))
    assert {c["kind"] for item in saved["passes"] for c in item["comparisons"]} == {"by layer"}


def test_more_memory_than_allowed_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "checkpoint", tiny_model(max_position_embeddings=CONTEXT))
    monkeypatch.setattr("export.export._check_memory", lambda *_: None)
    with pytest.raises(ResourceError, match=r"--max-ram 10: exporting .* took"):
        sportsllm.export(tmp_path / "checkpoint", out=tmp_path / "out", threads=1, max_ram=10)
    assert not (tmp_path / "out").exists()
