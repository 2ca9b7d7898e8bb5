"""The comparison against hand arithmetic on trainings that really ran, and FLOPs against torch's own counter."""

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.commands import compare as command
from benchmarks.compare.compare import _SCORED_TOKENS, compare, scratch_cost
from benchmarks.compare.cost import TrainingCost, cut_flops, repair_flops_per_token
from benchmarks.compare.inputs import ancestors, read_runs
from benchmarks.compare.manifest import ManifestFacts
from benchmarks.compare.methods import method_name, variants
from benchmarks.compare.page import COLUMNS, percent, short
from benchmarks.flops import forward_flops_per_token, matmul_parameters, training_flops_per_token
from compress.cli.prune import prune
from compress.distillation.run import distill, resolve_start
from compress.distillation.settings import DistillationConfig, KLWeight
from compress.distillation.student_training import StudentTraining
from sportsllm.cli import main as cli
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import MANIFEST, Stage, digest, output_directory
from sportsllm.formats.huggingface.config import load_config
from sportsllm.models.presets import preset
from sportsllm.training import setup as stages
from sportsllm.training.settings import TrainConfig
from sportsllm.verbs.run import load_recipe
from sportsllm.verbs.train import train
from tests.support.models import TINY_VOCAB, tiny_config, tiny_model
from tests.support.training import options_of

SEQUENCE = 32
PER_STEP = 2 * SEQUENCE
OBJECTIVE = DistillationConfig(kl_weight=KLWeight(0.9, 0.9), teacher_precision="fp32")


def training(steps: int, seed: int = 0) -> TrainConfig:
    return TrainConfig(
        steps=steps, batch_size=2, accumulation=1, sequence=SEQUENCE, learning_rate=3e-3, warmup=0, seed=seed,
        precision="fp32", validate_every=steps // 2,
    )  # fmt: skip


def distilled(student: str, teacher: Path, corpus: Path, out: Path, steps: int) -> None:
    plan = StudentTraining(teacher, training(steps), (corpus,), distillation=OBJECTIVE)
    distill(student, resolve_start(student, None, None, teacher), plan, out)


