"""The fit against a machine whose efficiencies are known, and the whole check on two tiny models."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.commands import devices, plan
from benchmarks.devices.load import load_device
from benchmarks.devices.schema import FORMAT, Device
from benchmarks.devices.write import write_device
from benchmarks.predict.calibrate import Readings
from benchmarks.predict.coefficients import CPU, CacheShares, Efficiency, FormCopies, FormOverheads, FormShares
from benchmarks.predict.efficiency_fit import Measured, Vector, fit_efficiency, least_squares, with_efficiency
from benchmarks.predict.latency import efficiency_of, peak_memory_bytes, tpot_ms, ttft_ms
from benchmarks.studies import prediction_error as prediction_check
from benchmarks.studies import prediction_measure
from benchmarks.studies.prediction_error import check, disturbances, errors, run_check
from benchmarks.studies.prediction_measure import Model, _figures, combinations
from benchmarks.studies.prediction_models import (
    DRAWN,
    FITTED,
    FORMS,
    MOST_DRAWN_PARAMETERS,
    SCORED,
    Form,
    drawn,
)
from sportsllm.errors import ArtifactError, ConflictError, UsageError
from sportsllm.models.config import ModelConfig

HOST = load_device("host")
TRUE = Efficiency(
    source="made up",
    date=CPU.date,
    kind="estimated",
    bandwidth_share=FormShares(fp32=0.9, int8=0.8, int4=0.6, int8_rows=0.8),
    pass_overhead_us=60.0,
    layer_overhead_us=15.0,
    layer_touched_kb=1_000.0,
    product_overhead_us=FormOverheads(int8=0.5, int4=0.7, int8_rows=2.0),
    standard_overhead_us=90.0,
    between_share=0.2,
    growing_share=0.6,
    runtime_mb=80.0,
    cache_share=CacheShares(fp32=0.7, int8=0.5),
    attention_share=CacheShares(fp32=0.2, int8=0.1),
    attention_step_share=CacheShares(fp32=0.05, int8=0.05),
    prefill_share=FormShares(fp32=0.5, int8=0.2, int4=0.25, int8_rows=0.5),
    decode_share=FormShares(fp32=0.05, int8=0.05, int4=0.1, int8_rows=0.08),
    weight_copies=FormCopies(fp32=1.3, int8=2.0, int4=1.8, int8_rows=1.2),
)


START = CPU.model_copy(
    update={
        "product_overhead_us": FormOverheads(int8=1, int4=1, int8_rows=1),
        "standard_overhead_us": 5 * CPU.layer_overhead_us,
        "growing_share": CPU.between_share,
    }
)


def _measured(noise: float = 0.0) -> list[Measured]:
    """What the true machine would show of every model that the check measures."""
    truth, random = with_efficiency(HOST, TRUE), np.random.default_rng(0)
    found = []
    for shape, config, forms in combinations():
        for name, form in forms.items():
            stored = form.stored()
            values = [("memory", 1_024, float(peak_memory_bytes(config, truth, stored, 1_024)))]
            values += [("ttft", prompt, ttft_ms(config, truth, stored, prompt)) for prompt in (128, 512)]
            values += [("decode", depth, tpot_ms(config, truth, stored, depth)) for depth in (50, 530, 1_042)]
            for kind, tokens, value in values:
                seen = value * float(np.exp(noise * random.standard_normal()))
                found.append(Measured(shape, name, config, stored, kind, tokens, seen))
    return found


def test_least_squares_finds_a_known_minimum_and_stays_within_bounds() -> None:
    """Rosenbrock's valley, whose minimum is at (1, 1); below a bound of 0.5 it is at (0.5, 0.25)."""

    def residuals(x: Vector) -> Vector:
        return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    free = np.full(2, np.inf)
    assert least_squares(residuals, np.array([-1.2, 1.0]), free) == pytest.approx([1, 1], abs=1e-2)
    bounded = least_squares(residuals, np.array([-1.2, 0.4]), np.array([0.5, np.inf]))
    assert bounded == pytest.approx([0.5, 0.25], abs=2e-2)


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return check(with_efficiency(HOST, START), _measured(), "a test", "a made-up machine")


