"""The machine that measures: its processors and which of them to use, and its rates."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.devices.load import instruction_set, processor_name
from benchmarks.devices.schema import Hardware, Kind, Quantity, SourcedText
from benchmarks.measure.probes import measure_bandwidth, read_integer
from sportsllm.process_memory import available_bytes, cpu_limit

WORKING_SET_BYTES = 256_000_000  # beyond most caches
MATRIX = 1_024
DOT_PRODUCT = ("VNNI", "AMX-INT8", "dot product", "I8MM")
"""Instructions that multiply four 8-bit numbers where others multiply one float32."""
CPU_FOLDER = Path("/sys/devices/system/cpu")


def default_threads() -> int:
    """Physical cores that this process may use, within a container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed, cpu_limit() or allowed))


def choose_cpus(threads: int, allowed: Collection[int] | None = None, folder: Path = CPU_FOLDER) -> list[int] | None:
    """Ascending numbers of `threads` logical processors, one a core while cores last, the strongest first.

    Two threads on one core share its arithmetic, and the scheduler moves threads between strong and weak cores.
    `allowed` are those that this process may use; None asks the system. Returns None if the system pins no process.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        allowed = os.sched_getaffinity(0)
    siblings: dict[tuple[int, int], int] = {}  # logical processors seen so far of each core
    ranked = []
    for cpu in sorted(allowed):
        described = folder / f"cpu{cpu}"
        core_id = read_integer(described / "topology" / "core_id")
        package = read_integer(described / "topology" / "physical_package_id") or 0
        core = (package, cpu if core_id is None else core_id)
        siblings[core] = siblings.get(core, -1) + 1
        strength = read_integer(described / "cpu_capacity") or read_integer(described / "cpufreq/cpuinfo_max_freq") or 0
        ranked.append((siblings[core], -strength, cpu))
    return sorted(cpu for _, _, cpu in sorted(ranked)[:threads])


def machine() -> dict[str, Any]:
    """This machine: processor, cores, memory in bytes, system, clock in MHz if readable, and the time now."""
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "processor": processor_name(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "clock_mhz": round(frequency.current) if frequency else None,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@lru_cache(maxsize=4)
def this_machine(threads: int | None = None) -> Hardware:
    """Free memory, bandwidth and float32 rate by numpy in a second; INT8 follows from the instruction set."""
    threads, today, free = threads or default_threads(), datetime.now(UTC).date(), available_bytes()
    working_set = min(WORKING_SET_BYTES, free // 4)
    bandwidth = measure_bandwidth(threads, working_set)["bandwidth_bytes_per_s"]
    real, instructions = _matmul_rate(), instruction_set()
    wide = 4 if any(name in instructions for name in DOT_PRODUCT) else 2

    def quantity(value: float, unit: str, source: str, kind: Kind = "measured") -> Quantity:
        return Quantity(value=float(f"{value:.4g}"), unit=unit, source=source, date=today, kind=kind)

    return Hardware(
        memory_total=quantity(psutil.virtual_memory().total / 1e6, "MB", "psutil"),
        memory_usable=quantity(free / 1e6, "MB", "free memory, within a container's limit"),
        cores=quantity(threads, "cores", "threads in use"),
        instruction_set=SourcedText(value=instructions, source="/proc/cpuinfo", date=today, kind="measured"),
        memory_bandwidth=quantity(bandwidth / 1e9, "GB/s", f"{working_set / 1e6:.0f} MB read by numpy"),
        fp32_matmul_rate=quantity(real / 1e9, "GFLOP/s", f"numpy's product of {MATRIX} x {MATRIX} matrices"),
        int8_matmul_rate=quantity(wide * real / 1e9, "GOP/s", f"{wide} times the float32 rate", "estimated"),
    )


def _matmul_rate() -> float:
    """Operations a second of float32 products in numpy, all cores; the best of 20."""
    matrix, best = np.ones((MATRIX, MATRIX), np.float32), float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - begin)
    return 2 * MATRIX**3 / best
