"""`fit`: what budgets let through, how measurements correct predictions, and one search from start to end."""

import json
import math
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import sportsllm
from benchmarks.devices.load import DEVICES, load_device
from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import judge
from benchmarks.fit import FitResult, _make, complaint, finish_best, fit, run_fit
from benchmarks.measure.machine import choose_cpus
from benchmarks.model_size import BODY_BYTES, ModelFormat, file_bytes
from benchmarks.search.candidates import ANCHORS, WHOLE, Candidate, Size, candidate_of, expert_counts, formats, ways
from benchmarks.search.recipe import Effort, Source, Target, export_settings, prune_settings, with_samples, write_recipe
from benchmarks.search.results import print_fit
from benchmarks.search.rounds import Search, Tried, run_rounds, start_search, try_longer, try_plain
from benchmarks.search.trials import BENCH_S, Clock, Losses, Timed, Trials
from compress.pruning.shapes import Shape, shape_for_share
from compress.quantization.config import QuantizationConfig, SizeBudget
from sportsllm import console
from sportsllm.errors import ArtifactError, ConflictError, DivergedError, GateError, InterruptedRun, UsageError
from sportsllm.formats.artifact import only_run
from sportsllm.formats.huggingface import load_config, to_hf
from sportsllm.formats.manifest import Manifest, directory_bytes, manifest_of
from sportsllm.models.config import Experts, ModelConfig, Selection
from sportsllm.models.presets import preset
from sportsllm.verbs.run import RunResult, load_recipe
from tests.support.models import tiny_config
from tests.support.training import interrupted_in_step

TEACHER = tiny_config(  # with room for the tokens that limits speak of
    num_hidden_layers=4, intermediate_size=256, hidden_size=128, num_attention_heads=8, max_position_embeddings=1_024,
)  # fmt: skip


def with_limits(name: str = "laptop-x86", **limits: float) -> Device:
    device = load_device(name)
    return device.model_copy(update={"limits": device.limits.model_copy(update=limits)})


def started(device: Device, teacher: ModelConfig = TEACHER, target: Target | None = None) -> Search:
    return start_search(teacher, device, target or Target("host"), 100_000)


FULL, MIXTURE = Shape.of(TEACHER), TEACHER.with_changes(mlp_kind="experts", experts=Experts(8, 2))


def one_of(search: Search, way: str, precision: str = "int4") -> Candidate:
    """The first planned candidate of a way."""
    return next(one for one in search.plain(False) if one.way == way and one.format.precision == precision)


def test_ways_are_the_plain_cuts_largest_first_and_all_of_them_can_be_cut() -> None:
    found = ways(TEACHER)
    assert list(found) == [WHOLE, "feed-forward", "evenly", "depth", "hidden size", "heads", "evenly and depth"]
    assert found[WHOLE] == [Size(FULL, TEACHER.vocab_size)]
    for way, line in found.items():
        counts = [size.applied_to(TEACHER).block_parameters for size in line]
        assert counts == sorted(counts, reverse=True), way
        assert (Size(FULL, TEACHER.vocab_size) in line) == (way == WHOLE)
    assert {size.shape for size in found["evenly"]} >= {shape_for_share(TEACHER, p / 100) for p in range(20, 96, 5)}
    assert found["depth"][0].shape == replace(FULL, layers=3)
    fewer = ways(TEACHER, [320])
    assert fewer["320 tokens"] == [Size(FULL, 320)] and fewer["320 tokens, evenly"][0].vocab_size == 320


def test_a_mixture_may_lose_experts_and_options_name_them_only_then(tmp_path: Path) -> None:
    assert expert_counts(MIXTURE) == [2, 4, 8]
    assert expert_counts(MIXTURE.with_changes(experts=Experts(8, 3))) == [4, 8]
    assert expert_counts(MIXTURE.with_changes(experts=Experts(8, 2, groups=4))) == [8] and expert_counts(TEACHER) == [0]
    assert [size.shape.experts for size in ways(MIXTURE)["experts"]] == [4, 2]
    config = MIXTURE.with_changes(num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)), encoding="utf-8")
    source, whole = Source(tmp_path, (), ()), Shape.of(config)
    assert prune_settings(source, replace(whole, experts=4), tmp_path, tmp_path, 1)["experts"] == 4
    assert "experts" not in prune_settings(source, replace(whole, layers=1), tmp_path, tmp_path, 1)


