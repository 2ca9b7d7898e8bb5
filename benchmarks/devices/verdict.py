"""Judge a model by a device's limits: for `bench`, `plan` and `fit` alike.

A verdict has three states. A limit is kept (`pass`) or missed (`fail`) only if the whole interval of its figure is on
one side of it: the confidence interval of a measurement, the band of a prediction. Otherwise, and if there is no
figure, it is `uncertain`: unknown never passes.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.devices.load import is_this_machine, processor_name
from benchmarks.devices.schema import Device, Limits
from benchmarks.labels import LIMITS
from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

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
Interval = tuple[float, float]


@dataclass(frozen=True)
class LimitVerdict:
    """One limit of a budget and the figure that is held to it.

    `value`, `source` ("measured" or "predicted") and the interval from `low` to `high` are None if unknown; `reason`
    says why a figure that is there decides nothing.
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


@dataclass(frozen=True)
class BudgetVerdict:
    """A model held to all limits of a target: `fail` if it fails one, `pass` if it passes all, else `uncertain`."""

    target: str
    limits: tuple[LimitVerdict, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the limits' verdicts."""
        found = {limit.verdict for limit in self.limits}
        return "fail" if "fail" in found else "uncertain" if "uncertain" in found else "pass"

    def to_json(self) -> dict[str, Any]:
        """`target`, `verdict` and `limits`, each with the fields of `LimitVerdict`."""
        return {"target": self.target, "verdict": self.verdict, "limits": [asdict(limit) for limit in self.limits]}


def misses(figures: Figures, device: Device) -> dict[str, float]:
    """The limits that the values themselves miss, with value / limit, to rank models by. A value equal to its limit
    keeps it."""
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
    intervals: Mapping[str, Interval | None] | None = None,
) -> BudgetVerdict:
    """Compare figures with a device's limits.

    Args:
        measured: values by the limit's name (`file_mb`, `ttft_ms`, ...); absent or None is unknown.
        predicted: values that stand in if nothing was measured.
        intervals: confidence intervals of measured values; without one a value is exact, with None it decides nothing.

    Raises:
        ValueError: a figure that no limit has.
    """
    predicted, intervals = predicted or Predicted({}), intervals or {}
    if unknown := (set(measured) | set(predicted.figures)) - set(LIMITS):
        raise ValueError(f"no limit is called {sorted(unknown)}; the limits are {list(LIMITS)}")
    found = []
    for name, limit in device.limits.given().items():
        value = measured.get(name)
        source, ends, reason = "measured", None if value is None else (value, value), None
        if value is not None and name in intervals:
            ends = intervals[name]
            reason = "too little to give an interval" if ends is None else None
        elif value is None and (value := predicted.figures.get(name)) is not None:
            factor = predicted.band.get(name, 1.0)
            source, ends = "predicted", (value / factor, value * factor)
        low, high = ends or (None, None)
        verdict: Verdict = "uncertain"
        if value is not None and low is not None and high is not None:
            verdict = "pass" if high <= limit else "fail" if low > limit or math.isnan(value) else "uncertain"
        known = None if value is None else source
        found.append(LimitVerdict(name, limit, LIMITS[name].unit, value, known, low, high, verdict, reason))
    return BudgetVerdict(device.name, tuple(found))


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


def judge_budget(
    device: Device,
    result: Mapping[str, Any],
    config: ModelConfig,
    directory: Path,
    on_device: bool,
    predict: Callable[[Device, ModelConfig, Path], Predicted] | None = None,
) -> dict[str, Any]:
    """The `budget` part of a bench result: by the measurement on the device itself, else by the prediction.

    Args:
        device, on_device: the budget, and whether this machine is it, recognised or not.
        result: figures as `run_bench` collects them; `placement`, if there is one, says what processor they are of.
        predict: makes the predictions for another device; without it only the files' own figures are known there.

    Returns:
        `BudgetVerdict.to_json`, and `tpot_depth_tokens`, `decided_by` ("measurement" or "prediction"),
        `measured_here`, and `efficiency`, what a prediction that decides was made with.
    """
    lengths = limit_lengths(device.limits, config.max_position_embeddings)
    measured, intervals = _measured(result, lengths)
    processor = (result.get("placement") or {}).get("processor", "cpu")
    exported = not str(result.get("runtime", "")).startswith("torch")  # PyTorch's figures are no export's
    here = exported and (on_device or is_this_machine(device, processor))
    predicted = None if predict is None or (here and processor != "gpu") else predict(device, config, directory)
    deciding = dict(measured) if here else {name: measured[name] for name in MACHINE_INDEPENDENT}
    if processor == "gpu":  # the card's memory was not measured, the process's was
        deciding.pop("peak_memory_mb", None)
    if here and predicted is not None:
        predicted = replace(predicted, figures={"peak_memory_mb": predicted.figures.get("peak_memory_mb")})
    outcome = judge(device, deciding, predicted, intervals)
    return {
        **({} if predicted is None else {"efficiency": dict(predicted.made_with)}),
        **outcome.to_json(),
        "tpot_depth_tokens": lengths.tpot_depth or 0,
        "decided_by": "measurement" if here else "prediction",
        "of_export": exported,
        "measured_here": measured,
    }


def _measured(
    result: Mapping[str, Any], lengths: Lengths
) -> tuple[dict[str, float | None], dict[str, Interval | None]]:
    """A bench result's figures by the limits' names, None if the context is too short for one, and their confidence
    intervals, None if one round gives none.

    Memory is a maximum of few processes that agree within a percent: it counts as it is, as the file's size does.
    """
    depth, prompt = str(lengths.tpot_depth), str(lengths.ttft_prompt)
    per_token = result["tpot_ms"].get(depth, {})
    figures = {
        "file_mb": result["file_bytes"] / 1e6,
        "peak_memory_mb": result["peak_rss_bytes"] / 1e6,
        "ttft_ms": result["ttft_ms"].get(prompt),
        "tpot_p50_ms": per_token.get("p50"),
        "tpot_p95_ms": per_token.get("p95"),
        **{name: result.get(name) for name in QUALITIES},
    }
    keys = {
        "ttft_ms": f"ttft_ms.{prompt}",
        "tpot_p50_ms": f"tpot_ms.{depth}.p50",
        "tpot_p95_ms": f"tpot_ms.{depth}.p95",
    }
    noise = {name: result.get("noise", {}).get(key) for name, key in keys.items()}
    intervals: dict[str, Interval | None] = {
        name: None if one["rounds"] == 1 else (one["low"], one["high"])
        for name, one in noise.items()
        if one is not None
    }
    for name, interval in QUALITIES.items():
        if result.get(name) is not None:
            ends = result.get(interval)
            intervals[name] = None if ends is None else (ends[0], ends[1])
    return figures, intervals
