"""`fit`: what budgets let through, how measurements correct predictions, and one search from start to end."""

import json
import math
import shutil
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.devices.load import DEVICES, load_device
from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import judge, misses
from benchmarks.fit import FitResult, finish_best, fit, run_fit
from benchmarks.measure.bench import ShortBench
from benchmarks.predict.model_size import ModelFormat, file_bytes
from benchmarks.search.candidates import Candidate, Estimates, candidates, cut_by_limit, grid_shapes
from benchmarks.search.clock import Clock
from benchmarks.search.cut import prune_options
from benchmarks.search.estimate import cut_dimensions
from benchmarks.search.formats import usual_loss, weight_formats
from benchmarks.search.measure import measured_estimates, suggested_vocabularies, usual_estimates
from benchmarks.search.printing import print_fit
from benchmarks.search.rounds import try_briefly, try_longer, try_plain
from benchmarks.search.search import Search, Tried, nothing_fits, start_search
from benchmarks.search.stages import Effort, Source, Target, export_settings, write_recipe
from benchmarks.search.trials import Losses, Timed, Trials
from compress.pruning.shapes import Shape, shape_for_share
from sportsllm import console
from sportsllm.errors import ConflictError, GateError, UsageError
from sportsllm.formats.huggingface import load_config, to_hf
from sportsllm.formats.manifest import directory_bytes
from sportsllm.models.config import ModelConfig
from sportsllm.models.config_records import Experts
from sportsllm.models.presets import preset
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


def usual(teacher: ModelConfig = TEACHER) -> Estimates:
    return usual_estimates(teacher, 100_000)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}])
def test_every_shape_of_the_grid_can_be_cut(changes: dict[str, Any]) -> None:
    teacher = TEACHER.with_changes(num_key_value_heads=4, **changes)
    shapes = list(grid_shapes(teacher))
    assert len({shape.applied_to(teacher) for shape in shapes}) == len(shapes)
    assert any(shape.merges_kv_heads(teacher) for shape in shapes) == (not changes)


MIXTURE = TEACHER.with_changes(num_hidden_layers=2, mlp_kind="experts", experts=Experts(8, 2))


def test_a_mixture_may_lose_experts_and_flags_name_them_only_then() -> None:
    cuts = list(grid_shapes(MIXTURE))
    assert {cut.experts for cut in cuts} == {8, 4, 2}
    assert {cut.experts for cut in grid_shapes(MIXTURE.with_changes(experts=Experts(8, 3)))} == {8, 4}
    assert {cut.experts for cut in grid_shapes(MIXTURE.with_changes(experts=Experts(8, 2, groups=4)))} == {8}
    whole = Shape.of(MIXTURE)
    half = replace(whole, experts=4).applied_to(MIXTURE)
    assert half.chosen_experts.count == 4 and half.parameters < MIXTURE.parameters
    assert half.active_parameters == MIXTURE.active_parameters - 4 * 2 * MIXTURE.hidden_size  # of the routers' rows
    assert prune_options(replace(whole, experts=4), MIXTURE)["experts"] == 4
    assert "experts" not in prune_options(replace(whole, layers=1), MIXTURE)
    assert "experts" not in Shape.of(TEACHER).sizes()


@pytest.mark.slow
def test_a_small_file_takes_experts_before_widths_of_a_mixture() -> None:
    """Half of 8 experts cost 1.2% and are most of the parameters."""
    sizes = {one.name: one.predicted["file_mb"] for one in candidates(MIXTURE, with_limits(), usual(MIXTURE))}
    chosen = best(
        with_limits(file_mb=0.8 * min(size for name, size in sizes.items() if "l2-h128-f256" in name and "e8" in name)),
        MIXTURE,
    )
    assert chosen.shape == replace(Shape.of(MIXTURE), experts=4) and "-e4-" in chosen.name


def started(device: Device, teacher: ModelConfig = TEACHER) -> Search:
    return start_search(teacher, device, usual(teacher), Target("host"), 100_000)