def test_an_int4_candidate_has_room_for_the_matrices_that_quantize_gives_8_bits() -> None:
    """Its file is predicted larger by as much as `quantize --bits 4` may add, and not that of another format."""
    for teacher in (TEACHER, TEACHER.with_changes(tie_word_embeddings=False)):
        for stored in (ModelFormat("int4", 64), ModelFormat("int8", 128)):
            candidate = candidate_of("", Size(FULL, teacher.vocab_size), stored, teacher, load_device("laptop-x86"))
            mixing = SizeBudget().spare_bytes(teacher, QuantizationConfig(4, 64)) + BODY_BYTES
            spare = mixing if stored.precision == "int4" else 0
            # The prediction counts the vectors of the layers too.
            assert candidate.predicted["file_mb"] * 1e6 == pytest.approx(file_bytes(teacher, stored) + spare, rel=1e-3)


def test_on_a_gpu_every_format_is_float16_and_predicted_so(tmp_path: Path) -> None:
    """An INT8 cache has no such graph; unrounded weights take two bytes."""
    search = started(with_limits(), target=Target("host", True, "cuda", "gpu"))
    assert {each.precision for each in search.formats} == {"fp16", "int8", "int4"}
    assert all(each.cache == "fp16" for each in search.formats)
    whole = one_of(search, WHOLE, "fp16")
    assert whole.predicted["file_mb"] == pytest.approx(2 * TEACHER.parameters / 1e6, rel=0.1)
    source = Source(tmp_path, (), ())
    assert export_settings(source, ModelFormat("int4"), tmp_path, tmp_path, "gpu")["dtype"] == "fp16"
    assert "dtype" not in export_settings(source, ModelFormat("int4"), tmp_path, tmp_path)


def test_each_way_is_planned_in_each_format_as_large_as_the_budget_allows() -> None:
    """A coarser format only if the model is larger; never a cut in a format in which the whole teacher fits."""
    search = started(with_limits(file_mb=0.4))
    planned = search.plain(sure=False)
    assert planned and not any(search.missed(one, sure=False) for one in planned)
    fitting = {one.format for one in planned if one.way == WHOLE}
    for way in ("feed-forward", "evenly", "depth", "hidden size"):
        line = [one for one in planned if one.way == way]
        assert line and not fitting & {one.format for one in line}
        assert [one.parameters for one in line] == sorted({one.parameters for one in line}, reverse=True)
    ffn = one_of(search, "feed-forward", "int8")
    wider = Size(replace(ffn.size.shape, intermediate=ffn.size.shape.intermediate + 32), TEACHER.vocab_size)
    assert "file_mb" in search.missed(candidate_of("x", wider, ffn.format, TEACHER, search.device), sure=False)
    assert ffn.bound_by == ("file_mb",)


def test_a_budget_that_only_a_shorter_cache_can_meet_gets_one() -> None:
    """The whole model with a float cache is too large by less than the cache: a smaller cache remains."""
    teacher, device = preset("tiny-5m"), load_device("raspberry-pi-5")
    size = Size(Shape.of(teacher), teacher.vocab_size)
    float_caches = [each for each in formats(teacher) if each.cache != "int8"]
    peaks = [candidate_of("", size, each, teacher, device).predicted["peak_memory_mb"] for each in float_caches]
    planned = started(with_limits(device.name, peak_memory_mb=min(peaks) - 1), teacher).plain(False)
    assert {one.format.cache for one in planned if one.way == WHOLE} == {"int8"}
    selected = teacher.with_changes(attention_kind="selected", selection=Selection(512, heads=4, parts=2, pairs=16))
    assert {each.cache for each in formats(selected)} == {"fp32"}  # no export has a smaller one
    with pytest.raises(UsageError, match="GPUs compute in float16"):
        formats(selected, "gpu")


def test_nothing_fits_names_the_nearest_miss_and_what_to_relax() -> None:
    """Numbers that `--limit` takes, also beyond a thousand."""
    relax = r"relax file_mb to [\d.]+( and peak_memory_mb to [\d.]+)?, or start"
    said = rf"nothing fits laptop-x86: .* file_mb [\d.]+ of 0.01 MB.* \(predicted\); {relax}"
    with pytest.raises(GateError, match=said):
        started(with_limits(file_mb=0.01), TEACHER.with_changes(vocab_size=2**24))


def test_what_is_measured_corrects_those_alike() -> None:
    search = started(load_device("host"))
    one, *others = search.plain(False)
    twice = {name: 2 * value for name, value in one.predicted.items()}
    search.record(one, {**twice, "quality_loss_percent": None})
    alike = candidate_of("x", Size(replace(FULL, layers=2), TEACHER.vocab_size), one.format, TEACHER, search.device)
    assert search.figures(one)["ttft_ms"] == twice["ttft_ms"]
    assert search.figures(others[0])["ttft_ms"] == pytest.approx(2 * others[0].predicted["ttft_ms"])
    search.record(others[0], {name: 5 * value for name, value in others[0].predicted.items()})
    assert search.figures(alike)["ttft_ms"] == pytest.approx(2 * alike.predicted["ttft_ms"])  # as its own format
    elsewhere = started(load_device("laptop-x86"))
    elsewhere.record(one, twice)
    assert elsewhere.figures(alike) == alike.predicted


