"""Rounds, their interval, and what may be called clean; the sustained run's windows."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.measure.bench import round_checks
from benchmarks.measure.process import ChildFailure, Payloads, Turn, run_child, take_turns
from benchmarks.measure.summary import summarise, summarise_sustained
from benchmarks.measure.worker import decode_windows
from benchmarks.spread import accuracy_loss, agree, quality_loss, spread
from sportsllm.inference.scoring import LEAST_DOCUMENTS


def test_checks_are_few_and_end_at_the_most() -> None:
    assert round_checks(5, 11) == [5, 8, 11] and round_checks(1, 1) == [1]
    assert round_checks(None, None) == [5, 8] and round_checks(2, None) == [2, 5, 8]
    assert round_checks(12, None) == [12] and round_checks(None, 3) == [3]


def turn(name: str, log: Path) -> Turn:
    body = f"open({str(log)!r}, 'a').write({name!r}); print('{{}}')"
    return Turn(name, [sys.executable, "-S", "-c", body], f"turn {name}")


def test_turns_alternate_until_they_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure.process.QUIET_CORES", 99.0)
    log, asked = tmp_path / "log", list[int]()

    def converged(raw: Payloads) -> bool:
        asked.append(len(raw["A"]))
        return len(raw["A"]) >= 3

    raw = take_turns("test", [turn("A", log), turn("B", log)], [2, 3, 4], converged, 60)
    assert log.read_text() == "ABABAB" and asked == [2, 3]
    assert [len(raw[name]) for name in "AB"] == [3, 3]
    assert all(one["other_cpu_cores"] >= 0 for one in raw["A"])


def test_beside_busy_programs_no_rounds_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = list[float]()
    monkeypatch.setattr(
        "benchmarks.measure.process.wait_for_quiet", lambda longest_s, cpus=None: bool(waited.append(longest_s))
    )
    monkeypatch.setattr("benchmarks.measure.process.QUIET_CORES", -1.0)
    raw = take_turns("test", [turn("A", tmp_path / "log")], [2, 3, 4], lambda raw: False, 60)
    assert len(raw["A"]) == 2 and waited == [3.0]
    assert "other programs are busy; no further rounds" in capsys.readouterr().err


def test_a_turn_that_fails_is_left_out_and_does_not_stop_the_others(tmp_path: Path) -> None:
    log, seen, failures = tmp_path / "log", list[set[str]](), dict[str, ChildFailure]()
    once = f"import sys; sys.exit(9 if open({str(log)!r}).read().count('B') > 1 else 0)"
    command = [sys.executable, "-S", "-c", f"open({str(log)!r}, 'a').write('B'); print('{{}}'); {once}"]
    turns = [turn("A", log), Turn("B", command, "turn B")]

    def converged(raw: Payloads) -> bool:
        seen.append(set(raw))
        return all(len(rounds) >= 2 for rounds in raw.values())

    raw = take_turns("test", turns, [2, 5], converged, 60, failures.__setitem__)
    assert log.read_text() == "ABAB" and failures["B"].exit_code == 1
    assert seen == [{"A"}] and [len(raw[name]) for name in "AB"] == [2, 1]  # what B left holds nobody up
    with pytest.raises(ChildFailure, match="exit code 9"):
        take_turns("test", turns, [2], converged, 60)


def test_a_process_is_watched_and_its_surroundings_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seconds: list[float] = []
    code = (
        "import json, os, time; time.sleep(1.3); print(json.dumps({'seed': os.environ.get('PYTHONHASHSEED', 'none')}))"
    )
    child = run_child(Turn("", [sys.executable, "-c", code], "", {"PYTHONHASHSEED": None}), 60, seconds.append)
    assert child["seed"] == "none" and child["seconds"] > 1 and len(seconds) >= 1


def speed_round(step: float, others: float = 0.0) -> dict[str, Any]:
    return {
        "load_s": 0.2, "ttft_ms": {"128": [10.0], "512": [40.0, 50.0]}, "step_ms": {"32": [[step] * 4, [6 * step]]},
        "cpus": [0], "other_cpu_cores": others,
    }  # fmt: skip


def summary(steps: list[float], others: float | list[float] = 0.0) -> dict[str, Any]:
    memory = [{"peak_rss_bytes": size, "context_tokens": 8} for size in (1000, 900)]
    busy = others if isinstance(others, list) else [others] * len(steps)
    speed = [speed_round(step, cores) for step, cores in zip(steps, busy, strict=True)]
    raw = {"speed": speed, "memory": memory}
    return {**summarise(raw), "raw": raw}


def test_only_enough_quiet_rounds_that_agree_are_clean_and_what_decided_is_named() -> None:
    """One disturbed round is no reason."""
    calm, disturbed_once = [2.0, 2.01, 2.02, 2.0, 1.99], [0.0, 0.0, 0.0, 0.0, 1.5]
    clean = summary(calm, disturbed_once)
    assert clean["clean"] is True and clean["tpot_ms"]["32"]["p50"] == 2.0 and clean["other_cpu_cores"] == 1.5
    assert clean["decode_tokens_per_s"]["32"] == 250 and clean["peak_rss_bytes"] == 1000  # means, and the largest
    assert clean["prefill_tokens_per_s"] == pytest.approx(512 / 0.045)
    for steps, others, reason in (
        (calm[:1], 0.0, "one round is too few to tell"),
        (calm[:4], [0.0, 0.0, 0.3, 0.3], "other programs used up to 0.3 cores of the measured processors, in half"),
        ([*calm[:4], 2.4], disturbed_once, "1 of 3 times vary by more than 5%"),
    ):
        found = summary(steps, others)
        assert (found["clean"], [one[: len(reason)] for one in found["noise_reasons"]]) == (False, [reason])
    raw = clean["raw"]
    short = summarise(raw | {"speed": [one | {"ttft_ms": {}, "step_ms": {}} for one in raw["speed"]]})
    assert short["noise_reasons"] == ["the context is too short for every prompt and depth"]


class Slowing:
    """A decoder whose steps take one millisecond at first and two after 300 of them, by a clock of its own."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0

    def prefill(self, rows: Any, max_length: int | None = None) -> None:
        self.now += 0.25  # must not count as decoding

    def step(self, tokens: Any) -> None:
        self.steps += 1
        self.now += 0.001 if self.steps <= 1500 else 0.002


