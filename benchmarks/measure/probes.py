"""What a measured process reads of its machine: memory bandwidth, clock, temperature, energy and the page cache.

Standard library and numpy alone, since any other import would count in the memory that is reported as the model's.
psutil's `cpu_freq` also lists cpufreq policies instead of processors, and its `sensors_temperatures` skips thermal
zones wherever any hwmon sensor exists. Linux's files hold kHz, thousandths of a degree, uJ, uW, mV and mA
(Documentation/power/powercap, Documentation/hwmon/sysfs-interface). `root` is "/" but in tests.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path("/")
SAMPLES, LEAST_SAMPLE_S = 5, 0.02
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "scpi_sensors")
PROCESSOR_ZONES = ("cpu", "pkg", "soc", "tj")
BOARD_RAILS = ("VDD_IN", "POM_5V_IN")
"""Labels of the rail that feeds a whole board (NVIDIA's Jetsons)."""
COLD_SHARE = 0.01
"""A file counts as cold when no more than this share of its bytes stayed in memory."""
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


class EnergyMeter:
    """Joules used since it was made: by the processor packages' counters, else by integrating a power sensor.

    `source` names what is read; None if nothing can be, for the `reason`.
    """

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self.source: str | None = None
        self.reason = "the machine shows no energy counter or power sensor"
        self._total, self._clock, self._time = 0.0, clock, clock()
        # neither the parts of a package nor psys around it
        packages = sorted(p for p in root.glob("sys/class/powercap/*") if _text(p / "name").startswith("package"))
        self._spans = [read_integer(package / "max_energy_range_uj") for package in packages]
        self._paths = [package / "energy_uj" for package in packages] or self._power_files(root)
        self._values = _readable(self._paths)
        if len(self._values) < len(self._paths):
            self.reason = f"{self._paths[0]}: cannot be read by this user"
        elif self._paths:
            self.source = f"powercap, {len(packages)} packages" if packages else f"hwmon {self._paths[0].name}"

    def joules(self) -> float | None:
        """The sum so far; None if nothing can be read, or no longer.

        Ask often: at least once before a counter wraps (minutes), every 50 ms for a power sensor.
        """
        if self.source is None:
            return None
        values, now = _readable(self._paths), self._clock()
        if len(values) < len(self._paths):
            self.source, self.reason = None, f"{self._paths[0]}: cannot be read any more"
            return None
        if self._spans:
            for value, last, span in zip(values, self._values, self._spans, strict=True):
                self._total += (value - last + (span or 0) * (value < last)) / 1e6  # it starts again at 0 after `span`
        else:  # uW, or mV times mA
            self._total += (math.prod(values) + math.prod(self._values)) / 2 * 1e-6 * (now - self._time)
        self._values, self._time = values, now
        return self._total

    def _power_files(self, root: Path) -> list[Path]:
        """Files whose product is the power in uW: of the board's rail, else of the only power sensor."""
        for label in root.glob("sys/class/hwmon/hwmon*/in*_label"):
            voltage = label.with_name(label.name.replace("_label", "_input"))
            if _text(label) in BOARD_RAILS:
                return [voltage, voltage.with_name(voltage.name.replace("in", "curr", 1))]
        hwmon = root / "sys/class/hwmon"
        sensors = sorted(hwmon.glob("hwmon*/power*_input")) or sorted(hwmon.glob("hwmon*/power*_average"))
        if len(sensors) > 1:
            self.reason = f"{len(sensors)} power sensors, none known to be the whole board's"
        return sensors if len(sensors) == 1 else []


def drop_files(paths: Sequence[Path]) -> str | None:
    """Drop the pages of `paths` (`man 2 posix_fadvise`) and check it: None if they are cold now, else why not.

    The disk's own cache and that of a virtual machine's host are out of reach.
    """
    if not hasattr(os, "posix_fadvise"):
        return "this system cannot drop a file from its cache"
    for path in paths:
        with path.open("rb") as stream:
            try:
                os.fsync(stream.fileno())  # only written pages can be dropped
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                return f"{path.name}: {error.strerror}"
    left, total = resident_bytes(paths), sum(path.stat().st_size for path in paths)
    if left is None:
        return "this system does not say which pages of a file are in memory"
    if left > COLD_SHARE * total:
        return f"{left / 1e6:.1f} of {total / 1e6:.1f} MB stayed in memory (in use, or a file system in memory)"
    return None


def resident_bytes(paths: Sequence[Path]) -> int | None:
    """Bytes of `paths` in the page cache by whole pages (`man 2 mincore`); None if it cannot be asked.

    All pages of files that this user may not write count.
    """
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError, TypeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for path in [path for path in paths if path.stat().st_size]:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            pages = np.zeros(-(-len(view) // mmap.PAGESIZE), dtype=np.uint8)
            failed = mincore(view.ctypes.data, len(view), pages.ctypes.data)
            del view  # a mapping that is looked at cannot be closed
            if failed:
                return None
            total += mmap.PAGESIZE * int(np.count_nonzero(pages & 1))
    return total


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