def test_times_of_a_busy_machine_exclude_nothing() -> None:
    search = started(load_device("host"))
    one = search.plain(False)[0]
    search.record(one, {**one.predicted, "ttft_ms": 1e6, "file_mb": 0.4, "peak_memory_mb": 160}, busy=True)
    assert search.figures(one)["ttft_ms"] == one.predicted["ttft_ms"] and search.figures(one)["file_mb"] == 0.4
    assert not search.missed(one, sure=True) and one.name in search.busy  # 160 MB are the limit


def test_of_those_as_good_as_the_best_the_one_that_opens_everywhere_and_is_fastest_wins() -> None:
    search, names = started(load_device("laptop-x86")), dict[str, Candidate]()
    int8 = ModelFormat("int8", 128)
    for label, layers, format in (("fast", 1, int8), ("slow", 2, int8), ("worse", 3, int8)):
        size = Size(replace(FULL, layers=layers), TEACHER.vocab_size)
        names[label] = candidate_of(label, size, format, TEACHER, search.device)
    closed = replace(int8, cache="int8")
    names["closed"] = candidate_of("closed", Size(FULL, TEACHER.vocab_size), closed, TEACHER, search.device)
    assert names["closed"].closed_to == ("optimum",) and not names["fast"].closed_to
    for label, loss in (("slow", 2.0), ("closed", 2.0), ("fast", 2.29), ("worse", 2.31)):  # equal within 0.3 points
        search.found[names[label].name] = names[label]
        search.tried[names[label].name] = Tried(100_000, Losses(loss - 0.5, loss))
    assert [one.way for one in search.ranking()] == ["fast", "slow", "closed", "worse"]
    search.tried[names["worse"].name] = Tried(100_000, Losses(1.0, 2.31), longer=True)
    assert search.ranking()[0] == names["worse"]


def test_an_export_whose_files_exceed_the_limit_is_not_finished_while_another_fits() -> None:
    """The prediction put both inside."""
    search = started(with_limits(file_mb=0.34))
    large, small = one_of(search, "feed-forward"), one_of(search, "depth")
    for candidate, losses in ((large, Losses(0.0, 0.0, None, 0.341)), (small, Losses(5.0, 5.0, None, 0.339))):
        search.found[candidate.name], search.tried[candidate.name] = candidate, Tried(10_000, losses)
    assert search.ranking() == [small]
    try_longer(search, cast(Trials, trials := Rule()), EFFORT, Clock())
    assert not trials.calls
    del search.tried[small.name]
    assert search.ranking() == [large]


class Rule:
    """A teacher whose losses follow a rule: a cut of the FFN costs least, rounding by its bits, all less by tokens."""

    def __init__(self, scale: float = 30.0, rounding: float = 1.0) -> None:
        self.scale, self.rounding, self.calls = scale, rounding, list[tuple[str, int, bool]]()
        self.now = 0.0  # a second for each thousand tokens
        self.fails: Callable[[str, bool], bool] = lambda name, longer: False

    def recovered(self, size: Size, tokens: int) -> float:
        weights = {"intermediate": 0.2, "layers": 1.0, "hidden": 1.5, "heads": 0.5, "kv_heads": 0.5}
        cuts = {name: -math.log(getattr(size.shape, name) / getattr(FULL, name)) for name in weights}
        return self.scale * sum(weights[name] * cut for name, cut in cuts.items()) * (tokens / 100_000) ** -0.3

    def losses(self, candidate: Candidate, tokens: int, trained: bool) -> Losses:
        self.calls.append((candidate.name, tokens, trained))
        self.now += tokens / 1_000
        if self.fails(candidate.name, trained):
            raise ArtifactError(f"{candidate.name} overflows")
        loss = self.recovered(candidate.size, tokens)
        return Losses(loss, loss + self.rounding * {"fp32": 0.0, "int8": 0.2, "int4": 1.0}[candidate.format.precision])

    def timed(self, candidate: Candidate) -> Timed:
        return Timed(dict(candidate.predicted), busy=False)

    def best_right_after_the_cut(self, shapes: list[Shape], count: int, seconds: float) -> list[Shape]:
        return sorted(shapes, key=lambda shape: self.recovered(Size(shape, 1), 1))[:count]


EFFORT = Effort(100_000, 10_000)