def test_the_fit_finds_the_machine_and_predicts_shapes_it_has_not_seen(checked: dict[str, Any]) -> None:
    found = checked["errors"]
    # Without noise only the ridge, which draws towards the start, keeps errors from being 0.
    assert checked["passed"] and max(kind["largest_percent"] for kind in found["fitted"].values()) < 10
    assert found["default"]["decode"]["largest_percent"] > 25  # the start was far off
    assert found["fitted"]["decode"]["figures"] == sum(3 * len(f) for s, _, f in combinations() if s in SCORED) >= 12
    fitted = checked["device"].efficiency
    # What measurements tell without anything beside it.
    assert fitted.weight_copies.fp32 == pytest.approx(1.3, rel=0.05)
    assert fitted.runtime_mb == pytest.approx(80, rel=0.05)
    assert fitted.prefill_share.int4 == pytest.approx(0.25, rel=0.15)
    assert fitted.product_overhead_us.int8_rows == pytest.approx(2.0, rel=0.15)
    assert fitted.product_overhead_us.fp32 == 0  # that of any operator, which the layer's overhead has
    assert fitted.growing_share == pytest.approx(0.6, rel=0.15) and fitted.between_share < 0.3
    assert fitted.error.combinations == found["fitted"]["decode"]["figures"]
    assert fitted.error.ttft_largest_percent == found["fitted"]["ttft"]["largest_percent"]


def test_noise_moves_the_error_about_as_much(checked: dict[str, Any]) -> None:
    noisy = _measured(noise=0.1)
    efficiency = fit_efficiency(with_efficiency(HOST, CPU), [each for each in noisy if each.shape in FITTED])
    scored = [each for each in noisy if each.shape in SCORED]
    found = errors(scored, with_efficiency(HOST, efficiency))
    for kind in found.values():  # a tenth either way has a median of 6.7%
        assert 3 < kind["median_percent"] < 13


def test_error_is_relative_to_the_measurement() -> None:
    (one, *_) = _measured()
    twice = Measured(one.shape, one.form, one.config, one.stored, one.kind, one.tokens, 2 * one.value)
    device = with_efficiency(HOST, TRUE)
    assert one.error_percent(device) == pytest.approx(0) and twice.error_percent(device) == pytest.approx(-50)
    assert errors([one, twice], device)["memory"] == {
        "figures": 2, "within": 1, "median_percent": 25.0, "largest_percent": 50.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="at least one"):
        fit_efficiency(device, [])


def test_shapes_that_are_scored_were_not_fitted() -> None:
    assert not set(FITTED) & set(SCORED)
    assert all(config not in FITTED.values() for config in SCORED.values())


def test_drawn_shapes_are_those_of_their_number_and_nobodys_choice() -> None:
    assert drawn(7) == drawn(7) and not set(drawn(7)) & set(drawn(8))
    usual = [*FITTED.values(), *SCORED.values()]
    for seed in range(20):
        shapes = drawn(seed)
        assert len(shapes) == DRAWN and all(name.startswith(f"drawn-{seed}-") for name in shapes)
        for config in shapes.values():
            assert config.parameters <= MOST_DRAWN_PARAMETERS and config not in usual
            assert config.num_attention_heads % config.num_key_value_heads == 0
            assert config.head_dim in (32, 64) and config.head_dim * config.num_attention_heads == config.hidden_size
    names = [name for name, *_ in combinations(drawn(7))]
    assert sorted(names) == sorted([*FITTED, *SCORED, *drawn(7)])


