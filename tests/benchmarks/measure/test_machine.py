"""What is read from the machine: sensors and processors, from made-up files."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.measure.machine import choose_cpus, default_threads, this_machine
from benchmarks.measure.probes import read_sensors
from benchmarks.measure.process import Turn, run_child
from export.runtime.session import session_options


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")


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


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"memory.max": 100_000_000, "memory.stat": "anon 40000000"})
    monkeypatch.setattr("sportsllm.process_memory._CONTAINER_LIMITS", {str(tmp_path / "memory.max"): "anon"})
    assert this_machine.__wrapped__(1).memory_usable.value == 60


@pytest.mark.parametrize(
    ("quota", "period", "allowed", "threads"),
    [("3 1", "3 1", 64, 3), ("max 1", "max 1", 64, 64), (50, 100, 64, 1), (-1, 100, 64, 64), ("3 1", "3 1", 2, 2)],
)
def test_threads_are_no_more_than_a_container_runs(
    quota: object, period: object, allowed: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"quota": quota, "period": period})
    monkeypatch.setattr("sportsllm.process_memory._CPU_LIMITS", {tmp_path / "quota": tmp_path / "period"})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(allowed), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    assert default_threads() == threads and session_options(None).intra_op_num_threads == threads % allowed


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
