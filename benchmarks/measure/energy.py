"""Clock, temperature and energy as Linux shows them under /sys. Standard library only; nothing here is guessed.

`root` is "/" but for tests. Units of the files: kHz, thousandths of a degree, uJ, uW, mV and mA
(Documentation/power/powercap, Documentation/hwmon/sysfs-interface and Documentation/power/power_supply_class of Linux).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

ROOT = Path("/")
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "scpi_sensors")
PROCESSOR_ZONES = ("cpu", "pkg", "soc", "tj")
BOARD_RAILS = ("VDD_IN", "POM_5V_IN")
"""Labels of the rail that feeds a whole board (NVIDIA's Jetsons)."""


def surroundings(cpus: Collection[int] | None = None, root: Path = ROOT) -> dict[str, Any]:
    """`clock_mhz` (with `clock_source`) and `temperature_c` now; None for what cannot be read."""
    clock, source = _clock_mhz(cpus, root)
    return {"clock_mhz": clock, "clock_source": source, "temperature_c": temperature_c(root)}


def _clock_mhz(cpus: Collection[int] | None, root: Path) -> tuple[float | None, str | None]:
    """Mean clock of the processors in use: cpufreq's, else /proc/cpuinfo's, which in virtual machines never moves."""
    folders = root.glob("sys/devices/system/cpu/cpu[0-9]*")
    wanted = [path for path in folders if cpus is None or int(path.name[3:]) in cpus]
    khz = [value for path in wanted if (value := _number(path / "cpufreq" / "scaling_cur_freq")) is not None]
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
        if (_text(folder / "name") or "") in PROCESSOR_SENSORS
        for path in folder.glob("temp*_input")
    ]
    paths = paths or [
        folder / "temp"
        for folder in root.glob("sys/class/thermal/thermal_zone*")
        if any(word in (_text(folder / "type") or "").lower() for word in PROCESSOR_ZONES)
    ]
    values = [value for path in paths if (value := _number(path)) is not None]
    return max(values) / 1e3 if values else None


class EnergyMeter:
    """Joules used since it was made: by a counter where there is one, else by adding up power over time.

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
        self._last = [_number(path) or 0.0 for path, _ in self._counters]
        self._last_watts, self._last_time = (self._watts() if self._watts else 0.0), clock()

    def joules(self) -> float:
        """The sum so far. Ask at least once in a counter's turn (minutes), and every 50 ms where power is added up.

        Raises:
            OSError: what could be read before cannot be read any more.
        """
        for index, (path, span) in enumerate(self._counters):
            value = _number(path)
            used = None if value is None else value - self._last[index]
            if used is not None and used < 0:  # it came round: after `span` it begins again at 0
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

    def _find_counters(self, root: Path) -> list[tuple[Path, float | None]]:
        """Counters in uJ of every processor package, with the largest value of each."""
        folders = [
            folder
            for folder in sorted(root.glob("sys/class/powercap/*"))
            if (_text(folder / "name") or "").startswith("package")  # not the parts of one, nor psys around it
        ]
        found: list[tuple[Path, float | None]] = [
            (folder / "energy_uj", _number(folder / "max_energy_range_uj")) for folder in folders
        ]
        if found:
            self.source = f"powercap, {len(found)} package{'s' if len(found) > 1 else ''}"
        else:
            inputs = sorted(root.glob("sys/class/hwmon/hwmon*/energy*_input"))
            sockets = [p for p in inputs if (_text(_label(p)) or "").startswith("Esocket")]
            found = [(path, None) for path in sockets or (inputs if len(inputs) == 1 else [])]
            if found:
                self.source = f"hwmon energy counter, {len(found)}"
        unreadable = next((path for path, _ in found if _number(path) is None), None)
        if unreadable is not None:
            self.source, self.reason = None, f"{unreadable}: cannot be read by this user"
            return []
        return found

    def _find_power(self, root: Path) -> Callable[[], float] | None:
        """What reads the watts of the board, of the one power sensor there is, or of a battery that discharges."""
        rails = [p for p in root.glob("sys/class/hwmon/hwmon*/in*_label") if (_text(p) or "") in BOARD_RAILS]
        rails = [p for p in rails if _number(p.with_name(_current(p))) is not None]
        sensors = sorted(root.glob("sys/class/hwmon/hwmon*/power*_input"))
        sensors = sensors or sorted(root.glob("sys/class/hwmon/hwmon*/power*_average"))
        batteries = [p for p in sorted(root.glob("sys/class/power_supply/*")) if _text(p / "status") == "Discharging"]
        if rails:
            volts, amperes = rails[0].with_name(rails[0].name.replace("_label", "_input")), _current(rails[0])
            return self._power(f"hwmon rail {_text(rails[0])}", [volts, rails[0].with_name(amperes)], 1e-6)
        if len(sensors) == 1:
            return self._power(f"hwmon {sensors[0].name}", sensors, 1e-6)
        for battery in batteries:
            if _number(battery / "power_now") is not None:
                return self._power(f"battery {battery.name}", [battery / "power_now"], 1e-6)
            paths = [battery / "current_now", battery / "voltage_now"]
            if all(_number(path) is not None for path in paths):
                return self._power(f"battery {battery.name}", paths, 1e-12)
        if len(sensors) > 1:
            self.reason = f"{len(sensors)} power sensors and none is known to be the whole board's"
        return None

    def _power(self, source: str, paths: list[Path], unit: float) -> Callable[[], float] | None:
        if any(_number(path) is None for path in paths):
            self.reason = f"{paths[0]}: cannot be read by this user"
            return None
        self.source = source

        def watts() -> float:
            product = unit
            for path in paths:
                value = _number(path)
                if value is None:
                    raise OSError(f"{path}: the power sensor is gone")
                product *= abs(value)  # some batteries count what they give as negative
            return product

        return watts


def _label(path: Path) -> Path:
    return path.with_name(path.name.replace("_input", "_label"))


def _current(label: Path) -> str:
    return label.name.replace("in", "curr", 1).replace("_label", "_input")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
