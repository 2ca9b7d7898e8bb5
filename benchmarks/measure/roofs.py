"""The roofs of a roofline: the bandwidth and the peak rates of the machine that measured."""

from __future__ import annotations

from typing import Any

from benchmarks.devices.load import is_this_machine
from benchmarks.devices.schema import Device


def machine_roofs(
    device: Device, bandwidth_bytes_per_s: float, on_device: bool, processor: str = "cpu"
) -> dict[str, Any]:
    """What limits the measured rates: `bandwidth_gb_s`, `int8_gops`, `fp32_gflops` and their `source`.

    The figures of `device` where this machine is that device. Elsewhere, and for `host`, which is any machine, the
    bandwidth is the one measured here and no peak rate is known (None).
    """
    hardware = device.hardware
    if hardware is None or not (on_device or is_this_machine(device, processor)):
        bandwidth = bandwidth_bytes_per_s / 1e9
        return {"bandwidth_gb_s": bandwidth, "int8_gops": None, "fp32_gflops": None, "source": "measured"}
    return {
        "bandwidth_gb_s": hardware.memory_bandwidth.value,
        "int8_gops": hardware.int8_matmul_rate.value,
        "fp32_gflops": hardware.fp32_matmul_rate.value,
        "source": device.name,
    }
