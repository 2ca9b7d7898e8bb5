"""The report's arithmetic against independent counts: fronts, lines of parents, roofline, searches, samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pareto import pareto_front
from benchmarks.report.changes import change_table
from benchmarks.report.charts import Chart
from benchmarks.report.inputs import Inputs, StageSummary, collect, summarize_directory
from benchmarks.report.lineage import lineage
from benchmarks.report.report import page_sections
from benchmarks.report.samples import before_and_after
from benchmarks.report.trade_off import trade_off_charts, trade_off_points
from benchmarks.report.training import training_charts
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, output_directory
from sportsllm.inference.decoder import open_decoder
from sportsllm.text.tokenizer import load_tokenizer


def made(out: Path, command: str, parents: list[Path], settings: dict[str, Any] | None = None) -> Path:
    """A finished stage without weights: manifests alone tell who descends from whom."""
    with output_directory(out, Stage(command, settings or {}, parents)) as partial:
        (partial / "model.safetensors").write_bytes(out.name.encode())
    return out


def benched(size: int, bits: float, ms: float, verdict: str = "uncertain") -> dict[str, Any]:
    limits = [
        {"name": "file_mb", "limit": 3.0, "value": size / 1e6, "unit": "MB", "verdict": verdict, "source": "measured"},
        {"name": "quality_loss_percent", "limit": 10.0, "value": 0, "unit": "%", "verdict": verdict, "source": None},
    ]
    return {
        "tpot_ms": {"512": {"p50": ms, "p95": ms}},
        "peak_rss_bytes": 100 * size,
        "bits_per_byte": bits,
        "teacher_bits_per_byte": 1.0,
        "budget": {"target": "host", "verdict": verdict, "limits": limits},
    }


def summary(name: str, size: int, bits: float, ms: float, verdict: str = "uncertain") -> StageSummary:
    return StageSummary(name, "export", name, 1, size, bits, bench=benched(size, bits, ms, verdict))


def drawn(chart: Chart) -> dict[str, Any]:
    assert chart.figure is not None
    return chart.figure


def test_the_front_is_what_no_point_beats_in_everything() -> None:
    points = [(float(a * 7 % 11), float(a * 5 % 13), float(a * 3 % 7)) for a in range(1, 40)] + [(0.0, 0.0, 6.0)] * 2
    best = set()
    for point in points:  # by the definition, every pair and every coordinate
        beaten = False
        for other in points:
            if other != point and all(other[i] <= point[i] for i in range(3)):
                beaten = True
        if not beaten:
            best.add(point)
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
    joined = drawn(size)["data"][0]
    assert list(zip(joined["x"], joined["y"], strict=True)) == [(1.0, 1.2), (2.0, 1.05), (5.0, 1.0)]
    (box,) = drawn(size)["layout"]["shapes"]
    assert (box["x1"], box["y1"]) == (3.0, pytest.approx(1.1))
    assert drawn(speed)["layout"]["shapes"][0]["xref"] == "paper"  # this budget has no time per token
    assert "5 lies above the plot, at 3.0000" in size.caption
    assert "size, time and quality together: 1, 2, 3." in speed.caption
    shown = [text for trace in drawn(size)["data"][1:] for text in trace["text"]]
    assert sorted(shown) == ["1", "2", "3", "4", "5"]


def test_the_line_of_parents_goes_through_what_was_not_given(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text", encoding="utf-8")
    teacher = made(tmp_path / "teacher", "train", [corpus])
    start = made(tmp_path / "start", "train", [corpus], {"seed": 1})
    pruned = made(tmp_path / "pruned", "prune", [teacher, corpus], {"checkpoint": str(teacher)})
    tuned = made(tmp_path / "tuned", "distill", [teacher, pruned], {"teacher": str(teacher), "init": str(pruned)})
    packed = made(tmp_path / "packed", "quantize", [tuned])
    last = made(tmp_path / "onnx", "export", [packed])
    given = [summarize_directory(path) for path in (last, start, pruned, teacher)]
    assert [stage.name for stage in lineage(given, given[0])] == ["teacher", "pruned", "onnx"]
    for path in packed.iterdir():  # the line ends where a stage between has gone
        path.unlink()
    assert [stage.name for stage in lineage(given, given[0])] == ["onnx"]


def test_changes_are_against_the_last_stage_with_the_figure(tmp_path: Path) -> None:
    teacher = made(tmp_path / "teacher", "train", [])
    pruned = made(tmp_path / "pruned", "prune", [teacher])
    last = made(tmp_path / "onnx", "export", [pruned])
    full = made(tmp_path / "teacher-onnx", "export", [teacher])
    figures = {teacher: (4e6, 1.5, None), pruned: (3e6, 1.6, None), last: (1e6, 1.7, 2.0), full: (4e6, 1.4, 5.0)}
    stages = []
    for path, (size, bits, ms) in figures.items():
        bench = benched(int(size), bits, ms) if ms else None
        stages.append(replace(summarize_directory(path, bench), size_bytes=int(size), bits_per_byte=bits))
    table = change_table(Inputs(stages, stages[2].bench))
    # The teacher was not measured, its export was; and only what bench scored is compared with what bench scored.
    assert table is not None and table.rows == [
        ("teacher", "train", "4.00", "1.4000", "5.00", "400"),
        ("pruned", "prune", "3.00 (-25.0%)", "\u2013", "\u2013", "\u2013"),
        ("onnx", "export", "1.00 (-66.7%)", "1.7000 (+21.4%)", "2.00 (-60.0%)", "100 (-75.0%)"),
    ]
    assert "teacher is measured as teacher-onnx." in table.caption and "Quality is from bench" in table.caption
    assert change_table(Inputs(stages[:1])) is None
    (missing,) = page_sections(Inputs(stages[:1]))[1].charts
    assert missing.figure is None and str(missing.command).startswith("sportsllm-compress report")


def candidate(name: str, size: float, loss: float, **more: Any) -> dict[str, Any]:
    """A record of fit.json, as `benchmarks.search.search.summary` writes it."""
    predicted = {"file_mb": size, "peak_memory_mb": 70.0, "ttft_ms": 9.0}
    record = {"name": name, "shape": {"hidden": 64}, "precision": "int4-b32", "parameters": 10, "predicted": predicted}
    record |= {"estimated_loss_percent": loss, "measured": None, "bits_per_byte": None, "within": True, "even": False}
    return record | more


def test_a_search_becomes_a_table_and_points(tmp_path: Path) -> None:
    fit = tmp_path / "fit"
    fit.mkdir()
    first = candidate("a", 1.0, 30.0, bits_per_byte=1.4, measured={"file_mb": 1.5, "quality_loss_percent": None})
    first["predicted"]["tpot_p50_ms"] = 2.0
    candidates = [first, candidate("b", 2.0, 25.0, bits_per_byte=1.3, within=False), candidate("c", 0.5, 20.0)]
    bench = {"tpot_ms": {}, "directory": "fit/a/export", "file_bytes": 1_500_000}
    data = {"candidates": candidates, "chosen": "a", "target": "host", "limits": {"file_mb": 3.0}, "bench": bench}
    data["cut_by_limit"] = {"file_mb": {"misses": 2_000, "alone": 7}}

    def read() -> Inputs:
        (fit / "fit.json").write_text(json.dumps(data), encoding="utf-8")
        return collect([fit])

    trade_off = page_sections(read())[0]
    table, cut = trade_off.tables
    assert table.rows[0][1:5] == ("a \u2605", "int4-b32", "10", "1.50")
    assert table.rows[0][7] == "~2.00" and table.rows[2][4] == "~0.500" and table.rows[2][8] == "~+20%"
    assert cut.rows == [("File size", "3.00 MB", "2,000, 7 of them alone")]
    size, speed = trade_off.charts
    # Candidates follow the one finished model, which has no quality, as 2, 3 and 4; c has none without a teacher.
    assert sorted(text for trace in drawn(size)["data"] for text in trace.get("text", ())) == ["2", "3"]
    assert speed.figure is None  # one candidate alone has a time
    data["bench"] = benched(1_000_000, 1.35, 2.0) | {"directory": "fit/a/export", "file_bytes": 1_000_000}
    inputs = read()  # its finished model is a stage, and gives the verdict and the teacher's 1.0
    assert [(one.name, one.bits_per_byte) for one in inputs.stages] == [("export", 1.35)]
    assert inputs.bench == data["bench"]
    guessed = trade_off_points(inputs)[-1]
    assert guessed.estimated and guessed.bits_per_byte == pytest.approx(1.2)
    joined = drawn(trade_off_charts(inputs)[0])["data"][0]
    assert joined["name"] == "front" and joined["x"] == [1.5, 2.0]  # neither the guess at 0.5 MB nor bench's text
    others = [candidate(f"o{number}", 1.0, 100.0 + number) for number in range(40)]
    data["candidates"] = [*others, *candidates]
    inputs = read()
    table = page_sections(inputs)[0].tables[-2]
    assert len(table.rows) == 20 and [row[1] for row in table.rows[:3]] == ["a \u2605", "b", "o0"]
    assert "23 more, all predicted, are in fit.json" in str(table.caption)
    assert "19 lie above the plot, at 1.4000 or more" in page_sections(inputs)[0].charts[0].caption
    (fit / "fit.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a result of `fit`"):
        collect([fit])


def test_samples_are_the_likeliest_tokens_of_the_first_and_last_stage(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    stages = [StageSummary(path.name, "train", str(path)) for path in (broken, checkpoint)]
    (sample,), skipped = before_and_after(stages, ["The ball"], threads=1, new_tokens=6)
    decoder = open_decoder(checkpoint, 1)
    tokenizer = load_tokenizer(checkpoint, decoder.config)
    tokens = [tokenizer.begin_id, *tokenizer.encode("The ball")]
    begin = len(tokens)
    for _ in range(6):  # without a cache: the whole text anew for every token
        tokens.append(int(decoder.prefill([tokens])[0].argmax()))
        if tokens[-1] in decoder.config.stop_token_ids:
            tokens.pop()
            break
    assert (sample.prompt, sample.text) == ("The ball", tokenizer.decode(tokens[begin:]))
    assert sample.heading == f"Before: {checkpoint.name}"
    assert [line.split(":")[0] for line in skipped[:1]] == ["No sample from broken"] and "alone" in skipped[1]
    with pytest.raises(ArtifactError, match="no stage can be opened"):
        before_and_after(stages[:1], ["The ball"])
    with pytest.raises(UsageError, match="UTF-8"):
        before_and_after(stages, ["\udc80"])


def test_the_shares_of_experts_are_drawn_as_multiples_of_an_even_one() -> None:
    """A directory measured twice is drawn once; a log whose shape changed, only since then; without experts nothing."""
    logged: list[dict[str, Any]] = [
        {"step": 5, "tokens": 50, "expert_shares": [[1.0, 0.0]]},
        {"step": 10, "tokens": 100, "loss": 3.0},
        {"step": 10, "tokens": 100, "expert_shares": [[0.5, 0.3, 0.2], [0.1, 0.9]]},
        {"step": 20, "tokens": 200, "loss": 2.0},
        {"step": 20, "tokens": 200, "expert_shares": [[0.4, 0.4, 0.2], [0.25, 0.75]]},
    ]
    mixed = replace(summary("mixed", 1, 1.0, 1.0), metrics=logged)
    dense = replace(summary("dense", 1, 1.0, 1.0), metrics=[{"tokens": 1, "loss": 3.0}, {"tokens": 2, "loss": 2.0}])
    charts = training_charts([dense, mixed, replace(mixed, name="again")])
    assert [chart.identifier for chart in charts] == ["loss", "valid-bits-per-byte", "expert-shares-0"]
    trace = drawn(charts[2])["data"][0]
    assert trace["x"] == [100, 200]
    assert trace["z"] == [[1.5, 1.2], [0.9, 1.2], [0.6, 0.6], [None, None], [0.2, 0.5], [1.8, 1.5]]
    assert trace["text"][5] == ["mixture 1, expert 1"] * 2 and trace["zmax"] == 2
    assert drawn(charts[2])["layout"]["yaxis"]["tickvals"] == [1.0, 4.5]
    for damaged in ([], [0.5, 0.5], [["x"]], "0.5"):
        broken = [{"tokens": place, "expert_shares": damaged} for place in range(3)]
        assert len(training_charts([replace(mixed, metrics=broken)])) == 2
