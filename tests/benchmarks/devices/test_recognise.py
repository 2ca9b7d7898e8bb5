"""Recognising this machine as a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.devices import recognise
from benchmarks.devices.load import list_devices, load_device
from benchmarks.devices.recognise import instruction_set, is_this_machine, processor_name
from benchmarks.devices.schema import Recognise


def _recognised(processor: str = "cpu") -> list[str]:
    """Names of the shipped devices that this machine is, `host` aside."""
    return [name for name in list_devices() if name != "host" and is_this_machine(load_device(name), processor)]


def test_recognition(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_tree(text: str, memory_mb: float) -> None:
        monkeypatch.setattr(recognise, "_device_tree_model", lambda: text)
        monkeypatch.setattr(recognise, "total_memory_mb", lambda: memory_mb)

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
    monkeypatch.setattr(recognise, "_android_product", lambda: "CPH2581")
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
        monkeypatch.setattr(recognise, name, lambda value=value: value)
    assert is_this_machine(device)
    for name, other in (("processor_name", "Some CPU 90"), ("instruction_set", "x86_64"), ("total_memory_mb", 8_200)):
        with monkeypatch.context() as changed:
            changed.setattr(recognise, name, lambda other=other: other)
            assert not is_this_machine(device), name
    assert not is_this_machine(device.model_copy(update={"recognise": Recognise(min_memory_mb=1)}))  # says nothing


def test_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(recognise, "CPUINFO", file)
    assert "not readable" in instruction_set()
    file.write_text("processor : 0\nmodel name : Some CPU 9\nflags : fpu avx2 avx512f avx512_vnni\n", encoding="utf-8")
    assert instruction_set().endswith("with AVX2, AVX-512, AVX512-VNNI") and processor_name() == "Some CPU 9"
    file.write_text("Features\t: fp asimd asimddp\n", encoding="utf-8")
    assert instruction_set().endswith("with NEON, int8 dot product")
