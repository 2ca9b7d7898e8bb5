"""How fast this machine reads memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

SAMPLES = 5
LEAST_SAMPLE_S = 0.02
Slice = np.ndarray[Any, Any]


def measure_bandwidth(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes per second at which this machine's cores read a working set of `working_set_bytes` again and again.

    Each thread reads its slice by numpy's `max` and with `dot` of the slice with itself, which load each number once;
    the faster counts. A working set of the model's size hits or misses the caches as the model's weights do.
    """
    threads = int(specification["threads"])
    count = max(1, int(specification["working_set_bytes"]) // 4 // threads)
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
    return {
        "working_set_bytes": 4 * count * threads,
        "rates_bytes_per_s": rates,
        "bandwidth_bytes_per_s": max(max(samples) for samples in rates.values()),
    }