def best(device: Device, teacher: ModelConfig = TEACHER) -> Candidate:
    return started(device, teacher).front(1)[0]


def test_the_whole_teacher_in_the_fastest_lossless_form_wins_where_everything_fits() -> None:
    chosen = best(load_device("laptop-x86"))
    assert chosen.shape == Shape.of(TEACHER)
    assert usual().formats[chosen.format] < 0.3


@pytest.mark.slow
def test_every_limit_only_takes_candidates_away() -> None:
    """Tightening one limit never adds a candidate, nor makes the best estimate better."""
    device = load_device("laptop-x86")
    loose, every = best(device), candidates(TEACHER, device, usual())
    for name in ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms"):
        values = sorted(one.predicted[name] for one in every)
        tight = with_limits(**{name: values[len(values) // 4]})
        search = started(tight)
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
        for one in candidates(teacher, device, usual(teacher))
        if one.shape == Shape.of(teacher) and one.format.name in ("int8-b128", "int4-b32")
    }
    tight = with_limits("raspberry-pi-5", file_mb=1.01 * sizes["int4"])
    search = started(tight, teacher)
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
        for one in candidates(teacher, device, usual(teacher))
        if one.shape == Shape.of(teacher)
    }
    least = min(value for name, value in peaks.items() if not name.endswith("-kv8"))
    tight = with_limits("raspberry-pi-5", peak_memory_mb=least - 1)
    chosen = best(tight, teacher)
    assert chosen.format.cache == "int8" or chosen.shape.kv_heads < teacher.num_key_value_heads


def test_what_each_limit_cuts_is_counted_one_by_one() -> None:
    tight = with_limits(file_mb=0.2, tpot_p50_ms=0.1)
    found = candidates(TEACHER, tight, usual())
    counts = cut_by_limit(found, tight)
    over_file = [one for one in found if one.predicted["file_mb"] > 0.2]
    over_step = [one for one in found if one.predicted["tpot_p50_ms"] > 0.1]
    assert counts["file_mb"]["misses"] == len(over_file)
    assert counts["tpot_p50_ms"]["misses"] == len(over_step)
    alone = [one for one in over_file if set(misses(one.predicted, tight)) == {"file_mb"}]
    assert counts["file_mb"]["alone"] == len(alone)


def test_nothing_fits_names_the_nearest_miss_and_what_to_relax() -> None:
    device = load_device("laptop-x86")
    least = min(one.predicted["file_mb"] for one in candidates(TEACHER, device, usual()))
    with pytest.raises(GateError, match=rf"nothing fits laptop-x86.*file_mb {least:.4g} of .*relax file_mb to"):
        started(with_limits(file_mb=least / 2))


def test_what_is_measured_corrects_those_alike() -> None:
    device = load_device("host")
    found = candidates(TEACHER, device, usual())
    search = Search(TEACHER, device, True, usual(), found)
    one = found[0]
    twice = {name: 2 * value for name, value in one.predicted.items()}
    search.record(one, {**twice, "quality_loss_percent": None})
    alike = next(other for other in found if other.format == one.format and other is not one)
    assert search.figures(one)["ttft_ms"] == twice["ttft_ms"]
    assert search.figures(alike)["ttft_ms"] == pytest.approx(2 * alike.predicted["ttft_ms"])
    elsewhere = Search(TEACHER, device, False, usual(), found)
    elsewhere.record(one, {**twice})
    assert elsewhere.figures(alike) == alike.predicted


def test_nearest_miss_uses_what_was_measured() -> None:
    device = with_limits("host", ttft_ms=1.0)
    found = candidates(TEACHER, device, usual())[:3]
    search = Search(TEACHER, device, True, usual(), found)
    for one in found:
        search.record(one, {**one.predicted, "ttft_ms": 50.0})
    assert "ttft_ms 50 of 1 ms (measured)" in nothing_fits(search)


def test_of_those_as_good_as_the_best_the_one_that_opens_everywhere_and_is_fastest_wins() -> None:
    found = candidates(TEACHER, load_device("host"), usual())
    int8 = [one for one in found if one.format.name == "int8-rows" and one.shape.hidden == TEACHER.hidden_size]
    fast, slow, worse = (next(one for one in int8 if one.shape.layers == layers) for layers in (1, 2, 3))
    assert not fast.closed_to and fast.predicted["tpot_p50_ms"] < slow.predicted["tpot_p50_ms"]
    closed = next(one for one in found if one.closed_to)
    search = Search(TEACHER, load_device("host"), False, usual_estimates(TEACHER, 1_000), found, tokens=1_000)
    for one, loss in ((slow, 2.0), (closed, 2.0), (fast, 2.29), (worse, 2.31)):  # equal within 0.3 points
        search.tried[one.name] = Tried(1_000, loss - 0.5, loss, loss, 1.0)
    assert search.ranking() == [fast, slow, closed, worse]
    search.tried[worse.name] = replace(search.tried[worse.name], longer=True)
    assert search.ranking()[0] == worse


def test_models_that_optimum_does_not_open_say_so() -> None:
    for one in candidates(TEACHER, load_device("host"), usual()):
        whole_heads = one.shape.hidden == one.shape.heads * TEACHER.head_dim
        assert one.closed_to == (() if whole_heads and one.format.cache != "int8" else ("optimum",))


class Rule:
    """A teacher whose losses follow a rule: cuts cost far more than usual, and less for each token of recovery."""

    def __init__(self, scale: float = 30.0) -> None:
        self.scale, self.calls = scale, list[tuple[str, int, bool]]()

    def recovered(self, shape: Shape, tokens: int) -> float:
        kept = [getattr(shape, name) / getattr(Shape.of(TEACHER), name) for name in shape.sizes()]
        return self.scale * sum(-math.log(share) for share in kept) * (tokens / 100_000) ** -0.3

    def losses(self, candidate: Candidate, tokens: int, trained: bool) -> Losses:
        self.calls.append((candidate.name, tokens, trained))
        loss = self.recovered(candidate.shape, tokens)
        return Losses(loss, loss + usual().formats[candidate.format])

    def timed(self, candidate: Candidate) -> Timed:
        return Timed(dict(candidate.predicted), busy=False)


def test_on_a_gpu_every_format_is_float16_and_predicted_so(tmp_path: Path) -> None:
    """An INT8 cache and INT8 in rows have no such graph; unrounded weights take two bytes."""
    search = start_search(TEACHER, with_limits(), usual(), Target("host", True, "cuda", "gpu"), 100_000)
    formats = {one.format for one in search.found}
    assert {each.precision for each in formats} == {"fp16", "int8", "int4"}
    assert all(each.cache == "fp16" and not each.per_row for each in formats)
    whole = next(one for one in search.found if one.shape == Shape.of(TEACHER) and one.format.precision == "fp16")
    assert whole.predicted["file_mb"] == pytest.approx(2 * TEACHER.parameters / 1e6, rel=0.1)
    source = Source(tmp_path, (), ())
    assert export_settings(source, ModelFormat("int4"), tmp_path, tmp_path, "gpu")["dtype"] == "fp16"
    assert "dtype" not in export_settings(source, ModelFormat("int4"), tmp_path, tmp_path)


class FakeTime:
    """A clock that trials advance by a second for each thousand tokens."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


EFFORT = Effort(100_000, 10_000)


def test_what_trials_show_moves_the_search_from_cuts_to_small_formats() -> None:
    """By usual estimates a cut with fine rounding is best. On a teacher that cuts hurt, the whole one at 4 bits is."""
    full = Shape.of(TEACHER)
    sizes = [file_bytes(TEACHER, each) / 1e6 for each in usual().formats]
    search = started(with_limits(file_mb=min(sizes)))
    assert search.front(1)[0].shape != full
    trials, clock = Rule(), Clock()
    for run in (try_plain, try_briefly, try_longer):
        run(search, cast(Trials, trials), EFFORT, clock)
    assert search.ranking()[0].shape == full
    for name, tried in search.tried.items():
        candidate = next(one for one in search.found if one.name == name)
        end = trials.losses(candidate, 100_000, True).rounded
        assert search.expected(candidate) == pytest.approx(end, rel=0.35)
        assert tried.foretold > 0


def test_the_plain_cuts_are_always_tried() -> None:
    """Each dimension alone as far as it reaches the budget, and the even cut; symmetric INT4 is among the formats."""
    search = started(with_limits(file_mb=0.3))
    trials = Rule()
    try_plain(search, cast(Trials, trials), EFFORT, Clock())
    full = Shape.of(TEACHER)
    cuts = [cut_dimensions(full, one.shape) for one in search.found if one.name in search.tried]
    assert {"intermediate"} in cuts and {"layers"} in cuts and {"hidden"} in cuts
    even = {shape_for_share(TEACHER, percent / 100) for percent in range(20, 95, 5)}
    assert even & {one.shape for one in search.found if one.name in search.tried}
    assert all(search.is_inside(one) for one in search.found if one.name in search.tried)
    assert ModelFormat("int4", 64) in usual().formats


def test_the_ffn_alone_is_as_wide_as_the_budget_allows() -> None:
    search = started(with_limits(file_mb=0.3))
    (ffn,) = [one for one in search.plain() if cut_dimensions(Shape.of(TEACHER), one.shape) == {"intermediate"}]
    wider = replace(ffn.shape, intermediate=ffn.shape.intermediate + 32)
    assert file_bytes(wider.applied_to(TEACHER), ffn.format) / 1e6 > 0.3 >= ffn.predicted["file_mb"]


@pytest.mark.parametrize("minutes", [1.0, 3.0, 8.0])
def test_the_time_limit_holds_for_trials_and_the_finish_together(minutes: float) -> None:
    """A trial takes a second for each thousand tokens, a finish of all 100,000 a hundred seconds."""
    now, trials = FakeTime(), Rule()
    clock = Clock(minutes, now)
    losses = trials.losses

    def slow(candidate: Candidate, tokens: int, trained: bool) -> Losses:
        now.now += tokens / 1_000
        return losses(candidate, tokens, trained)

    trials.losses = slow  # type: ignore[method-assign]
    search = started(with_limits(file_mb=0.5))
    for run in (try_plain, try_briefly, try_longer):
        run(search, cast(Trials, trials), EFFORT, clock)
    tokens = clock.affordable("trial", EFFORT.tokens, EFFORT.search_tokens)
    assert search.tried and now.now + tokens / 1_000 <= 60 * minutes
    assert (tokens == EFFORT.tokens) == (minutes > 2)


def test_a_candidate_is_sure_only_with_the_whole_band_of_its_prediction() -> None:
    """On another device the search prefers models whose time is inside the limit at the slow end of the band."""
    device = load_device("raspberry-pi-5")
    loose = [one.predicted["tpot_p50_ms"] for one in candidates(TEACHER, device, usual())]
    search = started(with_limits("raspberry-pi-5", tpot_p50_ms=statistics.median(loose), quality_loss_percent=50.0))
    factor = search.band["tpot_p50_ms"]
    assert factor > 1 and not search.uncertain and search.inside()
    assert all(factor * one.predicted["tpot_p50_ms"] <= statistics.median(loose) for one in search.inside())
    tight = started(with_limits("raspberry-pi-5", tpot_p50_ms=1.01 * min(loose)))
    assert tight.uncertain and tight.inside()


def test_times_of_a_busy_machine_exclude_nothing() -> None:
    device = load_device("host")
    search = Search(TEACHER, device, True, usual(), candidates(TEACHER, device, usual()))
    one = search.found[0]
    search.record(one, {**one.predicted, "ttft_ms": 1e6, "file_mb": 0.4}, busy=True)
    assert search.figures(one)["ttft_ms"] == one.predicted["ttft_ms"] and search.figures(one)["file_mb"] == 0.4
    assert search.is_inside(one) and one.name in search.busy


def plain_loss(weights: ModelFormat) -> float:
    """The usual loss without that of 8-bit activations."""
    return usual_loss(weights) - 0.2 * weights.quantized


class Costs:
    """A teacher that loses twice the usual by rounding, half of it when calibrated, and 10% by fewer tokens."""

    def rounding(self, weights: ModelFormat, calibrated: bool = False) -> float:
        return plain_loss(replace(weights, zero_points=False)) * (1 if calibrated else 2)

    def activations(self, weights: ModelFormat) -> float:
        return 0.25

    def vocabulary_loss(self, size: int, tuned: bool = False) -> float:
        if size < 300:
            raise UsageError("259 tokens always stay")
        return 6.0 if tuned else 10.0


def test_what_is_measured_replaces_the_usual_estimates() -> None:
    """Calibration's share at one format stands for the others; of equal ones the larger asymmetric grid goes."""
    trials = cast(Trials, Costs())
    found = measured_estimates(TEACHER, 1_000, trials, [], [320, 256], Clock())
    int4 = ModelFormat("int4", 64, head_bits=4)
    assert found.formats[int4] == pytest.approx(plain_loss(int4) + 0.25)
    assert not any(each.zero_points for each in found.formats)
    assert found.formats[ModelFormat("int8", per_row=True)] == pytest.approx(2 * 0.12 + 0.25)
    assert set(found.vocabularies) == {384, 320} and 0 < found.vocabularies[320] < 10
    with pytest.raises(UsageError, match="always stay"):
        measured_estimates(TEACHER, 1_000, trials, [256], [], Clock())
    search = start_search(TEACHER, with_limits(), found, Target("host"), 1_000)
    search.learn_vocabulary(320, 6.0)
    whole = [one for one in search.found if one.vocab_size == 320 and one.shape == Shape.of(TEACHER)]
    assert min(one.loss_percent for one in whole) == pytest.approx(6.0)


def test_a_block_that_is_longer_than_the_rows_is_left_out() -> None:
    """Rows of 128 numbers, or 256: blocks of 256 would be half empty in the one and save too little in the other."""
    for each in weight_formats(TEACHER):
        if each.quantized and not each.per_row and each.block_size > 16:
            finer = replace(each, block_size=each.block_size // 2)
            assert file_bytes(TEACHER, each) < file_bytes(TEACHER, finer)
    assert {each.block_size for each in weight_formats(TEACHER) if each.precision == "int4"} >= {16, 32, 64, 128}


def test_smaller_vocabularies_are_suggested_where_the_table_is_large() -> None:
    assert suggested_vocabularies(tiny_config(vocab_size=4_096, tie_word_embeddings=False)) == [3_072, 2_048]
    assert suggested_vocabularies(TEACHER.with_changes(vocab_size=128)) == []


def test_the_recipe_is_toml_whatever_the_paths_and_export_gets_the_threads(tmp_path: Path, checkpoint: Path) -> None:
    odd = tmp_path / 'a "quoted" name\x7f'  # DEL is legal in a path and must be escaped in TOML
    int4 = ModelFormat("int4", 64, head_bits=4, zero_points=True)
    candidate = replace(best(with_limits()), shape=replace(Shape.of(TEACHER), layers=2), format=int4)
    source = Source(checkpoint, (odd,), (odd,), valid=(odd,), threads=1, settings={"learning_rate": 1e-3})
    write_recipe(odd / "recipe.toml", candidate, source, Effort(1_000, 100), Target("host"), odd)
    recipe = tomllib.loads((odd / "recipe.toml").read_text(encoding="utf-8"))
    stages = {stage["command"]: stage for stage in recipe["stage"]}
    assert recipe["out"] == str(odd) and stages["prune"]["corpus"] == [str(odd)]
    assert stages["prune"]["set"]["learning_rate"] == 1e-3 and stages["quantize"]["qad"] == 200
    packing = {key: stages["quantize"][key] for key in ("bits", "group_size", "head_bits", "symmetric")}
    assert packing == {"bits": 4, "group_size": 64, "head_bits": 4, "symmetric": False}
    assert "learning_rate" not in stages["quantize"]
    assert stages["bench"]["on_device"] is False and stages["bench"]["text"] == [str(odd)]
    assert all(stages[command]["threads"] == 1 for command in ("prune", "quantize", "export", "bench"))
    assert export_settings(source, candidate.format, odd, odd)["threads"] == 1
    write_recipe(
        odd / "recipe.toml", replace(candidate, vocab_size=320), source, Effort(1_000, 100), Target("host"), odd
    )
    first = tomllib.loads((odd / "recipe.toml").read_text(encoding="utf-8"))["stage"][0]
    assert first["vocab_size"] == 320 and first["valid"] == [str(odd)]  # held-out text chooses no tokens


@dataclass
class Line:
    """A tiny teacher, its text, a budget that only a smaller model meets, and a clock that measures by rule."""

    teacher: Path
    corpus: Path
    budget: Path
    out: Path
    calls: list[Path] = field(default_factory=list)

    def fit(self, **changes: Any) -> FitResult:
        effort = changes.pop("effort", Effort(tokens=256, search_tokens=128, finalists=1))
        small = {"sequence": 64, "batch_size": 2, "accumulation": 1}
        valid = changes.pop("valid", ())
        source = Source(self.teacher, (self.corpus,), (self.corpus,), valid, settings=small)
        return run_fit(source, Target(str(self.budget)), self.out, effort, **changes)

    def measured(self, directory: Path, *_: Any, **__: Any) -> dict[str, Any]:
        """In place of `run_bench`."""
        self.calls.append(directory)
        return {
            "directory": str(directory),
            "file_bytes": directory_bytes(directory),
            "peak_rss_bytes": 80_000_000,
            "ttft_ms": {"512": 100.0},
            "tpot_ms": {"512": {"p50": 1.0, "p95": 2.0}},
            "memory_floor": {"by_depth_ms": {}},
            **{"threads": 1, "load_s": 0.1, "memory_floor_tpot_ms": 0.5, "prefill_tokens_per_s": None},
            **{"decode_tokens_per_s": {"512": 1000.0}, "clean": True},
        }

    def timed(self, directory: Path, device: Device, threads: int | None = None, provider: str = "cpu") -> ShortBench:
        """In place of `short_bench`; the first measurement is disturbed."""
        self.calls.append(directory)
        figures: dict[str, float | None] = {"file_mb": directory_bytes(directory) / 1e6, "peak_memory_mb": 80.0}
        figures |= {"ttft_ms": 100.0, "tpot_p50_ms": 1.0, "tpot_p95_ms": 2.0, "quality_loss_percent": None}
        return ShortBench(figures, other_cores=1.0 if len(self.calls) == 1 else 0.0)


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
        patch.setattr("benchmarks.search.trials.wait_for_quiet", lambda _: True)
        patch.setattr("benchmarks.measure.bench.run_bench", line.measured)
        patch.setattr("benchmarks.reporting.bench_tables.print_bench", lambda *_: None)
        yield line


@pytest.mark.slow
def test_a_search_from_start_to_end(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    """The winner is inside the budget as measured, the recipe makes it, and a second run does nothing anew."""
    found = line.fit()
    result = found.to_json()
    assert len(line.calls) > 1 and line.calls[0] == line.calls[1]  # measured again once the machine was quiet
    limit = load_device(str(line.budget)).limits.file_mb
    assert found.out is not None and directory_bytes(found.out) / 1e6 <= limit
    assert found.bench is not None and found.decided_by == "measurement"
    failed = [one["name"] for one in found.bench["budget"]["limits"] if one["verdict"] == "fail"]
    assert not failed and (found.exit_code == 0) == (found.bench["budget"]["verdict"] == "pass")
    chosen = next(one for one in found.candidates if one["name"] == found.chosen)
    assert chosen["measured"]["ttft_ms"] == 100.0 and chosen["within"] and not chosen["busy"]
    assert chosen["tried_tokens"] and chosen["bits_per_byte"] > 0
    assert found.bench["quality_loss_percent"] is not None  # judged although no held-out text was given
    assert found.documents["trials"] > 0 and found.documents["final"] > 0
    recipe = tomllib.loads(Path(str(found.line)).read_text(encoding="utf-8"))
    assert [stage["command"] for stage in recipe["stage"]][-2:] == ["export", "bench"]
    assert json.loads((line.out / "fit.json").read_text(encoding="utf-8"))["chosen"] == found.chosen
    print_fit(console.output(), result)
    shown = capsys.readouterr().out
    assert found.chosen in shown.replace("\n", "") and "file size" in shown
    assert len(shown.splitlines()) <= 24 and "after trials on" in shown
    calls = len(line.calls)
    again = line.fit()
    assert again.chosen == found.chosen and len(line.calls) == calls
    with pytest.raises(ConflictError, match="other finalists"):
        line.fit(effort=Effort(tokens=256, search_tokens=128, finalists=2))
    with pytest.raises(ConflictError, match="other inputs, valid"):
        line.fit(valid=(line.corpus,))


def finished(name: str, loss: float, **figures: float) -> dict[str, Any]:
    """A finished model in short."""
    device = with_limits("host", ttft_ms=900.0, quality_loss_percent=3.0)
    judged = judge(device, {"quality_loss_percent": loss, "ttft_ms": 100.0, **figures})
    limits = [
        {**one, "verdict": "pass" if one["value"] is None else one["verdict"]} for one in judged.to_json()["limits"]
    ]
    verdict = "fail" if any(one["verdict"] == "fail" for one in limits) else "pass"
    return {"chosen": name, "bench": {"quality_loss_percent": loss, "budget": {"verdict": verdict, "limits": limits}}}


@pytest.mark.parametrize(
    ("made", "best", "attempts"),
    [
        ([finished("a", 12.0), finished("b", 3.9), finished("c", 5.0)], "b", 3),  # quality alone, in no order
        ([finished("a", 1.0, ttft_ms=2000.0), finished("b", 1.0, ttft_ms=1000.0)], "b", 2),
        ([finished("a", 1.0, ttft_ms=1000.0), finished("b", 1.0, ttft_ms=2000.0)], "a", 2),
        ([finished("a", 1.0, ttft_ms=2000.0), finished("b", 2.0), finished("c", 1.0)], "b", 2),
    ],
)
def test_the_best_of_the_finished_models_is_returned(made: list[dict[str, Any]], best: str, attempts: int) -> None:
    ranking = candidates(TEACHER, load_device("host"), usual())[: len(made)]
    left = list(made)
    result = finish_best(ranking, lambda _: left.pop(0), Clock())
    assert result["chosen"] == best and len(made) - len(left) == attempts
    assert set(result["gave_up"]) == {one["chosen"] for one in made[:attempts]} - {best}


@pytest.fixture
def fresh(line: Line, tmp_path: Path) -> Line:
    """The same, with nothing made yet."""
    return replace(line, out=tmp_path / "fit", calls=[])


def test_a_dry_run_makes_nothing_and_needs_no_text(fresh: Line) -> None:
    result = fit(teacher=fresh.teacher, target=str(fresh.budget), out=fresh.out, dry_run=True)
    assert not fresh.out.exists() and not fresh.calls
    assert result.chosen and result.inside < result.considered


def test_a_smaller_vocabulary_is_a_candidate_and_must_be_smaller(fresh: Line) -> None:
    result = fresh.fit(dry_run=True, vocabularies=[320])
    assert result.considered > fresh.fit(dry_run=True).considered
    with pytest.raises(UsageError, match="below the teacher's 384"):
        fresh.fit(vocabularies=[384])


def test_a_directory_that_holds_something_else_is_left_alone(fresh: Line) -> None:
    fresh.out.mkdir()
    (fresh.out / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConflictError, match="holds no search"):
        fresh.fit()
    assert [path.name for path in fresh.out.iterdir()] == ["mine.txt"]