def test_windows_show_how_the_speed_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Any = Slowing()
    monkeypatch.setattr("benchmarks.measure.worker.time.perf_counter", lambda: decoder.now)
    asked = {"minutes": 0.5, "depth": 10, "steps": 20, "warm_up_steps": 5}
    windows = decode_windows(decoder, list(range(64)), asked)
    rates = [window["tokens_per_s"] for window in windows]
    assert rates[0] == pytest.approx(1000.0) and rates[-1] == pytest.approx(500.0)
    found = summarise_sustained({"windows": windows, "other_cpu_cores": 0.0})
    assert found["throttling_percent"] == pytest.approx(50.0) and found["throttled"] is True
    slower = [{"tokens_per_s": rate} for rate in (100.0, 95.5)]
    assert summarise_sustained({"windows": slower, "other_cpu_cores": 0.0})["throttled"] is False  # 5% are allowed
    alone = summarise_sustained({"windows": windows[:1], "other_cpu_cores": 0.0})
    assert alone["throttling_percent"] is None and alone["throttled"] is None


def rounds(count: int, runs: int, noise: float, correlation: float) -> list[list[float]]:
    """Figures around 1: a first-order autoregressive series for each run."""
    rng = np.random.default_rng(0)
    fresh = rng.normal(size=(runs, count))
    series = np.empty_like(fresh)
    series[:, 0] = fresh[:, 0]
    for place in range(1, count):
        series[:, place] = correlation * series[:, place - 1] + math.sqrt(1 - correlation**2) * fresh[:, place]
    found: list[list[float]] = (1 + noise * series).tolist()
    return found


