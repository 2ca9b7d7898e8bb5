"""Judging limits: known, unknown and predicted figures, and contexts too short for a limit."""

from dataclasses import replace

import pytest

from benchmarks.devices.load import load_device, load_target
from benchmarks.devices.verdict import (
    TIMED_STEPS,
    LimitVerdict,
    Predicted,
    depths_that_fit,
    judge,
    limit_lengths,
    misses,
    worst,
)
from benchmarks.measure import bench
from benchmarks.measure.worker import window_around
from benchmarks.model_size import ModelFormat
from benchmarks.predict.latency import predict_figures
from benchmarks.reporting.measured import Bench, Percentiles, judge_bench
from benchmarks.spread import spread
from sportsllm.models.presets import PRESETS
from tests.support.devices import reference_machine

HOST = load_device("host")


def named(judged: list[LimitVerdict], verdict: str) -> list[str]:
    return [limit.name for limit in judged if limit.verdict == verdict]


def test_a_limit_is_kept_missed_or_open() -> None:
    limits = HOST.limits
    exactly = limits.given()
    kept = judge(HOST, exactly)
    assert worst(kept) == "pass" and not misses(exactly, HOST)
    assert {limit.source for limit in kept} == {"measured"}
    missed = judge(HOST, {**exactly, "ttft_ms": limits.ttft_ms + 0.1})
    assert worst(missed) == "fail" and named(missed, "fail") == ["ttft_ms"]
    assert misses({"file_mb": 150.0, "ttft_ms": 250.0, "tpot_p50_ms": None}, HOST) == {"file_mb": 1.5}  # by how much
    broken = {**exactly, "ttft_ms": float("nan")}
    assert worst(judge(HOST, broken)) == "fail" and set(misses(broken, HOST)) == {"ttft_ms"}  # NaN keeps no limit
    unknown = judge(HOST, {**exactly, "quality_loss_percent": None})
    assert worst(unknown) == "uncertain" and named(unknown, "uncertain") == ["quality_loss_percent"]


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((200.0, 249.0), "pass"), ((250.0, 260.0), "uncertain"), ((251.0, 300.0), "fail"), (None, "uncertain")],
)
def test_the_interval_of_a_measurement_decides(interval: tuple[float, float] | None, verdict: str) -> None:
    """The limit of the first token is 250 ms."""
    exactly = HOST.limits.given()
    value = 245.0 if interval is None else sum(interval) / 2
    result = judge(HOST, {**exactly, "ttft_ms": value}, intervals={"ttft_ms": interval})
    assert worst(result) == verdict and named(result, "pass")
    limit = next(each for each in result if each.name == "ttft_ms")
    assert (limit.reason is not None) == (interval is None)


@pytest.mark.parametrize(("value", "verdict"), [(160.0, "pass"), (300.0, "uncertain"), (380.0, "fail")])
def test_the_band_of_a_prediction_decides(value: float, verdict: str) -> None:
    predicted = Predicted({"ttft_ms": value, "file_mb": 500.0, "peak_memory_mb": 9.0}, {"ttft_ms": 1.5})
    result = judge(HOST, {"file_mb": 50.0, "ttft_ms": None}, predicted)
    by_name = {limit.name: limit for limit in result}
    assert (by_name["file_mb"].value, by_name["file_mb"].source) == (50.0, "measured")
    first = by_name["ttft_ms"]
    assert (first.verdict, first.source) == (verdict, "predicted")
    assert (first.low, first.high) == pytest.approx((value / 1.5, value * 1.5))  # a factor of 1.5 either way
    assert by_name["peak_memory_mb"].low == by_name["peak_memory_mb"].high == 9.0  # without a band
    assert (by_name["tpot_p50_ms"].verdict, by_name["tpot_p50_ms"].source) == ("uncertain", None)
    assert worst(result) == ("fail" if verdict == "fail" else "uncertain")
    with pytest.raises(AssertionError):
        judge(HOST, {"speed": 1.0})


@pytest.mark.parametrize("context", [100, 148, 149, 300, 511, 512, 660, 1_024, 2_048])
def test_a_context_too_short_for_a_limit_is_unknown_to_all(context: int) -> None:
    """`plan` and `fit` predict what `bench` would measure: the same tokens, and nothing where it has no figure."""
    config = PRESETS["tiny-1m"].with_changes(max_position_embeddings=context)
    depths, prompts = depths_that_fit(context), bench.prompts_that_fit(context)
    first, further = {str(prompt): 1.0 for prompt in prompts}, Percentiles(1.0, p95=1.0)
    measured = Bench("x", {str(depth): further for depth in depths}, first, file_bytes=1, peak_rss_bytes=1)
    budget = judge_bench(HOST, measured, config, on_device=True)
    by_name = {limit.name: limit for limit in budget.limits}
    predicted = predict_figures(config, reference_machine(), ModelFormat("int4")).figures
    for name in ("ttft_ms", "tpot_p50_ms", "tpot_p95_ms"):
        value = by_name[name].value
        assert (value is None) == (predicted[name] is None), name
        assert (by_name[name].verdict == "uncertain") == (value is None)
    assert (predicted["ttft_ms"] is None) == (context < 512)
    assert (predicted["tpot_p50_ms"] is None) == (context <= TIMED_STEPS)
    assert budget.tpot_depth_tokens == max(0, min(512, context - TIMED_STEPS))
    assert limit_lengths(HOST.limits, context).memory_context == min(1_024, context)
    assert budget.verdict == "uncertain"  # quality is unknown
    once = judge_bench(HOST, replace(measured, noise={"ttft_ms.512": spread([1.0])}), config, on_device=True)
    assert once.limits[list(by_name).index("ttft_ms")].verdict == "uncertain"  # one round decides nothing


@pytest.mark.parametrize("depth", [1, 2, 16, 32, 152, 512, 1_900])
def test_timed_steps_are_centred_on_their_depth(depth: int) -> None:
    prompt, positions = window_around(depth, bench.WARM_UP_STEPS, bench.STEPS)
    assert sum(positions) / len(positions) == pytest.approx(depth, abs=1.0 if depth < 4 else 0.5)
    assert 1 <= prompt <= positions.start and len(positions) == min(depth, bench.STEPS)


@pytest.mark.parametrize("name", ["accuracy_loss_points", "kl_nats", "top1_changed_percent"])
def test_a_limit_that_may_be_left_out_is_judged_where_it_is_set(name: str) -> None:
    """A file without it has none; the figure's interval decides."""
    assert name not in HOST.limits.given()
    exactly = {**HOST.limits.given(), name: 1.0}
    device = load_target("host", {name: 2.0})
    for ends, verdict in (((0.5, 1.5), "pass"), ((0.0, 2.5), "uncertain"), ((2.1, 3.0), "fail"), (None, "uncertain")):
        assert worst(judge(device, exactly, intervals={name: ends})) == verdict
    assert worst(judge(HOST, exactly)) == "pass" and worst(judge(device, HOST.limits.given())) == "uncertain"
