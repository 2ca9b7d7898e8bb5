"""The roofline: counted operations, and only the roofs of the machine that measured."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.devices.load import load_device
from benchmarks.measure.roofs import machine_roofs
from benchmarks.report.roofline import measured_rates, roofline_chart
from sportsllm.models.config import ModelConfig

MEASURED = 20e9  # bytes per second beside the model


def test_roofline_points_are_counted_operations_over_counted_bytes() -> None:
    config = ModelConfig(50, 12, 20, 3, 2, 1, 6, max_position_embeddings=64)
    bench = {
        "memory_floor": {"weight_bytes": 1000, "kv_bytes_per_token": 10},
        "tpot_ms": {"4": {"p50": 0.5}},
        "ttft_ms": {"5": 2.0},
    }

    def token(position: int, head: bool) -> int:
        """Two operations for each multiplication, matrix by matrix; position counts from 1."""
        matrices = 12 * 12 + 12 * 6 + 12 * 6 + 12 * 12 + 3 * 12 * 20
        attention = 2 * (2 * 6) * position * 2  # scores and values, two heads of six
        return 3 * (2 * matrices + attention) + (2 * 50 * 12 if head else 0)

    decode, prefill = measured_rates(bench, config)
    operations = token(5, True)
    assert decode == [(operations / 1040, pytest.approx(operations / 0.5e-3 / 1e9), "decode after 4")]
    operations = sum(token(position, position == 5) for position in range(1, 6))
    assert prefill == [(operations / 1050, pytest.approx(operations / 2e-3 / 1e9), "prompt of 5")]


def drawn(directory: Path, roofs: dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """The roofline's traces by name, and its caption."""
    bench = {
        "directory": str(directory),
        "tpot_ms": {"512": {"p50": 1.0}},
        "ttft_ms": {},
        "memory_floor": {"weight_bytes": 1e6, "kv_bytes_per_token": 10, "bandwidth_bytes_per_s": MEASURED},
        "budget": {"device": "host"},
    }
    chart = roofline_chart([], bench | ({} if roofs is None else {"roofs": roofs}))
    if chart.figure is None:
        return {}, chart.missing
    return {trace["name"]: trace for trace in chart.figure["data"]}, chart.caption


def test_the_roofs_are_those_of_the_result(checkpoint: Path) -> None:
    """Whatever the device is called: no file of that name is read."""
    roofs = {"bandwidth_gb_s": 30.0, "int8_gops": 400.0, "fp32_gflops": 100.0, "source": "my-machine"}
    traces, caption = drawn(checkpoint, roofs)
    eight, thirty_two = traces["8-bit peak"], traces["32-bit peak"]
    assert eight["y"][-1] == 400 and thirty_two["y"][-1] == 100
    assert eight["y"][0] / eight["x"][0] == pytest.approx(30)
    assert traces["measured GB/s"]["y"][0] / traces["measured GB/s"]["x"][0] == pytest.approx(MEASURED / 1e9)
    assert "my-machine" in caption


def test_without_peaks_the_bandwidth_is_the_only_roof(checkpoint: Path) -> None:
    traces, caption = drawn(checkpoint, machine_roofs(load_device("host"), MEASURED, on_device=False))
    assert set(traces) == {"bandwidth", "decode"} and "peak rates are not known" in caption
    assert [y / x for x, y in zip(traces["bandwidth"]["x"], traces["bandwidth"]["y"], strict=True)] == [20, 20]


def test_a_result_without_roofs_says_so(checkpoint: Path) -> None:
    assert drawn(checkpoint, None) == ({}, "The result has no bandwidth or peak rates: measure again.")


@pytest.mark.parametrize("name", ["host", "raspberry-pi-5-8gb"])
def test_a_devices_figures_are_roofs_only_on_that_device(name: str) -> None:
    """`host` is any machine and has no figures; --on-device gives it none."""
    device = load_device(name)
    measured = {"bandwidth_gb_s": 20.0, "int8_gops": None, "fp32_gflops": None, "source": "measured"}
    assert machine_roofs(device, MEASURED, on_device=False) == measured
    hardware, expected = device.hardware, measured
    if hardware is not None:
        expected = {
            "bandwidth_gb_s": hardware.memory_bandwidth.value,
            "int8_gops": hardware.int8_matmul_rate.value,
            "fp32_gflops": hardware.fp32_matmul_rate.value,
            "source": name,
        }
    assert (expected == measured) == (name == "host")
    assert machine_roofs(device, MEASURED, on_device=True) == expected
