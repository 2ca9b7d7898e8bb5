"""What a measured process reads of its machine: memory bandwidth, clock and temperature.

Standard library and numpy alone, since any other import would count in the memory that is reported as the model's.
psutil's `cpu_freq` also lists cpufreq policies instead of processors, and its `sensors_temperatures` skips thermal
zones wherever any hwmon sensor exists. Linux's files hold kHz and thousandths of a degree (Documentation/hwmon).
`root` is "/" but in tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path("/")
SAMPLES, LEAST_SAMPLE_S = 5, 0.02
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "scpi_sensors")
PROCESSOR_ZONES = ("cpu", "pkg", "soc", "tj")
Slice = np.ndarray[Any, Any]


def measure_bandwidth(threads: int, working_set_bytes: int) -> dict[str, Any]:
    """Bytes per second at which this machine's cores read a working set again and again.

    Each thread reads its slice by numpy's `max` and with `dot` of the slice with itself, which load each number once;
    the faster counts. A working set of the model's size hits or misses the caches as the model's weights do.
    """
    count = max(1, working_set_bytes // 4 // threads)
    slices = [np.ones(count, dtype=np.float32) for _ in range(threads)]
    kernels: dict[str, Callable[[Slice], Any]] = {"max": lambda x: x.max(), "dot": lambda x: x @ x}
    rates: dict[str, list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:

        def seconds(kernel: Callable[[Slice], Any], repeats: int) -> float:
            started = time.perf_counter()
            list(pool.map(lambda x: [kernel(x) for _ in range(repeats)], slices))
            return time.perf_counter() - started

        for name, kernel in kernels.items():
            repeats = 1
            while seconds(kernel, repeats) < LEAST_SAMPLE_S:
                repeats *= 2
            rates[name] = [4 * count * threads * repeats / seconds(kernel, repeats) for _ in range(SAMPLES)]
    best = max(max(samples) for samples in rates.values())
    return {"working_set_bytes": 4 * count * threads, "rates_bytes_per_s": rates, "bandwidth_bytes_per_s": best}


def read_sensors(cpus: Collection[int], root: Path = ROOT) -> dict[str, float | None]:
    """`clock_mhz`, the mean of `cpus`, and `temperature_c`, the processor's hottest sensor; None if unreadable."""
    khz = _readable(root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in cpus)
    chips = [folder for folder in root.glob("sys/class/hwmon/hwmon*") if _text(folder / "name") in PROCESSOR_SENSORS]
    zones = [
        folder / "temp"
        for folder in root.glob("sys/class/thermal/thermal_zone*")
        if any(word in _text(folder / "type").lower() for word in PROCESSOR_ZONES)
    ]
    heat = _readable([path for folder in chips for path in folder.glob("temp*_input")] or zones)
    clock_mhz = sum(khz) / len(khz) / 1e3 if khz else None
    return {"clock_mhz": clock_mhz, "temperature_c": max(heat) / 1e3 if heat else None}


def read_integer(path: Path) -> int | None:
    """The number that a file of the system holds; None if it cannot be read."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _readable(paths: Iterable[Path]) -> list[int]:
    return [value for path in paths if (value := read_integer(path)) is not None]


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
