"""Device files and budgets: what ships is documented, what is wrong is named, what misses fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device_commands
from benchmarks.devices import load
from benchmarks.devices.load import (
    DEVICES,
    instruction_set,
    is_this_machine,
    list_devices,
    load_device,
    load_target,
    processor_name,
    write_device,
)
from benchmarks.devices.schema import FORMAT, Device, Recognise
from benchmarks.devices.verdict import judge
from benchmarks.labels import LIMITS
from benchmarks.predict.latency import resolve
from sportsllm import processors
from sportsllm.errors import ArtifactError, UsageError
from tests.support.devices import reference_machine


@pytest.mark.parametrize("name", list_devices())
def test_every_figure_has_its_evidence(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert len(device.description) > 80 and len(device.limits.reason) > 60
    data = device.model_dump(mode="json", exclude_none=True)
    records = [*data.get("hardware", {}).values(), *data.get("published", [])]
    assert bool(records) == (name != "host")  # which stands for any machine
    for record in records:
        assert {"value", "source", "date", "kind"} <= set(record)
        assert len(record["source"]) > 10
        assert "unit" in record or isinstance(record["value"], str)


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s", "rates"),
    [
        ("raspberry-pi-zero-2-w", 0.9 * 32 / 8, (4 * 1.0 * 8, 4 * 1.0 * 16)),
        ("raspberry-pi-4", 3.2 * 32 / 8, (4 * 1.8 * 8, 4 * 1.8 * 16)),
        ("raspberry-pi-5-8gb", 4.267 * 32 / 8, (4 * 2.4 * 16, 4 * 2.4 * 64)),
        ("jetson-orin-nano-super", 6.4 * 128 / 8, (1_024 * 1.02 * 2, 32 * 1.02 * 1_024)),
        ("android-flagship", 9.6 * 64 / 8, None),
        ("laptop-x86", 5.6 * 128 / 8, (8 * 3.3 * 32, 8 * 3.3 * 128)),
        ("rtx-3060", 15 * 192 / 8, (3_584 * 1.777 * 2, 112 * 1.777 * 512)),
        ("rtx-3070", 14 * 256 / 8, (5_888 * 1.725 * 2, 184 * 1.725 * 512)),
        ("rtx-3080", 19 * 320 / 8, (8_704 * 1.71 * 2, 272 * 1.71 * 512)),
        ("rtx-3090", 19.5 * 384 / 8, (10_496 * 1.695 * 2, 328 * 1.695 * 512)),
        ("h100", 5.238 * 5_120 / 8, (16_896 * 1.98 * 2, 528 * 1.83 * 2_048)),
    ],
)
def test_figures_are_transfers_times_width_and_units_times_clock(
    name: str, gigabytes_per_s: float, rates: tuple[float, float] | None
) -> None:
    hardware = load_device(name).hardware
    assert hardware.memory_bandwidth.value == pytest.approx(gigabytes_per_s, rel=2e-3)
    if rates is not None:  # in float32 and INT8
        assert (hardware.fp32_matmul_rate.value, hardware.int8_matmul_rate.value) == pytest.approx(rates, rel=5e-3)


def test_names() -> None:
    assert load_device("raspberry-pi-5").name == "raspberry-pi-5-8gb"
    with pytest.raises(UsageError, match="rtx-3060, rtx-3070, rtx-3080, rtx-3090"):
        load_device("rtx")
    for unknown in ("toaster", ""):
        with pytest.raises(UsageError) as caught:
            load_device(unknown)
        assert all(name in str(caught.value) for name in list_devices())


def _good() -> str:
    return (DEVICES / "rtx-3070.toml").read_text(encoding="utf-8")


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_several_mistakes_are_one_line_by_field(tmp_path: Path) -> None:
    text = _good()
    for old, new in (("file_mb = 2_000", 'file_mb = "2 GB"'), ("value = 220", "value = -220")):
        text = text.replace(old, new)
    with pytest.raises(ArtifactError, match=r"mine\.toml: hardware.power: .*; limits.file_mb: .*") as caught:
        load_device(_write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("peak_memory_mb = 4_000", "peak_memory_mb = 1_000", r"must be at least file_mb, .*read into that memory"),
        ("peak_memory_mb = 4_000", "peak_memory_mb = 9_000", "more than the device's memory_usable"),
        ("tpot_p50_ms = 10\ntpot_p95_ms = 15", "tpot_p50_ms = 200\ntpot_p95_ms = 300", "longer than a prompt"),
        ("value = 7_590", "value = 75_900", "more than memory_total"),
        ("tpot_depth_tokens = 512", "tpot_depth_tokens = 100", "limits.tpot_depth_tokens"),
        ('value = 8_590\nunit = "MB"', 'value = 8_590\nunit = "GB/s"', "memory_total: is in 'GB/s'; give it in MB"),
        ('unit = "W"', f'unit = "{"x" * 999}"', r"power: is in 'xx.{1,200}give it in"),
        ("ttft_ms = 100", "ttft_ms = inf", "limits.ttft_ms"),
        ("tpot_p50_ms = 10", "tpot_p50_ms = 20", "the 95th percentile cannot be below"),
        ("quality_loss_percent = 1", "qualty_loss_percent = 1", "limits.qualty_loss_percent: unknown field"),
        (f"format = {FORMAT}\n", f"format = {FORMAT + 1}\n", "newer than this program's"),
        (f"format = {FORMAT}\n", f"format = {FORMAT - 1}\n", "older than this program's"),
        ("quality_loss_percent = 1", "quality_loss_percent = 0", "limits.quality_loss_percent"),
        ('kind = "decision"', 'kind = "measured"', "limits.kind"),
        ('processor = "gpu"', 'processor = "gpu"\ncolour = "red"', "colour: unknown field"),
        ("date = 2026-11-21\nmemory_context", 'date = "soon"\nmemory_context', "limits.date"),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, field: str) -> None:
    assert old in _good()
    with pytest.raises(ArtifactError, match=field):
        load_device(_write(tmp_path, _good().replace(old, new)))


def test_host_has_no_figures_of_a_machine(tmp_path: Path) -> None:
    """Every machine is recognised as `host`: another machine's figures would be wrong for all but one."""
    assert load_device("host").hardware is None
    text = _good()
    hardware = text[text.index("[hardware.memory_total]") : text.index("[limits]")].partition("[[published]]")[0]
    host = (DEVICES / "host.toml").read_text(encoding="utf-8")
    with pytest.raises(ArtifactError, match="hardware: has figures of one machine"):
        load_device(_write(tmp_path, host.replace("[limits]", hardware + "[limits]")))
    with pytest.raises(ArtifactError, match="hardware: is missing"):
        load_device(_write(tmp_path, host.replace("always = true", 'processor = "Some CPU 9"')))


