"""The `plan` command: arithmetic, predictions with their bands, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device_commands
from benchmarks.labels import band, megabytes
from benchmarks.model_size import ModelFormat, file_bytes
from compress.quantization.config import QuantizationConfig, SizeBudget
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import to_hf
from sportsllm.models.memory import PRECISIONS
from sportsllm.models.presets import PRESETS
from tests.support.command_line import CommandLine
from tests.support.plans import plan


def test_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(model="small", device="raspberry-pi-5", shapes=True, block_size=128, head_bits=4)
    assert result["parameters"] == 97_241_856
    assert sum(result["parameters_by_component"].values()) == result["parameters"]
    assert set(result["weight_bytes"]) == set(PRECISIONS)
    assert result["weight_bytes"]["fp32"] == 388_967_424
    assert result["kv_cache_bytes_per_token"] == {"fp32": 73_728, "fp16": 36_864, "int8": 18_432}
    assert result["training_memory_bytes"] == result["training"]["plain"]["total_bytes"]
    assert result["training"]["checkpointed"]["total_bytes"] < result["training_memory_bytes"]
    keys = {"precision", "depth", "ttft_ms", "tpot_ms", "peak_rss_bytes"}
    for row in result["predicted"]:
        assert keys <= set(row)
        assert all(row[f"{name}_low"] < row[name] < row[f"{name}_high"] for name in ("ttft_ms", "tpot_ms"))
    assert {row["precision"] for row in result["predicted"]} == set(PRECISIONS)
    verdicts = {name: budget["verdict"] for name, budget in result["predicted_budget"].items()}
    assert verdicts["fp32"] == "fail" and verdicts["int4"] == "uncertain"  # the quality is unknown
    json.dumps(result)
    printed = capsys.readouterr().out
    row = result["predicted"][0]
    shown = band(row["tpot_ms_low"], row["tpot_ms_high"])
    for part in ("97,241,856", "73,728", "q_proj.weight", "never held whole", "fail", "uncertain", shown):
        assert part in printed
    factors = result["efficiency"]["band"]
    words = " ".join(printed.split())
    assert f"a factor, either way, of {factors['tpot']:g} (time per token)" in words and "`devices calibrate`" in words


def test_a_file_limit_that_mixed_bits_may_exceed_is_uncertain() -> None:
    """`quantize` may add 5% to the matrices of INT4, and nothing to INT8."""
    limits = [plan(target="laptop-x86", limit={"file_mb": each})["predicted_budget"] for each in (62, 64, 67)]
    sizes = [{limit["name"]: limit for limit in found["int4"]["limits"]}["file_mb"] for found in limits]
    low, high = sizes[0]["low"], sizes[0]["high"]
    config = PRESETS["small"]
    spare = SizeBudget().spare_bytes(config, QuantizationConfig(4, 32, symmetric=False))
    assert low == pytest.approx(file_bytes(config, ModelFormat("int4", zero_points=True, cache="fp16")) / 1e6)
    assert high - low == pytest.approx(spare / 1e6, rel=1e-2)
    assert [size["verdict"] for size in sizes] == ["fail", "uncertain", "pass"]


def test_the_bands_of_a_card_are_called_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert not plan(model="small", device="rtx-3060")["efficiency"]["band"]["measured"]
    assert "Bands are estimates" in capsys.readouterr().out
    device_commands.show("rtx-3060")
    assert "Bands are estimates" in capsys.readouterr().out


def test_devices_show_host_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> None:
        raise AssertionError("must not be asked for")

    monkeypatch.setattr("benchmarks.predict.latency.this_machine", measure)
    device_commands.show("host")
    assert "tpot_p50_ms" in capsys.readouterr().out


def test_plan_of_an_export_shows_what_it_is(
    exported_int4: Path, cli: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    result = plan(model=str(exported_int4), device="raspberry-pi-5")
    files = sum(path.stat().st_size for path in exported_int4.iterdir() if path.name.startswith("model.onnx"))
    assert result["stored"]["precision"] == "int4" and result["file_bytes"] == files
    assert set(result["predicted_budget"]) == {"int4"} >= {row["precision"] for row in result["predicted"]}
    assert set(result["weight_bytes"]) == {"int4"}
    assert set(result["kv_cache_bytes_per_token"]) == {result["stored"]["cache"]}
    printed = capsys.readouterr().out
    assert "int4 MB" in printed and f"its files {megabytes(files)}" in " ".join(printed.split())
    for other in ("int8 MB", "fp32", "training step"):
        assert other not in printed
    for words in ("--set group_size=64", "--training", "--shapes"):
        cli.refuses(2, "is an export, whose format is fixed", "plan", exported_int4, *words.split())


def test_layers_without_experts_of_a_directory_are_shown_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PRESETS["tiny-experts"].with_changes(dense_layers=1, dense_intermediate_size=320)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000))
    result = plan(model=str(tmp_path))
    assert result["file_bytes"] == 1_000 and "predicted" not in result
    attention, norms = 2 * 128 * 128 + 2 * 64 * 128, 2 * 128
    dense, mixture = (attention + norms + rest for rest in (3 * 128 * 320, 4 * 3 * 128 * 160 + 4 * 128))
    assert result["dense_blocks"]["parameters"] == dense
    assert result["dense_blocks"]["weight_bytes"]["fp32"] == 4 * dense
    assert result["parameters"] == dense + 3 * mixture + 2_048 * 128 + 128
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["1", "without", "experts", f"{dense:,}"] in lines
    assert ["3", "with", "experts", f"{3 * mixture:,}"] in lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "tiny-1m", "length": 5_000}, "context"),
        ({"model": "small", "device": "raspberry-pi-5", "kv_cache": "int4"}, "kv_cache=int4: use one of fp32, fp16"),
        ({"shape": "7X"}, r"'7X' is no directory, no number of parameters such as 7B .* 70b"),
    ],
)
def test_plan_refuses_what_it_cannot_mean(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(**given)


def test_parts_by_percent_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """The shares of base-162m that its sources give, to a tenth of a percent; in fp32 four bytes a number."""
    result = plan(shape="base-162m")
    total, parts = result["parameters"], result["parameters_by_component"]
    shares = {name: round(100 * count / total, 1) for name, count in parts.items()}
    assert shares == {"embedding": 15.1, "attention": 17.4, "feed_forward": 52.3, "norms": 0.0, "head": 15.1}
    for precision, sizes in result["weight_bytes_by_component"].items():
        assert sum(sizes.values()) == result["weight_bytes"][precision]
    for name, count in parts.items():
        assert result["weight_bytes_by_component"]["fp32"][name] == 4 * count
        assert result["weight_bytes_by_component"]["fp16"][name] == 2 * count
    # Attention as INT4 in blocks of 32: half a byte a number, a float16 scale and a 4-bit zero point for each block.
    assert result["weight_bytes_by_component"]["int4"]["attention"] == 28_311_552 // 2 + 2.5 * 28_311_552 // 32
    assert result["weight_bytes_by_component"]["int4"]["norms"] == 4 * 19_200
    block = result["weight_bytes_per_block"]["int8"]
    assert block["up_proj"] == 2_359_296 + 2 * 2_359_296 // 32 and block["input_layernorm"] == 4 * 768
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) < 40  # a screen
    assert ["attention", "28,311,552", "17.4", "113", "56.6", "30.1", "16.4"] in lines
    assert ["all", "12", "blocks", "113,264,640", "69.7", "453", "227", "120", "65.5"] in lines
    assert ["one", "block", "9,438,720", "5.8", "37.8", "18.9", "10.0", "5.46"] in lines


def test_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(shape="7B")
    assert result["weight_bytes_without_scales"] == {"fp32": 28e9, "fp16": 14e9, "int8": 7e9, "int4": 3.5e9}
    # With 2 bytes for 32 numbers, at 4 bits 2.5.
    assert result["weight_bytes"] == {"fp32": 28e9, "fp16": 14e9, "int8": 7.4375e9, "int4": 4.046875e9}
    assert "fp16, bf16 14,000" in " ".join(capsys.readouterr().out.split())
    assert plan(shape="1.5b")["parameters"] == 1_500_000_000 and plan(shape="162.4M")["parameters"] == 162_400_000
    assert "`70b` is a shape" in (plan(shape="70B"), capsys.readouterr().out)[1]
    useless = [{"device": "rtx-3060"}, {"training": True}, {"shapes": True}, {"cache_tokens": 5}, {"head_bits": 4}]
    for flags in useless:
        with pytest.raises(UsageError, match="a number of parameters has weights only"):
            plan(shape="7B", **flags)
    with pytest.raises(UsageError, match="has no parameters"):
        plan(shape="0M")


def test_memory_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """80 layers of 64 heads of 128 numbers, keys and values, 100,000 tokens: 262 GB in fp16."""
    used = plan(shape="70b", cache_tokens=100_000)["memory_in_use"]
    assert used["cache_bytes"]["fp16"] == 2 * 80 * 64 * 128 * 2 * 100_000 == 262_144_000_000
    assert used["cache_bytes"]["int8"] * 4 == used["cache_bytes"]["fp32"]
    assert "100,000 tokens, MB 524,288 262,144 131,072" in " ".join(capsys.readouterr().out.split())
    result = plan(shape="small", cache_tokens=1_000)
    total = result["memory_in_use"]["total_bytes"]["int4"]["int8"]
    assert total == result["weight_bytes"]["int4"] + 1_000 * 18_432
