"""The scales of an INT8 cache, and exports that have one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sportsllm
from export.runtime.decoder import OnnxDecoder
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.manifest import read_manifest
from sportsllm.models.language_model import KVCache
from tests.support.export_models import int8_samples, measured_scales, tiny_model


def test_scales_have_the_least_error_of_their_channel() -> None:
    model = tiny_model()
    found = measured_scales(model, int8_samples())
    assert [tuple(scale.shape) for scale in found.states] == [(2, 2, 16)] * 2
    seen = []
    for tokens in int8_samples():
        cache = KVCache(model.config, 1, 60)
        model.hidden(tokens, cache=cache)
        seen.append(cache.tensors[0][1, 0, 1, :, 3].double())
    numbers = torch.cat(seen).detach().numpy()

    def error(scale: float) -> float:
        return float(np.square(np.clip(np.rint(numbers / scale), -128, 127) * scale - numbers).sum())

    largest = np.abs(numbers).max() / 127
    best = min(error(largest * share) for share in np.linspace(0.3, 1.3, 400))
    mine = error(float(found.states[0][1, 1, 3]))
    assert mine <= error(largest) * (1 + 1e-4)
    assert mine <= 1.2 * best, "33 tries come near what 400 find"


def test_silent_channels_keep_a_scale_above_zero() -> None:
    model = tiny_model()
    torch.nn.init.zeros_(model.model.layers[0].self_attn.k_proj.weight)
    assert (measured_scales(model, int8_samples()).states[0] > 0).all()
    with pytest.raises(ArtifactError, match="no calibration text"):
        measured_scales(model, [])


def test_the_command_measures_on_text(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"threads": 1, "kv_cache": "int8", "calibration": [corpus_file]}
    result = sportsllm.export(checkpoint, out=tmp_path / "out", **options)
    assert result.kv_cache == "int8" and result.parity["passed"]
    assert read_manifest(tmp_path / "out").settings["kv_cache"] == "int8"
    plain = OnnxDecoder(tmp_path / "out", 1).logits([5, 6, 7, 8])
    sportsllm.export(checkpoint, out=tmp_path / "full", threads=1)
    full = OnnxDecoder(tmp_path / "full", 1).logits([5, 6, 7, 8])
    assert 0 < np.abs(plain - full).max() < 0.1 * full.std()


def test_a_float16_cache_needs_no_text(checkpoint: Path, tmp_path: Path) -> None:
    result = sportsllm.export(checkpoint, out=tmp_path / "out", threads=1, kv_cache="fp16")
    assert result.parity["passed"]
    assert result.kv_cache == "fp16"
    decoder = OnnxDecoder(tmp_path / "out", 1)
    sportsllm.export(checkpoint, out=tmp_path / "full", threads=1)
    plain, full = decoder.logits([5, 6, 7, 8]), OnnxDecoder(tmp_path / "full", 1).logits([5, 6, 7, 8])
    assert 0 < np.abs(plain - full).max() < 0.01 * full.std()


def test_without_text_the_model_writes_its_own(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sportsllm.export(checkpoint, out=tmp_path / "out", threads=1, kv_cache="int8").parity["passed"]
    assert "texts that the model writes itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kv_cache": "int4"}, UsageError, "--kv-cache 'int4'"),
        ({"calibration": ["matches"]}, UsageError, "is for --kv-cache int8"),
        ({"kv_cache": "fp16", "calibration": ["matches"]}, UsageError, "is for --kv-cache int8"),
        ({"kv_cache": "fp16", "format": "web"}, UsageError, "--format web with --kv-cache fp16"),
        ({"kv_cache": "fp16", "format": "standard"}, UsageError, "no standard operator reads such a cache"),
        ({"kv_cache": "int8", "calibration": ["nothing.txt"]}, ArtifactError, "nothing.txt"),
    ],
)
def test_bad_input(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    files = [tmp_path / name for name in settings.pop("calibration", [])]
    for path in files:
        if path.name == "matches":
            path.write_text("text", encoding="utf-8")
    with pytest.raises(error, match=message):
        sportsllm.export(checkpoint, out=tmp_path / "out", calibration=files, **settings)
    assert not (tmp_path / "out").exists()
