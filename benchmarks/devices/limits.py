"""Hold a measured model to a device's budget: by the measurement on the device itself, else by the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.devices.load import is_this_machine, judge
from benchmarks.devices.schema import Device
from benchmarks.measure.bandwidth_bound import budget_depth
from benchmarks.predict.latency import DEEPEST_LEAVES, predict_figures, reliability
from benchmarks.predict.model_size import packed_as, stored_form
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

# Facts about the files, the same wherever they are measured.
MACHINE_INDEPENDENT = ("file_mb", "quality_loss_percent")


def check_on_device(device: Device, on_device: bool) -> None:
    """Refuse `--on-device` for a budget that no measurement of a CPU can decide.

    Raises:
        UsageError: the budget is for another processor.
    """
    if on_device and device.processor != "cpu":
        raise UsageError(
            f"--on-device: bench measures the CPU and the budget of {device.name} is for its "
            f"{device.processor.upper()}; leave the flag out to be judged by the prediction"
        )


def judge_budget(
    device: Device, result: Mapping[str, Any], config: ModelConfig, directory: Path, on_device: bool
) -> dict[str, Any]:
    """The `budget` part of a bench result.

    Args:
        device: the budget.
        result: figures as `run_bench` collects them.
        config: the model's shape.
        directory: the model's files, for the form its weights are stored in.
        on_device: this machine is the device, whether it is recognised or not.

    Returns:
        `device`, `limits` (one record each; `value` and `passed` are None where nothing is known), `passed`
        (no known figure misses), `complete` (every limit had a figure), `tpot_depth_tokens`, which a short context
        makes less than the limits', and `decided_by`; where that is the prediction, `efficiency` says what it was made
        with and how far such predictions were off.
    """
    measured = measured_figures(device, result)
    here = on_device or is_this_machine(device)
    if here:
        outcome = judge(device.limits, measured)
    else:
        facts = {name: measured[name] for name in MACHINE_INDEPENDENT}
        outcome = judge(device.limits, facts, predicted_figures(device, config, directory))
    return {
        **({} if here else {"efficiency": reliability(device)}),
        **outcome.as_dict(device.name),
        "complete": outcome.complete,
        "tpot_depth_tokens": _depth(result),
        "decided_by": "measurement" if here else "prediction",
        "measured_here": measured,
    }


def measured_figures(device: Device, result: Mapping[str, Any]) -> dict[str, float | None]:
    """A bench result's figures by the budget's names; None where the model cannot give one.

    A context with no room for the depth of the limits gives the time per token at the deepest that was measured.
    """
    limits = device.limits
    per_token = result["tpot_ms"].get(str(_depth(result)), {})
    return {
        "file_mb": result["file_bytes"] / 1e6,
        "peak_memory_mb": result["peak_rss_bytes"] / 1e6,
        "ttft_ms": result["ttft_ms"].get(str(limits.ttft_prompt_tokens)),
        "tpot_p50_ms": per_token.get("p50"),
        "tpot_p95_ms": per_token.get("p95"),
        "quality_loss_percent": result["quality_loss_percent"],
    }


def _depth(result: Mapping[str, Any]) -> int:
    """Tokens that a result's time per token for the budget stands behind; 0 where it has none."""
    return budget_depth(int(depth) for depth in result["tpot_ms"])


def predicted_figures(device: Device, config: ModelConfig, directory: Path) -> dict[str, float | None]:
    """Predictions by the budget's names; None where the model's context is too short for what a limit asks.

    Of NF4 no more than the file's size: its operator unpacks every matrix anew, which the roofline does not describe.
    """
    figures: dict[str, float | None] = dict(predict_figures(config, device, stored_form(directory)))
    if packed_as(directory).get("method") == "nf4":
        return dict.fromkeys(figures) | {"file_mb": figures["file_mb"]}
    context, limits = config.max_position_embeddings, device.limits
    if context < limits.ttft_prompt_tokens:
        figures["ttft_ms"] = None
    if context <= DEEPEST_LEAVES:
        figures["tpot_p50_ms"] = figures["tpot_p95_ms"] = None
    return figures