@pytest.mark.parametrize(("scale", "best"), [(30.0, WHOLE), (1.5, "feed-forward")])
def test_measured_losses_decide_between_cuts_and_small_formats(scale: float, best: str) -> None:
    """INT4 of the whole costs two points. Cut the FFN if that costs less, and keep the teacher whole if cuts hurt."""
    whole, device = Size(FULL, TEACHER.vocab_size), load_device("laptop-x86")
    int4 = candidate_of(WHOLE, whole, ModelFormat("int4", 64), TEACHER, device)
    search = started(with_limits(file_mb=int4.predicted["file_mb"] + 0.01))
    trials = Rule(scale, rounding=2.0)
    ranking = run_rounds(search, cast(Trials, trials), EFFORT, Clock())
    assert ranking[0].way == best
    planned = search.plain(sure=True)
    assert {one.way for one in planned} == {*ways(TEACHER)} - {"heads"}  # too few parameters
    assert {one.name for one in planned} <= set(search.tried)
    assert any(search.found[name].way == "mixed" for name in search.tried)
    longer = [call for call in trials.calls if call[2]]
    assert len(longer) == EFFORT.finalists and {tokens for _, tokens, _ in longer} == {30_000}
    for name in search.tried:
        candidate = search.found[name]
        assert search.expected(candidate) == pytest.approx(trials.losses(candidate, 100_000, True).rounded)


def test_simple_cuts_come_first_and_the_best_export_is_always_tried_for_longer() -> None:
    """Cuts that are expected to gain more by further tokens do not push it out."""
    search, trials = started(with_limits(file_mb=0.34)), Rule()
    cut = [one.way for one in search.plain(False) if one.way != WHOLE]
    assert set(cut[:3]) == set(ANCHORS) and not {*ANCHORS} & {*cut[cut.index("hidden size") :]}
    simple, *others = search.plain(False)[:4]
    for place, candidate in enumerate([simple, *others]):
        search.found[candidate.name] = candidate
        search.tried[candidate.name] = Tried(10_000, Losses(0.5, 5.0) if place == 0 else Losses(9.0, 9.0))
    assert simple not in search.ranking()[: EFFORT.finalists]
    try_longer(search, cast(Trials, trials), EFFORT, Clock())
    assert len(trials.calls) == EFFORT.finalists and (simple.name, EFFORT.longer_tokens, True) in trials.calls


def test_a_teacher_that_loses_nothing_whole_is_not_cut() -> None:
    """INT8 loses less than counts: INT4 is still tried, as it could be equal and faster; cuts cannot be better."""
    search, trials = started(load_device("laptop-x86")), Rule()
    best, *_ = run_rounds(search, cast(Trials, trials), EFFORT, Clock())
    assert {search.found[name].way for name in search.tried} == {WHOLE}
    assert best.format.precision == "int8" and not any(longer for *_, longer in trials.calls)


def test_elsewhere_what_is_surely_inside_comes_first() -> None:
    """The time is inside the limit at the slow end of the band, unless the quality limit asks for a larger model."""
    pi = "raspberry-pi-5"
    whole = one_of(started(load_device(pi)), WHOLE).predicted["tpot_p50_ms"]
    for quality, sure in ((50.0, True), (1e-3, False)):
        search = started(with_limits(pi, tpot_p50_ms=whole, quality_loss_percent=quality))
        run_rounds(search, cast(Trials, Rule()), EFFORT, Clock())
        assert all(bool(search.missed(search.found[name], sure=True)) is False for name in search.tried) == sure
        assert not any(search.missed(search.found[name], sure=False) for name in search.tried)


def test_on_the_device_a_model_that_is_outside_as_timed_is_replaced_by_a_smaller_one() -> None:
    device = with_limits("host", tpot_p50_ms=1.0, ttft_ms=1e3, peak_memory_mb=1e3, file_mb=0.5)
    search, trials = started(device), Rule()

    def slow(candidate: Candidate) -> Timed:
        share = candidate.parameters / TEACHER.parameters
        return Timed({**candidate.predicted, "tpot_p50_ms": 2.0 * share}, busy=False)

    trials.timed = slow  # type: ignore[method-assign]
    try_plain(search, cast(Trials, trials), EFFORT, Clock())
    assert search.tried and all(name in search.timed for name in search.tried)
    assert all(search.timed[name]["tpot_p50_ms"] <= 1.0 for name in search.tried)  # type: ignore[operator]


def test_a_search_goes_on_without_candidates_whose_trials_fail() -> None:
    """In either round; if all fail, it ends with the first one's error."""
    search, trials = started(with_limits(file_mb=0.5)), Rule()
    failing = {one.name for one in search.plain(sure=False)[::2]}
    trials.fails = lambda name, longer: longer or name in failing
    ranking = run_rounds(search, cast(Trials, trials), EFFORT, Clock())
    assert {*search.failed} & failing and {*search.failed} - failing
    assert ranking and not {one.name for one in ranking} & {*search.failed}
    trials.fails = lambda name, longer: True
    with pytest.raises(ArtifactError, match=f"{trials.calls[0][0]} overflows"):
        run_rounds(started(with_limits(file_mb=0.5)), cast(Trials, trials), EFFORT, Clock())


