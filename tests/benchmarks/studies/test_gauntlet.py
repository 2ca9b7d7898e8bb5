"""The gauntlet's table: rises, gains, and the median and worst of each."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.studies.gauntlet import fit_rise, gains, plot, rise, summary
from sportsllm.inference.scoring import TextScore


def score(nats: float) -> TextScore:
    return TextScore(nats=nats, tokens=100, bytes=400)


SCORES = {
    "": score(200.0),
    "half": score(210.0),
    "narrowed": score(240.0),
    "narrowed-fresh": score(300.0),
    "int4": score(204.0),
    "int4-trained": score(203.0),
}


def test_pruned_models_rise_in_bits_and_rounded_ones_in_perplexity() -> None:
    assert rise(SCORES, "half") == pytest.approx(5.0)
    assert rise(SCORES, "int4") == pytest.approx(100 * (math.exp(0.04) - 1))
    assert rise(SCORES, "int8") is None


def test_gains_compare_the_start_and_the_training() -> None:
    found = gains(SCORES)
    assert found["cut_against_fresh"] == pytest.approx(20.0)
    assert found["damage_gone"] == pytest.approx(100 * (1 - math.expm1(0.03) / math.expm1(0.04)))
    assert gains({"": score(1.0)}) == {"cut_against_fresh": None, "damage_gone": None}


def test_what_fit_made_is_read_from_its_bench(tmp_path: Path) -> None:
    assert fit_rise(tmp_path, "a") is None
    for teacher, loss in (("a", 4.5), ("b", None)):
        (tmp_path / f"{teacher}-fit").mkdir()
        result = {"chosen": "l2", "bench": {"quality_loss_percent": loss}}
        (tmp_path / f"{teacher}-fit" / "fit.json").write_text(json.dumps(result))
    assert (fit_rise(tmp_path, "a"), fit_rise(tmp_path, "b")) == (4.5, None)


def test_worst_is_the_largest_rise_and_the_smallest_gain() -> None:
    rows = {"a": {"half": 1.0, "damage_gone": 30.0}, "b": {"half": 3.0, "damage_gone": 10.0}, "c": {"half": 8.0}}
    found = summary(rows)
    assert (found["median"]["half"], found["worst"]["half"]) == (3.0, 8.0)
    assert (found["median"]["damage_gone"], found["worst"]["damage_gone"]) == (20.0, 10.0)
    assert found["median"]["int8"] is None


def test_the_plot_has_a_trace_for_each_teacher() -> None:
    figure = plot({"a": {"half": 1.0, "int8": 0.01}, "b": {"half": 3.0, "int8": -0.1}}).figure
    assert figure is not None
    assert [trace["x"] for trace in figure["data"]] == [["half", "int8"], ["half"]]
