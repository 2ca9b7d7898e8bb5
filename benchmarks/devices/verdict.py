"""Judge a model by a device's limits: for `bench`, `plan` and `fit` alike.

A verdict has three states. A limit is kept (`pass`) or missed (`fail`) only if the whole interval of its figure is on
one side of it: the confidence interval of a measurement, the band of a prediction. Otherwise, and if there is no
figure, it is `uncertain`: an unknown figure never passes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from benchmarks.devices.load import is_this_machine, processor_name
from benchmarks.devices.schema import Device, Limits
from benchmarks.labels import LIMITS
from sportsllm.console import log
from sportsllm.errors import UsageError

TIMED_STEPS = 148
"""Tokens decoded after a depth to time it, 20 of them to warm up: the deepest depth leaves room for them."""
QUALITIES = {
    "quality_loss_percent": "quality_interval_percent",
    "accuracy_loss_points": "accuracy_interval_points",
    "kl_nats": "kl_interval_nats",
    "top1_changed_percent": "top1_changed_interval_percent",
}
"""Limits of quality, and where a bench result has the intervals of their figures."""
DISTANCES = {"kl_nats", "top1_changed_percent"}  # from the teacher, whose tokens the model must have
MACHINE_INDEPENDENT = ("file_mb", *QUALITIES)  # figures of the files themselves

Figures = Mapping[str, float | None]


def known(figures: Figures) -> dict[str, float]:
    """The figures that are not None."""
    return {name: value for name, value in figures.items() if value is not None}


class Lengths(NamedTuple):
    """Tokens at which a model is held to the limits; None if its context is too short."""

    ttft_prompt: int | None
    tpot_depth: int | None
    memory_context: int


def limit_lengths(limits: Limits, context: int) -> Lengths:
    """Where the figures for the limits are taken, for a model with a context of `context` tokens.

    The time per token is that of the deepest step there is room for, at most the limit's depth; memory is that of a
    full context, at most the limit's. A shorter prompt than the limit's says nothing about it.
    """
    deepest = context - TIMED_STEPS
    return Lengths(
        ttft_prompt=limits.ttft_prompt_tokens if limits.ttft_prompt_tokens <= context else None,
        tpot_depth=min(limits.tpot_depth_tokens, deepest) if deepest >= 1 else None,
        memory_context=min(limits.memory_context_tokens, context),
    )


def depths_that_fit(context: int, depths: Iterable[int] = (32, 512)) -> list[int]:
    """The depths, in tokens, that leave room for timed steps, and the deepest of all; none in a very short context."""
    deepest = context - TIMED_STEPS
    return sorted({depth for depth in (*depths, deepest) if 1 <= depth <= deepest})


@dataclass(frozen=True)
class Predicted:
    """Predictions by the limits' names.

    Attributes:
        figures: by limit; None if unknown.
        band: factors, either way, that hold 90% of such predictions; 1 if a figure is computed exactly.
        made_with: the coefficients' source and band, for the result.
    """

    figures: Figures
    band: Mapping[str, float] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)


Verdict = Literal["pass", "fail", "uncertain"]


@dataclass(frozen=True)
class LimitVerdict:
    """One limit of a budget and the figure that is held to it.

    `value`, `source` ("measured" or "predicted") and the interval from `low` to `high` are None if unknown; `reason`
    says why a known figure decides nothing.
    """

    name: str
    limit: float
    unit: str
    value: float | None
    source: str | None
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str | None = None


def worst(limits: Iterable[LimitVerdict]) -> Verdict:
    """That of a budget: `fail` if it fails one limit, `pass` if it passes all, else `uncertain`."""
    found = {limit.verdict for limit in limits}
    return "fail" if "fail" in found else "uncertain" if "uncertain" in found else "pass"


def misses(figures: Figures, device: Device) -> dict[str, float]:
    """The limits that values exceed, with value / limit, to rank models; intervals and bands do not count."""
    found = {}
    for name, limit in device.limits.given().items():
        value = figures.get(name)
        if value is not None and not value <= limit:  # NaN keeps no limit
            found[name] = value / limit
    return found


def judge(
    device: Device,
    measured: Figures,
    predicted: Predicted | None = None,
    intervals: Mapping[str, tuple[float, float] | None] | None = None,
) -> list[LimitVerdict]:
    """Hold figures to a device's limits.

    Args:
        measured: values by the limit's name (`file_mb`, `ttft_ms`, ...); absent or None is unknown.
        predicted: values that stand in if nothing was measured.
        intervals: confidence intervals of measured values; without one a value is exact, with None it decides nothing.
    """
    predicted, intervals = predicted or Predicted({}), intervals or {}
    assert measured.keys() | predicted.figures.keys() <= LIMITS.keys()
    found = []
    for name, limit in device.limits.given().items():
        source, ends, reason = None, None, None
        if (value := measured.get(name)) is not None:
            source, ends = "measured", intervals.get(name, (value, value))
            reason = "too little to give an interval" if ends is None else None
        elif (value := predicted.figures.get(name)) is not None:
            factor = predicted.band.get(name, 1.0)
            source, ends = "predicted", (value / factor, value * factor)
        low, high = ends or (None, None)
        verdict: Verdict = "uncertain"
        if low is not None and high is not None:  # NaN keeps no limit
            verdict = "pass" if high <= limit else "uncertain" if low <= limit else "fail"
        found.append(LimitVerdict(name, limit, LIMITS[name].unit, value, source, low, high, verdict, reason))
    return found


def check_on_device(device: Device, on_device: bool, processor: str = "cpu") -> None:
    """Refuse `--on-device` for a budget that no measurement on `processor` can decide; doubt it on another machine.

    Raises:
        UsageError: the budget is for another processor.
    """
    if on_device and device.processor != processor:
        provider = "--provider cuda (or another GPU's)" if device.processor == "gpu" else "--provider cpu"
        raise UsageError(
            f"--on-device: the model runs on the {processor.upper()}, and the budget of {device.name} is for its "
            f"{device.processor.upper()}; add {provider}, or leave the flag out to be judged by the prediction"
        )
    if on_device and device.recognise is not None and not is_this_machine(device, processor):
        here = f"{processor_name()}, {platform.machine()}"
        log(f"--on-device: this machine ({here}) does not look like {device.name}; its figures decide all the same")