@pytest.mark.parametrize("minutes", [1.5, 4.0])
def test_the_time_limit_holds_for_trials_and_the_finish_together(minutes: float) -> None:
    """A trial takes a second for each thousand tokens, a finish of all 100,000 a hundred seconds, and its bench."""
    trials = Rule()
    clock = Clock(minutes, lambda: trials.now)
    search = started(with_limits(file_mb=0.5))
    run_rounds(search, cast(Trials, trials), EFFORT, clock)
    tokens = clock.affordable("trial", EFFORT.tokens, EFFORT.search_tokens, BENCH_S)
    assert search.tried and trials.now + tokens / 1_000 + BENCH_S <= 60 * minutes
    assert (tokens == EFFORT.tokens) == (minutes > 2)


@pytest.mark.parametrize(("token_s", "cuts"), [(0.0, True), (1e-3, False)])
def test_a_recovery_that_was_never_timed_counts_as_predicted(token_s: float, cuts: bool) -> None:
    """The first cut is not begun if the prediction leaves no time for it and the finish."""
    trials = Rule()
    clock, search = Clock(2.0, lambda: trials.now), started(with_limits(file_mb=0.5))
    clock.token_s = token_s
    try_plain(search, cast(Trials, trials), EFFORT, clock)
    assert any(search.found[name].way != WHOLE for name in search.tried) == cuts


def test_the_recipe_is_toml_whatever_the_paths_and_export_gets_the_threads(tmp_path: Path, checkpoint: Path) -> None:
    odd = tmp_path / 'a "quoted" name\x7f'  # DEL is legal in a path and must be escaped in TOML
    int4 = ModelFormat("int4", 64, head_bits=4, zero_points=True)
    teacher = load_config(checkpoint)
    size = Size(replace(Shape.of(teacher), layers=1), teacher.vocab_size)
    candidate = candidate_of("depth", size, int4, teacher, load_device("laptop-x86"))
    source = Source(checkpoint, (odd,), (odd,), valid=(odd,), threads=1, settings={"learning_rate": 1e-3})

    def recipe_of(one: Candidate) -> dict[str, Any]:
        write_recipe(odd / "recipe.toml", one, source, Effort(1_000, 100), Target("host"), odd)
        return tomllib.loads((odd / "recipe.toml").read_text(encoding="utf-8"))

    recipe = recipe_of(candidate)
    stages = {stage["command"]: stage for stage in recipe["stage"]}
    assert recipe["out"] == str(odd) and stages["prune"]["corpus"] == [str(odd)]
    assert stages["prune"]["set"]["learning_rate"] == 1e-3 and "qad" not in stages["quantize"]
    assert (stages["quantize"]["bits"], stages["quantize"]["group_size"]) == (4, 64)
    assert stages["bench"]["on_device"] is False and stages["bench"]["text"] == [str(odd)]
    assert all(stages[command]["threads"] == 1 for command in ("prune", "quantize", "export", "bench"))
    assert export_settings(source, int4, odd, odd)["threads"] == 1
    packed, *_ = recipe_of(replace(candidate, size=replace(size, shape=Shape.of(teacher))))["stage"]
    assert packed["qad"] == 200 and packed["set"] == {"head_bits": 4, "symmetric": False}  # and no learning rate
    first, tuned, *_ = recipe_of(replace(candidate, size=replace(size, vocab_size=320)))["stage"]
    assert first["vocab_size"] == 320 and first["valid"] == [str(odd)]  # held-out text chooses no tokens
    assert (tuned["command"], tuned["checkpoint"], tuned["learning_rate"]) == ("train", first["out"], 1e-3)
    assert len(load_recipe(odd / "recipe.toml").stages) == 6  # every stage has settings that its command takes


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
        source = Source(self.teacher, (self.corpus,), (self.corpus,), changes.pop("valid", ()), settings=small)
        return run_fit(source, Target(str(self.budget)), self.out, effort, **changes)

    def measured(self, directory: Path, *_: Any, **__: Any) -> dict[str, Any]:
        """In place of `run_bench`."""
        self.calls.append(directory)
        times = {"ttft_ms": {"512": 100.0}, "tpot_ms": {"512": {"p50": 1.0, "p95": 2.0}}}
        return {"directory": str(directory), "file_bytes": directory_bytes(directory), "peak_rss_bytes": 8e7} | times

    def timed(self, directory: Path, device: Device, threads: int | None = None, provider: str = "cpu") -> Any:
        """In place of `short_bench`; the first measurement is disturbed."""
        self.calls.append(directory)
        figures: dict[str, float | None] = {"file_mb": directory_bytes(directory) / 1e6, "peak_memory_mb": 80.0}
        figures |= {"ttft_ms": 100.0, "tpot_p50_ms": 1.0, "tpot_p95_ms": 2.0, "quality_loss_percent": None}
        return figures, 1.0 if len(self.calls) == 1 else 0.0


