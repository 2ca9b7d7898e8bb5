"""`fit`: what budgets let through, how measurements correct predictions, and one search from start to end."""

import itertools
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.devices.limits import judge_budget
from benchmarks.devices.load import DEVICES, load_device
from benchmarks.devices.schema import Device
from benchmarks.search.candidates import (
    Candidate,
    all_forms,
    candidates,
    cut_by_limit,
    misses,
    pareto,
    shape_loss_percent,
)
from benchmarks.search.run import Effort, run_fit
from benchmarks.search.search import Search, compare_finalists, equal_quality, nothing_fits, start_search
from benchmarks.search.tables import print_fit
from benchmarks.search.trials import Source, Trials, prune_settings
from compress.pruning.shapes import Shape
from sportsllm import console
from sportsllm.errors import ConflictError, GateError, UsageError
from sportsllm.models.hf_config import load_config
from sportsllm.models.presets import preset
from sportsllm.storage.artifact import directory_bytes
from tests.support.models import tiny_config

TEACHER = tiny_config(num_hidden_layers=4, intermediate_size=256, hidden_size=128, num_attention_heads=8)


def with_limits(name: str = "laptop-x86", **limits: float) -> Device:
    device = load_device(name)
    return device.model_copy(update={"limits": device.limits.model_copy(update=limits)})


def best(device: Device, teacher: object = TEACHER) -> Candidate:
    return start_search(teacher, device, [teacher.vocab_size], on_device=False).front(1)[0]  # type: ignore[attr-defined, arg-type]


def test_the_whole_teacher_in_the_fastest_lossless_form_wins_where_everything_fits() -> None:
    chosen = best(load_device("laptop-x86"))
    assert chosen.shape == Shape.of(TEACHER)
    assert chosen.form.loss_percent < 0.05


