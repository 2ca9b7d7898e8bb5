"""The gauntlet's table: rises, gains, and the median and worst of each."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.studies.gauntlet import rise, row, summary
from sportsllm.inference.scoring import TextScore

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
    found = summary(
        {"a": {"half": 1.0, "damage_gone": 30.0}, "b": {"half": 3.0, "damage_gone": 10.0}, "c": {"half": 8.0}}
    )
    assert (found["median"]["half"], found["worst"]["half"]) == (3.0, 8.0)
    assert (found["median"]["damage_gone"], found["worst"]["damage_gone"]) == (20.0, 10.0)
    assert found["median"]["int8"] is None