@pytest.fixture(scope="module")
def line(checkpoint: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("search")
    checkpoint = shutil.copytree(checkpoint, folder / "teacher")  # with room for the tokens that limits speak of
    config = load_config(checkpoint).with_changes(max_position_embeddings=1_024)
    (checkpoint / "config.json").write_text(json.dumps(to_hf(config)), encoding="utf-8")
    corpus, budget = folder / "corpus.jsonl", folder / "pocket.toml"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:12]), encoding="utf-8")
    # Of the smallest format: something must be cut.
    limit = 0.97 * min(file_bytes(config, each) for each in formats(config)) / 1e6
    lines = (DEVICES / "host.toml").read_text(encoding="utf-8").splitlines()
    limits = {"name": '"pocket"', "file_mb": f"{limit:.4f}", "quality_loss_percent": "100", "ttft_ms": "900"}
    budget.write_text(
        "\n".join(f"{key} = {limits[key]}" if (key := text.split(" = ")[0]) in limits else text for text in lines),
        encoding="utf-8",
    )
    line = Line(checkpoint, corpus, budget, folder / "fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.search.rounds._MIXED", 1)
        patch.setattr("benchmarks.search.rounds._VALUES", 3)
        patch.setattr("benchmarks.search.recipe._CUT_SAMPLES", 8)
        patch.setattr("benchmarks.search.trials._SCORED_TOKENS", 2_000)
        patch.setattr("benchmarks.search.trials.short_bench", line.timed)
        patch.setattr("benchmarks.search.trials.wait_for_quiet", lambda *_: True)
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
    assert min(found.documents.values()) > 0 and found.bench["quality_loss_percent"] is not None  # by text of its own
    recipe = tomllib.loads(Path(str(found.line)).read_text(encoding="utf-8"))
    assert [stage["command"] for stage in recipe["stage"]][-2:] == ["export", "bench"]
    cuts = [found.out.parent / "student", *(line.out / "trials" / "recovered").glob("l*-128")]
    assert len({manifest_of(cut).settings["samples"] for cut in cuts}) == 1  # else a trial is of another cut
    assert json.loads((line.out / "fit.json").read_text(encoding="utf-8"))["chosen"] == found.chosen
    print_fit(console.output(), result)
    shown = capsys.readouterr().out
    assert found.chosen in shown.replace("\n", "") and "file MB" in shown
    assert len(shown.splitlines()) <= 24 and "after trials on" in shown
    assert not found.whole_teacher and {"feed-forward", "depth"} <= {one["way"] for one in found.candidates}
    assert "shapes cut" in (line.out / "trials" / "log.txt").read_text(encoding="utf-8")  # mixed ones
    calls = len(line.calls)
    assert line.fit().chosen == found.chosen and len(line.calls) == calls
    with pytest.raises(ConflictError, match=r"other settings or inputs \(finalists 1, not 2\)"):
        line.fit(effort=Effort(tokens=256, search_tokens=128, finalists=2))
    with pytest.raises(ConflictError, match="other settings or inputs"):
        line.fit(valid=(line.corpus,))
    with only_run(line.out), pytest.raises(ConflictError, match=f"^{line.out}: another run is writing it"):
        line.fit()


