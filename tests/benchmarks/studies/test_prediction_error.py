"""The study of prediction errors: its shapes, its arithmetic, and a run with real models."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.predict import calibrate
from benchmarks.predict.calibrate import SHAPES, Figure, shape
from benchmarks.predict.latency import costs, resolve, total
from benchmarks.studies import prediction_error
from benchmarks.studies.prediction_error import (
    ALL_FORMATS,
    MOST_PARAMETERS,
    SHAPE_COUNT,
    compare,
    random_shapes,
    run_study,
    summarise,
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


def test_the_factor_that_holds_nine_tenths() -> None:
    """Ten figures that are 1.1 to 2.0 times what is predicted, against a set that is exact and one that halves it."""
    config, stored = SHAPES[0], ALL_FORMATS[0]
    exact = resolve(DEVICE)
    one = total(Figure("tpot", config, stored, 100, 1.0).terms(), costs(exact))
    figures = [Figure("tpot", config, stored, 100, one * (1 + step / 10)) for step in range(1, 11)]
    figures += [Figure(kind, config, stored, 100, 1.0) for kind in ("ttft", "memory")]
    rates = {name: getattr(exact, name) * (0.5 if name.endswith("_per_s") else 2.0) for name in costs(exact)}
    twice = exact.model_copy(update=rates)
    rows = compare(figures, {"exact": exact, "twice": twice})
    assert rows[0]["measured"] / rows[0]["exact"] == pytest.approx(1.1, rel=1e-4)  # five digits
    found = {(row["figure"], row["coefficients"]): row for row in summarise(rows, ["exact", "twice"])}
    assert found["tpot", "exact"]["figures"] == 10
    assert found["tpot", "exact"]["factor_90"] == pytest.approx(1.9 * (2.0 / 1.9) ** 0.1, abs=2e-3)
    # Twice as long as predicted: 2 / 1.1 is the farthest, 2 / 2 the nearest.
    assert found["tpot", "twice"]["factor_90"] == pytest.approx(2 / 1.2 * (1.2 / 1.1) ** 0.1, abs=2e-3)


@pytest.fixture
def two_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = shape(256, 128, 128, 1, 2, 1).with_changes(max_position_embeddings=128)
    monkeypatch.setattr(prediction_error, "random_shapes", lambda: [tiny])
    monkeypatch.setattr(prediction_error, "this_machine", lambda threads: DEVICE.hardware)
    monkeypatch.setattr(prediction_error, "calibrate", lambda threads, rounds: (resolve(DEVICE), 0.0))
    monkeypatch.setattr(prediction_error, "default_threads", lambda: 1)
    monkeypatch.setattr(calibrate, "PROMPTS", (32,))
    monkeypatch.setattr(calibrate, "DEPTHS", (16,))
    short = {"prompts": (32,), "depths": (16,), "context_tokens": 100, "seconds_per_figure": 0.0}
    monkeypatch.setattr(calibrate, "SHORT_BENCH", {**calibrate.SHORT_BENCH, **short})


@pytest.mark.usefixtures("two_tiny_models")
def test_a_study_from_start_to_end(tmp_path: Path) -> None:
    """Real models, processes and files; whether the predictions are good depends on the machine and is not asked."""
    summary = run_study(tmp_path / "out", rounds=1)
    with (tmp_path / "out" / "prediction.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["format"] for row in rows} == {"fp32", "int8-rows"} and len(rows) == 2 * 3
    assert all(float(row[name]) > 0 for row in rows for name in ("measured", "calibrated", "shipped"))
    assert all(row["calibrated"] == row["shipped"] for row in rows)  # the same coefficients here
    assert [(row["figure"], row["coefficients"]) for row in summary][:2] == [
        ("tpot", "calibrated"),
        ("tpot", "shipped"),
    ]
    with (tmp_path / "out" / "summary.csv").open(encoding="utf-8") as stream:
        assert "1 rounds" in next(csv.DictReader(stream))["machine"]
    with pytest.raises(ConflictError, match="exists already"):
        run_study(tmp_path / "out", rounds=1)
