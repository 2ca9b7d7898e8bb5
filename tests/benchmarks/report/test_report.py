"""The report: nothing is loaded from outside, nothing in it runs as code, and missing parts say what they need."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.labels import number
from benchmarks.report.charts import Chart
from benchmarks.report.inputs import Inputs, Sample, StageSummary, collect
from benchmarks.report.markdown import markdown
from benchmarks.report.report import page_sections, targets, write_report
from benchmarks.report.training import training_charts
from sportsllm import cli
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, output_directory
from sportsllm.formats.manifest import FileEntry, Manifest, Parent

EVIL = "</script><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)>"
LIMITS = (("file_mb", 1.0, 0.5, "pass"), ("ttft_ms", 100.0, 150.0, "fail"), ("tpot_p50_ms", 10.0, None, "uncertain"))


def bench_result(directory: str = "runs/export") -> dict[str, Any]:
    times = {depth: {"p50": ms, "p90": ms, "p95": 1.2 * ms, "p99": 2 * ms} for depth, ms in (("32", 1.0), ("512", 2.0))}
    return {
        "directory": directory,
        "runtime": "onnxruntime",
        "threads": 2,
        "load_s": 0.1,
        "ttft_ms": {"128": 10.0, "512": 150.0},
        "tpot_ms": times,
        "decode_tokens_per_s": {"32": 1000.0, "512": 500.0},
        "prefill_tokens_per_s": 5000.0,
        "roofs": {"bandwidth_gb_s": 20.0, "int8_gops": None, "fp32_gflops": None, "source": "measured"},
        "peak_rss_bytes": 50_000_000,
        "memory_floor_tpot_ms": 0.5,
        "memory_floor": {
            "by_depth_ms": {"32": 0.4, "512": 0.5},
            "weight_bytes": 1_000_000,
            "kv_bytes_per_token": 2_000,
        },
        "noisy": ["ttft_ms.128"],
        "machine": {"processor": "tested", "cores": 2},
        "peak_rss_context_tokens": 1024,
        "context_length": 2048,
        "budget": {
            "target": "host",
            "verdict": "fail",
            "limits": [
                {"name": name, "limit": limit, "value": value, "unit": "x", "verdict": verdict, "source": "measured"}
                for name, limit, value, verdict in LIMITS
            ],
        },
    }


def stage(name: str, size: int, quality: float | None) -> StageSummary:
    metrics = [{"step": n, "tokens": 100 * n, "loss": 5 / n, "lr": 1e-3} for n in range(1, 20)]
    metrics += [{"step": n, "tokens": 100 * n, "valid_bits_per_byte": 3 / n} for n in (5, 10, 15)]
    manifest = Manifest(
        settings={"steps": 19, "note": EVIL},
        versions={"torch": "2"},
        parents=(Parent("corpus", "ab" * 32),),
        files={"model.safetensors": FileEntry("cd" * 32, size)},
    )
    return StageSummary(name, "train", f"runs/{name}", 1234, size, quality, metrics, manifest)


class Page(HTMLParser):
    """Collects what a browser would load, and the elements on the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_script = tag == "script"
        for name, value in attrs:
            if name == "href" and (value or "").startswith("#"):
                continue  # a place on the page itself
            if name in ("src", "href", "srcset", "data", "action", "poster") or name.startswith("on"):
                self.loads.append(f"{tag} {name}={value}")
            if name == "id" and value:
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if not self._in_script:
            self.text += data


def written(tmp_path: Path, title: str, inputs: Inputs) -> tuple[str, Page]:
    out = tmp_path / "report.html"
    write_report({"html": out}, title, inputs)
    html = out.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    return html, Page(html)


def traces(inputs: Inputs, identifier: str) -> list[dict[str, Any]]:
    (found,) = [one for section in page_sections(inputs) for one in section.charts if one.identifier == identifier]
    return data_of(found)


def data_of(chart: Chart) -> list[dict[str, Any]]:
    assert chart.figure is not None
    return list(chart.figure["data"])


