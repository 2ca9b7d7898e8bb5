"""`fit`: what budgets let through, how measurements correct predictions, and one search from start to end."""

import json
import math
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.console_results import print_fit
from benchmarks.devices.limits import judge_budget, misses
from benchmarks.devices.load import DEVICES, load_device
from benchmarks.devices.schema import Device
from benchmarks.measure.bench import BenchRequest, BenchResult
from benchmarks.search.candidates import (
    FORMATS,
    Candidate,
    candidates,
    cut_by_limit,
    shape_loss_percent,
)
from benchmarks.search.run import finish_first_inside, run_fit
from benchmarks.search.search import Search, compare_finalists, equal_quality, nothing_fits, start_search
from benchmarks.search.stages import Effort, Source, Target, export_settings, prune_settings
from benchmarks.search.trials import Trials
from benchmarks.search.winner_recipe import write_recipe
from compress.pruning.shapes import Shape
from sportsllm import console
from sportsllm.errors import ConflictError, GateError, UsageError
from sportsllm.models.hf_config import load_config, to_hf
from sportsllm.models.presets import preset
from sportsllm.storage.artifact import directory_bytes
from tests.support.models import tiny_config

TEACHER = tiny_config(
    num_hidden_layers=4,
    intermediate_size=256,
    hidden_size=128,
    num_attention_heads=8,
    max_position_embeddings=1_024,  # room for the tokens that limits speak of
)


def with_limits(name: str = "laptop-x86", **limits: float) -> Device:
    device = load_device(name)
    return device.model_copy(update={"limits": device.limits.model_copy(update=limits)})


def best(device: Device, teacher: object = TEACHER) -> Candidate:
    return start_search(teacher, device, [teacher.vocab_size], on_device=False).front(1)[0]  # type: ignore[attr-defined, arg-type]


def test_the_whole_teacher_in_the_fastest_lossless_form_wins_where_everything_fits() -> None:
    chosen = best(load_device("laptop-x86"))
    assert chosen.shape == Shape.of(TEACHER)
    assert FORMATS[chosen.format] < 0.05