def test_every_limit_only_takes_candidates_away() -> None:
    """Tightening one limit never adds a candidate, nor makes the best estimate better."""
    device = load_device("laptop-x86")
    loose = best(device)
    for name in ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms"):
        values = sorted(one.predicted[name] for one in candidates(TEACHER, device, [TEACHER.vocab_size]))
        tight = with_limits(**{name: values[len(values) // 4]})
        search = start_search(TEACHER, tight, [TEACHER.vocab_size], on_device=False)
        inside = search.inside()
        assert 0 < len(inside) < len(search.found)
        assert all(one.predicted[name] <= values[len(values) // 4] for one in inside)
        assert inside[0].loss_percent >= loose.loss_percent - 0.1


def test_a_budget_that_only_int4_can_meet_gets_int4() -> None:
    teacher = preset("tiny-5m")
    device = load_device("raspberry-pi-5")
    sizes = {
        one.form.precision: one.predicted["file_mb"]
        for one in candidates(teacher, device, [teacher.vocab_size])
        if one.shape == Shape.of(teacher) and one.form.name in ("int8-b32", "int4-b32")
    }
    tight = with_limits("raspberry-pi-5", file_mb=1.01 * sizes["int4"])
    whole = [
        one
        for one in start_search(teacher, tight, [teacher.vocab_size], False).inside()
        if one.shape == Shape.of(teacher)
    ]
    assert whole and {one.form.precision for one in whole} == {"int4"}
    assert best(tight, teacher).form.precision == "int4"


def test_a_budget_that_only_a_shorter_cache_can_meet_gets_one() -> None:
    """The whole model with a float32 cache is too large by less than the cache: a smaller cache remains."""
    teacher = preset("tiny-5m")
    device = load_device("raspberry-pi-5")
    peaks = {
        (one.form.name): one.predicted["peak_memory_mb"]
        for one in candidates(teacher, device, [teacher.vocab_size])
        if one.shape == Shape.of(teacher)
    }
    least = min(value for name, value in peaks.items() if not name.endswith("-kv8"))
    tight = with_limits("raspberry-pi-5", peak_memory_mb=least - 1)
    chosen = best(tight, teacher)
    assert chosen.form.cache == "int8" or chosen.shape.kv_heads < teacher.num_key_value_heads


def test_what_each_limit_cuts_is_counted_one_by_one() -> None:
    tight = with_limits(file_mb=0.2, tpot_p50_ms=0.1)
    found = candidates(TEACHER, tight, [TEACHER.vocab_size])
    counts = cut_by_limit(found, tight)
    over_file = [one for one in found if one.predicted["file_mb"] > 0.2]
    over_step = [one for one in found if one.predicted["tpot_p50_ms"] > 0.1]
    assert counts["file_mb"]["misses"] == len(over_file)
    assert counts["tpot_p50_ms"]["misses"] == len(over_step)
    alone = [one for one in over_file if set(misses(one.predicted, tight)) == {"file_mb"}]
    assert counts["file_mb"]["alone"] == len(alone)


def test_nothing_fits_names_the_nearest_miss_and_what_to_relax() -> None:
    device = load_device("laptop-x86")
    least = min(one.predicted["file_mb"] for one in candidates(TEACHER, device, [TEACHER.vocab_size]))
    with pytest.raises(GateError, match=rf"nothing fits laptop-x86.*file_mb {least:.4g} of .*relax file_mb to"):
        start_search(TEACHER, with_limits(file_mb=least / 2), [TEACHER.vocab_size], on_device=False)


def test_the_estimate_is_that_of_the_log() -> None:
    """The cuts that the weights were fitted to (docs/log.md), within what a single run may differ."""
    full = Shape(96, 352, 3, 3, 6)
    for shape, measured in (
        (replace(full, intermediate=192), 2.59),
        (replace(full, layers=4), 2.07),
        (replace(full, intermediate=256, layers=5), 1.36),
        (replace(full, intermediate=160, layers=5), 5.50),
    ):
        assert shape_loss_percent(full, shape) == pytest.approx(measured, rel=0.2)
    assert shape_loss_percent(full, full) == 0


def test_pareto_front_against_brute_force() -> None:
    rows = [{"a": float(a), "b": float(b)} for a, b in itertools.product((1, 2, 3), (1, 2, 3))] + [{"a": 0.5, "b": 5.0}]
    front = [row for row, kept in zip(rows, pareto(rows), strict=True) if kept]
    assert front == [{"a": 1.0, "b": 1.0}, {"a": 0.5, "b": 5.0}]


def test_what_is_measured_corrects_those_alike() -> None:
    device = load_device("host")
    found = candidates(TEACHER, device, [TEACHER.vocab_size])
    search = Search(TEACHER, device, True, found)
    one = found[0]
    twice = {name: 2 * value for name, value in one.predicted.items()}
    search.record(one, {**twice, "quality_loss_percent": None})
    alike = next(other for other in found if other.form == one.form and other is not one)
    assert search.figures(one)["ttft_ms"] == twice["ttft_ms"]
    assert search.figures(alike)["ttft_ms"] == pytest.approx(2 * alike.predicted["ttft_ms"])
    elsewhere = Search(TEACHER, device, False, found)
    elsewhere.record(one, {**twice})
    assert elsewhere.figures(alike) == alike.predicted


def test_nearest_miss_uses_what_was_measured() -> None:
    device = with_limits("host", ttft_ms=1.0)
    found = candidates(TEACHER, device, [TEACHER.vocab_size])[:3]
    search = Search(TEACHER, device, True, found)
    for one in found:
        search.record(one, {**one.predicted, "ttft_ms": 50.0})
    assert "ttft_ms 50 of 1 ms (measured)" in nothing_fits(search)


def test_of_finalists_as_good_as_the_best_the_fastest_wins() -> None:
    device = load_device("host")
    found = candidates(TEACHER, device, [TEACHER.vocab_size])
    slow, fast, worse = sorted(found[:3], key=lambda one: -one.predicted["tpot_p50_ms"])
    qualities = {slow.name: 2.0, fast.name: 2.0019, worse.name: 2.0021}  # 0.1% of 2 is 0.002

    class Brief:
        def quality(self, candidate: Candidate) -> float:
            return qualities[candidate.name]

    search = Search(TEACHER, device, False, found)
    ranking = compare_finalists(search, cast(Trials, Brief()), [slow, worse, fast], lambda: float("inf"))
    assert ranking == [fast, slow, worse]


def test_forms_differ_in_name() -> None:
    names = [form.name for form in all_forms()]
    assert len(set(names)) == len(names)
    assert all(math.isfinite(form.loss_percent) for form in all_forms())


@pytest.fixture
def line(checkpoint: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tiny teacher, its text, a budget that only a smaller model meets, and a clock that measures by rule."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    whole = directory_bytes(checkpoint) / 1e6
    budget = tmp_path / "pocket.toml"
    lines = (DEVICES / "host.toml").read_text(encoding="utf-8").splitlines()
    limits = {"name": '"pocket"', "file_mb": f"{whole / 2:.3f}", "quality_loss_percent": "100", "ttft_ms": "900"}
    budget.write_text(
        "\n".join(f"{key} = {limits[key]}" if (key := text.split(" = ")[0]) in limits else text for text in lines),
        encoding="utf-8",
    )
    calls: list[Path] = []
    finished: list[float] = []  # what finished models take for a first token, ms, one after another

    def clock(
        directory: Path, device: str, on_device: bool = False, threads: int | None = None, *args: Any, **settings: Any
    ) -> dict[str, Any]:
        calls.append(directory)
        read = load_device(device)
        times = {"p50": 1.0, "p95": 2.0}
        result = {
            "directory": str(directory),
            "file_bytes": directory_bytes(directory),
            "peak_rss_bytes": 80_000_000,
            "ttft_ms": {"512": finished.pop(0) if finished else 100.0},
            "tpot_ms": {"512": times},
            "quality_loss_percent": 1.0,
            "clean": True,
        }
        return result | {"budget": judge_budget(read, result, load_config(directory), directory, on_device)}

    def quick(directory: Path, device: Device, threads: int | None = None) -> dict[str, float | None]:
        calls.append(directory)
        figures = {"file_mb": directory_bytes(directory) / 1e6, "peak_memory_mb": 80.0, "ttft_ms": 100.0}
        return {**figures, "tpot_p50_ms": 1.0, "tpot_p95_ms": 2.0, "quality_loss_percent": None}

    monkeypatch.setattr("benchmarks.search.trials.quick_figures", quick)
    monkeypatch.setattr("benchmarks.measure.bench.run_bench", clock)
    monkeypatch.setattr("benchmarks.measure.tables.print_bench", lambda *_: None)
    return {
        "teacher": checkpoint,
        "corpus": corpus,
        "budget": budget,
        "out": tmp_path / "fit",
        "calls": calls,
        "finished": finished,
    }


def fit(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    effort = changes.pop("effort", Effort(tokens=1024, search_tokens=512, finalists=2))
    small = {"sequence": 64, "batch_size": 2, "accumulation": 1}
    source = Source(line["teacher"], (line["corpus"],), (line["corpus"],), settings=small)
    return run_fit(source, str(changes.pop("budget", line["budget"])), line["out"], effort, **changes)


def test_a_search_from_start_to_end(line: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The winner is inside the budget as measured, the recipe makes it, and a second run does nothing anew."""
    result = fit(line)
    limit = load_device(str(line["budget"])).limits.file_mb
    assert directory_bytes(Path(result["out"])) / 1e6 <= limit
    assert result["bench"]["budget"]["passed"] and result["decided_by"] == "measurement"
    chosen = next(one for one in result["candidates"] if one["name"] == result["chosen"])
    assert chosen["measured"]["ttft_ms"] == 100.0 and chosen["within"]
    compared = [one for one in result["candidates"] if one["bits_per_byte"] is not None]
    assert chosen["bits_per_byte"] <= equal_quality(one["bits_per_byte"] for one in compared)
    assert any(one["even"] for one in compared)
    recipe = tomllib.loads(Path(result["line"]).read_text(encoding="utf-8"))
    assert [stage["command"] for stage in recipe["stage"]][-2:] == ["export", "bench"]
    assert json.loads((line["out"] / "fit.json").read_text(encoding="utf-8"))["chosen"] == result["chosen"]
    print_fit(console.output(), result)
    shown = capsys.readouterr().out
    assert result["chosen"] in shown.replace("\n", "") and "File size" in shown
    calls = len(line["calls"])
    again = fit(line)
    assert again["chosen"] == result["chosen"] and len(line["calls"]) == calls
    with pytest.raises(ConflictError, match="other tokens"):
        fit(line, effort=Effort(tokens=2048, search_tokens=512, finalists=2))


@pytest.mark.parametrize(
    ("times", "kept"), [((2000.0, 1000.0, 3000.0), 1), ((1000.0, 2000.0, 3000.0), 0), ((2000.0, 100.0), 1)]
)
def test_of_finalists_that_miss_as_finished_the_nearest_is_kept(
    line: dict[str, Any], capsys: pytest.CaptureFixture[str], times: tuple[float, ...], kept: int
) -> None:
    line["finished"].extend(times)
    result = fit(line)
    assert not line["finished"] and result["bench"]["ttft_ms"]["512"] == times[kept]
    others = result["gave_up"]  # the even cut is one finalist more
    assert len(others) == len(times) - 1 and result["chosen"] not in others
    assert all(missed == ["ttft_ms"] for missed in others.values())
    print_fit(console.output(), result)
    shown = " ".join(capsys.readouterr().out.split())
    inside = times[kept] < 900
    assert result["bench"]["budget"]["passed"] is inside
    assert ("that keeps to the budget once finished" if inside else "misses the budget once finished, as") in shown


def test_a_dry_run_makes_nothing(line: dict[str, Any]) -> None:
    result = fit(line, dry_run=True)
    assert not line["out"].exists() and not line["calls"]
    assert result["chosen"] and result["inside"] < result["considered"]


def test_a_smaller_vocabulary_is_a_candidate_and_must_be_smaller(line: dict[str, Any]) -> None:
    result = fit(line, dry_run=True, vocabularies=[320])
    assert result["considered"] > fit(line, dry_run=True)["considered"]
    with pytest.raises(UsageError, match="below the teacher's 384"):
        fit(line, vocabularies=[384])


def test_a_directory_that_holds_something_else_is_left_alone(line: dict[str, Any]) -> None:
    line["out"].mkdir()
    (line["out"] / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConflictError, match="holds no search"):
        fit(line)
    assert [path.name for path in line["out"].iterdir()] == ["mine.txt"]


def test_a_cut_vocabulary_recovers_at_the_original_teachers_rate(tmp_path: Path) -> None:
    """The fine-tuning after the cut has a low rate of its own; a quarter of that would leave its candidates behind."""
    for name, peak in (("teacher", 4e-3), ("tuned", 1e-4)):
        (tmp_path / name).mkdir()
        manifest = {"format": 1, "command": "train", "settings": {"learning_rate": peak}, "files": {}}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    candidate = best(with_limits())
    source = Source(tmp_path / "teacher", (), ())
    made = prune_settings(source, candidate, tmp_path / "tuned", tmp_path / "out", 1_000)
    assert made["learning_rate"] == pytest.approx(1e-3)
    assert "learning_rate" not in prune_settings(source, candidate, tmp_path / "teacher", tmp_path / "out", 1_000)
    own = replace(source, settings={"learning_rate": 2e-3})
    assert prune_settings(own, candidate, tmp_path / "tuned", tmp_path / "out", 1_000)["learning_rate"] == 2e-3