def test_the_error_is_printed_with_each_prediction(
    checked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_device(checked["device"], tmp_path / "mine.toml")
    device = load_device(str(tmp_path / "mine.toml"))
    assert device == checked["device"] and efficiency_of(device).error is not None
    result = plan(model="small", device=str(tmp_path / "mine.toml"))
    error = result["efficiency"]["error"]
    assert result["efficiency"]["own"] and error["machine"] == "a made-up machine"
    keys = {"precision", "depth", "ttft_ms", "tpot_ms", "peak_rss_bytes"}
    assert all(keys <= set(row) for row in result["predicted"])
    printed = " ".join(capsys.readouterr().out.split())
    for name, words in (("decode", "time per token"), ("ttft", "first token"), ("memory", "memory")):
        median, largest = error[f"{name}_median_percent"], error[f"{name}_largest_percent"]
        assert f"{words} {median:.0f}% (at most {largest:.0f}%)" in printed
    devices("show", str(tmp_path / "mine.toml"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "a made-up machine" in shown and "prefill share, int8 rows" in shown
    assert plan(model="small", device="rtx-3060")["efficiency"]["error"] is None
    assert "not measured" in capsys.readouterr().out


def test_a_wrong_error_is_refused(checked: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_device(checked["device"], path)
    text = path.read_text(encoding="utf-8").replace("ttft_median_percent = ", "ttft_median_percent = -1")
    path.write_text(text.replace("combinations = 60", "combinations = 0"), encoding="utf-8")
    with pytest.raises(ArtifactError) as caught:
        load_device(str(path))
    assert "efficiency.error.ttft_median_percent: " in str(caught.value)
    assert "efficiency.error.combinations: " in str(caught.value)


@pytest.fixture
def two_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the check's own: one that is fitted and one that is scored."""
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
    shapes = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    one = FITTED["5m"].with_changes(**tiny, **shapes)
    models = [
        ("5m", one, {"int4": Form(4, 32)}),
        ("other", one.with_changes(num_hidden_layers=2), {"fp32": FORMS["fp32"]}),
    ]
    monkeypatch.setattr(
        prediction_measure,
        "combinations",
        lambda more: iter([*models, *((name, one, {"fp32": FORMS["fp32"]}) for name in more)]),
    )
    monkeypatch.setattr(prediction_measure, "PROMPTS", (64,))
    monkeypatch.setattr(prediction_measure, "DEPTHS", (32,))
    quick = {**prediction_measure.QUICK, "prompts": (64,), "depths": (32,), "context_tokens": 128}
    monkeypatch.setattr(prediction_measure, "QUICK", quick)


@pytest.mark.usefixtures("two_tiny_models")
def test_the_whole_check(tmp_path: Path) -> None:
    """Real models, processes and files; whether the figures are good depends on the machine and is not asked."""
    own = with_efficiency(HOST, CPU).model_copy(update={"format": FORMAT})
    write_device(own, tmp_path / "own.toml")
    result = run_check(tmp_path / "out", tmp_path / "own.toml", threads=1, rounds=2)
    assert result == json.loads((tmp_path / "out" / "prediction.json").read_text(encoding="utf-8"))
    with (tmp_path / "out" / "prediction.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(result["rows"]) == 6 and {row["used_for"] for row in rows} == {"fitting", "scoring"}
    assert {row["figure"] for row in rows} == {"decode", "ttft", "memory"}
    assert all(float(row["measured"]) > 0 for row in rows)
    device = load_device(result["device"])
    assert device.limits == HOST.limits and device.efficiency is not None and device.efficiency.error is not None
    assert device.efficiency.error.combinations == 1
    prediction_check.print_check(result)
    with_drawn = run_check(tmp_path / "drawn", tmp_path / "own.toml", threads=1, rounds=1, draw=3)
    assert set(drawn(3)) <= set(with_drawn["shapes"]) and with_drawn["errors"]["drawn"]["decode"]["figures"] > DRAWN - 1
    with pytest.raises(ConflictError, match="exists already"):
        run_check(tmp_path / "out", tmp_path / "own.toml")
    with pytest.raises(UsageError, match="GPU"):
        run_check(tmp_path / "other", Path("rtx-3060"))


@pytest.mark.usefixtures("two_tiny_models")
def test_without_a_device_file_each_round_calibrates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def read_round(readings: Readings, threads: int) -> Iterator[str]:
        order.append(f"probes on {threads}")
        readings.add("read.384.2", float(len(order)))
        readings.other_cpu_cores = 0.7
        yield "read.384.2"

    def measure_one(model: Model, mode: str, threads: int) -> float:
        order.append(mode)
        model.medians.setdefault(("decode", 50), []).append(1.0)
        model.peak_rss_bytes = 8e7
        return 0.0

    def describe(readings: Readings, name: str, threads: int, decided: Device) -> tuple[Device, list[str]]:
        assert readings.rounds == {"read.384.2": [1.0, 4.0]} and decided.name == "host"
        return with_efficiency(HOST, CPU), []

    monkeypatch.setattr(prediction_measure, "read_round", read_round)
    monkeypatch.setattr(prediction_measure, "_measure_one", measure_one)
    monkeypatch.setattr(prediction_check, "describe", describe)
    result = run_check(tmp_path / "out", threads=3, rounds=2)
    assert order == 2 * ["probes on 3", "speed", "speed"] + 2 * ["memory"]
    assert result["other_cpu_cores"] == 0.7 and not result["clean"]
    assert result["disturbances"] == [
        "other programs used up to 0.7 cores",
        "2 of the 5 rounds that tell how far they differ",
    ]


def test_each_round_goes_through_all_models_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str, str]] = []

    def measure_one(model: Model, mode: str, threads: int) -> float:
        assert threads == 2
        order.append((mode, model.shape, model.form))
        model.medians[("decode", 50)] = [1.0]
        model.peak_rss_bytes = 8e7
        return 0.0

    def make_checkpoint(config: ModelConfig, directory: Path) -> Path:
        directory.mkdir()
        return directory

    monkeypatch.setattr(prediction_measure, "make_checkpoint", make_checkpoint)
    monkeypatch.setattr(prediction_measure, "make_export", lambda _source, form, _directory: form.stored())
    monkeypatch.setattr(prediction_measure, "_measure_one", measure_one)
    prediction_measure.measure(2, 3)
    every = [(shape, form) for shape, _, forms in combinations() for form in forms]
    rounds = [order[start : start + len(every)] for start in range(0, len(order), len(every))]
    assert [{mode for mode, *_ in each} for each in rounds] == [{"speed"}, {"speed"}, {"speed"}, {"memory"}]
    assert all(sorted(names for _, *names in each) == sorted(map(list, every)) for each in rounds)
    assert len({tuple(each) for each in rounds}) == 4


def test_rounds_that_differ_are_not_called_clean() -> None:
    (one, *_) = (each for each in _measured() if each.kind == "decode")
    near, far = replace(one, rounds_above_percent=2.0), replace(one, rounds_above_percent=11.0)
    memory = replace(one, kind="memory")
    assert disturbances([near, near, far, memory, memory, memory], 5, 0.0) == []
    (why,) = disturbances([near, far, far, memory, memory, memory], 5, 0.0)
    assert "11% or more above their quartile" in why


def test_the_quiet_quarter_of_the_rounds_counts(tmp_path: Path) -> None:
    model = Model("1m", "int4", FITTED["1m"], FORMS["int4"].stored(), tmp_path, {("decode", 50): [3.0, 2.0, 2.5]}, 7e7)
    memory, decode = _figures(model)
    assert (memory.kind, memory.value, memory.rounds_above_percent) == ("memory", 7e7, 0)
    assert (decode.kind, decode.tokens, decode.value) == ("decode", 50, 2.25)
    assert decode.rounds_above_percent == pytest.approx(100 / 9)
