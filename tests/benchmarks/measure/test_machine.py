"""What is read from the machine: sensors, processors, memory and the page cache, from made-up and from real files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure.machine import choose_cpus
from benchmarks.measure.probes import EnergyMeter, drop_files, read_sensors, resident_bytes
from benchmarks.measure.process import Turn, memory_split, run_child


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")


def package(number: int, energy_uj: int, range_uj: int = 1_000_000) -> dict[str, object]:
    folder = f"sys/class/powercap/intel-rapl:{number}"
    return {
        f"{folder}/name": f"package-{number}",
        f"{folder}/energy_uj": energy_uj,
        f"{folder}/max_energy_range_uj": range_uj,
    }


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_energy_counters_of_all_packages_add_up_and_wrap(tmp_path: Path) -> None:
    write(tmp_path, package(0, 999_000) | package(1, 100))
    part = "sys/class/powercap/intel-rapl:0:0"  # inside package 0: counted there
    write(tmp_path, {f"{part}/name": "core", f"{part}/energy_uj": 0, f"{part}/max_energy_range_uj": 1_000_000})
    meter = EnergyMeter(tmp_path)
    assert meter.source == "powercap, 2 packages"
    write(tmp_path, package(0, 500) | package(1, 300) | {f"{part}/energy_uj": 77_777})
    assert meter.joules() == pytest.approx(1_700e-6)  # 1,000 to the end and 500 after it; 200
    write(tmp_path, package(0, 700))
    assert meter.joules() == pytest.approx(1_900e-6)


def test_energy_that_cannot_be_read_is_absent_and_says_why(tmp_path: Path) -> None:
    write(tmp_path, package(0, 100))
    meter = EnergyMeter(tmp_path)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    assert meter.joules() is None and "cannot be read any more" in meter.reason
    hidden = EnergyMeter(tmp_path)
    assert hidden.source is None and "cannot be read by this user" in hidden.reason
    nothing = EnergyMeter(tmp_path / "empty")
    assert nothing.joules() is None and "no energy counter" in nothing.reason
    write(tmp_path / "two/sys/class/hwmon", {"hwmon0/power1_input": 1, "hwmon1/power1_input": 2})
    assert EnergyMeter(tmp_path / "two").reason.startswith("2 power sensors")


@pytest.mark.parametrize(
    ("files", "later", "source", "joules"),
    [
        (  # a board's main rail, 5 V * 2 A, 3 A two seconds later: (10 + 15) / 2 W * 2 s
            {"hwmon1/in1_label": "VDD_IN", "hwmon1/in1_input": 5000, "hwmon1/curr1_input": 2000},
            {"hwmon1/curr1_input": 3000},
            "hwmon in1_input",
            25.0,
        ),
        ({"hwmon0/power1_input": 10_000_000}, {"hwmon0/power1_input": 20_000_000}, "hwmon power1_input", 30.0),
    ],
)
def test_power_is_added_up_over_time(
    tmp_path: Path, files: dict[str, object], later: dict[str, object], source: str, joules: float
) -> None:
    hwmon, clock = tmp_path / "sys/class/hwmon", Clock()
    write(hwmon, files)
    meter = EnergyMeter(tmp_path, clock)
    assert meter.source == source
    write(hwmon, later)
    clock.now = 2.0
    assert meter.joules() == pytest.approx(joules)


def test_temperature_and_clock_are_the_processors(tmp_path: Path) -> None:
    assert read_sensors([0], tmp_path) == {"clock_mhz": None, "temperature_c": None}
    thermal, hwmon = "sys/class/thermal/thermal_zone", "sys/class/hwmon/hwmon"
    write(tmp_path, {f"{thermal}0/type": "gpu-thermal", f"{thermal}0/temp": 90_000})
    assert read_sensors([0], tmp_path)["temperature_c"] is None
    write(tmp_path, {f"{thermal}1/type": "CPU-therm", f"{thermal}1/temp": 51_500})
    assert read_sensors([0], tmp_path)["temperature_c"] == 51.5
    write(tmp_path, {f"{hwmon}0/name": "nvme", f"{hwmon}0/temp1_input": 80_000})
    write(tmp_path, {f"{hwmon}1/name": "k10temp", f"{hwmon}1/temp1_input": 45_000, f"{hwmon}1/temp3_input": 47_000})
    cpu = "sys/devices/system/cpu/cpu"
    write(tmp_path, {f"{cpu}{i}/cpufreq/scaling_cur_freq": khz for i, khz in enumerate((1_000_000, 2_000_000, 9))})
    assert read_sensors([0, 1], tmp_path) == {"clock_mhz": 1500.0, "temperature_c": 47.0}


def test_threads_get_cores_of_their_own_and_the_strong_ones(tmp_path: Path) -> None:
    for cpu in range(4):  # two cores of two threads each
        write(tmp_path, {f"cpu{cpu}/topology/physical_package_id": 0, f"cpu{cpu}/topology/core_id": cpu // 2})
    assert choose_cpus(2, range(4), tmp_path) == [0, 2]
    assert choose_cpus(3, range(4), tmp_path) == [0, 1, 2]
    assert choose_cpus(2, {2, 3}, tmp_path) == [2, 3]
    assert choose_cpus(9, {1, 2}, tmp_path) == [1, 2]
    board = tmp_path / "board"
    for cpu in range(6):  # four weak cores, then two strong ones
        write(board, {f"cpu{cpu}/topology/core_id": cpu, f"cpu{cpu}/cpu_capacity": 1024 if cpu > 3 else 400})
    assert choose_cpus(2, range(6), board) == [4, 5]
    assert choose_cpus(3, range(6), board) == [0, 4, 5]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process")
def test_a_child_runs_on_the_processors_it_is_given() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = "import json, os, time; time.sleep(0.2); print(json.dumps({'cpus': sorted(os.sched_getaffinity(0))}))"
    command = [sys.executable, "-S", "-c", code]
    assert run_child(Turn("pinned", command, "pinned", cpus=[cpu]))["cpus"] == [cpu]
    assert run_child(Turn("pinned", command, "pinned", cpus=[100_000]))["cpus"] == sorted(os.sched_getaffinity(0))


SPLIT = memory_split(os.getpid()) is not None


@pytest.mark.skipif(not SPLIT, reason="this system does not split up memory")
def test_memory_is_split_as_the_kernel_counts_it() -> None:
    code = "held = bytearray(b'x') * 30_000_000; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = memory_split(process.pid)
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        process.communicate(b"\n")
    kilobytes = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines[1:])}
    assert found is not None
    rss, anonymous = 1024 * kilobytes["Rss"], 1024 * kilobytes["Anonymous"]
    private = 1024 * sum(value for name, value in kilobytes.items() if name.startswith("Private_"))
    expected = {"rss_bytes": rss, "pss_bytes": 1024 * kilobytes["Pss"], "uss_bytes": private}
    expected |= {"anonymous_bytes": anonymous, "file_bytes": rss - anonymous}
    # The process stands still. The kernel counts pages in batches per thread, up to 64 pages off.
    assert found == pytest.approx(expected, abs=64 * 4096)
    assert memory_split(process.pid) is None  # it has ended


@pytest.mark.skipif(not SPLIT, reason="this system does not split up memory")
def test_the_split_is_that_of_the_peak() -> None:
    code = "import time; {}time.sleep(0.3); held = None; time.sleep(0.1); print('{{}}')"
    turns = [
        Turn("memory", [sys.executable, "-S", "-c", code.format(held)], "memory", watch_memory=True)
        for held in ("", "held = bytearray(b'x') * 80_000_000; ")
    ]
    small, large = (run_child(turn)["split"] for turn in turns)
    assert large["samples"] >= 2 and large["rss_bytes"] == large["anonymous_bytes"] + large["file_bytes"]
    # 80 MB of its own memory, give or take what the interpreter keeps or frees meanwhile
    assert 75e6 < large["anonymous_bytes"] - small["anonymous_bytes"] < 90e6


def test_dropped_files_are_out_of_the_cache(tmp_path: Path) -> None:
    path, empty = tmp_path / "weights", tmp_path / "empty"
    path.write_bytes(bytes(range(256)) * 4 * 4096)
    empty.touch()
    size = path.stat().st_size
    if (resident := resident_bytes([path, empty])) is None:
        pytest.skip("this system does not say what is cached")
    assert resident == size
    reason = drop_files([path, empty])
    left = resident_bytes([path])
    if reason is None:
        assert left == 0
    else:  # a file system in memory keeps all
        assert left == size and "stayed in memory" in reason
    if shutil.which("fincore"):
        shown = subprocess.run(["fincore", "-nbo", "res", str(path)], capture_output=True, text=True, check=True)
        assert int(shown.stdout) == left
