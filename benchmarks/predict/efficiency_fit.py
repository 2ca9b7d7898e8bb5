"""Fit an efficiency set to measured models: few parameters, by least squares of the logarithms of times and bytes.

    minimise  sum_i log(predicted_i / measured_i)**2  +  RIDGE * sum_p log(parameter_p / start_p)**2

so that an error of 10% counts the same wherever it is, and what the measurements do not tell stays where probes put
it. Levenberg and Marquardt's method (SIAM J. Appl. Math. 11(2), 1963) with differences for derivatives; shares are kept
at or below what the device file allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.devices.schema import Device
from benchmarks.predict.coefficients import MOST_OF_A_RATE, Efficiency
from benchmarks.predict.latency import Stored, efficiency_of, peak_memory_bytes, tpot_ms, ttft_ms
from sportsllm.models.config import ModelConfig

RIDGE = 0.003  # errors of 5% beside parameters that are known within a factor of 2 or 3: (0.05 / 0.9)^2
STEP = 1e-3
ITERATIONS = 40
SLOWER_SCORES = 0.1  # the second start's rate of scores, beside the first one's
LEAST_START = {"_us": 10.0, "_kb": 300.0}  # by unit: the logarithm of nothing leads nowhere
Vector = npt.NDArray[np.float64]

# What is fitted where the start has it; of the tables entries above 0 that a measurement could tell.
_NUMBERS = (
    "working_set_scale", "between_share", "growing_share", "pass_overhead_us", "layer_overhead_us",
    "layer_touched_kb", "standard_overhead_us", "runtime_mb",
)  # fmt: skip
_TABLES = (
    "bandwidth_share", "cache_share", "attention_share", "attention_step_share", "prefill_share", "decode_share",
    "weight_copies", "product_overhead_us",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One figure of one model: `kind` is decode (ms at depth `tokens`), ttft (ms for so many) or memory (bytes).

    `value` is the `quiet_quarter` of several rounds, the median of which lies `rounds_above_percent` above it.
    """

    shape: str
    form: str
    config: ModelConfig
    stored: Stored
    kind: str
    tokens: int
    value: float
    rounds_above_percent: float = 0.0

    def predicted(self, device: Device) -> float:
        """The same by `benchmarks.predict.latency`."""
        figures: dict[str, Callable[[ModelConfig, Device, Stored, int], float]]
        figures = {"decode": tpot_ms, "ttft": ttft_ms, "memory": peak_memory_bytes}
        return figures[self.kind](self.config, device, self.stored, self.tokens)

    def error_percent(self, device: Device) -> float:
        """How far the prediction is off, above 0 where it is too high."""
        return 100 * (self.predicted(device) / self.value - 1)


def with_efficiency(device: Device, efficiency: Efficiency) -> Device:
    """The device with another efficiency set."""
    plain = device.hardware.model_copy(update={"bandwidth_share": None, "layer_overhead": None})
    return device.model_copy(update={"hardware": plain, "efficiency": efficiency})


def fit_efficiency(device: Device, measured: Sequence[Measured], ridge: float = RIDGE) -> Efficiency:
    """The set that describes the measurements best, starting from the device's.

    Args:
        device: whose peaks and bandwidths count.
        measured: what is fitted; not empty.
        ridge: what a parameter's departure from its start costs.

    Raises:
        ValueError: nothing to fit, or a fitted figure that cannot be (pydantic's ValidationError is one).
    """
    if not measured:
        raise ValueError("fitting needs at least one measurement")
    start = efficiency_of(device)
    names, first, highest = _parameters(start)

    def residuals(logs: Vector) -> Vector:
        changed = with_efficiency(device, _replaced(start, names, np.exp(logs)))
        off = [math.log(each.predicted(changed) / each.value) for each in measured]
        return np.array([*off, *(math.sqrt(ridge) * (logs - first))])

    # Attention takes the longer of reading and scores: where one is far below the other, slopes say nothing of it.
    slower_scores = [name == "attention_step_share" for name, _ in names]
    starts = [first, np.where(slower_scores, first + math.log(SLOWER_SCORES), first)]
    ends = [least_squares(residuals, each, highest) for each in starts]
    found = min(ends, key=lambda end: float(residuals(end) @ residuals(end)))
    fitted = _replaced(start, names, [float(f"{value:.4g}") for value in np.exp(found)])
    return Efficiency.model_validate(fitted.model_dump())


def least_squares(residuals: Callable[[Vector], Vector], start: Vector, highest: Vector) -> Vector:
    """Where the sum of squared residuals is least, each component at most its `highest`.

    Args:
        residuals: (P,) to (R,).
        start: (P,), within the bounds.
        highest: (P,), infinite where there is none.
    """
    point, damping = start.copy(), 1e-2
    current = residuals(point)
    for _ in range(ITERATIONS):
        columns = []
        for place in range(len(point)):
            moved = point.copy()
            moved[place] -= STEP  # downwards, which no bound forbids
            columns.append((current - residuals(moved)) / STEP)
        slopes = np.stack(columns, axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ current
        gained = 0.0
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), gradient)
            trial = np.minimum(point - step, highest)
            after = residuals(trial)
            gained = float(current @ current - after @ after)
            if gained > 0:
                point, current, damping = trial, after, damping / 3
                break
            damping *= 4
        if gained < 1e-7 * float(current @ current):
            break
    return point


def _parameters(start: Efficiency) -> tuple[list[tuple[str, str]], Vector, Vector]:
    """Names (field and, in a table, entry), logarithms to start from, and their bounds."""
    names = [(name, "") for name in _NUMBERS if getattr(start, name) is not None]
    names += [(table, entry) for table in _TABLES for entry, value in getattr(start, table) if value]
    values = [_value(start, *name) for name in names]
    logs = [
        math.log(max(value, LEAST_START.get(name[-3:], value) if name in _NUMBERS else value))
        for (name, _), value in zip(names, values, strict=True)
    ]
    highest = [_highest(name) for name, _ in names]
    return names, np.array(logs), np.array(highest)


def _highest(name: str) -> float:
    """Of a parameter's logarithm."""
    if name in ("bandwidth_share", "growing_share", "prefill_share", "decode_share"):
        return math.log(MOST_OF_A_RATE)
    return 0.0 if name.endswith("_share") else math.inf


def _value(efficiency: Efficiency, name: str, entry: str) -> float:
    found = getattr(efficiency, name)
    return float(getattr(found, entry) if entry else found)


def _replaced(start: Efficiency, names: Sequence[tuple[str, str]], values: Sequence[float] | Vector) -> Efficiency:
    changes: dict[str, Any] = {}
    for (name, entry), value in zip(names, values, strict=True):
        if entry:
            table = changes.get(name, getattr(start, name))
            changes[name] = table.model_copy(update={entry: float(value)})
        else:
            changes[name] = float(value)
    return start.model_copy(update=changes)