def test_the_page_loads_nothing_and_says_what_it_was_given(tmp_path: Path) -> None:
    stages = [stage("teacher", 4_000_000, 1.5), stage("student", 500_000, 1.6)]
    html, page = written(tmp_path, "A title", Inputs(stages, bench_result(), [Sample("sample", "Some text", "Given")]))
    assert page.loads == []
    assert page.tags.count("script") == 2 and "link" not in page.tags and "iframe" not in page.tags
    assert not re.search(r"url\(\s*['\"]?https?:", html.partition("<script>")[0])
    assert "default-src 'none'" in html
    assert html.count("plotly.js v") == 1
    for words in (
        "A title",
        "Does not fit host",
        "not measured",
        "teacher",
        "1.5000",
        "0.500 MB",
        "ab" * 32,
        "GivenSome text",
    ):
        assert words in page.text
    assert {"quality-size", "loss", "valid-bits-per-byte", "speed-depth", "memory-tokens"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_text_stays_text(tmp_path: Path) -> None:
    stages = [stage(EVIL, 4_000_000, 1.5), stage("b", 500_000, 1.6)]
    html, page = written(tmp_path, EVIL, Inputs(stages, bench_result(EVIL), [Sample(EVIL, EVIL, EVIL)], [], [EVIL]))
    assert EVIL not in html
    assert page.tags.count("script") == 2 and "img" not in page.tags and page.loads == []
    assert page.text.count(EVIL) >= 5  # title, heading, stage, setting, sample
    write_report({"md": tmp_path / "a.md"}, EVIL, Inputs(stages, bench_result(EVIL), [], [], [EVIL]))
    markdown = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert "<" not in markdown and "alert(1)" in markdown


@pytest.mark.parametrize("parts", ["nothing", "stages", "bench", "samples", "bare stage"])
def test_missing_parts_say_which_command_supplies_them(tmp_path: Path, parts: str) -> None:
    stages = [stage("only", 10, None)] if parts == "stages" else []
    if parts == "bare stage":
        stages = [StageSummary("bare", "checkpoint", "runs/bare stage")]
    samples = [Sample("a", "b")] if parts == "samples" else []
    bench = bench_result() if parts == "bench" else None
    html, page = written(tmp_path, "T", Inputs(stages, bench, samples))
    assert "None" not in page.text and "undefined" not in page.text
    assert ("stages" in page.ids) == bool(stages)
    assert ("No text was given" in page.text) == (parts != "samples")
    assert ("Does not fit" in page.text) == (parts == "bench")
    assert ("No verdict" in page.text) == (parts != "bench")
    assert len(html) < 100_000 or parts in ("stages", "bench")  # no charts, no plotly
    if parts == "bare stage":  # a command that can be pasted, its directory quoted
        assert "sportsllm-compress bench 'runs/bare stage' --target host --out bare.json" in page.text
    if parts == "bench":
        assert {"speed-depth", "memory-tokens"} <= set(page.ids)
        assert "It needs the model's shape" in page.text  # the roofline, since runs/export does not exist


def test_the_last_stages_measurement_gives_the_verdict(tmp_path: Path) -> None:
    measured = bench_result()
    for limit in measured["budget"]["limits"]:
        limit["verdict"] = "pass"
    measured["budget"]["verdict"] = "pass"
    stages = [StageSummary("a", "export", "a", bench=bench_result()), StageSummary("b", "export", "b", bench=measured)]
    _, page = written(tmp_path, "T", Inputs(stages))
    assert "Fits host" in page.text


def test_charts_skip_what_is_not_finite() -> None:
    metrics = [{"tokens": n, "loss": value} for n, value in enumerate((3.0, float("nan"), 2.0, float("inf"), 1.0))]
    loss, missing = training_charts([StageSummary("a", "train", "a", metrics=metrics)])
    assert data_of(loss)[0]["y"] == [3.0, 2.0, 1.0]
    assert json.loads(json.dumps(loss.figure, allow_nan=False)) == loss.figure
    assert missing.figure is None and str(missing.command).startswith("sportsllm-compress train")


def test_a_thinned_curve_keeps_its_ends() -> None:
    metrics = [{"tokens": n, "loss": 1000.0 - n} for n in range(1, 804)]
    loss, _ = training_charts([StageSummary("a", "train", "a", metrics=metrics)])
    (curve,) = data_of(loss)
    assert (curve["x"][0], curve["x"][-1], curve["y"][-1]) == (1, 803, 197.0)
    assert len(curve["x"]) < 803 and curve["x"] == sorted(set(curve["x"]))


def test_numbers_have_three_digits() -> None:
    shown = [number(value) for value in (0, 0.01234, 1.234, 12.34, 123.4, 12_345.6, float("nan"))]
    assert shown == ["0", "0.0123", "1.23", "12.3", "123", "12,346", "\u2013"]


def test_the_memory_line_grows_by_the_cache() -> None:
    data = {trace["name"]: trace for trace in traces(Inputs([], bench_result()), "memory-tokens")}
    # 50 MB at 1,024 tokens and 2,000 bytes a token: 47.952 MB at none, 52.048 MB at 2,048.
    assert data["peak, computed"]["y"] == pytest.approx([47.952, 52.048])
    assert data["cache, computed"]["y"] == pytest.approx([0, 4.096])
    assert (data["measured"]["x"], data["measured"]["y"]) == ([1024], [50.0])


def test_further_figures_of_bench_are_shown_where_they_are(tmp_path: Path) -> None:
    bench = bench_result() | {
        "memory_split": {"pss_bytes": 41_000_000},
        "joules_per_token": 0.25,
        "without_cache": {"512": {"tpot_ms": 160.0, "decode_tokens_per_s": 6.25, "cache_speedup": 80.0}},
        "sustained": {"windows": [{"start_s": 30, "tokens_per_s": 480.0, "clock_mhz": None}]},
        "against": {"llama.cpp": {"status": "measured", "ttft_ms": {"512": 236.0}}, "other": {"status": "absent"}},
    }
    _, page = written(tmp_path, "T", Inputs([], bench))
    for words in ("41.0 MB", "0.250 J per token", "480", "ttft ms 512: 236", "absent", "What the cache saves", "6.25"):
        assert words in page.text
    text = markdown("T", Inputs([], bench))
    assert "| 512 | 500 | 6.25 | 80.0 |" in text and "reads the whole text again" in text
    assert "anonymous memory" not in page.text


def test_formats_follow_suffix_or_flag() -> None:
    html, md = Path("a/r.html"), Path("a/r.md")
    assert targets(html) == {"html": html} and targets(md) == {"md": md}
    assert targets(html, "html, md,csv") == {"html": html, "md": md, "csv": Path("a/r.csv")}
    assert targets(Path("a/v1.2"), "md") == {"md": Path("a/v1.2.md")}
    for out, formats in ((Path("a/r.pdf"), None), (Path("a"), None), (html, "html,pdf"), (html, " ")):
        with pytest.raises(UsageError, match=r"md"):
            targets(out, formats)


def test_markdown_and_csv_have_fixed_columns(tmp_path: Path) -> None:
    measured = bench_result() | {"bits_per_byte": 1.61}
    stages = [stage("a|b", 4_000_000, 1.5), StageSummary("b", "export", "b", 9, 500_000, 1.61, bench=measured)]
    files = targets(tmp_path / "r.md", "md,csv")
    write_report(files, "T", Inputs(stages))
    lines = files["md"].read_text(encoding="utf-8").splitlines()
    start = lines.index("### Stages")
    assert lines[start + 4] == "| 1 | a\\|b | train | 1,234 | 4.00 MB | 1.5000 | \u2013 | \u2013 | \u2013 | \u2013 |"
    assert lines[start + 5].endswith("| 0.500 MB | 1.6100 | 150 ms | 2.00 ms | 50.0 MB | fail |")
    assert "| First token" not in lines and "| Time to first token | 150 x | 100 x | fail | measured |" in lines
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text(encoding="utf-8"))))
    assert [(row["stage"], row["size_bytes"], row["scored_by"]) for row in rows] == [
        ("a|b", "4000000", "training"),
        ("b", "500000", "bench"),
    ]
    assert [row["tpot_512_p95_ms"] for row in rows] == ["", "2.4"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.md"
    out.write_text("old", encoding="utf-8")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report({"md": out}, "T", Inputs())
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"] and out.read_text(encoding="utf-8") == "old"


def test_the_command_sorts_what_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "stage"
    record = Stage("train", {"steps": 3}, results={"parameters": 77, "valid_bits_per_byte": 2.5})
    with output_directory(made, record) as partial:
        (partial / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "loss": 2.0}\n', encoding="utf-8")
    bench, sample, out = tmp_path / "bench.json", tmp_path / "before.txt", tmp_path / "out.html"
    bench.write_text(json.dumps(bench_result(str(made))), encoding="utf-8")
    sample.write_text("The ball is round.", encoding="utf-8")
    inputs = collect([made, bench, sample])
    (first,) = inputs.stages
    assert (first.parameters, first.bits_per_byte, first.bench) == (77, 2.5, inputs.bench)
    assert first.metrics == [{"step": 1, "tokens": 5, "loss": 2.0}]
    assert inputs.samples == [Sample("before", "The ball is round.")]
    (alone,) = collect([bench]).stages  # a measurement whose directory was not given
    assert (alone.name, alone.command, alone.bench) == ("stage", "bench", inputs.bench)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(made), str(bench), str(sample), "--out", str(out), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stages"] == ["stage"]
    assert "The ball is round." in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("given", [True, False], ids=["directory", "results alone"])
def test_two_results_of_one_directory_are_both_shown(tmp_path: Path, given: bool) -> None:
    stage_directory = tmp_path / "export"
    with output_directory(stage_directory, Stage("export", {})):
        pass
    for device, milliseconds in (("host", 2.0), ("raspberry-pi-5", 9.0)):
        result = bench_result(str(stage_directory))
        result["budget"]["target"], result["tpot_ms"]["512"]["p50"] = device, milliseconds
        (tmp_path / f"bench-{device}.json").write_text(json.dumps(result), encoding="utf-8")
    results = [tmp_path / "bench-host.json", tmp_path / "bench-raspberry-pi-5.json"]
    inputs = collect([*([stage_directory] if given else []), *results])
    shown = [(stage.name, stage.limit_metrics()["tpot_p50_ms"]) for stage in inputs.stages]
    assert shown == [("export (bench-host)", 2.0), ("export (bench-raspberry-pi-5)", 9.0)]
    assert inputs.deciding == inputs.stages[1].bench


def test_inputs_that_are_no_stage_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a result of `bench`"):
        collect([other])
    with pytest.raises(UsageError, match="give stage directories"):
        collect([tmp_path / "absent"])
    (tmp_path / "metrics.jsonl").write_text("{broken\n", encoding="utf-8")
    other.unlink()
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl: line 1"):
        collect([tmp_path])
