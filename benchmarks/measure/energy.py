"""Clock, temperature and energy as Linux shows them under /sys. Standard library only; nothing here is guessed.

psutil's `cpu_freq` lists cpufreq policies, not processors, and its `sensors_temperatures` skips thermal zones wherever
any hwmon sensor exists: both read the wrong thing on boards and phones. `root` is "/" but for tests. Units of the
files: kHz, thousandths of a degree, uJ, uW, mV and mA (Documentation/power/powercap,
Documentation/hwmon/sysfs-interface and Documentation/power/power_supply_class of Linux).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
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
    khz = [value for path in wanted if (value := read_integer(path / "cpufreq" / "scaling_cur_freq")) is not None]
    if khz:
        return sum(khz) / len(khz) / 1e3, "cpufreq"
    mhz, number = [], -1
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, text = line.partition(":")
        if key.strip() == "processor":
            number = int(text)
        elif key.strip() == "cpu MHz" and (cpus is None or number in cpus):
            mhz.append(float(text))
    return (sum(mhz) / len(mhz), "cpuinfo") if mhz else (None, None)


def temperature_c(root: Path = ROOT) -> float | None:
    """The hottest sensor of the processor; None where no sensor says that it is the processor's."""
    paths = [
        path
        for folder in root.glob("sys/class/hwmon/hwmon*")
        if _text(folder / "name") in PROCESSOR_SENSORS
        for path in folder.glob("temp*_input")
    ]
    paths = paths or [
        folder / "temp"
        for folder in root.glob("sys/class/thermal/thermal_zone*")
        if any(word in (_text(folder / "type") or "").lower() for word in PROCESSOR_ZONES)
    ]
    values = [value for path in paths if (value := read_integer(path)) is not None]
    return max(values) / 1e3 if values else None


class EnergyMeter:
    """Joules used since it was made: by a counter where there is one, else by integrating power over time.

    Attributes:
        source: what is read, for people; None where the machine shows nothing.
        reason: why `source` is None.
    """

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self.source: str | None = None
        self.reason = "the machine shows no energy counter, power sensor or discharging battery"
        self._total, self._clock = 0.0, clock
        self._counters = self._find_counters(root)
        self._watts = None if self._counters else self._find_power(root)
        self._last = [read_integer(path) or 0 for path, _ in self._counters]
        self._last_watts, self._last_time = (self._watts() if self._watts else 0.0), clock()

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
        if self._watts:
            watts, now = self._watts(), self._clock()
            self._total += (watts + self._last_watts) / 2 * (now - self._last_time)
            self._last_watts, self._last_time = watts, now
        return self._total

    def _find_counters(self, root: Path) -> list[tuple[Path, int | None]]:
        """Counters in uJ of every processor package, each with its largest value."""
        packages = [
            folder
            for folder in sorted(root.glob("sys/class/powercap/*"))
            if (_text(folder / "name") or "").startswith("package")  # not the parts of one, nor psys around it
        ]
        found = [(folder / "energy_uj", read_integer(folder / "max_energy_range_uj")) for folder in packages]
        if found:
            self.source = f"powercap, {len(found)} package{'s' if len(found) > 1 else ''}"
        else:
            inputs = sorted(root.glob("sys/class/hwmon/hwmon*/energy*_input"))
            labels = {path: _text(path.with_name(path.name.replace("_input", "_label"))) or "" for path in inputs}
            sockets = [path for path, label in labels.items() if label.startswith("Esocket")]
            found = [(path, None) for path in sockets or (inputs if len(inputs) == 1 else [])]
            if found:
                self.source = f"hwmon energy counter, {len(found)}"
        unreadable = next((path for path, _ in found if read_integer(path) is None), None)
        if unreadable is not None:
            self.source, self.reason = None, f"{unreadable}: cannot be read by this user"
            return []
        return found

    def _find_power(self, root: Path) -> Callable[[], float] | None:
        """A function that reads the watts of the board, of the only power sensor, or of a discharging battery."""
        for label in root.glob("sys/class/hwmon/hwmon*/in*_label"):
            current = label.with_name(label.name.replace("in", "curr", 1).replace("_label", "_input"))
            if _text(label) in BOARD_RAILS and read_integer(current) is not None:
                volts = label.with_name(label.name.replace("_label", "_input"))
                return self._power(f"hwmon rail {_text(label)}", [volts, current], 1e-6)
        sensors = sorted(root.glob("sys/class/hwmon/hwmon*/power*_input"))
        sensors = sensors or sorted(root.glob("sys/class/hwmon/hwmon*/power*_average"))
        if len(sensors) == 1:
            return self._power(f"hwmon {sensors[0].name}", sensors, 1e-6)
        for battery in sorted(root.glob("sys/class/power_supply/*")):
            if _text(battery / "status") != "Discharging":
                continue
            if read_integer(battery / "power_now") is not None:
                return self._power(f"battery {battery.name}", [battery / "power_now"], 1e-6)
            paths = [battery / "current_now", battery / "voltage_now"]
            if all(read_integer(path) is not None for path in paths):
                return self._power(f"battery {battery.name}", paths, 1e-12)
        if len(sensors) > 1:
            self.reason = f"{len(sensors)} power sensors, none known to be the whole board's"
        return None

    def _power(self, source: str, paths: list[Path], unit: float) -> Callable[[], float] | None:
        if any(read_integer(path) is None for path in paths):
            self.reason = f"{paths[0]}: cannot be read by this user"
            return None
        self.source = source

        def watts() -> float:
            product = unit
            for path in paths:
                value = read_integer(path)
                if value is None:
                    raise OSError(f"{path}: the power sensor is gone")
                product *= abs(value)  # some batteries count a discharge as negative
            return product

        return watts


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