def test_a_budget_of_ones_own_extends_a_shipped_device(tmp_path: Path) -> None:
    own = load_device(_write(tmp_path, 'extends = "raspberry-pi-5"\n[limits]\nfile_mb = 60\n'))
    pi = load_device("raspberry-pi-5")
    assert own.name == "mine" and own.limits.file_mb == 60 and own.hardware == pi.hardware
    assert own.limits.ttft_ms == pi.limits.ttft_ms and own.recognise == pi.recognise
    with pytest.raises(ArtifactError, match=r"extends 'raspberry-pi-5-6gb': no such device; did you mean raspberry"):
        load_device(_write(tmp_path, 'extends = "raspberry-pi-5-6gb"\n'))
    with pytest.raises(ArtifactError, match="at most 8 deep"):
        load_device(_write(tmp_path, 'extends = "mine.toml"\n'))


def test_limits_of_a_target_can_be_replaced() -> None:
    assert load_target("host", {"file_mb": 60.0}).limits.file_mb == 60
    assert load_target("host", {}) == load_device("host")
    with pytest.raises(UsageError, match=r"--limit file_mb=200: limits.*peak_memory_mb.*change the other limit too"):
        load_target("host", {"file_mb": 200.0})
    only = load_target(None, {"file_mb": 1.0})
    assert [(one.name, one.verdict) for one in judge(only, {"file_mb": 2.0})] == [("file_mb", "fail")]


