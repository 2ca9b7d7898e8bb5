"""The INT8 cache: its scales, what the runtime really keeps, and the gate that reads it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import pack_model, save, tiny_model

from export.export import run_export
from export.gate import EXACT_INT8_CACHE
from export.graph import write_graph
from export.kv_cache import RoundedCache, cache_scales, measured_scales
from export.parity import check_parity
from export.runtime import OnnxDecoder
from sportsllm.artifacts import read_manifest
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.model import KVCache

CONTEXT = 320


def samples(count: int = 4, length: int = 60) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 96, (1, length), generator=draw) for _ in range(count)]


def test_scales_have_the_least_error_of_their_channel() -> None:
    model = tiny_model()
    found = measured_scales(model, samples())
    assert found.keys.shape == found.values.shape == (2, 2, 16)
    seen = []
    for tokens in samples():
        cache = KVCache(model.config, 1, 60)
        model.hidden(tokens, cache=cache)
        seen.append(cache.keys[1, 0, 1, :, 3].double())
    numbers = torch.cat(seen).detach().numpy()

    def error(scale: float) -> float:
        return float(np.square(np.clip(np.rint(numbers / scale), -128, 127) * scale - numbers).sum())

    largest = np.abs(numbers).max() / 127
    best = min(error(largest * share) for share in np.linspace(0.3, 1.3, 400))
    mine = error(float(found.keys[1, 1, 3]))
    assert mine <= error(largest) * (1 + 1e-4)
    assert mine <= 1.2 * best, "33 tries come near what 400 find"


def test_silent_channels_keep_a_scale_above_zero() -> None:
    model = tiny_model()
    torch.nn.init.zeros_(model.model.layers[0].self_attn.k_proj.weight)
    assert (measured_scales(model, samples()).keys > 0).all()
    with pytest.raises(ArtifactError, match="no calibration text"):
        measured_scales(model, [])


@pytest.mark.parametrize("head_dim", [16, 8], ids=["rotary inside", "rotary outside"])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_graph_keeps_what_the_reference_keeps(
    head_dim: int, bits: int | None, qk_norm: bool, tmp_path: Path
) -> None:
    model = tiny_model(max_position_embeddings=CONTEXT, head_dim=head_dim, qk_norm=qk_norm)
    scales = measured_scales(model, samples())
    save(tmp_path, model, pack_model(model, bits) if bits else None)
    write_graph(tmp_path, tmp_path, scales=scales)
    report = check_parity(tmp_path, tmp_path, threads=1)
    assert report.failures() == []
    assert [item.name for item in report.passes] == (["exact"] if bits is None else ["exact", "deployed"])
    assert max(c.relative_error for c in report.passes[0].comparisons) < EXACT_INT8_CACHE.error / 3
    if bits is not None:
        return
    decoder, tokens = OnnxDecoder(tmp_path, 1), samples(1, 30)[0]
    decoder.prefill([tokens[0].tolist()], 40)
    cache = KVCache(model.config, 1, 40)
    with torch.inference_mode():
        model.hidden(tokens, cache=RoundedCache(model.config, 30, scales))
        model.hidden(tokens, cache=cache)
    assert decoder._cache is not None
    kept = decoder._cache.buffers["0.key"][0]
    assert kept.dtype == np.int8 and decoder._cache.buffers["1.value"].dtype == np.int8
    expected = torch.clamp(torch.round(cache.keys[0, 0] / scales.keys[0][:, None]), -128, 127).numpy()
    # The first layer reads the same inputs: only a number in the very middle between two steps may differ.
    assert (kept[:, :30] == expected[:, :30]).mean() > 0.999


def test_the_command_measures_on_text(checkpoint: Path, corpus_file: Path, tmp_path: Path) -> None:
    result = run_export(checkpoint, tmp_path / "out", threads=1, kv_cache="int8", calibration=[corpus_file])
    assert result["kv_cache"] == "int8" and result["parity"]["passed"]
    assert read_manifest(tmp_path / "out")["settings"]["kv_cache"] == "int8"
    plain = OnnxDecoder(tmp_path / "out", 1).logits([5, 6, 7, 8])
    run_export(checkpoint, tmp_path / "full", threads=1)
    full = OnnxDecoder(tmp_path / "full", 1).logits([5, 6, 7, 8])
    assert 0 < np.abs(plain - full).max() < 0.1 * full.std()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kv_cache": "int4"}, UsageError, "--kv-cache 'int4'"),
        ({"kv_cache": "int8"}, UsageError, "needs calibration text"),
        ({"calibration": ["matches"]}, UsageError, "belongs to --kv-cache int8"),
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
        run_export(checkpoint, tmp_path / "out", calibration=files, **settings)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="needs calibration text"):
        cache_scales(checkpoint, [])
