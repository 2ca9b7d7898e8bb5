"""The studies: prediction errors with real models, and the gauntlet's table of rises and gains."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.labels import read_csv
from benchmarks.predict.calibrate import SHAPES, shape
from benchmarks.predict.latency import resolve
from benchmarks.studies import prediction_error
from benchmarks.studies.gauntlet import rise, row, summary
from benchmarks.studies.prediction_error import MOST_PARAMETERS, SHAPE_COUNT, random_shapes, run_study
from sportsllm.errors import ConflictError
from sportsllm.inference.scoring import TextScore
from tests.support.devices import reference_machine

DEVICE = reference_machine()


def test_the_shapes_are_drawn_once_and_none_is_fitted() -> None:
    shapes = random_shapes()
    assert len(set(shapes)) == SHAPE_COUNT == 20 and shapes == random_shapes() and not set(shapes) & set(SHAPES)
    for config in shapes:
        assert config.parameters <= MOST_PARAMETERS and config.num_attention_heads % config.num_key_value_heads == 0
        assert config.head_dim in (32, 64) and config.head_dim * config.num_attention_heads == config.hidden_size
        assert config.hidden_size % 128 == config.intermediate_size % 128 == 0  # whole blocks


def test_a_study_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real models, processes and files; whether the predictions are good depends on the machine and is not asked."""
    monkeypatch.setattr(prediction_error, "random_shapes", lambda: [shape(256, 128, 128, 1, 2, 1)])
    monkeypatch.setattr(prediction_error, "this_machine", lambda threads: DEVICE.hardware)
    monkeypatch.setattr(prediction_error, "calibrate", lambda threads, rounds: (resolve(DEVICE), 0.0))
    monkeypatch.setattr(prediction_error, "default_threads", lambda: 1)
    summary = run_study(tmp_path / "out", rounds=1)
    rows = read_csv(tmp_path / "out" / "prediction.csv")
    assert {row["format"] for row in rows} == {"fp32", "int4-b32"} and len(rows) == 2 * 3
    assert all(float(row[name]) > 0 for row in rows for name in ("measured", "calibrated", "shipped"))
    assert all(row["calibrated"] == row["shipped"] for row in rows)  # the same coefficients here
    kinds = {(name, kind) for name in ("calibrated", "shipped") for kind in ("tpot", "ttft", "memory")}
    assert {(row["coefficients"], row["figure"]) for row in summary} == kinds and len(summary) == 6
    assert all(row["factor_90"] >= 1 and "1 rounds" in row["machine"] for row in summary)
    assert (tmp_path / "out" / "summary.csv").is_file()
    with pytest.raises(ConflictError, match="exists already"):
        run_study(tmp_path / "out", rounds=1)


SCORES = {
    kind: TextScore(nats=nats, tokens=100, bytes=400)
    for kind, nats in {
        "": 200.0, "half": 210.0, "narrowed": 240.0, "narrowed-fresh": 300.0, "int4": 204.0, "int4-trained": 203.0,
    }.items()
}  # fmt: skip


def test_pruned_models_rise_in_bits_and_rounded_ones_in_perplexity() -> None:
    assert rise(SCORES, "half") == pytest.approx(5.0)
    assert rise(SCORES, "int4") == pytest.approx(100 * (math.exp(0.04) - 1))
    assert rise(SCORES, "int8") is None


def test_gains_compare_the_start_and_the_training(tmp_path: Path) -> None:
    found = row(SCORES, tmp_path / "none")
    assert found["cut_against_fresh"] == pytest.approx(20.0)
    assert found["damage_gone"] == pytest.approx(100 * (1 - math.expm1(0.03) / math.expm1(0.04)))
    result = {"target": "host", "chosen": "l2", "candidates": [], "limits": {}}
    result["bench"] = {"directory": "x", "tpot_ms": {}, "quality_loss_percent": 4.5}
    (tmp_path / "fit.json").write_text(json.dumps(result))
    found = row({"": SCORES[""]}, tmp_path)
    assert (found["cut_against_fresh"], found["damage_gone"], found["fit"]) == (None, None, 4.5)


def test_worst_is_the_largest_rise_and_the_smallest_gain() -> None:
    rows = {"a": {"half": 1.0, "damage_gone": 30.0}, "b": {"half": 3.0, "damage_gone": 10.0}, "c": {"half": 8.0}}
    found = summary(rows)
    assert (found["median"]["half"], found["worst"]["half"]) == (3.0, 8.0)
    assert (found["median"]["damage_gone"], found["worst"]["damage_gone"]) == (20.0, 10.0)
    assert found["median"]["int8"] is None
