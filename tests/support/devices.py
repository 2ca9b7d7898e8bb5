"""A device with known figures, for tests of predictions."""

from benchmarks.devices.load import load_device
from benchmarks.devices.schema import Device


def reference_machine(bandwidth: float = 65.0) -> Device:
    """Two virtual cores of a quiet Zen 5 server: GB/s, GFLOP/s and GOP/s; limits are those of `host`."""
    laptop = load_device("laptop-x86")
    assert laptop.hardware is not None
    rates = {"memory_bandwidth": bandwidth, "fp32_matmul_rate": 510.0, "int8_matmul_rate": 2_060.0, "cores": 2.0}
    figures = {name: getattr(laptop.hardware, name).model_copy(update={"value": rate}) for name, rate in rates.items()}
    hardware = laptop.hardware.model_copy(update={**figures, "bandwidth_share": None, "layer_overhead": None})
    return laptop.model_copy(
        update={"name": "reference", "hardware": hardware, "limits": load_device("host").limits, "recognise": None}
    )
