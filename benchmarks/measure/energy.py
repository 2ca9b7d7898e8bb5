"""Clock, temperature and energy as Linux shows them under /sys. Standard library only; `root` is "/" but for tests.

psutil's `cpu_freq` lists cpufreq policies, not processors, and its `sensors_temperatures` skips thermal zones wherever
any hwmon sensor exists. The files hold kHz, thousandths of a degree, uJ, uW, mV and mA (Linux's Documentation/power:
powercap and power_supply_class; Documentation/hwmon/sysfs-interface).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure.cpus import read_integer

ROOT = Path("/")
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "scpi_sensors")
PROCESSOR_ZONES = ("cpu", "pkg", "soc", "tj")
BOARD_RAILS = ("VDD_IN", "POM_5V_IN")
"""Labels of the rail that feeds a whole board (NVIDIA's Jetsons)."""


def read_sensors(cpus: Collection[int] | None = None, root: Path = ROOT) -> dict[str, Any]:
    """`clock_mhz` (with `clock_source`) and `temperature_c` now; None for what cannot be read."""
    clock, source = _clock_mhz(cpus, root)
    return {"clock_mhz": clock, "clock_source": source, "temperature_c": temperature_c(root)}


def _clock_mhz(cpus: Collection[int] | None, root: Path) -> tuple[float | None, str | None]:
    """Mean clock of the processors in use: cpufreq's, else /proc/cpuinfo's, which is constant in virtual machines."""
    folders = root.glob("sys/devices/system/cpu/cpu[0-9]*")
    wanted = [path for path in folders if cpus is None or int(path.name[3:]) in cpus]
    khz = _readable([path / "cpufreq" / "scaling_cur_freq" for path in wanted])
    if khz:
        return sum(khz) / len(khz) / 1e3, "cpufreq"
    mhz, number = [], -1
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, text = line.partition(":")
        if key.strip() == "processor":
            number = int(text)
        elif key.strip() == "cpu MHz" and (cpus is None or number in cpus):
            mhz.append(float(text))
    return (sum(mhz) / len(mhz), "cpuinfo") if mhz else (None, None)


def temperature_c(root: Path = ROOT) -> float | None:
    """The hottest sensor of the processor; None where no sensor says that it is the processor's."""
    chips = [folder for folder in root.glob("sys/class/hwmon/hwmon*") if _text(folder / "name") in PROCESSOR_SENSORS]
    paths = [path for folder in chips for path in folder.glob("temp*_input")]
    paths = paths or [
        folder / "temp"
        for folder in root.glob("sys/class/thermal/thermal_zone*")
        if any(word in _text(folder / "type").lower() for word in PROCESSOR_ZONES)
    ]
    return max(values) / 1e3 if (values := _readable(paths)) else None


class EnergyMeter:
    """Joules used since it was made: by counters where there are any, else by integrating power over time.

    `source` says what is read, for people; None where the machine shows nothing, for the `reason`.
    """

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self.source: str | None = None
        self.reason = "the machine shows no energy counter, power sensor or discharging battery"
        self._total, self._clock = 0.0, clock
        self._counters = self._find_counters(root)
        sensors = () if self._counters else self._power_sensors(root)
        used = next((sensor for sensor in sensors if self._use(*sensor[:2])), ("", [], 1.0))
        _, self._power, self._unit = used  # files whose product times `_unit` is watts
        self._last = [read_integer(path) or 0 for path, _ in self._counters]
        self._last_watts, self._last_time = self._watts(), clock()

    def joules(self) -> float:
        """The sum so far. Ask often: at least once before a counter wraps (minutes), every 50 ms for a power sensor.

        Raises:
            OSError: what could be read before cannot be read any more.
        """
        for index, (path, span) in enumerate(self._counters):
            value = read_integer(path)
            used = None if value is None else value - self._last[index]
            if used is not None and used < 0:  # wrapped: after `span` the counter starts again at 0
                used = used + span if span else None
            if value is None or used is None:
                raise OSError(f"{path}: the energy counter was reset or is gone")
            self._total += used / 1e6
            self._last[index] = value
        watts, now = self._watts(), self._clock()
        self._total += (watts + self._last_watts) / 2 * (now - self._last_time)
        self._last_watts, self._last_time = watts, now
        return self._total

    def _find_counters(self, root: Path) -> list[tuple[Path, int | None]]:
        """Counters in uJ of every processor package, each with its largest value."""
        # neither the parts of a package nor psys around it
        packages = [path for path in root.glob("sys/class/powercap/*") if _text(path / "name").startswith("package")]
        found = [(folder / "energy_uj", read_integer(folder / "max_energy_range_uj")) for folder in sorted(packages)]
        source = f"powercap, {len(found)} package{'s' if len(found) > 1 else ''}"
        if not found:
            inputs = sorted(root.glob("sys/class/hwmon/hwmon*/energy*_input"))
            sockets = [path for path in inputs if _text(_sibling(path, "_label")).startswith("Esocket")]
            found = [(path, None) for path in sockets or (inputs if len(inputs) == 1 else [])]
            source = f"hwmon energy counter, {len(found)}"
        return found if found and self._use(source, [path for path, _ in found]) else []

    def _power_sensors(self, root: Path) -> Iterator[tuple[str, list[Path], float]]:
        """The board's rail, the only power sensor, and batteries that discharge: name, files, unit of their product."""
        for label in root.glob("sys/class/hwmon/hwmon*/in*_label"):
            current = label.with_name(label.name.replace("in", "curr", 1).replace("_label", "_input"))
            if _text(label) in BOARD_RAILS and current.exists():
                yield f"hwmon rail {_text(label)}", [_sibling(label, "_input"), current], 1e-6
        hwmon = root / "sys/class/hwmon"
        sensors = sorted(hwmon.glob("hwmon*/power*_input")) or sorted(hwmon.glob("hwmon*/power*_average"))
        if len(sensors) == 1:
            yield f"hwmon {sensors[0].name}", sensors, 1e-6
        elif sensors:
            self.reason = f"{len(sensors)} power sensors, none known to be the whole board's"
        for battery in sorted(root.glob("sys/class/power_supply/*")):
            for names, unit in ((["power_now"], 1e-6), (["current_now", "voltage_now"], 1e-12)):
                paths = [battery / name for name in names]
                if _text(battery / "status") == "Discharging" and all(path.exists() for path in paths):
                    yield f"battery {battery.name}", paths, unit

    def _use(self, source: str, paths: list[Path]) -> bool:
        """Whether all of `paths` can be read: sets `source`, else the reason."""
        unreadable = [path for path in paths if read_integer(path) is None]
        if unreadable:
            self.reason = f"{unreadable[0]}: cannot be read by this user"
        else:
            self.source = source
        return not unreadable

    def _watts(self) -> float:
        """The power now; 0 where counters are read."""
        values = _readable(self._power)
        if len(values) < len(self._power):
            raise OSError(f"{self._power[0]}: the power sensor is gone")
        return self._unit * math.prod(abs(value) for value in values) if values else 0.0  # batteries may count down


def _readable(paths: Iterable[Path]) -> list[int]:
    return [value for path in paths if (value := read_integer(path)) is not None]


def _sibling(path: Path, ending: str) -> Path:
    """`in1_input` beside `in1_label`, and so on."""
    return path.with_name(path.name.rpartition("_")[0] + ending)


def _text(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