def test_a_machine_that_stays_busy_is_waited_for_once(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are not used, and the time limit is not spent on waiting before each candidate.

    Only what other programs do on the processors that are measured counts.
    """
    waits = list[tuple[float, list[int] | None]]()
    monkeypatch.setattr("benchmarks.search.trials.wait_for_quiet", lambda *asked: bool(waits.append(asked)))
    monkeypatch.setattr("benchmarks.search.trials.short_bench", lambda *_: ({"file_mb": 0.1}, 1.0))
    device, config = load_device(str(line.budget)), load_config(line.teacher)
    trials = Trials(Source(line.teacher, (), (), threads=1), device, tmp_path, line.corpus, 1)
    for size in ways(config)["feed-forward"][:2]:
        timed = trials.timed(candidate_of("feed-forward", size, ModelFormat("int4", 32), config, device))
        assert timed.busy and timed.figures == {"file_mb": 0.1}
    assert waits == [(60.0, choose_cpus(1)), (0.0, choose_cpus(1))]


def test_a_repeated_search_may_start_elsewhere(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut is asked for with the same scores again: with others `prune` would refuse what is there."""

    def prune(self: Trials, command: str, settings: dict[str, Any]) -> None:
        scores = settings.get("settings", {}).get("scores")
        if not settings["out"].exists():
            Manifest(command=command, settings={"scores": scores}).write(settings["out"])
        assert manifest_of(settings["out"]).text("scores") == (scores and str(scores))

    monkeypatch.setattr(Trials, "_run", prune)
    cuts = ways(load_config(line.teacher))
    for order in ([*cuts["feed-forward"][:2]], [cuts["feed-forward"][1], cuts["depth"][0], cuts["feed-forward"][0]]):
        trials = Trials(Source(line.teacher, (), ()), load_device(str(line.budget)), tmp_path, line.corpus, 1)
        made = [trials._student(size, 1) for size in order]
    assert manifest_of(made[1]).text("scores") == str(made[2])  # those of the first cut of all


def test_short_sequences_of_a_recovery_do_not_ask_the_first_ranking_for_samples_that_the_text_lacks(
    line: Line, texts: list[str], tmp_path: Path
) -> None:
    text, whole = tmp_path / "text.jsonl", Shape.of(load_config(line.teacher))
    text.write_text(json.dumps({"text": " ".join(texts)[:4_000]}) + "\n", encoding="utf-8")
    source = with_samples(Source(line.teacher, (text,), (text,), settings={"sequence": 16}))
    trials = Trials(source, load_device(str(line.budget)), tmp_path, line.corpus, 1)
    smaller = [replace(whole, layers=1), replace(whole, intermediate=32)]
    assert trials.best_right_after_the_cut(smaller, 1, 60.0)[0] in smaller


def finished(name: str, loss: float, **figures: float) -> dict[str, Any]:
    device = with_limits("host", ttft_ms=900.0, quality_loss_percent=3.0)
    judged = judge(device, {"quality_loss_percent": loss, "ttft_ms": 100.0, **figures})
    limits = [asdict(one) | {"verdict": "pass" if one.value is None else one.verdict} for one in judged]
    verdict = "fail" if any(one["verdict"] == "fail" for one in limits) else "pass"
    budget = {"target": device.name, "verdict": verdict, "limits": limits}
    return {"chosen": name, "bench": {"quality_loss_percent": loss, "budget": budget}}


@pytest.mark.parametrize(
    ("made", "best", "attempts"),
    [
        ([finished("a", 12.0), finished("b", 3.9), finished("c", 5.0)], "b", 3),  # quality alone, in no order
        ([finished("a", 1.0, ttft_ms=2000.0), finished("b", 1.0, ttft_ms=1000.0)], "b", 2),
        ([finished("a", 1.0, ttft_ms=1000.0), finished("b", 1.0, ttft_ms=2000.0)], "a", 2),
        ([finished("a", 1.0, ttft_ms=2000.0), finished("b", 2.0), finished("c", 1.0)], "b", 2),
        ([{}, finished("b", 2.0), finished("c", 1.0)], "b", 2),  # the first one could not be finished
    ],
)
def test_the_best_of_the_finished_models_is_returned(made: list[dict[str, Any]], best: str, attempts: int) -> None:
    ranking = started(load_device("laptop-x86")).plain(False)[: len(made)]
    left = list(made)

    def finish(_: Candidate) -> dict[str, Any]:
        if not (one := left.pop(0)):
            raise DivergedError("the loss is not finite")
        return one

    result = finish_best(ranking, finish, Clock())
    assert result["chosen"] == best and len(made) - len(left) == attempts
    assert set(result["gave_up"]) == {one["chosen"] for one in made[:attempts] if one} - {best}
    if not made[0]:
        left = [{}]
        with pytest.raises(DivergedError):
            finish_best(ranking[:1], finish, Clock())


def test_a_finish_that_the_time_cut_short_is_kept_and_made_anew_with_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = one_of(started(with_limits(file_mb=0.3)), "feed-forward")
    (tmp_path / "trials").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(to_hf(TEACHER)), encoding="utf-8")
    made = RunResult(recipe="", stages=[], bench=None, seconds=0.0)
    monkeypatch.setattr("sportsllm.verbs.run.run", lambda _: made)
    tokens = list[int]()
    for minutes in (1.5, 0.1, None, 1.5):
        clock = Clock(minutes, now=lambda: 0.0)
        clock._seen["trial"] = [(100, 30.0), (200, 60.0)]
        source, effort, target = Source(tmp_path, (), ()), Effort(1_000, 100), Target("laptop-x86")
        found = _make(tmp_path, candidate, source, effort, target, tmp_path, clock)
        written = tomllib.loads(Path(found["line"]).read_text(encoding="utf-8"))
        tokens.append(found["tokens"])
        assert written["stage"][0]["recover"] == found["tokens"]
    assert 100 < tokens[0] == tokens[1] < 200 and tokens[2:] == [1_000, 1_000]


