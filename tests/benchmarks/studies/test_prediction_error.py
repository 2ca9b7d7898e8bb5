"""The study of prediction errors: its shapes, and a run with real models."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.predict.calibrate import SHAPES, shape
from benchmarks.predict.latency import resolve
from benchmarks.studies import prediction_error
from benchmarks.studies.prediction_error import (
    MOST_PARAMETERS,
    SHAPE_COUNT,
    random_shapes,
    run_study,
)
from sportsllm.errors import ConflictError
from tests.support.devices import reference_machine

DEVICE = reference_machine()


def test_the_shapes_are_drawn_once_and_none_is_fitted() -> None:
    shapes = random_shapes()
    assert len(set(shapes)) == SHAPE_COUNT == 20 and shapes == random_shapes() and not set(shapes) & set(SHAPES)
    for config in shapes:
        assert config.parameters <= MOST_PARAMETERS and config.num_attention_heads % config.num_key_value_heads == 0
        assert config.head_dim in (32, 64) and config.head_dim * config.num_attention_heads == config.hidden_size
        assert config.hidden_size % 128 == config.intermediate_size % 128 == 0  # whole blocks


@pytest.fixture
def two_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_error, "random_shapes", lambda: [shape(256, 128, 128, 1, 2, 1)])
    monkeypatch.setattr(prediction_error, "this_machine", lambda threads: DEVICE.hardware)
    monkeypatch.setattr(prediction_error, "calibrate", lambda threads, rounds: (resolve(DEVICE), 0.0))
    monkeypatch.setattr(prediction_error, "default_threads", lambda: 1)


@pytest.mark.usefixtures("two_tiny_models")
def test_a_study_from_start_to_end(tmp_path: Path) -> None:
    """Real models, processes and files; whether the predictions are good depends on the machine and is not asked."""
    summary = run_study(tmp_path / "out", rounds=1)
    with (tmp_path / "out" / "prediction.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["format"] for row in rows} == {"fp32", "int8-rows"} and len(rows) == 2 * 3
    assert all(float(row[name]) > 0 for row in rows for name in ("measured", "calibrated", "shipped"))
    assert all(row["calibrated"] == row["shipped"] for row in rows)  # the same coefficients here
    kinds = {(name, kind) for name in ("calibrated", "shipped") for kind in ("tpot", "ttft", "memory")}
    assert {(row["coefficients"], row["figure"]) for row in summary} == kinds and len(summary) == 6
    assert all(row["factor_90"] >= 1 and "1 rounds" in row["machine"] for row in summary)
    assert (tmp_path / "out" / "summary.csv").is_file()
    with pytest.raises(ConflictError, match="exists already"):
        run_study(tmp_path / "out", rounds=1)
