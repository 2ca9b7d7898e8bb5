"""Device files and budgets: what ships is documented, what is wrong is named, what misses fails."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import devices
from benchmarks.devices import load as budget
from benchmarks.devices.load import (
    DEVICES,
    LIMIT_UNITS,
    Device,
    is_this_machine,
    judge,
    list_devices,
    load_device,
    recognise_host,
)
from benchmarks.devices.schema import FORMAT, Recognise
from sportsllm.errors import ArtifactError, UsageError

# file MB, memory MB, TTFT ms, TPOT p50 and p95 ms, loss %
CARD = (2_000, 4_000, 100, 10, 15, 1)
TABLE = {
    "raspberry-pi-5-8gb": (100, 256, 2_000, 30, 50, 3),
    "jetson-orin-nano-super": (600, 1_500, 500, 20, 30, 2),
    "android-flagship": (250, 512, 500, 20, 30, 2),
    "laptop-x86": (500, 1_024, 500, 15, 25, 2),
    "rtx-3060": CARD,
    "rtx-3070": CARD,
    "rtx-3080": CARD,
    "rtx-3090": CARD,
    "host": (100, 160, 250, 4, 6, 3),
}


def test_shipped_limits() -> None:
    assert set(list_devices()) == set(TABLE)
    for name, expected in TABLE.items():
        limits = load_device(name).limits
        assert tuple(getattr(limits, limit) for limit in LIMIT_UNITS) == expected, name
        assert (limits.memory_context_tokens, limits.ttft_prompt_tokens, limits.tpot_depth_tokens) == (
            1_024,
            512,
            512,
        )


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_figure_has_its_evidence(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert len(device.description) > 80 and len(device.limits.reason) > 60
    data = tomllib.loads((DEVICES / f"{name}.toml").read_text(encoding="utf-8"))
    records = [*data["hardware"].values(), *data["published"]] if "published" in data else data["hardware"].values()
    for record in records:
        assert {"value", "source", "date", "kind"} <= set(record)
        assert len(record["source"]) > 10
        assert "unit" in record or isinstance(record["value"], str)


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [
        ("raspberry-pi-5-8gb", 4.267 * 32 / 8),
        ("jetson-orin-nano-super", 6.4 * 128 / 8),
        ("android-flagship", 9.6 * 64 / 8),
        ("laptop-x86", 5.6 * 128 / 8),
        ("rtx-3060", 15 * 192 / 8),
        ("rtx-3070", 14 * 256 / 8),
        ("rtx-3080", 19 * 320 / 8),
        ("rtx-3090", 19.5 * 384 / 8),
    ],
)
def test_bandwidth_is_transfers_times_width(name: str, gigabytes_per_s: float) -> None:
    assert load_device(name).hardware.memory_bandwidth.value == pytest.approx(gigabytes_per_s, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "float_rate", "integer_rate"),
    [
        ("raspberry-pi-5-8gb", 4 * 2.4 * 16, 4 * 2.4 * 64),
        ("jetson-orin-nano-super", 1_024 * 1.02 * 2, 32 * 1.02 * 1_024),
        ("laptop-x86", 8 * 3.3 * 32, 8 * 3.3 * 128),
        ("rtx-3060", 3_584 * 1.777 * 2, 112 * 1.777 * 512),
        ("rtx-3070", 5_888 * 1.725 * 2, 184 * 1.725 * 512),
        ("rtx-3080", 8_704 * 1.71 * 2, 272 * 1.71 * 512),
        ("rtx-3090", 10_496 * 1.695 * 2, 328 * 1.695 * 512),
    ],
)
def test_rates_are_units_times_clock(name: str, float_rate: float, integer_rate: float) -> None:
    hardware = load_device(name).hardware
    assert hardware.fp32_matmul_rate.value == pytest.approx(float_rate, rel=5e-3)
    assert hardware.int8_matmul_rate.value == pytest.approx(integer_rate, rel=5e-3)


def test_names() -> None:
    assert load_device("raspberry-pi-5").name == "raspberry-pi-5-8gb"
    with pytest.raises(UsageError, match="rtx-3060, rtx-3070, rtx-3080, rtx-3090"):
        load_device("rtx")
    for unknown in ("toaster", ""):
        with pytest.raises(UsageError) as caught:
            load_device(unknown)
        assert all(name in str(caught.value) for name in TABLE)


def _good() -> str:
    return (DEVICES / "rtx-3070.toml").read_text(encoding="utf-8")


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_own_file_by_path(tmp_path: Path) -> None:
    text = _good().replace('name = "rtx-3070"', 'name = "my-card"').replace("ttft_ms = 100", "ttft_ms = 70")
    device = load_device(_write(tmp_path, text))
    assert (device.name, device.limits.ttft_ms) == ("my-card", 70)


def test_all_mistakes_at_once_with_line_and_field(tmp_path: Path) -> None:
    changes = {
        "file_mb = 2_000": 'file_mb = "2 GB"',
        "ttft_ms = 100": "ttft_ms = 0.1",
        "tpot_p50_ms = 10": "tpot_p50_ms = 20",
        "quality_loss_percent = 1": "qualty_loss_percent = 1",
        'unit = "GB/s"': 'unit = "GB"',
        "value = 220": "value = -220",
        "format = 1": f"format = {FORMAT + 1}",
    }
    text = _good()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = _write(tmp_path, text)
    with pytest.raises(ArtifactError) as caught:
        load_device(path)
    message = str(caught.value)
    assert "\n" not in message
    lines = text.splitlines()
    for old, field in {
        f"format = {FORMAT + 1}": "format",
        'unit = "GB"': "hardware.memory_bandwidth.unit",
        "value = -220": "hardware.power.value",
        'file_mb = "2 GB"': "limits.file_mb",
        "ttft_ms = 0.1": "limits.ttft_ms",
        "tpot_p95_ms = 15": "limits.tpot_p95_ms",
        "qualty_loss_percent = 1": "limits.qualty_loss_percent",
        "[limits]": "limits.quality_loss_percent",
    }.items():
        assert f"{path}:{lines.index(old) + 1}: {field}: " in message
    assert message.count(path) == 8
    assert "upgrade" in message and "95th percentile" in message


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("peak_memory_mb = 4_000", "peak_memory_mb = 1_000", "file is read into that memory"),
        ("peak_memory_mb = 4_000", "peak_memory_mb = 9_000", "more than the device's memory_usable"),
        ("tpot_p50_ms = 10\ntpot_p95_ms = 15", "tpot_p50_ms = 200\ntpot_p95_ms = 300", "longer than a prompt"),
        ("value = 7_590", "value = 75_900", "more than memory_total"),
        ("tpot_depth_tokens = 512", "tpot_depth_tokens = 100", "limits.tpot_depth_tokens"),
        ("ttft_ms = 100", "ttft_ms = inf", "limits.ttft_ms"),
        ("quality_loss_percent = 1", "quality_loss_percent = 0", "limits.quality_loss_percent"),
        ('kind = "decision"', 'kind = "measured"', "limits.kind"),
        ('processor = "gpu"', 'processor = "gpu"\ncolour = "red"', "colour: is no field"),
        ("date = 2026-11-21\nmemory_context", 'date = "soon"\nmemory_context', "limits.date"),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert old in _good()
    with pytest.raises(ArtifactError, match=field):
        load_device(_write(tmp_path, _good().replace(old, new)))


def test_a_share_of_the_bandwidth_in_its_older_meaning(tmp_path: Path) -> None:
    text = (DEVICES / "raspberry-pi-5-8gb.toml").read_text(encoding="utf-8")
    assert "format = 4\n" in text and load_device(_write(tmp_path, text)).hardware.bandwidth_share is not None
    with pytest.raises(ArtifactError, match=r"hardware: bandwidth_share is that of reading beside multiplying"):
        load_device(_write(tmp_path, text.replace("format = 4\n", "format = 1\n")))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not found"):
        load_device(str(tmp_path / "missing.toml"))
    with pytest.raises(ArtifactError, match="not valid TOML"):
        load_device(_write(tmp_path, "format = = 1"))
    (tmp_path / "mine.toml").write_bytes(b"format = 1\nname = '\xff'\n")
    with pytest.raises(ArtifactError, match="not valid TOML"):
        load_device(str(tmp_path / "mine.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ArtifactError, match="is a directory"):
        load_device(str(tmp_path / "folder.toml"))


def test_judge() -> None:
    limits = load_device("host").limits
    exactly = {name: float(getattr(limits, name)) for name in LIMIT_UNITS}
    passed = judge(limits, exactly)
    assert passed.passed and passed.complete and not passed.missed
    assert {verdict.source for verdict in passed.verdicts} == {"measured"}
    missed = judge(limits, {**exactly, "ttft_ms": limits.ttft_ms + 0.1})
    assert not missed.passed
    assert [verdict.name for verdict in missed.missed] == ["ttft_ms"]
    broken = judge(limits, {**exactly, "ttft_ms": float("nan")})
    assert not broken.passed  # what is no number keeps no limit


def test_judge_without_figures_and_with_predictions() -> None:
    limits = load_device("host").limits
    result = judge(limits, {"file_mb": 50.0, "ttft_ms": None}, {"ttft_ms": 300.0, "file_mb": 500.0})
    by_name = {verdict.name: verdict for verdict in result.verdicts}
    assert (by_name["file_mb"].value, by_name["file_mb"].source) == (50.0, "measured")
    assert (by_name["ttft_ms"].passed, by_name["ttft_ms"].source) == (False, "predicted")
    assert (by_name["tpot_p50_ms"].passed, by_name["tpot_p50_ms"].source) == (None, None)
    assert not result.passed and not result.complete
    record = result.as_dict("host")
    assert set(record) == {"device", "limits", "passed"}
    assert record["limits"][0] == {
        "name": "file_mb",
        "limit": 100.0,
        "value": 50.0,
        "unit": "MB",
        "passed": True,
        "source": "measured",
    }
    with pytest.raises(ValueError, match="speed"):
        judge(limits, {"speed": 1.0})


def test_recognition(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_tree(text: str, memory_mb: float) -> None:
        monkeypatch.setattr(budget, "_read_text", lambda path: text if "device-tree" in str(path) else "")
        monkeypatch.setattr(budget, "total_memory_mb", lambda: memory_mb)

    pi = load_device("raspberry-pi-5")
    device_tree("Raspberry Pi 5 Model B Rev 1.0", 8_439)
    assert is_this_machine(pi) and recognise_host() == "raspberry-pi-5-8gb"
    device_tree("Raspberry Pi 5 Model B Rev 1.0", 4_140)  # the 4 GB board
    assert not is_this_machine(pi) and recognise_host() is None
    device_tree("Raspberry Pi 4 Model B Rev 1.4", 8_439)
    assert not is_this_machine(pi)
    device_tree("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 8_000)
    assert recognise_host() is None  # its budget is the GPU's
    assert recognise_host(processor="gpu") == "jetson-orin-nano-super"
    monkeypatch.setattr(budget, "_android_product", lambda: "CPH2581")
    assert recognise_host() == "android-flagship"
    assert is_this_machine(load_device("host"))
    assert not is_this_machine(load_device("laptop-x86"))


def test_a_calibrated_machine_is_recognised_by_processor_instructions_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = Recognise(
        processor="Some CPU 9", instruction_set="x86_64 with AVX2", min_memory_mb=7_900, max_memory_mb=8_100
    )
    device = load_device("host").model_copy(update={"recognise": rule})
    here = {"processor_name": "Some CPU 9", "instruction_set": "x86_64 with AVX2", "total_memory_mb": 8_000}
    for name, value in here.items():
        monkeypatch.setattr(budget, name, lambda value=value: value)
    assert is_this_machine(device)
    for name, other in (("processor_name", "Some CPU 90"), ("instruction_set", "x86_64"), ("total_memory_mb", 8_200)):
        with monkeypatch.context() as changed:
            changed.setattr(budget, name, lambda other=other: other)
            assert not is_this_machine(device), name
    assert not is_this_machine(device.model_copy(update={"recognise": Recognise(min_memory_mb=1)}))  # says nothing


def test_devices_command(capsys: pytest.CaptureFixture[str]) -> None:
    listed = devices()["devices"]
    assert {device["name"] for device in listed} == set(TABLE)
    assert all({"name", "kind", "limits"} <= set(device) for device in listed)
    assert set(listed[0]["limits"]) == set(LIMIT_UNITS)
    assert "raspberry-pi-5-8gb" in capsys.readouterr().out
    shown: list[dict[str, Any]] = devices("show", "raspberry-pi-5")["devices"]
    assert Device.model_validate_json(json.dumps(shown[0])).name == "raspberry-pi-5-8gb"
    printed = capsys.readouterr().out
    assert "17.07 GB/s" in printed and "geerlingguy" in printed and "256 MB" in printed


@pytest.mark.parametrize("arguments", [("show",), ("explain", "host"), ("host",)])
def test_devices_command_says_how_it_is_used(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="devices show NAME"):
        devices(*arguments)
