"""Coefficients from a device's figures, by hand; their costs; and what stands in for this machine's figures."""

from __future__ import annotations

import pytest

from benchmarks.devices.load import load_device
from benchmarks.devices.schema import Hardware
from benchmarks.measure import hardware
from benchmarks.predict import coefficients as module
from benchmarks.predict.coefficients import costs, reliability, resolve, with_costs
from tests.support.devices import reference_machine


def test_shares_of_a_devices_figures_by_hand() -> None:
    """65 GB/s, 510 GFLOP/s and 2,060 GOP/s, with the shipped shares of a CPU."""
    found = resolve(reference_machine())
    # A byte of float32 is a quarter of a weight: read at 65 GB/s, then half an operation at 0.3 of 510 GFLOP/s.
    assert found.weights_gb_per_s["fp32"] == pytest.approx(1 / (1 / 65 + 0.5 / (0.3 * 510)))
    assert found.weights_gb_per_s["int4"] == pytest.approx(1 / (1 / 65 + (2 / 0.53125) / (0.4 * 2_060)))
    assert found.cache_gb_per_s == pytest.approx({"fp32": 0.7 * 65, "int8": 0.45 * 65})
    assert found.attention_gmac_per_s == pytest.approx(0.25 * 255)
    assert found.prefill_gmac_per_s["int8_rows"] == pytest.approx(0.7 * 1_030)
    assert found.elementwise_gb_per_s == pytest.approx(0.25 * 65)
    assert (found.layer_us, found.kernel_layer_us, found.standard_layer_us) == (18, pytest.approx(12.6), 90)


def test_a_devices_own_share_and_overhead_replace_the_shipped_ones() -> None:
    found = resolve(load_device("raspberry-pi-5"))
    assert (found.layer_us, found.standard_layer_us) == (70, 350)
    assert found.weights_gb_per_s["fp32"] == pytest.approx(1 / (1 / (0.97 * 17.07) + 0.5 / (0.3 * 154)))


def test_costs_and_back() -> None:
    found = resolve(reference_machine())
    priced = costs(found)
    assert priced["weights_gb_per_s.fp32"] == pytest.approx(1e3 / (found.weights_gb_per_s["fp32"] * 1e9))  # ms a byte
    assert (priced["layer_us"], priced["runtime_mb"]) == (pytest.approx(0.018), 69e6)
    assert priced["weights_gb_per_s.fp16"] == 2 * priced["weights_gb_per_s.fp32"]  # widened to float32
    changed = {name: 2 * priced[name] for name in ("weights_gb_per_s.int4", "pass_us", "runtime_mb")}
    again = with_costs(found, changed)
    assert again.weights_gb_per_s["int4"] == pytest.approx(found.weights_gb_per_s["int4"] / 2, rel=1e-3)
    assert (again.pass_us, again.runtime_mb) == (20, 138)
    assert again.weights_gb_per_s["fp32"] == found.weights_gb_per_s["fp32"]


def test_reliability_says_whose_coefficients_they_are() -> None:
    device = reference_machine()
    assert not reliability(device)["own"] and reliability(device)["band"]["measured"]
    own = device.model_copy(update={"coefficients": resolve(device)})
    assert reliability(own)["own"]
    assert not reliability(load_device("rtx-3060"))["band"]["measured"]


def test_host_is_predicted_with_this_machines_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never with those of the machine that the file was written on."""
    here = reference_machine(bandwidth=12.5).hardware
    assert here is not None
    monkeypatch.setattr(module, "this_machine", lambda: here)
    assert resolve(load_device("host")).cache_gb_per_s["fp32"] == pytest.approx(0.7 * 12.5)


def test_the_figures_of_this_machine_are_measured() -> None:
    hardware.this_machine.cache_clear()
    found = hardware.this_machine(1)
    assert isinstance(found, Hardware) and found.cores.value == 1
    assert found.memory_bandwidth.kind == found.fp32_matmul_rate.kind == "measured"
    factor = 4 if any(name in found.instruction_set.value for name in hardware.DOT_PRODUCT) else 2
    # Four digits of either.
    assert found.int8_matmul_rate.value == pytest.approx(factor * found.fp32_matmul_rate.value, rel=1e-3)
    assert hardware.this_machine(1) is found  # once
    hardware.this_machine.cache_clear()
