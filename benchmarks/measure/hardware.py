"""The figures of the machine that the program runs on, measured in about a second: bandwidth and arithmetic."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
import psutil

from benchmarks.devices.load import instruction_set
from benchmarks.devices.schema import Hardware, Kind, Quantity, SourcedText
from benchmarks.measure.bandwidth import measure_bandwidth
from benchmarks.measure.bench import default_threads

WORKING_SET_BYTES = 256_000_000  # beyond most caches
MATRIX = 1_024
DOT_PRODUCT = ("VNNI", "AMX-INT8", "dot product", "I8MM")
"""Instructions that multiply four 8-bit numbers where others multiply one float32."""


@lru_cache(maxsize=4)
def this_machine(threads: int | None = None) -> Hardware:
    """Memory by psutil, bandwidth and float32 rate by numpy; the INT8 rate follows from the instruction set.

    Args:
        threads: CPU threads that read; all physical cores if not given.
    """
    threads, today, memory = threads or default_threads(), datetime.now(UTC).date(), psutil.virtual_memory()
    working_set = min(WORKING_SET_BYTES, memory.available // 4)
    bandwidth = measure_bandwidth({"threads": threads, "working_set_bytes": working_set})["bandwidth_bytes_per_s"]
    real, instructions = _matmul_rate(), instruction_set()
    wide = 4 if any(name in instructions for name in DOT_PRODUCT) else 2

    def quantity(value: float, unit: str, source: str, kind: Kind = "measured") -> Quantity:
        return Quantity(value=float(f"{value:.4g}"), unit=unit, source=source, date=today, kind=kind)

    return Hardware(
        memory_total=quantity(memory.total / 1e6, "MB", "psutil"),
        memory_usable=quantity(memory.available / 1e6, "MB", "free memory by psutil"),
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