@pytest.fixture(scope="module")
def runs(tokenizer_directory: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, its half-way twin, students from scratch, a distilled and a pruned one, all really trained."""
    base = tmp_path_factory.mktemp("runs")

    def scratch(name: str, model: str, steps: int, seed: int = 0) -> None:
        train(
            model=model,
            corpus=[corpus_file],
            out=base / name,
            tokenizer=tokenizer_directory,
            **options_of(training(steps, seed)),
        )

    scratch("teacher", "tiny-1m", 12)
    scratch("half", "tiny-1m", 6)
    scratch("scratch-2", "tiny-300k", 2)
    scratch("scratch-8", "tiny-300k", 8)
    scratch("scratch-8-seed-1", "tiny-300k", 8, seed=1)
    distilled("tiny-300k", base / "teacher", corpus_file, base / "distilled", 4)
    prune(
        checkpoint=base / "teacher", out=base / "pruned", calibration=[corpus_file],
        hidden=64, intermediate=192, heads=2, kv_heads=1, samples=4,
        recover=3 * PER_STEP, corpus=[corpus_file], sequence=SEQUENCE, batch_size=2,
        set=["accumulation=1", "precision=fp32"],
    )  # fmt: skip
    return base


NAMES = ("half", "scratch-2", "scratch-8", "scratch-8-seed-1", "distilled", "pruned")


@pytest.fixture(scope="module")
def result(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("compared") / "out"
    return compare([runs / name for name in NAMES], runs / "teacher", out, "Six runs | <b>one</b> teacher")


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def manifest(runs: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((runs / name / MANIFEST).read_text(encoding="utf-8")))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}], ids=str)
@pytest.mark.parametrize("length", [16, 64])
def test_forward_flops_are_those_torch_counts(changes: dict[str, object], length: int) -> None:
    """Exact: both count two a multiply-add. The counter sees attention only as plain products, and there over all
    T x T pairs; causal attention needs the T (T + 1) / 2 that are counted out here one by one."""
    model, tokens = tiny_model(**changes), torch.randint(3, TINY_VOCAB, (2, length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    assert set(counted) == {"aten.mm", "aten.bmm"}
    allowed = sum(key <= query for query in range(length) for key in range(length))
    expected = counted["aten.mm"] + counted["aten.bmm"] * allowed // length**2
    assert forward_flops_per_token(model.config, length) * tokens.numel() == expected


def test_training_takes_three_forward_passes() -> None:
    """Exact for the matrices; the attention of both is the counter's fused kernel, which it does not see."""
    model, tokens = tiny_model(), torch.randint(3, TINY_VOCAB, (2, 48))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == 6 * matmul_parameters(model.config) * tokens.numel()
    assert training_flops_per_token(model.config, 48) == 3 * forward_flops_per_token(model.config, 48)


def test_flops_of_a_worked_example() -> None:
    """`small` at T = 2,048: its blocks' matrices (spec: 12 x 7,077,888) and the tied head of 12,288,000."""
    assert matmul_parameters(preset("small")) == 12 * 7_077_888 + 12_288_000 == 97_222_656
    assert training_flops_per_token(preset("small"), 2_048) == 6 * 97_222_656 + 12 * 12 * 768 * 2_049 // 2
    cost = TrainingCost(student_per_token=30, teacher_per_token=4, start=1_000, importance=200, signals=50)
    assert cost.at(0) == 1_250 and cost.at(10) == 1_590 == sum(cost.parts(10).values())


def test_cross_entropy_recovery_counts_no_teacher() -> None:
    settings = {"checkpoint": "a", "teacher": "b", "kl_weight": 0.0}

    def teacher(**changes: float) -> str | None:
        return ManifestFacts(Path("run"), "prune", {**settings, **changes}, {}, {}).teacher

    assert teacher() is None and teacher(hidden_weight=0.1) == "b" and teacher(kl_weight=1.0) == "b"


def test_repair_costs_about_what_it_is_said_to() -> None:
    """An estimate, so within a quarter; a tenth is the counter's attention, over all T x T pairs."""
    from compress.pruning.kept_units import choose_units
    from compress.pruning.refit import refit_layers
    from compress.pruning.rotation import rotate
    from compress.pruning.scores import importance_scores
    from compress.pruning.shapes import Shape
    from compress.pruning.slicing import slice_model

    model, samples = tiny_model(), [torch.randint(3, TINY_VOCAB, (1, 64)) for _ in range(3)]
    scores = importance_scores(model, samples)
    kept = choose_units(model.config, scores, Shape(32, 64, 2, 1, 2, 16).applied_to(model.config))
    pruned = slice_model(rotate(model, scores.directions, 32), kept)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        refit_layers(pruned, model, kept, samples, into=scores.directions.into(32))
    assert repair_flops_per_token(model.config, pruned.config, 64) * 3 * 64 == pytest.approx(
        counter.get_total_flops(), rel=0.25
    )


def test_a_factor_is_read_off_the_best_finished_runs() -> None:
    """Worked by hand: 2.0 -> 1.6 -> 1.5 at 100, 400 and 1,600; a worse run at 800 and a worse seed change nothing."""
    finals = [(1_600.0, 1.5), (100.0, 2.0), (800.0, 1.7), (400.0, 1.6), (400.0, 1.65)]
    assert scratch_cost(finals, 1.8) == ("=", pytest.approx(200.0))  # half-way in the logarithm of 100 and 400
    assert scratch_cost(finals, 1.55) == ("=", pytest.approx(800.0))
    assert scratch_cost(finals, 1.6) == ("=", pytest.approx(400.0))
    assert scratch_cost(finals, 2.0) == ("=", 100.0)
    assert scratch_cost(finals, 2.1) == ("<", 100.0)
    assert scratch_cost(finals, 1.49) == (">", 1_600.0)
    assert scratch_cost([(100.0, 2.0), (900.0, 2.2)], 1.9) == (">", 900.0)


def test_rows_are_ordered_and_figures_are_those_of_the_manifests(result: dict[str, Any], runs: Path) -> None:
    order = [(-row["parameters"], row["bits_per_byte"]) for row in result["rows"]]
    assert order == sorted(order) and len(order) == len(NAMES)
    teacher = manifest(runs, "teacher")["results"]
    blocks = load_config(runs / "teacher").block_parameters
    for name, row in rows(result).items():
        recorded, config = manifest(runs, name)["results"], load_config(runs / name)
        assert row["parameters"] == recorded["parameters"] == config.parameters
        assert row["tokens"] == recorded["tokens"] == recorded["steps"] * PER_STEP
        assert row["bits_per_byte"] == recorded["valid_bits_per_byte"]
        assert row["seconds"] == recorded["seconds"] and row["epochs"] == recorded["epochs"]
        assert row["share_of_teacher_tokens"] == recorded["tokens"] / teacher["tokens"]
        assert row["share_of_teacher_block_parameters"] == config.block_parameters / blocks
        assert row["tokens_per_parameter"] == pytest.approx(recorded["tokens_per_parameter"], abs=0.005)
        over = 100 * (recorded["valid_bits_per_byte"] - teacher["valid_bits_per_byte"]) / teacher["valid_bits_per_byte"]
        assert row["over_teacher_percent"] == pytest.approx(over)
        assert row["bits_per_byte_before_recovery"] == recorded.get("bits_per_byte_before_recovery")
    assert rows(result)["pruned"]["bits_per_byte_before_recovery"] > 0
    assert result["teacher"]["over_teacher_percent"] == 0 and result["teacher"]["share_of_teacher_flops"] == 1


def test_costs_are_the_students_the_teachers_and_the_scoring(result: dict[str, Any], runs: Path) -> None:
    student, teacher = (load_config(runs / name) for name in ("scratch-2", "teacher"))
    own, pass_over = training_flops_per_token(student, SEQUENCE), forward_flops_per_token(teacher, SEQUENCE)
    found = rows(result)
    assert found["scratch-8"]["training_flops"] == 8 * PER_STEP * own
    assert found["distilled"]["training_flops"] == 4 * PER_STEP * (own + pass_over)
    assert found["pruned"]["training_flops_by_part"]["student"] == 3 * PER_STEP * own
    assert found["pruned"]["training_flops_by_part"]["teacher"] == 3 * PER_STEP * pass_over
    record = manifest(runs, "pruned")
    tokens = record["results"].get("calibration_tokens", record["settings"]["samples"] * SEQUENCE)
    assert 0 < tokens <= 4 * SEQUENCE
    repair = repair_flops_per_token(teacher, student, SEQUENCE) if record["settings"].get("repair") else 0
    assert found["pruned"]["training_flops_by_part"]["importance"] == tokens * (pass_over + repair)
    shallow = teacher.with_changes(num_hidden_layers=3)
    tried = cut_flops(teacher, shallow, SEQUENCE, tokens=10, scored=False, candidates=2, repaired=False)
    assert tried == 10 * 2 * forward_flops_per_token(shallow, SEQUENCE)
    assert found["half"]["share_of_teacher_flops"] == pytest.approx(0.5)


def test_factors_compare_with_scratch_runs_of_the_same_shape(result: dict[str, Any]) -> None:
    found = rows(result)
    scratch = [found[name] for name in ("scratch-2", "scratch-8", "scratch-8-seed-1")]
    for name in ("distilled", "pruned"):
        for unit, own in (("tokens", "tokens"), ("flops", "training_flops")):
            relation, cost = scratch_cost(
                [(row[own], row["bits_per_byte"]) for row in scratch], found[name]["bits_per_byte"]
            )
            assert found[name][f"scratch_{unit}"] == {
                "relation": relation,
                "factor": cost / found[name][own],
                "cost": cost,
            }
    assert all(found[name]["scratch_tokens"] is None for name in NAMES[:4])


def test_seeds_and_the_teachers_headroom(result: dict[str, Any], runs: Path) -> None:
    (group,) = result["seeds"]
    bits = [manifest(runs, name)["results"]["valid_bits_per_byte"] for name in ("scratch-8", "scratch-8-seed-1")]
    assert sorted(group["seeds"]) == [0, 1] and group["mean_bits_per_byte"] == pytest.approx(sum(bits) / 2)
    # With two values the sample standard deviation is their distance over the root of 2.
    assert group["deviation_bits_per_byte"] == pytest.approx(abs(bits[0] - bits[1]) / math.sqrt(2))
    half, full = (manifest(runs, name)["results"]["valid_bits_per_byte"] for name in ("half", "teacher"))
    assert result["headroom"]["finished"] and result["headroom"]["name"] == "half"
    assert result["headroom"]["gain_percent"] == pytest.approx(100 * (half - full) / half)


def test_without_a_twin_the_teachers_own_curve_is_used_and_marked(runs: Path, tmp_path: Path) -> None:
    found = compare([runs / "distilled"], runs / "teacher", tmp_path / "out", "T")
    records = [json.loads(line) for line in (runs / "teacher" / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [r for r in records if r["step"] == 6 and "valid_bits_per_byte" in r]
    assert found["headroom"]["finished"] is False and found["headroom"]["tokens"] == 6 * PER_STEP
    assert found["headroom"]["bits_per_byte"] == logged["valid_bits_per_byte"]
    assert any("in mid-run, of no finished model" in note for note in found["notes"])
    assert rows(found)["distilled"]["scratch_tokens"] is None


def test_a_run_carries_what_it_starts_from(runs: Path, corpus_file: Path, tmp_path: Path) -> None:
    distilled(str(runs / "pruned"), runs / "teacher", corpus_file, tmp_path / "further", 2)
    both = compare([runs / "pruned", tmp_path / "further"], runs / "teacher", tmp_path / "both", "T")
    alone = compare([tmp_path / "further"], runs / "teacher", tmp_path / "alone", "T")
    first, second = rows(both)["pruned"], rows(both)["further"]
    assert second["method"] == f"{first['method']} + distilled"
    assert second["tokens"] == first["tokens"] + 2 * PER_STEP
    assert second["training_flops_by_part"]["start"] == first["training_flops"]
    assert rows(alone)["further"]["training_flops"] == second["training_flops"]
    assert any("further starts from pruned" in note for note in both["notes"])


def test_stored_signals_cost_one_pass_of_their_teacher(runs: Path, tmp_path: Path) -> None:
    made = {"teacher": str(runs / "half"), "sequence": 64}
    signals = tmp_path / "signals"
    with output_directory(signals, Stage("signals", made, [runs / "half"], results={"tokens": 640})):
        pass

    def from_them(data: dict[str, Any]) -> None:
        data["settings"]["signals"] = str(signals)
        data["parents"].append({"path": str(signals), "sha256": digest(signals)})

    copy = edited(runs / "distilled", tmp_path / "stored", from_them)
    teacher, (stored,) = read_runs([copy], runs / "teacher")
    assert stored.flops.signals == 640 * forward_flops_per_token(teacher.config, 64)  # half has the teacher's shape
    assert stored.flops.teacher_per_token == 0 and "counts once" in stored.notes[0]
    assert {signals, runs / "half"} <= set(ancestors([runs / "teacher", copy]))
    shutil.rmtree(signals)
    with pytest.raises(ArtifactError, match="cannot be counted"):
        read_runs([copy], runs / "teacher")


def test_an_untrained_start_costs_nothing(runs: Path, tmp_path: Path) -> None:
    untrained = edited(
        runs / "half",
        tmp_path / "start",
        lambda data: data["results"].update(tokens=0, valid_bits_per_byte=None, epochs=0),
    )

    def from_it(data: dict[str, Any]) -> None:
        data["settings"]["init"] = str(untrained)
        data["parents"].append({"path": str(untrained), "sha256": digest(untrained)})

    _, (run,) = read_runs([edited(runs / "distilled", tmp_path / "run", from_it)], runs / "teacher")
    assert run.method == "from scratch + distilled" and run.before == run.flops.start == 0
    assert run.tokens == 4 * PER_STEP


def edited(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a run with another manifest."""
    shutil.copytree(source, target)
    data = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    change(data)
    (target / MANIFEST).write_text(json.dumps(data), encoding="utf-8")
    return target


def test_methods_are_named_by_what_differs() -> None:
    assert method_name("train", {"model": "small"}, None) == "from scratch"
    assert method_name("train", {"init": "x", "lora": {"rank": 4}}, "pruned") == "pruned + fine-tuned with LoRA"
    assert method_name("distill", {"init": None}, None) == "distilled"
    assert method_name("distill", {"init": "x"}, None) == "distilled from weights"
    assert method_name("prune", {"recover": {"seed": 1}}, None) == "pruned + recovered"
    cut = {"checkpoint": "a/b", "samples": 4, "recover": {"learning_rate": 1.0}}
    names = variants(
        [
            ("pruned", cut | {"repair": True, "importance": "random", "learning_rate": 1}),
            ("pruned", cut | {"repair": False, "importance": "random", "learning_rate": 2}),
            ("distilled", {"signals": "runs/signals", "lora": {"rank": 4}}),
            ("distilled", {"signals": None, "lora": None}),
        ]
    )
    assert names == ["pruned, repair", "pruned, no repair", "distilled, lora rank 4, signals", "distilled"]


def test_the_scored_tokens_are_those_of_training() -> None:
    assert stages._VALIDATION_TOKENS == _SCORED_TOKENS


def test_files_hold_the_table_and_text_stays_text(result: dict[str, Any]) -> None:
    out = Path(result["out"])
    assert {"comparison.json", "comparison.md", "comparison.csv", "comparison.html"} <= {p.name for p in out.iterdir()}
    lines = (out / "comparison.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == r"## Six runs \| &lt;b&gt;one&lt;/b&gt; teacher"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 1 + len(NAMES)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {len(COLUMNS) + 1}
    assert f"{rows(result)['pruned']['bits_per_byte']:.4f}" in "\n".join(table)
    with (out / "comparison.csv").open(encoding="utf-8", newline="") as stream:
        records = list(csv.DictReader(stream))
    assert [record["role"] for record in records] == ["teacher"] + ["run"] * len(NAMES)
    assert float(records[1]["bits_per_byte"]) == result["rows"][0]["bits_per_byte"]
    html = (out / "comparison.html").read_text(encoding="utf-8")
    page = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "<b>one</b>" not in page and "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=|url\(""", page)


def test_the_plot_shows_each_finished_run_twice(result: dict[str, Any], runs: Path) -> None:
    html = (Path(result["out"]) / "comparison.html").read_text(encoding="utf-8")
    (figure,) = json.loads(html.rpartition("const figures = ")[2].partition(";\n")[0])
    for axis, unit in (("x", "tokens"), ("x2", "training_flops")):
        traces = [trace for trace in figure["data"] if trace["xaxis"] == axis]
        marks = {
            (x, y)
            for trace in traces
            if "marker" in trace
            for x, y, size in zip(trace["x"], trace["y"], trace["marker"]["size"], strict=True)
            if size
        }
        assert marks == {(row[unit], row["bits_per_byte"]) for row in result["rows"]}
        low, high = (10**edge for edge in figure["layout"]["xaxis" + axis[1:]]["range"])
        assert all(low < x < high for trace in traces for x in trace["x"] if x is not None)
        symbols = {trace["marker"]["symbol"] for trace in traces if "marker" in trace}
        assert len(symbols) == len({row["method"] for row in result["rows"]})
        pale = [trace for trace in traces if "opacity" in trace and trace["y"]]
        for trace in pale:  # never worse with more training
            assert trace["y"] == sorted(trace["y"], reverse=True) and trace["x"] == sorted(trace["x"])
        assert len(pale) == 2  # of the teacher's own shape and of the students'
    bits = result["teacher"]["bits_per_byte"]
    bands = [shape for shape in figure["layout"]["shapes"] if shape["type"] == "rect"]
    assert [(band["y0"], band["y1"]) for band in bands] == [(bits, pytest.approx(1.02 * bits))] * 2
    zero = figure["layout"]["xaxis"]["tickvals"][0]
    assert figure["layout"]["xaxis"]["ticktext"][0] == "0" and zero < PER_STEP  # the pruned run before recovery


def test_it_is_a_cached_stage(result: dict[str, Any], runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path(result["out"])
    again = command([runs / name for name in NAMES], runs / "teacher", out, result["title"])
    assert again["cached"] and again["rows"] == result["rows"]
    arguments = ["compare", str(runs / "half"), "--teacher", str(runs / "teacher"), "--out", str(out), "--json"]
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 6  # other inputs
    arguments[5] = str(out.with_name("other"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    printed = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and {"out", "rows", "teacher", "notes"} <= set(printed)


def test_it_is_a_recipe_stage(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[[stage]]\nname = "a"\ncommand = "train"\nmodel = "tiny-1m"\n'
        '[[stage]]\nname = "figures"\ncommand = "compare"\ndirectories = ["@a"]\nteacher = "@a"\n',
        encoding="utf-8",
    )
    settings = load_recipe(recipe, tmp_path).stages[1].settings
    assert settings["directories"] == [tmp_path / "a"] and settings["out"] == tmp_path / "figures"


def test_refusals(runs: Path, checkpoint: Path, tmp_path: Path) -> None:
    out, teacher = tmp_path / "out", runs / "teacher"
    with pytest.raises(ArtifactError, match="no such directory"):
        compare([tmp_path / "absent"], teacher, out, "T")
    with pytest.raises(ArtifactError, match=r"is not a finished training \(it has no manifest"):
        compare([checkpoint], teacher, out, "T")
    with pytest.raises(ArtifactError, match=r"^--teacher .*is not a finished training"):
        compare([runs / "half"], checkpoint, out, "T")
    with pytest.raises(UsageError, match="nothing to compare"):
        compare([teacher], teacher, out, "T")
    untrained = edited(runs / "half", tmp_path / "untrained", lambda data: data["results"].update(tokens=0))
    with pytest.raises(ArtifactError, match="no tokens or no held-out bits"):
        compare([untrained], teacher, out, "T")

    def other_text(data: dict[str, Any]) -> None:
        data["settings"]["valid"] = ["matches/other.jsonl"]
        data["parents"].append({"path": "matches/other.jsonl", "sha256": "0" * 64})

    other = edited(runs / "half", tmp_path / "other", other_text)
    with pytest.raises(ArtifactError, match=r"other held-out text \(matches/other.jsonl\)"):
        compare([other], teacher, out, "T")
    words = edited(runs / "half", tmp_path / "words", lambda data: None)
    tokenizer = json.loads((words / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"].pop()
    (words / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ArtifactError, match="its tokenizer differs"):
        compare([words], teacher, out, "T")
    lost = edited(runs / "distilled", tmp_path / "lost", lambda data: data["parents"].pop(0))
    with pytest.raises(ArtifactError, match="cannot be counted"):
        compare([lost], teacher, out, "T")
    assert not out.exists()


def test_counts_read_well() -> None:
    assert [short(n) for n in (950, 12_345, 1_500_000, 23_000_000, 999_999)] == [
        "950",
        "12.3k",
        "1.50M",
        "23.0M",
        "1.00M",
    ]
    assert [percent(share) for share in (1.0, 0.66, 0.0995, 0.0432)] == ["100%", "66%", "10%", "4.3%"]
    assert tiny_config().block_parameters < tiny_config().parameters
