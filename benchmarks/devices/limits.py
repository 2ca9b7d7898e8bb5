"""Judge a model by a device's limits: for `bench`, `plan` and `fit` alike.

A limit is kept, missed or unknown: unknown where there is no figure, or where the model's context is too short for
the tokens that the limit speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.devices.recognise import is_this_machine
from benchmarks.devices.schema import Device, Limits
from benchmarks.labels import LIMITS
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

TIMED_STEPS = 148
"""Tokens decoded after a depth to time it, 20 of them to warm up: the deepest depth leaves room for them."""
MACHINE_INDEPENDENT = ("file_mb", "quality_loss_percent")  # figures of the files themselves

Figures = Mapping[str, float | None]


class Lengths(NamedTuple):
    """Tokens at which a model is held to the limits; None where its context is too short."""

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
        figures: by limit; None where unknown.
        band: factors, either way, that hold 90% of such predictions; 1 where a figure is computed exactly.
        made_with: the coefficients' source and band, for the result.
    """

    figures: Figures
    band: Mapping[str, float] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)

    def known(self) -> dict[str, float]:
        """The figures that are not None."""
        return {name: value for name, value in self.figures.items() if value is not None}


def misses(figures: Figures, device: Device) -> dict[str, float]:
    """The limits that known figures miss, with value / limit. A value equal to its limit keeps it."""
    found = {}
    for name in LIMITS:
        value, limit = figures.get(name), getattr(device.limits, name)
        if value is not None and not value <= limit:  # NaN keeps no limit
            found[name] = value / limit
    return found


def judge(device: Device, measured: Figures, predicted: Predicted | None = None) -> dict[str, Any]:
    """Compare figures with a device's limits.

    Args:
        device: the budget.
        measured: values by the limit's name (`file_mb`, `ttft_ms`, ...); absent or None is unknown.
        predicted: values that stand in where nothing was measured.

    Returns:
        `device`; `limits`, for each `name`, `limit`, `value`, `unit`, `passed`, `source` (measured or predicted), and
        `low` and `high`, the ends of a prediction's band, all None where unknown; and `passed`: no known figure misses.

    Raises:
        ValueError: a figure that no limit has.
    """
    predicted, results = predicted or Predicted({}), list[dict[str, Any]]()
    if unknown := (set(measured) | set(predicted.figures)) - set(LIMITS):
        raise ValueError(f"no limit is called {sorted(unknown)}; the limits are {list(LIMITS)}")
    for name, words in LIMITS.items():
        value, source, low, high = measured.get(name), "measured", None, None
        if value is None and (value := predicted.figures.get(name)) is not None:
            factor = predicted.band.get(name, 1.0)
            source, low, high = "predicted", value / factor, value * factor
        known = value is not None
        record = {"name": name, "limit": float(getattr(device.limits, name)), "value": value, "unit": words.unit}
        record |= {"passed": not misses({name: value}, device) if known else None, "source": source if known else None}
        results.append(record | {"low": low, "high": high})
    kept = all(each["passed"] is not False for each in results)
    return {"device": device.name, "limits": results, "passed": kept}


def check_on_device(device: Device, on_device: bool, processor: str = "cpu") -> None:
    """Refuse `--on-device` for a budget that no measurement on `processor` can decide.

    Raises:
        UsageError: the budget is for another processor.
    """
    if on_device and device.processor != processor:
        provider = "--provider cuda (or another GPU's)" if device.processor == "gpu" else "--provider cpu"
        raise UsageError(
            f"--on-device: the model runs on the {processor.upper()}, and the budget of {device.name} is for its "
            f"{device.processor.upper()}; add {provider}, or leave the flag out to be judged by the prediction"
        )


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
        device: the budget.
        result: figures as `run_bench` collects them; `placement`, if there is one, says what processor they are of.
        config: the model's shape.
        directory: the model's files.
        on_device: this machine is the device, whether it is recognised or not.
        predict: makes the predictions for another device; without it only the files' own figures are known there.

    Returns:
        The keys of `judge`, `complete` (every limit had a figure), `tpot_depth_tokens`, `decided_by`, `measured_here`,
        and `efficiency`, what a prediction that decides was made with.
    """
    lengths = limit_lengths(device.limits, config.max_position_embeddings)
    measured, processor = measured_figures(result, lengths), (result.get("placement") or {}).get("processor", "cpu")
    here = on_device or is_this_machine(device, processor)
    predicted = None if predict is None or (here and processor != "gpu") else predict(device, config, directory)
    deciding = dict(measured) if here else {name: measured[name] for name in MACHINE_INDEPENDENT}
    if processor == "gpu":  # the card's memory was not measured, the process's was
        deciding.pop("peak_memory_mb", None)
    if here and predicted is not None:
        predicted = replace(predicted, figures={"peak_memory_mb": predicted.figures.get("peak_memory_mb")})
    outcome = judge(device, deciding, predicted)
    return {
        **({} if predicted is None else {"efficiency": dict(predicted.made_with)}),
        **outcome,
        "complete": all(limit["passed"] is not None for limit in outcome["limits"]),
        "tpot_depth_tokens": lengths.tpot_depth or 0,
        "decided_by": "measurement" if here else "prediction",
        "measured_here": measured,
    }


def measured_figures(result: Mapping[str, Any], lengths: Lengths) -> dict[str, float | None]:
    """A bench result's figures by the limits' names; None where the context is too short for one."""
    per_token = result["tpot_ms"].get(str(lengths.tpot_depth), {})
    return {
        "file_mb": result["file_bytes"] / 1e6,
        "peak_memory_mb": result["peak_rss_bytes"] / 1e6,
        "ttft_ms": result["ttft_ms"].get(str(lengths.ttft_prompt)),
        "tpot_p50_ms": per_token.get("p50"),
        "tpot_p95_ms": per_token.get("p95"),
        "quality_loss_percent": result["quality_loss_percent"],
    }