def test_the_advice_is_about_the_limits_that_are_missed() -> None:
    def advice(tokens: int, loss: float, **figures: float) -> str:
        bench = finished("a", loss, **figures)["bench"]
        nothing: dict[str, Any] = {"target": "", "decided_by": "", "limits": {}, "candidates": [], "band": {}}
        found = FitResult.of({**nothing, "uncertain": False, "whole_teacher": False, "chosen": "a", "bench": bench})
        return complaint(replace(found, tokens=tokens), 1_000)

    assert "with more --minutes" in advice(100, 4.0) and "raise --tokens" in advice(1_000, 4.0)
    assert advice(1_000, 1.0, file_mb=900.0).endswith("relax file_mb")
    assert "quiet machine" in advice(1_000, 1.0, ttft_ms=2000.0)


@pytest.fixture
def fresh(line: Line, tmp_path: Path) -> Line:
    return replace(line, out=tmp_path / "fit", calls=[])


def test_a_dry_run_lists_all_makes_nothing_and_needs_no_text(fresh: Line, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(teacher=fresh.teacher, target=str(fresh.budget), out=fresh.out, dry_run=True)
    assert not fresh.out.exists() and not fresh.calls and not any(one["tried_tokens"] for one in result.candidates)
    shown = capsys.readouterr().out.replace("\n", "")
    assert all(one["name"] in shown for one in result.candidates) and "chosen" not in shown


def test_what_is_interrupted_can_be_continued_unless_it_makes_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.fit.run_fit", interrupted)
    for dry_run, message in ((True, "interrupted$"), (False, "interrupted; run the same command again to continue")):
        with pytest.raises(InterruptedRun, match=f"^{message}"):
            fit(teacher=checkpoint, target="host", corpus=[checkpoint / "config.json"], dry_run=dry_run)


def test_the_table_breaks_no_number_and_the_next_best_is_comparable(capsys: pytest.CaptureFixture[str]) -> None:
    one = {
        "name": "l4-h64-f128-a2-k1-v2048-int4-b64-asym", "way": "evenly and depth", "parameters": 1_238_144,
        "predicted": {"file_mb": 10.3, "tpot_p50_ms": 0.5}, "measured": None, "rounded_loss_percent": 28.3,
        "expected_loss_percent": 15.1, "interval_percent": (26.5, 30.3), "within": True, "sure": True, "busy": False,
        "closed_to": ["optimum"], "tried_tokens": 10, "bound_by": [],
    }  # fmt: skip
    all_ten = [one, *({**one, "name": str(number)} for number in range(9))]
    all_ten[1] |= {"within": False, "expected_loss_percent": 10.0}
    all_ten[2] |= {"tried_tokens": 5, "expected_loss_percent": 12.0}
    all_ten[3] |= {"expected_loss_percent": 16.1}
    result = {"target": "host", "decided_by": "prediction", "candidates": all_ten, "chosen": one["name"]}
    print_fit(console.output(), {**result, "band": {"tpot_p50_ms": 2.0}, "whole_teacher": False})
    cells = " ".join([str(one["name"]), "evenly and", "1,238,144", "10", "0.25-1", "+28.3% ±2.0", "+15.1%"])
    shown = capsys.readouterr().out
    assert any(" ".join(text.split()).startswith(cells) for text in shown.splitlines())
    assert "\n2 more in fit.json\n" in shown and "Next best: 2, expected to lose 1.0 points more" in shown


def test_an_interrupted_trial_is_continued(fresh: Line) -> None:
    for step in (1, 2):
        with interrupted_in_step(step), pytest.raises(InterruptedRun):
            fresh.fit(effort=Effort(tokens=1_024, search_tokens=512, finalists=1))


def test_a_smaller_vocabulary_is_a_candidate_and_must_be_smaller(fresh: Line) -> None:
    search = partial(sportsllm.fit, teacher=fresh.teacher, target=str(fresh.budget), out=fresh.out, dry_run=True)
    assert any(one["shape"]["vocab_size"] == 320 for one in search(vocab_size=320).candidates)
    for size in (0, 384):
        with pytest.raises(UsageError, match=f"`vocab_size` {size}: must be below the teacher's 384 and above 0"):
            search(vocab_size=[320, size])
    with pytest.raises(UsageError, match="need the teacher's vocabulary"):  # else its last step would fail
        search(vocab_size=320, limit={"kl_nats": 1})
    with pytest.raises(UsageError, match="accuracy_loss_points: fit measures no tasks"):
        search(limit={"accuracy_loss_points": 1})


def test_a_directory_that_holds_something_else_is_left_alone(fresh: Line) -> None:
    fresh.out.mkdir()
    (fresh.out / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConflictError, match="holds no search"):
        fresh.fit()
    assert [path.name for path in fresh.out.iterdir()] == ["mine.txt"]
