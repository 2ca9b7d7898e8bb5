"""The `plan` command: arithmetic, predictions with their bands, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.commands import devices, plan
from benchmarks.console_tables import band
from sportsllm.errors import UsageError
from sportsllm.models.hf_config import to_hf
from sportsllm.models.presets import PRESETS
from sportsllm.models.size import PRECISIONS


def test_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(model="small", device="raspberry-pi-5", shapes=True, block_size=128, head_bits=4)
    assert result["parameters"] == 97_241_856
    assert sum(result["parameters_by_component"].values()) == result["parameters"]
    assert set(result["weight_bytes"]) == set(PRECISIONS)
    assert result["weight_bytes"]["fp32"] == 388_967_424
    assert result["kv_cache_bytes_per_token"] == {"fp32": 73_728, "fp16": 36_864, "int8": 18_432}
    assert result["training_memory_bytes"] == result["training_memory"]["total_bytes"]
    assert result["training_memory"]["total_checkpointed_bytes"] < result["training_memory_bytes"]
    keys = {"precision", "depth", "ttft_ms", "tpot_ms", "peak_rss_bytes"}
    for row in result["predicted"]:
        assert keys <= set(row)
        assert all(row[f"{name}_low"] < row[name] < row[f"{name}_high"] for name in ("ttft_ms", "tpot_ms"))
    assert {row["precision"] for row in result["predicted"]} == set(PRECISIONS)
    assert result["predicted_budget"]["int4"]["passed"] and not result["predicted_budget"]["fp32"]["passed"]
    json.dumps(result)
    printed = capsys.readouterr().out
    row = result["predicted"][0]
    shown = band(row["tpot_ms_low"], row["tpot_ms_high"])
    for part in ("97,241,856", "73,728", "q_proj.weight", "never made whole", "misses", "fits", shown):
        assert part in printed
    factors = result["efficiency"]["band"]
    words = " ".join(printed.split())
    assert f"a factor, either way, of {factors['tpot']:g} (time per token)" in words and "`calibrate` measures" in words


def test_a_band_is_shown_by_its_ends() -> None:
    assert band(0.41234, 0.6189) == "0.41-0.62" and band(8.77, 19.7) == "8.8-20" and band(52.4, 52.41) == "52"
    assert band(95.2, 1_234.5) == "95-1,234"


def test_every_depth_leaves_room_for_the_steps_that_time_it() -> None:
    rows = plan(model="tiny-1m", device="raspberry-pi-5")["predicted"]
    assert [row["depth"] for row in rows if row["precision"] == "int4"] == [32, 512, 876]  # a context of 1,024


def test_a_context_too_short_for_a_limit_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of 128 tokens says nothing about one of 512; with 148 tokens no step is timed at all."""
    for context, unknown in ((160, {"ttft_ms"}), (128, {"ttft_ms", "tpot_p50_ms", "tpot_p95_ms"})):
        config = PRESETS["tiny-1m"].with_changes(max_position_embeddings=context)
        (tmp_path / "config.json").write_text(json.dumps(to_hf(config)), encoding="utf-8")
        result = plan(model=str(tmp_path), device="raspberry-pi-5")
        limits = result["predicted_budget"]["int4"]["limits"]
        found = {limit["name"] for limit in limits if limit["passed"] is None}
        assert found == unknown | {"quality_loss_percent"}
        assert "? [2,000]" in " ".join(capsys.readouterr().out.split())


def test_the_bands_of_a_card_are_called_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert not plan(model="small", device="rtx-3060")["efficiency"]["band"]["measured"]
    assert "Bands are estimates" in capsys.readouterr().out
    devices("show", "rtx-3060")
    assert "Bands are estimates" in capsys.readouterr().out


def test_devices_show_host_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> None:
        raise AssertionError("must not be asked for")

    monkeypatch.setattr("benchmarks.predict.coefficients.this_machine", measure)
    devices("show", "host")
    assert "tpot_p50_ms" in capsys.readouterr().out


def test_plan_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_hf(PRESETS["tiny-1m"])), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000))
    result = plan(model=str(tmp_path))
    assert (result["parameters"], result["file_bytes"]) == (PRESETS["tiny-1m"].parameters, 1_000)
    assert "predicted" not in result


def test_plan_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(UsageError, match="tiny-1m"):
        plan(model="smal")
    with pytest.raises(UsageError, match="context"):
        plan(model="tiny-1m", length=5_000)
    with pytest.raises(UsageError, match="raspberry-pi-5-8gb"):
        plan(model="small", device="toaster")
    with pytest.raises(UsageError, match="--kv-cache fp16: no export has such a cache"):
        plan(model="small", device="raspberry-pi-5", kv_cache="fp16")