def test_an_interval_by_hand() -> None:
    """Median 3, standard deviation sqrt(12.5); v = 2.225 for five rounds, and t = 2.132 for four degrees of freedom."""
    reach = 1.1 * 2.132 * math.sqrt(2.225 * 4 / ((5 - 2.225) * 5)) * math.sqrt(12.5)
    found = spread([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found.low, found.high, found.half_width) == pytest.approx((0.0, 3 + reach, reach / 3))  # never below 0
    calm, noisy, worse = (spread([100.0 - off, 100.0, 100.0 + off, 100.0, 100.0]) for off in (0.0, 4.0, 9.0))
    assert noisy.noisy and noisy.noise < 0.03 and agree([*[calm] * 9, noisy])
    assert not agree([*[calm] * 9, worse])  # 12%, though all ten together have less than 4%


@pytest.mark.parametrize(
    ("count", "correlation", "least"), [(5, 0.0, 0.95), (5, 0.3, 0.92), (5, 0.5, 0.85), (8, 0.5, 0.85)]
)
def test_the_interval_covers_the_median_on_machines_whose_rounds_resemble_each_other(
    count: int, correlation: float, least: float
) -> None:
    """2,000 runs: three standard errors of a coverage of 90% are 2 points."""
    found = [spread(one) for one in rounds(count, 2_000, 0.02, correlation)]
    covered = sum(one.low <= 1 <= one.high for one in found) / len(found)
    assert covered >= least


def test_a_run_called_steady_is_seldom_wrong_and_a_calm_one_is_seldom_refused() -> None:
    """Five figures of one run, rounds of correlation 0.5. Wrong: called steady, and a figure is more than 5% off.

    The false-positive rate is below 4% for each figure, and 11% for any of the five, at the worst noise (4%, eight
    rounds; 20,000 runs). It is 0 at noise of 2% or less and at 8% or more.
    """
    steady, wrong = {}, {}
    for count in (5, 8):
        for noise in (0.01, 0.02, 0.03, 0.04, 0.08):
            runs = np.array(rounds(count, 5 * 150, noise, 0.5)).reshape(150, 5, count)
            calls = np.array([agree([spread(one) for one in figures.tolist()]) for figures in runs])
            off = np.abs(np.median(runs, axis=2) - 1) > 0.05
            steady[count, noise] = calls.mean()
            wrong[count, noise] = (calls[:, None] & off).mean()
    assert steady[5, 0.01] > 0.99 and steady[5, 0.02] > 0.95 and steady[8, 0.03] > 0.95, steady
    assert steady[5, 0.08] < 0.02 and steady[8, 0.08] < 0.02, steady
    assert max(wrong.values()) < 0.04, wrong
    assert agree([]) is False and agree([spread([1.0])]) is False


def test_a_paired_interval_of_a_loss_covers_it_and_is_narrow() -> None:
    """Documents differ by 100%, the loss between the models by 1%: the pairs show it, both sums apart would not."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(100):
        teacher = rng.lognormal(5, 1, 60)
        own = teacher * (1.02 + 0.01 * rng.normal(size=60))
        _, interval = quality_loss(own.tolist(), teacher.tolist())
        assert interval is not None and interval[1] - interval[0] < 1.5
        held += interval[0] <= 2.0 <= interval[1]
    assert quality_loss([2.0] * (LEAST_DOCUMENTS - 1), [1.0] * (LEAST_DOCUMENTS - 1)) == (pytest.approx(100.0), None)
    assert held >= 85  # 95% less what a percentile bootstrap of 60 skewed ratios lacks, and three standard errors


def test_the_loss_of_accuracy_is_paired() -> None:
    """Ten questions of 200 lost and two won, with half a question more for each outcome: p = 8 / 202."""
    teacher = np.array([1.0] * 120 + [0.0] * 80)
    own = teacher.copy()
    own[:10], own[-2:] = 0.0, 1.0
    points, interval = accuracy_loss(own.tolist(), teacher.tolist())
    reach = 196 * ((13 / 202 - (8 / 202) ** 2) / 202) ** 0.5
    assert points == pytest.approx(4.0) and interval == pytest.approx((800 / 202 - reach, 800 / 202 + reach))
    assert accuracy_loss([1.0] * 15, [1.0] * 15) == (0.0, None)
    assert accuracy_loss([1.0] * 16, [1.0] * 16) == (0.0, pytest.approx((-196 / 18, 196 / 18)))  # few say little


@pytest.mark.parametrize(("documents", "lost"), [(16, 0.05), (50, 0.02), (200, 0.05)])
def test_the_interval_of_a_loss_of_accuracy_covers_it(documents: int, lost: float) -> None:
    """Each question is lost with some probability, and none is won: 2,000 runs, three standard errors are 1.5 points.

    Whole numbers of questions cost up to 2 points more; standard errors alone covered 56% in the first case.
    """
    draws = np.random.default_rng(0).random((2_000, documents)) < lost
    found = [accuracy_loss((1.0 - run).tolist(), [1.0] * documents)[1] for run in draws]
    assert sum(ends is not None and ends[0] <= 100 * lost <= ends[1] for ends in found) >= 0.915 * len(found)
