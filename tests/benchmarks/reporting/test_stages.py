"""The report's arithmetic against independent counts: fronts, work of training, searches, samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sportsllm
from benchmarks.report import before_and_after
from benchmarks.reporting.fits import fit_tables
from benchmarks.reporting.inputs import Inputs, StageSummary, collect, summarize
from benchmarks.reporting.measured import as_bench
from benchmarks.reporting.page import savings_line, stage_table
from benchmarks.reporting.plots import commonest, pareto_front, trade_off_charts, trade_off_points, training_charts
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, output_directory
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import Manifest


def benched(size: int, bits: float, ms: float, verdict: str = "uncertain") -> dict[str, Any]:
    limits = [
        {"name": name, "limit": limit, "value": value, "unit": "x", "verdict": verdict, "source": None}
        | {"low": None, "high": None}
        for name, limit, value in (("file_mb", 3.0, size / 1e6), ("quality_loss_percent", 10.0, 0.0))
    ]
    return {
        "directory": "runs/export",
        "tpot_ms": {"512": {"p50": ms, "p95": ms}},
        "peak_rss_bytes": 100 * size,
        "bits_per_byte": bits,
        "teacher_bits_per_byte": 1.0,
        "budget": {"target": "host", "verdict": verdict, "limits": limits},
    }


def summary(name: str, size: int, bits: float, ms: float, verdict: str = "uncertain") -> StageSummary:
    return StageSummary(name, "export", name, 1, size, bits, bench=as_bench(benched(size, bits, ms, verdict)))


def test_the_front_is_what_no_point_beats_in_everything() -> None:
    points = [(float(a * 7 % 41), float(a * 5 % 43 + 50 / a)) for a in range(1, 40)] * 2
    best = {  # by the definition, every pair
        (x, y) for x, y in points if not any(other != (x, y) and other[0] <= x and other[1] <= y for other in points)
    }
    assert pareto_front(points) == sorted(best) and 1 < len(best) < len(set(points))


def test_the_box_and_the_points_inside_it() -> None:
    stages = [
        summary("big", 5_000_000, 1.0, 4.0, "fail"),
        summary("good", 2_000_000, 1.05, 2.0, "pass"),
        summary("bad", 1_000_000, 1.2, 1.0),
        summary("dominated", 4_000_000, 1.06, 4.5),
        summary("hopeless", 2_000_000, 3.0, 2.0, "fail"),
    ]
    inputs = Inputs(stages, stages[0].bench)
    # `bad` has no verdict, but 1.2 is more than 10% above the teacher's 1.0; `dominated` has 4 of 3 MB.
    assert [point.inside for point in trade_off_points(inputs)] == [False, True, False, False, False]
    size, speed = trade_off_charts(inputs)
    joined = size.figure["data"][0]
    assert list(zip(joined["x"], joined["y"], strict=True)) == [(1.0, 1.2), (2.0, 1.05), (5.0, 1.0)]
    (box,) = size.figure["layout"]["shapes"]
    assert (box["x1"], box["y1"]) == (3.0, pytest.approx(1.1))
    assert speed.figure["layout"]["shapes"][0]["xref"] == "paper"  # this budget has no time per token
    assert "Above the plot: 5, at 3.0000 or more" in size.caption
    shown = [text for trace in size.figure["data"][1:] for text in trace["text"]]
    assert sorted(shown) == ["1", "2", "3", "4", "5"]


def test_points_far_inside_a_budget_fill_the_plot() -> None:
    # The limits are 3 MB and 1.1 bits per byte.
    sizes = [400_000, 410_000, 420_000, 420_000, 440_000, 600_000]
    stages = [summary(str(n), size, 1.01 + 0.002 * (n % 3), 1.0) for n, size in enumerate(sizes)]
    chart = trade_off_charts(Inputs(stages, stages[0].bench))[0]
    layout = chart.figure["layout"]
    assert "3 MB lies to the right" in chart.caption and "1.1000 bits per byte lies above" in chart.caption
    assert 10 ** layout["xaxis"]["range"][1] < 1 and layout["yaxis"]["range"][1] < 1.05  # limits stretch no axis


def candidate(name: str, size: float, **more: Any) -> dict[str, Any]:
    """A record of fit.json, as `benchmarks.search.results.summary` writes it."""
    predicted = {"file_mb": size, "peak_memory_mb": 70.0, "ttft_ms": 9.0}
    record = {"name": name, "shape": {"hidden": 64}, "precision": "int4-b32", "parameters": 10, "predicted": predicted}
    return record | {"measured": None, "bits_per_byte": None, "within": True} | more


def test_a_search_becomes_a_table_and_points(tmp_path: Path) -> None:
    fit = tmp_path / "fit"
    fit.mkdir()
    first = candidate("a", 1.0, bits_per_byte=1.4, measured={"file_mb": 1.5, "quality_loss_percent": None})
    first["predicted"]["tpot_p50_ms"] = 2.0
    candidates = [first, candidate("b", 2.0, bits_per_byte=1.3, within=False), candidate("c", 0.5)]
    bench = {"tpot_ms": {}, "directory": "fit/a/export", "file_bytes": 1_500_000}
    data = {"candidates": candidates, "chosen": "a", "target": "host", "limits": {"file_mb": 3.0}, "bench": bench}

    def read() -> Inputs:
        (fit / "fit.json").write_text(json.dumps(data), encoding="utf-8")
        return collect([fit])

    (table,) = fit_tables(read().fits, 2)
    assert table.rows[0][1:5] == ("a \u2605", "int4-b32", "10", "1.50")
    assert table.rows[0][7] == "~2.00" and table.rows[1][4] == "~2.00" and len(table.rows) == 2
    assert "1 more, all predicted, are in fit.json" in table.caption
    (size,) = trade_off_charts(read())  # one candidate alone has a time
    # Candidates follow the one finished model, which has no quality, as 2 and 3.
    assert sorted(text for trace in size.figure["data"] for text in trace.get("text", ())) == ["2", "3"]
    data["bench"] = benched(1_000_000, 1.35, 2.0) | {"directory": "fit/a/export", "file_bytes": 1_000_000}
    inputs = read()  # its finished model is a stage, and gives the verdict and the teacher's 1.0
    assert [(one.name, one.bits_per_byte) for one in inputs.stages] == [("export", 1.35)]
    assert inputs.bench == as_bench(benched(1_000_000, 1.35, 2.0) | {"directory": "fit/a/export", "file_bytes": 1e6})
    joined = trade_off_charts(inputs)[0].figure["data"][0]
    assert joined["name"] == "front" and joined["x"] == [1.5, 2.0]  # not bench's text
    (fit / "fit.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a result of `fit`"):
        collect([fit])


def test_samples_are_the_likeliest_tokens_of_the_first_and_last_stage(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    stages = [StageSummary(path.name, "train", str(path)) for path in (broken, checkpoint)]
    (sample,), skipped = before_and_after(stages, ["The ball"], new_tokens=6)
    text = "".join(sportsllm.load(checkpoint, threads=1).generate("The ball", max_new_tokens=6, temperature=0))
    assert (sample.prompt, sample.text) == ("The ball", text.rstrip("\ufffd"))  # half a character
    assert sample.heading == f"Before: {checkpoint.name}"
    assert [line.split(":")[0] for line in skipped[:1]] == ["No sample from broken"] and "alone" in skipped[1]
    with pytest.raises(ArtifactError, match="no stage can be opened"):
        before_and_after(stages[:1], ["The ball"])
    with pytest.raises(UsageError, match="UTF-8"):
        before_and_after(stages, ["\udc80"])


def test_the_load_of_the_busiest_expert_is_a_multiple_of_an_even_one() -> None:
    """A directory measured twice is drawn once; without experts nothing."""
    logged: list[dict[str, Any]] = [
        {"tokens": 100, "expert_shares": [[0.5, 0.3, 0.2], [0.1, 0.9]]},
        {"tokens": 200, "loss": 2.0},
        {"tokens": 200, "expert_shares": [[0.4, 0.4, 0.2], [0.25, 0.75]]},
    ]
    mixed = replace(summary("mixed", 1, 1.0, 1.0), metrics=logged)
    dense = replace(summary("dense", 1, 1.0, 1.0), metrics=[{"tokens": 1, "loss": 3.0}, {"tokens": 2, "loss": 2.0}])
    charts = training_charts([dense, mixed, replace(mixed, name="again")])
    assert [chart.identifier for chart in charts] == ["loss", "busiest-expert"]
    (trace,) = charts[1].figure["data"]
    assert (trace["x"], trace["y"]) == ([100, 200], [1.8, 1.5])
    for damaged in ([], [0.5, 0.5], [["x"]], [[]], "0.5"):
        broken = [{"tokens": place, "expert_shares": damaged} for place in range(3)]
        assert training_charts([replace(mixed, metrics=broken)]) == []


def test_curves_skip_what_is_not_finite_and_thinned_ones_keep_their_ends() -> None:
    losses = (3.0, float("nan"), 2.0, float("inf"), 1.0)
    metrics = [{"tokens": n, "loss": value} for n, value in enumerate(losses)]
    (loss,) = training_charts([StageSummary("a", "train", "a", metrics=metrics)])
    assert loss.figure["data"][0]["y"] == [3.0, 2.0, 1.0]
    assert json.loads(json.dumps(loss.figure, allow_nan=False)) == loss.figure
    metrics = [{"tokens": n, "loss": 1000.0 - n} for n in range(1, 804)]
    (curve,) = training_charts([StageSummary("a", "train", "a", metrics=metrics)])[0].figure["data"]
    assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (1, 803, 197.0)
    assert len(curve["x"]) < 803 and curve["x"] == sorted(set(curve["x"]))


def test_training_is_counted_with_the_teachers_forward_passes(checkpoint: Path, tmp_path: Path) -> None:
    """Matrix by matrix for one layer after another; a cache of signals replaces the teacher."""
    config = load_config(checkpoint)
    width, query, shared = config.hidden_size, config.query_size, 2 * config.num_key_value_heads * config.head_dim
    layer = 2 * width * query + width * shared + 3 * width * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * width
    forward = 2 * weights + 4 * config.num_hidden_layers * query * (16 + 1) / 2  # sequences of 16 tokens
    teacher = {"teacher": str(checkpoint), "sequence": 16}
    plans: dict[str, tuple[dict[str, Any], float | None]] = {
        "alone": ({"sequence": 16}, 3 * forward),
        "taught": (teacher, 4 * forward),
        "recovered": ({"teacher": str(checkpoint), "recover": {"sequence": 16}}, 4 * forward),
        "cached": ({**teacher, "signals": "cache"}, 3 * forward),
        "moved": ({**teacher, "teacher": "gone"}, None),
    }
    for name, (settings, expected) in plans.items():
        out = tmp_path / name
        with output_directory(out, Stage("distill", settings, results={"tokens": 1_000})) as partial:
            (partial / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        stage = summarize(out)
        assert (stage.tokens, stage.flops) == (1_000, None if expected is None else pytest.approx(1_000 * expected))


def scored(name: str, size: int, bits: float | None, text: str = "a") -> StageSummary:
    bench = {"directory": name, "tpot_ms": {}, "peak_rss_bytes": 80_000_000, "bits_per_byte": bits}
    bench |= {"text": [f"{text}.jsonl"], "text_digests": [text]}
    return StageSummary(name, "export", name, size_bytes=size, bits_per_byte=bits, bench=as_bench(bench))


def test_savings_compare_the_first_and_the_last_measured_stage() -> None:
    stages = [scored("teacher", 4_000_000, 0.8), StageSummary("student", "distill", "x")]
    assert savings_line(stages) is None
    assert savings_line([*stages, scored("small", 600_000, 0.82)]) == (
        "small against teacher: 15% of the file (0.600 of 4.00 MB), 100% of the peak memory, "
        "2.5% more bits per byte (0.8200 against 0.8000)"
    )
    line = savings_line([scored("teacher", 4_000_000, None), scored("small", 1_000_000, 0.5)])
    assert line is not None and "bits per byte" not in line and "25% of the file" in line


def test_qualities_of_different_texts_are_not_compared() -> None:
    """Neither in words nor silently in the table."""
    one, other = scored("teacher", 4_000_000, 0.8), scored("small", 600_000, 0.5, text="b")
    line = savings_line([one, other])
    assert line is not None and "15% of the file" in line and "bits per byte" not in line
    made = Manifest(settings={"valid": ["d/held_out.txt"]})
    trained = StageSummary("x", "train", "x", bits_per_byte=0.9, manifest=made)
    assert stage_table([one, one]).caption == ""
    assert stage_table([one, trained, other, one]).caption == (
        "Compare bits per byte only between stages scored on the same text (1, 4: a.jsonl, by bench; 2: half of what "
        "is held out of held_out.txt; 3: b.jsonl, by bench)."
    )
    assert StageSummary("x", "train", "x").scored is None
    assert commonest([None, *[trained.scored] * 3, *[one.scored] * 2, other.scored]) == one.scored
    assert commonest([trained.scored, one.scored, trained.scored]) == trained.scored
    assert commonest([None]) is None
