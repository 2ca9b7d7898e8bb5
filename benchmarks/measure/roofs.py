"""The roofs of a roofline: the bandwidth and the peak rates of the machine that measured."""

from __future__ import annotations

from typing import Any

from benchmarks.devices.recognise import is_this_machine
from benchmarks.devices.schema import Device


def machine_roofs(device: Device, bandwidth_bytes_per_s: float, on_device: bool) -> dict[str, Any]:
    """What limits the measured rates, for the result's `roofs`.

    Another device's figures say nothing about this machine, and `host`, which is any machine, has none: then the
    bandwidth is the one measured here, and no peak rate is known.

    Args:
        device: whose budget the result is judged by.
        bandwidth_bytes_per_s: measured beside the model.
        on_device: this machine is `device`, whether it is recognised or not.

    Returns:
        `bandwidth_gb_s`, `int8_gops` and `fp32_gflops` (None where not known), and `source`: the device, or "measured".
    """
    hardware = device.hardware
    if hardware is None or not (on_device or is_this_machine(device)):
        roofs = {"bandwidth_gb_s": bandwidth_bytes_per_s / 1e9, "int8_gops": None, "fp32_gflops": None}
        return roofs | {"source": "measured"}
    return {
        "bandwidth_gb_s": hardware.memory_bandwidth.value,
        "int8_gops": hardware.int8_matmul_rate.value,
        "fp32_gflops": hardware.fp32_matmul_rate.value,
        "source": device.name,
    }