def test_devices_command(capsys: pytest.CaptureFixture[str]) -> None:
    listed = device_commands.list().devices
    assert {device["name"] for device in listed} == set(list_devices())
    assert all({"name", "kind", "limits"} <= set(device) for device in listed)
    assert set(LIMITS) - set(listed[0]["limits"]) == {"accuracy_loss_points", "kl_nats", "top1_changed_percent"}
    assert "raspberry-pi-5-8gb" in capsys.readouterr().out
    shown: list[dict[str, Any]] = device_commands.show("raspberry-pi-5").devices
    assert Device.model_validate_json(json.dumps(shown[0])).name == "raspberry-pi-5-8gb"
    printed = capsys.readouterr().out
    assert "17.07 GB/s" in printed and "geerlingguy" in printed and "256 MB" in printed
    strict = load_device("host")
    strict = strict.model_copy(update={"limits": strict.limits.model_copy(update={"kl_nats": 0.125})})
    device_commands._print_devices([load_device("h100"), strict], ())
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line[:1] == "h"] == ["\u2013", "0.125"]


def test_a_device_with_coefficients_and_every_limit_reads_back(tmp_path: Path) -> None:
    """Names with control characters, quotes and letters beyond ASCII too: a processor's name is not the program's."""
    device = reference_machine()
    changes = {"title": 'a "chip"\x7f\\ \u00e9 \U0001f680', "description": "two\nlines"}
    limits = device.limits.model_copy(update=dict.fromkeys(LIMITS, 2.0))
    device = device.model_copy(update=changes | {"coefficients": resolve(device), "limits": limits})
    path = tmp_path / "new" / "mine.toml"
    write_device(device, path, "A comment.")
    assert load_device(str(path)) == device
    assert "# A comment.\n" in path.read_text(encoding="utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["mine.toml"]


def _recognised(processor: str = "cpu") -> list[str]:
    """Names of the shipped devices that this machine is, `host` aside."""
    return [name for name in list_devices() if name != "host" and is_this_machine(load_device(name), processor)]


def test_a_board_whose_name_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "_BOARD", tmp_path)  # to read a folder fails for root too, as another's file for users
    assert not is_this_machine(load_device("raspberry-pi-5"))
    monkeypatch.setattr(load, "_BOARD", tmp_path / "model")
    assert load._device_tree_model() == ""
    (tmp_path / "model").write_bytes(b"Raspberry Pi 5\0")
    assert load._device_tree_model() == "Raspberry Pi 5"


def test_recognition(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_tree(text: str, memory_mb: float) -> None:
        monkeypatch.setattr(load, "_device_tree_model", lambda: text)
        monkeypatch.setattr(load, "total_memory_mb", lambda: memory_mb)

    pi = load_device("raspberry-pi-5")
    device_tree("Raspberry Pi 5 Model B Rev 1.0", 8_439)
    assert is_this_machine(pi) and _recognised() == ["raspberry-pi-5-8gb"]
    device_tree("Raspberry Pi 5 Model B Rev 1.0", 4_140)  # the 4 GB board
    assert not is_this_machine(pi) and _recognised() == ["raspberry-pi-5-4gb"]
    device_tree("Raspberry Pi 4 Model B Rev 1.4", 8_439)
    assert not is_this_machine(pi)
    device_tree("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 8_000)
    assert _recognised() == []  # its recognise is the GPU's
    assert _recognised("gpu") == ["jetson-orin-nano-super"]
    monkeypatch.setattr(load, "_android_product", lambda: "CPH2581")
    assert _recognised() == ["android-flagship"]
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
        monkeypatch.setattr(load, name, lambda value=value: value)
    assert is_this_machine(device)
    for name, other in (("processor_name", "Some CPU 90"), ("instruction_set", "x86_64"), ("total_memory_mb", 8_200)):
        with monkeypatch.context() as changed:
            changed.setattr(load, name, lambda other=other: other)
            assert not is_this_machine(device), name
    assert not is_this_machine(device.model_copy(update={"recognise": Recognise(min_memory_mb=1)}))  # says nothing


def test_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(processors, "CPUINFO", file)
    assert "not readable" in instruction_set()
    file.write_text("processor : 0\nmodel name : Some CPU 9\nflags : fpu avx2 avx512f avx512_vnni\n", encoding="utf-8")
    assert instruction_set().endswith("with AVX2, AVX-512, AVX512-VNNI") and processor_name() == "Some CPU 9"
    file.write_text("Features\t: fp asimd asimddp\n", encoding="utf-8")
    assert instruction_set().endswith("with NEON, int8 dot product")