@pytest.mark.slow
def test_every_limit_only_takes_candidates_away() -> None:
    """Tightening one limit never adds a candidate, nor makes the best estimate better."""
    device = load_device("laptop-x86")
    loose, every = best(device), candidates(TEACHER, device, [TEACHER.vocab_size])
    for name in ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms"):
        values = sorted(one.predicted[name] for one in every)
        tight = with_limits(**{name: values[len(values) // 4]})
        search = start_search(TEACHER, tight, [TEACHER.vocab_size], on_device=False)
        inside = search.inside()
        assert 0 < len(inside) < len(search.found)
        assert all(one.predicted[name] <= values[len(values) // 4] for one in inside)
        assert inside[0].loss_percent >= loose.loss_percent - 0.1


@pytest.mark.slow
def test_a_budget_that_only_int4_can_meet_gets_int4() -> None:
    teacher = preset("tiny-5m")
    device = load_device("raspberry-pi-5")
    sizes = {
        one.format.precision: one.predicted["file_mb"]
        for one in candidates(teacher, device, [teacher.vocab_size])
        if one.shape == Shape.of(teacher) and one.format.name in ("int8-b32", "int4-b32")
    }
    tight = with_limits("raspberry-pi-5", file_mb=1.01 * sizes["int4"])
    search = start_search(teacher, tight, [teacher.vocab_size], False)
    whole = [one for one in search.inside() if one.shape == Shape.of(teacher)]
    assert whole and {one.format.precision for one in whole} == {"int4"}
    assert search.front(1)[0].format.precision == "int4"


@pytest.mark.slow
def test_a_budget_that_only_a_shorter_cache_can_meet_gets_one() -> None:
    """The whole model with a float32 cache is too large by less than the cache: a smaller cache remains."""
    teacher = preset("tiny-5m")
    device = load_device("raspberry-pi-5")
    peaks = {
        one.format.name: one.predicted["peak_memory_mb"]
        for one in candidates(teacher, device, [teacher.vocab_size])
        if one.shape == Shape.of(teacher)
    }
    least = min(value for name, value in peaks.items() if not name.endswith("-kv8"))
    tight = with_limits("raspberry-pi-5", peak_memory_mb=least - 1)
    chosen = best(tight, teacher)
    assert chosen.format.cache == "int8" or chosen.shape.kv_heads < teacher.num_key_value_heads


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
    full = Shape(96, 352, 3, 3, 6, 32)
    for shape, measured in (
        (replace(full, intermediate=192), 2.59),
        (replace(full, layers=4), 2.07),
        (replace(full, intermediate=256, layers=5), 1.36),
        (replace(full, intermediate=160, layers=5), 5.50),
    ):
        assert shape_loss_percent(full, shape) == pytest.approx(measured, rel=0.2)
    assert shape_loss_percent(full, full) == 0


def test_what_is_measured_corrects_those_alike() -> None:
    device = load_device("host")
    found = candidates(TEACHER, device, [TEACHER.vocab_size])
    search = Search(TEACHER, device, True, found)
    one = found[0]
    twice = {name: 2 * value for name, value in one.predicted.items()}
    search.record(one, {**twice, "quality_loss_percent": None})
    alike = next(other for other in found if other.format == one.format and other is not one)
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


def test_formats_differ_in_name() -> None:
    names = [format.name for format in FORMATS]
    assert len(set(names)) == len(names) and "int4-b32-kv8-latency" in names and "int8-rows" in names
    assert all(math.isfinite(loss) for loss in FORMATS.values())


def test_the_recipe_is_toml_whatever_the_paths_and_export_gets_the_threads(tmp_path: Path, checkpoint: Path) -> None:
    odd = tmp_path / 'a "quoted" name\x7f'  # DEL is legal in a path and must be escaped in TOML
    candidate = replace(best(with_limits()), format=next(format for format in FORMATS if format.precision == "int4"))
    source = Source(checkpoint, (odd,), (odd,), valid=(odd,), threads=1, settings={"learning_rate": 1e-3})
    write_recipe(odd / "recipe.toml", candidate, source, Effort(1_000, 100), Target("host"))
    recipe = tomllib.loads((odd / "recipe.toml").read_text(encoding="utf-8"))
    stages = {stage["command"]: stage for stage in recipe["stage"]}
    assert recipe["out"] == str(odd) and stages["prune"]["corpus"] == [str(odd)]
    assert stages["prune"]["learning_rate"] == 1e-3 and stages["quantize"]["qad"] == 200
    assert stages["bench"]["on_device"] is False and stages["bench"]["text"] == [str(odd)]
    assert all(stages[command]["threads"] == 1 for command in ("prune", "quantize", "export", "bench"))
    assert export_settings(source, candidate.format, odd, odd)["threads"] == 1


@dataclass
class Line:
    """A tiny teacher, its text, a budget that only a smaller model meets, and a clock that measures by rule."""

    teacher: Path
    corpus: Path
    budget: Path
    out: Path
    calls: list[Path] = field(default_factory=list)

    def fit(self, **changes: Any) -> dict[str, Any]:
        effort = changes.pop("effort", Effort(tokens=1024, search_tokens=512, finalists=2))
        small = {"sequence": 64, "batch_size": 2, "accumulation": 1}
        source = Source(self.teacher, (self.corpus,), (self.corpus,), settings=small)
        return run_fit(source, Target(str(self.budget)), self.out, effort, **changes)

    def measured(self, request: BenchRequest) -> BenchResult:
        """In place of `run_bench`."""
        self.calls.append(request.directory)
        figures = {
            "directory": str(request.directory),
            "file_bytes": directory_bytes(request.directory),
            "peak_rss_bytes": 80_000_000,
            "ttft_ms": {"512": 100.0},
            "tpot_ms": {"512": {"p50": 1.0, "p95": 2.0}},
            "memory_floor": {"bandwidth_bytes_per_s": 1e10},
            "clean": True,
        }
        return BenchResult(load_config(request.directory), figures, {}, {}, {})

    def timed(self, directory: Path, device: Device, threads: int | None = None) -> dict[str, float | None]:
        """In place of `short_bench`."""
        self.calls.append(directory)
        figures = {"file_mb": directory_bytes(directory) / 1e6, "peak_memory_mb": 80.0, "ttft_ms": 100.0}
        return {**figures, "tpot_p50_ms": 1.0, "tpot_p95_ms": 2.0, "quality_loss_percent": None}


@pytest.fixture(scope="module")
def line(checkpoint: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("search")
    checkpoint = shutil.copytree(checkpoint, folder / "teacher")  # with room for the tokens that limits speak of
    config = load_config(checkpoint).with_changes(max_position_embeddings=1_024)
    (checkpoint / "config.json").write_text(json.dumps(to_hf(config)), encoding="utf-8")
    corpus, budget = folder / "corpus.jsonl", folder / "pocket.toml"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    whole = directory_bytes(checkpoint) / 1e6
    lines = (DEVICES / "host.toml").read_text(encoding="utf-8").splitlines()
    limits = {"name": '"pocket"', "file_mb": f"{whole / 2:.3f}", "quality_loss_percent": "100", "ttft_ms": "900"}
    budget.write_text(
        "\n".join(f"{key} = {limits[key]}" if (key := text.split(" = ")[0]) in limits else text for text in lines),
        encoding="utf-8",
    )
    line = Line(checkpoint, corpus, budget, folder / "fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.search.trials.short_bench", line.timed)
        patch.setattr("benchmarks.bench.run_bench", line.measured)
        patch.setattr("benchmarks.console_results.print_bench", lambda *_: None)
        yield line


@pytest.fixture(scope="module")
def searched(line: Line) -> tuple[dict[str, Any], list[Candidate]]:
    """The result of one whole search, and the ranking whose first one it finished."""
    rankings: list[Sequence[Candidate]] = []

    def recorded(ranking: Sequence[Candidate], finish: Callable[[Candidate], dict[str, Any]]) -> dict[str, Any]:
        rankings.append(ranking)
        return finish_first_inside(ranking, finish)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.search.run.finish_first_inside", recorded)
        result = line.fit()
    return result, list(rankings[0])


@pytest.mark.slow
def test_a_search_from_start_to_end(
    line: Line, searched: tuple[dict[str, Any], list[Candidate]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The winner is inside the budget as measured, the recipe makes it, and a second run does nothing anew."""
    result = searched[0]
    limit = load_device(str(line.budget)).limits.file_mb
    assert directory_bytes(Path(result["out"])) / 1e6 <= limit
    assert result["bench"]["budget"]["passed"] and result["decided_by"] == "measurement"
    chosen = next(one for one in result["candidates"] if one["name"] == result["chosen"])
    assert chosen["measured"]["ttft_ms"] == 100.0 and chosen["within"]
    compared = [one for one in result["candidates"] if one["bits_per_byte"] is not None]
    assert chosen["bits_per_byte"] <= equal_quality(one["bits_per_byte"] for one in compared)
    assert any(one["even"] for one in compared)
    recipe = tomllib.loads(Path(result["line"]).read_text(encoding="utf-8"))
    assert [stage["command"] for stage in recipe["stage"]][-2:] == ["export", "bench"]
    assert json.loads((line.out / "fit.json").read_text(encoding="utf-8"))["chosen"] == result["chosen"]
    print_fit(console.output(), result)
    shown = capsys.readouterr().out
    assert result["chosen"] in shown.replace("\n", "") and "File size" in shown
    calls = len(line.calls)
    again = line.fit()
    assert again["chosen"] == result["chosen"] and len(line.calls) == calls
    with pytest.raises(ConflictError, match="other tokens"):
        line.fit(effort=Effort(tokens=2048, search_tokens=512, finalists=2))


@pytest.mark.parametrize(
    ("times", "kept"), [((2000.0, 1000.0, 3000.0), 1), ((1000.0, 2000.0, 3000.0), 0), ((2000.0, 100.0), 1)]
)
def test_of_finalists_that_miss_as_finished_the_nearest_is_kept(
    line: Line,
    searched: tuple[dict[str, Any], list[Candidate]],
    capsys: pytest.CaptureFixture[str],
    times: tuple[float, ...],
    kept: int,
) -> None:
    """The choice of a whole search, replayed with other times of the finished models."""
    found, ranking = searched
    device, export, left = load_device(str(line.budget)), Path(found["out"]), list(times)

    def finish(candidate: Candidate) -> dict[str, Any]:
        figures = {**found["bench"], "ttft_ms": {"512": left.pop(0)}}
        budget = judge_budget(device, figures, load_config(export), export, on_device=False)
        return {**found, "chosen": candidate.name, "bench": {**figures, "budget": budget}}

    result = finish_first_inside(ranking, finish)
    assert not left and result["bench"]["ttft_ms"]["512"] == times[kept]
    assert len(ranking) == 3  # the even cut is one finalist more
    others = result["gave_up"]
    assert len(others) == len(times) - 1 and result["chosen"] not in others
    assert all(missed == ["ttft_ms"] for missed in others.values())
    print_fit(console.output(), result)
    shown = " ".join(capsys.readouterr().out.split())
    inside = times[kept] < 900
    assert result["bench"]["budget"]["passed"] is inside
    assert ("that keeps to the budget once finished" if inside else "misses the budget once finished, as") in shown


@pytest.fixture
def fresh(line: Line, tmp_path: Path) -> Line:
    """The same, with nothing made yet."""
    return replace(line, out=tmp_path / "fit", calls=[])


def test_a_dry_run_makes_nothing(fresh: Line) -> None:
    result = fresh.fit(dry_run=True)
    assert not fresh.out.exists() and not fresh.calls
    assert result["chosen"] and result["inside"] < result["considered"]


def test_a_smaller_vocabulary_is_a_candidate_and_must_be_smaller(fresh: Line) -> None:
    result = fresh.fit(dry_run=True, vocabularies=[320])
    assert result["considered"] > fresh.fit(dry_run=True)["considered"]
    with pytest.raises(UsageError, match="below the teacher's 384"):
        fresh.fit(vocabularies=[384])


def test_a_directory_that_holds_something_else_is_left_alone(fresh: Line) -> None:
    fresh.out.mkdir()
    (fresh.out / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConflictError, match="holds no search"):
        fresh.fit()
    assert [path.name for path in fresh.out.iterdir()] == ["mine.txt"]


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
