"""Judging limits: known, unknown and predicted figures, and contexts too short for a limit."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.devices.load import load_device, load_target, write_device
from benchmarks.devices.verdict import (
    TIMED_STEPS,
    BudgetVerdict,
    Predicted,
    depths_that_fit,
    judge,
    judge_budget,
    limit_lengths,
    misses,
)
from benchmarks.measure import bench
from benchmarks.measure.worker import window_around
from benchmarks.model_size import ModelFormat
from benchmarks.predict.latency import predict_figures
from sportsllm.models.presets import PRESETS
from tests.support.devices import reference_machine

HOST = load_device("host")


def _by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {limit["name"]: limit for limit in result["limits"]}


def named(judged: BudgetVerdict, verdict: str) -> list[str]:
    return [limit.name for limit in judged.limits if limit.verdict == verdict]


def test_a_limit_is_kept_missed_or_open() -> None:
    limits = HOST.limits
    exactly = limits.given()
    kept = judge(HOST, exactly)
    assert kept.verdict == "pass" and not misses(exactly, HOST)
    assert {limit.source for limit in kept.limits} == {"measured"}
    missed = judge(HOST, {**exactly, "ttft_ms": limits.ttft_ms + 0.1})
    assert missed.verdict == "fail" and named(missed, "fail") == ["ttft_ms"]
    broken = {**exactly, "ttft_ms": float("nan")}
    assert judge(HOST, broken).verdict == "fail" and set(misses(broken, HOST)) == {"ttft_ms"}  # NaN keeps no limit
    unknown = judge(HOST, {**exactly, "quality_loss_percent": None})
    assert unknown.verdict == "uncertain" and named(unknown, "uncertain") == ["quality_loss_percent"]


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((200.0, 249.0), "pass"), ((240.0, 260.0), "uncertain"), ((251.0, 300.0), "fail"), (None, "uncertain")],
)
def test_the_interval_of_a_measurement_decides(interval: tuple[float, float] | None, verdict: str) -> None:
    """The limit of the first token is 250 ms."""
    exactly = HOST.limits.given()
    value = 245.0 if interval is None else sum(interval) / 2
    result = judge(HOST, {**exactly, "ttft_ms": value}, intervals={"ttft_ms": interval})
    assert result.verdict == verdict and named(result, "pass")
    limit = next(each for each in result.limits if each.name == "ttft_ms")
    assert (limit.reason is not None) == (interval is None)


@pytest.mark.parametrize(("value", "verdict"), [(160.0, "pass"), (300.0, "uncertain"), (380.0, "fail")])
def test_the_band_of_a_prediction_decides(value: float, verdict: str) -> None:
    predicted = Predicted({"ttft_ms": value, "file_mb": 500.0}, {"ttft_ms": 1.5})
    result = judge(HOST, {"file_mb": 50.0, "ttft_ms": None}, predicted)
    by_name = _by_name(result.to_json())
    assert (by_name["file_mb"]["value"], by_name["file_mb"]["source"]) == (50.0, "measured")
    assert (by_name["ttft_ms"]["verdict"], by_name["ttft_ms"]["source"]) == (verdict, "predicted")
    ends = by_name["ttft_ms"]["low"], by_name["ttft_ms"]["high"]
    assert ends == pytest.approx((value / 1.5, value * 1.5))  # a factor of 1.5 either way
    assert (by_name["tpot_p50_ms"]["verdict"], by_name["tpot_p50_ms"]["source"]) == ("uncertain", None)
    assert result.target == "host" and result.verdict == ("fail" if verdict == "fail" else "uncertain")
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
        assert (_by_name(budget)[name]["verdict"] == "uncertain") == (value is None)
    assert (predicted["ttft_ms"] is None) == (context < 512)
    assert (predicted["tpot_p50_ms"] is None) == (context <= TIMED_STEPS)
    assert budget["tpot_depth_tokens"] == (limit_lengths(HOST.limits, context).tpot_depth or 0)
    assert budget["verdict"] == "uncertain"  # quality is unknown


@pytest.mark.parametrize("depth", [1, 2, 16, 32, 152, 512, 1_900])
def test_timed_steps_are_centred_on_their_depth(depth: int) -> None:
    window = window_around(depth, bench.WARM_UP_STEPS, bench.STEPS)
    first = window.prompt + window.warm_up
    positions = range(first, first + window.steps)
    assert sum(positions) / len(positions) == pytest.approx(depth, abs=1.0 if depth < 4 else 0.5)
    assert window.prompt >= 1 and window.steps == min(depth, bench.STEPS)


@pytest.mark.parametrize("name", ["accuracy_loss_points", "kl_nats", "top1_changed_percent"])
def test_a_limit_that_may_be_left_out_is_judged_where_it_is_set(name: str, tmp_path: Path) -> None:
    """A file without it has none; the figure's interval decides."""
    assert name not in HOST.limits.given()
    assert load_target("host", {"ttft_ms": 300.0}).limits.given()["ttft_ms"] == 300.0
    exactly = {**HOST.limits.given(), name: 1.0}
    device = load_target("host", {name: 2.0})
    write_device(device, tmp_path / "own.toml", "a test")
    assert load_device(str(tmp_path / "own.toml")) == device
    for ends, verdict in (((0.5, 1.5), "pass"), ((0.0, 2.5), "uncertain"), ((2.1, 3.0), "fail"), (None, "uncertain")):
        assert judge(device, exactly, intervals={name: ends}).verdict == verdict
    assert judge(HOST, exactly).verdict == "pass" and judge(device, HOST.limits.given()).verdict == "uncertain"
