"""Judging limits: known, unknown and predicted figures, and contexts too short for a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.devices.limits import (
    TIMED_STEPS,
    Predicted,
    depths_that_fit,
    judge,
    judge_budget,
    limit_lengths,
    misses,
)
from benchmarks.devices.load import load_device
from benchmarks.labels import LIMITS
from benchmarks.measure import bench
from benchmarks.predict.latency import predict_figures
from benchmarks.predict.model_size import ModelFormat
from sportsllm.models.presets import PRESETS
from tests.support.devices import reference_machine

HOST = load_device("host")


def _by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {limit["name"]: limit for limit in result["limits"]}


def test_judge() -> None:
    limits = HOST.limits
    exactly = {name: float(getattr(limits, name)) for name in LIMITS}
    passed = judge(HOST, exactly)
    assert passed["passed"] and not misses(exactly, HOST)
    assert {limit["source"] for limit in passed["limits"]} == {"measured"}
    missed = judge(HOST, {**exactly, "ttft_ms": limits.ttft_ms + 0.1})
    assert not missed["passed"]
    assert [limit["name"] for limit in missed["limits"] if limit["passed"] is False] == ["ttft_ms"]
    broken = {**exactly, "ttft_ms": float("nan")}
    assert not judge(HOST, broken)["passed"] and set(misses(broken, HOST)) == {"ttft_ms"}  # NaN keeps no limit


def test_judge_without_figures_and_with_predictions() -> None:
    predicted = Predicted({"ttft_ms": 300.0, "file_mb": 500.0}, {"ttft_ms": 1.5})
    result = judge(HOST, {"file_mb": 50.0, "ttft_ms": None}, predicted)
    by_name = _by_name(result)
    assert (by_name["file_mb"]["value"], by_name["file_mb"]["source"]) == (50.0, "measured")
    assert (by_name["ttft_ms"]["passed"], by_name["ttft_ms"]["source"]) == (False, "predicted")
    assert (by_name["ttft_ms"]["low"], by_name["ttft_ms"]["high"]) == (200.0, 450.0)  # a factor of 1.5 either way
    assert (by_name["tpot_p50_ms"]["passed"], by_name["tpot_p50_ms"]["source"]) == (None, None)
    assert set(result) == {"device", "limits", "passed"} and result["device"] == "host" and not result["passed"]
    assert result["limits"][0] == {
        "name": "file_mb",
        "limit": 100.0,
        "value": 50.0,
        "unit": "MB",
        "passed": True,
        "source": "measured",
        "low": None,
        "high": None,
    }
    with pytest.raises(ValueError, match="speed"):
        judge(HOST, {"speed": 1.0})


def test_misses_says_by_how_much() -> None:
    assert misses({"file_mb": 150.0, "ttft_ms": 250.0, "tpot_p50_ms": None}, HOST) == {"file_mb": 1.5}


@pytest.mark.parametrize("context", [100, 148, 149, 300, 511, 512, 660, 1_024, 2_048])
def test_a_context_too_short_for_a_limit_is_unknown_to_all(context: int) -> None:
    """`plan` and `fit` predict what `bench` would measure: the same tokens, and nothing where it has no figure."""
    config = PRESETS["tiny-1m"].with_changes(max_position_embeddings=context)
    depths, prompts = depths_that_fit(context), bench.prompts_that_fit(context)
    measured = {
        "file_bytes": 1,
        "peak_rss_bytes": 1,
        "ttft_ms": {str(prompt): 1.0 for prompt in prompts},
        "tpot_ms": {str(depth): {"p50": 1.0, "p95": 1.0} for depth in depths},
        "quality_loss_percent": None,
    }
    budget = judge_budget(HOST, measured, config, Path(), on_device=True)
    predicted = predict_figures(config, reference_machine(), ModelFormat("int4")).figures
    for name in ("ttft_ms", "tpot_p50_ms", "tpot_p95_ms"):
        value = _by_name(budget)[name]["value"]
        assert (value is None) == (predicted[name] is None), name
        assert (_by_name(budget)[name]["passed"] is None) == (value is None)
    assert (predicted["ttft_ms"] is None) == (context < 512)
    assert (predicted["tpot_p50_ms"] is None) == (context <= TIMED_STEPS)
    assert budget["tpot_depth_tokens"] == (limit_lengths(HOST.limits, context).tpot_depth or 0)
    assert not budget["complete"]  # quality is unknown


def test_depths_fit_the_context() -> None:
    """After the deepest one there is room for every timed step: none at the context's own end."""
    assert depths_that_fit(1_024, (32, 512, 1_024)) == [32, 512, 876]
    assert depths_that_fit(2_048, (32, 512, 1_024)) == [32, 512, 1_024, 1_900]
    assert depths_that_fit(100) == []
    assert bench.WARM_UP_STEPS + bench.STEPS == TIMED_STEPS
