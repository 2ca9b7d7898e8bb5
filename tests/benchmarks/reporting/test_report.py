"""The report: nothing is loaded from outside, nothing in it runs as code, and missing parts say what they need."""

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reporting.inputs import Inputs, Sample, StageSummary, collect
from benchmarks.reporting.measured import Bench, as_bench
from benchmarks.reporting.page import html_page, markdown, stages_csv
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, output_directory
from sportsllm.formats.manifest import FileEntry, Manifest, Parent
from tests.support.command_line import CommandLine

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
        "peak_rss_bytes": 50_000_000,
        "memory_floor": {"by_depth_ms": {"32": 0.4, "512": 0.5}},
        "noise": {"ttft_ms.128": {"low": 9.0, "high": 11.0, "half_width": 0.1, "noisy": True, "rounds": 5}},
        "noise_reasons": ["one round is too few to tell"],
        "clean": False,
        "machine": {"processor": "tested", "cores": 2},
        "peak_rss_context_tokens": 1024,
        "context_length": 2048,
        "budget": {
            "target": "host",
            "verdict": "fail",
            "limits": [
                {"name": name, "limit": limit, "value": value, "low": value, "high": value, "unit": "x"}
                | {"verdict": verdict, "source": "measured"}
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
    figures = {"parameters": 1234, "size_bytes": size, "bits_per_byte": quality, "tokens": 1900, "flops": 1.5e9}
    return StageSummary(name, "train", f"runs/{name}", **figures, metrics=metrics, manifest=manifest)  # type: ignore[arg-type]


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


def measured(directory: str = "runs/export", **more: Any) -> Bench:
    return as_bench(bench_result(directory) | more)


def page_of(title: str, inputs: Inputs) -> tuple[str, Page]:
    html = html_page(title, inputs)
    return html, Page(html)


def test_the_page_loads_nothing_and_says_what_it_was_given() -> None:
    stages = [stage("teacher", 4_000_000, 1.5), stage("student", 500_000, 1.6)]
    html, page = page_of("A title", Inputs(stages, measured(), [Sample("sample", "Some text", "Given")]))
    assert page.loads == []
    assert page.tags.count("script") == 2 and "link" not in page.tags and "iframe" not in page.tags
    assert not re.search(r"url\(\s*['\"]?https?:", html.partition("<script>")[0])
    assert "default-src 'none'" in html
    assert html.count("plotly.js v") == html.count("<main>") == html.count("</main>") == 1
    verdict = "host: fail: time to first token 150 of 100 x; open: median time per token (not measured)"
    noise = "NOISY, not a clean result; one round is too few to tell; repeat it on a quiet machine"
    for words in ("A title", verdict, noise, "1.5000", "0.500 MB", "1,900", "1.5e+09", "ab" * 32, "GivenSome text"):
        assert words in page.text
    assert '<td class="fail">fail</td>' in html and '<td class="uncertain">uncertain</td>' in html
    assert {"file-mb", "loss", "valid-bits-per-byte", "budget", "measurement"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_text_stays_text() -> None:
    inputs = Inputs([stage(EVIL, 4_000_000, 1.5), stage("b", 500_000, 1.6)], measured(EVIL), [], [], [EVIL])
    html, page = page_of(EVIL, replace(inputs, samples=[Sample(EVIL, EVIL, EVIL)]))
    assert EVIL not in html
    assert page.tags.count("script") == 2 and "img" not in page.tags and page.loads == []
    assert page.text.count(EVIL) >= 5  # title, heading, stage, setting, sample
    text = markdown(EVIL, inputs)
    assert "<" not in text and "alert(1)" in text


@pytest.mark.parametrize("parts", ["nothing", "stages", "bench", "samples", "bare stage"])
def test_missing_parts_are_left_out(parts: str) -> None:
    stages = {
        "stages": [stage("only", 10, None)],
        "bare stage": [StageSummary("bare", "checkpoint", "runs/bare stage", 1)],
    }
    samples = [Sample("a", "b")] if parts == "samples" else []
    html, page = page_of("T", Inputs(stages.get(parts, []), measured() if parts == "bench" else None, samples))
    assert "None" not in page.text and "undefined" not in page.text
    shown = {"stages": {"stages", "training"}, "bench": {"budget", "measurement"}, "bare stage": {"stages"}}
    known = {"budget", "stages", "trade-offs", "measurement", "training", "samples"}
    assert known & set(page.ids) == shown.get(parts, {"samples"} if parts == "samples" else set())
    assert ("host: fail" in page.text) == (parts == "bench") != ("No verdict" in page.text)
    assert (len(html) > 100_000) == (parts == "stages")  # no charts, no plotly
    if parts == "bare stage":  # a command that can be pasted, its directory quoted
        assert "sportsllm-compress bench 'runs/bare stage' --target NAME --text HELD-OUT" in page.text


def test_all_that_bench_measured_is_shown() -> None:
    peer = {"status": "measured", "ttft_ms": {"512": 236.0}, "generated_tokens_per_s": {"32": 50.0}, "steady": False}
    ratio = {"ratio": 2.0, "low": 1.5, "high": 2.5, "peer": "llama.cpp", "better": "higher"}
    score = {"metric": "acc", "metrics": {"acc": [0.5, None]}, "documents": 99, "shots": 0}
    bench = measured(
        rounds=5,
        sustained={
            "windows": [{"start_s": 30, "tokens_per_s": 480.0, "clock_mhz": None}] * 40,
            "throttling_percent": 7.0,
            "throttled": True,
            "other_cpu_cores": 1.3,
        },
        against={"llama.cpp": peer, "genai": {"status": "not installed", "install": "pip install it"}},
        against_ratios={"generated_tokens_per_s.32": ratio},
        texts={"copying": {"proposed": 8, "accepted": 6, "tokens_per_pass": 4.0, "tokens_per_s": 900.0}},
        bits_per_byte=1.53,
        teacher_bits_per_byte=1.5,
        quality_loss_percent=2.0,
        quality_interval_percent=[1.0, 3.0],
        quality_documents=20,
        tasks={"quiz": score | {"value": 0.25, "error": 0.01}},
        teacher_tasks={"quiz": score | {"value": 0.5, "error": None}},
        accuracy_loss_points=25.0,
        accuracy_interval_points=[20.0, 30.0],
    )
    text = markdown("T", Inputs([], bench))
    for words in (
        "| first token, prompt of 128 | 10.0 ms | 9.00 to 11.0 (noisy) |",
        "| 512 | 2.00 | 2.00 | 2.40 | 4.00 | 0.500 | 500 |",
        "THROTTLED: the last of 40 windows is 7.0% below the first. NOISY: other programs used 1.3 cores meanwhile.",
        "| llama.cpp (noisy) | \u2013 | 50.0 | 236 | \u2013 |",
        "per s after 32: 2.00 (1.50 to 2.50; llama.cpp; higher is better) genai: not installed: pip install it",
        "Quality: 1.5300 bits per byte, 2.00% worse than the teacher's 1.5000 (95% interval +1.00 to +3.00%, 20 doc",
        "| copying | 75.0 % | 4.00 | 900 | \u2013 |",
        "| quiz | acc | 0.2500 ± 0.0100 | 0.5000 | 99 |",
        "Accuracy: +25.00 points below the teacher's (95% interval +20.00 to +30.00)",
    ):
        assert words in text, words
    assert text.count("| 30.0 | 480 |") == 3


def test_markdown_leaves_out_empty_columns_and_csv_keeps_all() -> None:
    stages = [replace(stage("a|b", 4_000_000, 1.5), tokens=None, flops=None)]
    stages += [StageSummary("b", "export", "b", 9, 500_000, 1.61, bench=measured(bits_per_byte=1.61))]
    lines = markdown("T", Inputs(stages, stages[1].bench)).splitlines()
    start = lines.index("### Stages")
    assert "tokens" not in lines[start + 2] and "FLOPs" not in lines[start + 2]
    assert lines[start + 4] == "| 1 | a\\|b | train | 1,234 | 4.00 MB | 1.5000 | \u2013 | \u2013 | \u2013 | \u2013 |"
    assert lines[start + 5].endswith("| 0.500 MB | 1.6100 | 150 ms | 2.00 ms | 50.0 MB | fail |")
    assert "| Time to first token | 150 x | 100 x | fail | measured | \u2013 |" in lines
    rows = list(csv.DictReader(io.StringIO(stages_csv(Inputs(stages)))))
    found = [(row["stage"], row["file_mb"], row["scored_by"]) for row in rows]
    assert found == [("a|b", "4.0", "training"), ("b", "0.5", "bench")]
    assert [row["tpot_p95_ms"] for row in rows] == ["", "2.4"] and "tokens" in rows[0]


def test_the_command_sorts_what_it_is_given(tmp_path: Path, cli: CommandLine) -> None:
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
    printed = cli.result("report", made, bench, sample, "--out", out)
    assert printed["stages"] == ["stage"] and printed["bytes"] == out.stat().st_size
    assert "The ball is round." in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("given", [True, False], ids=["directory", "results alone"])
def test_two_results_of_one_directory_are_both_shown(tmp_path: Path, given: bool) -> None:
    stage_directory = tmp_path / "export"
    with output_directory(stage_directory, Stage("export", {})):
        pass
    for device, milliseconds in (("host", 2.0), ("raspberry-pi-5", 9.0)):
        result = bench_result(str(stage_directory))
        result["tpot_ms"]["512"]["p50"] = milliseconds
        (tmp_path / f"bench-{device}.json").write_text(json.dumps(result), encoding="utf-8")
    results = [tmp_path / "bench-host.json", tmp_path / "bench-raspberry-pi-5.json"]
    inputs = collect([*([stage_directory] if given else []), *results])
    shown = [(stage.name, stage.figures()["tpot_p50_ms"]) for stage in inputs.stages]
    assert shown == [("export (bench-host)", 2.0), ("export (bench-raspberry-pi-5)", 9.0)]
    assert inputs.bench == inputs.stages[1].bench


def test_results_of_other_commands_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A glob finds them beside those of `bench`."""
    results = {"bench": bench_result(), "eval": {"perplexity": 4.5}, "generate": {"prompt": "a", "text": "b"}}
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    assert [stage.name for stage in collect(sorted(tmp_path.glob("*.json"))).stages] == ["export"]
    assert capsys.readouterr().err.count("skipped, since it is no result of `bench`") == 2
    with pytest.raises(UsageError, match="no stage among them"):
        collect([tmp_path / "eval.json"])


def test_inputs_that_are_no_stage_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a result of `bench`"):
        collect([other])
    other.write_text(json.dumps(bench_result("a\0b")), encoding="utf-8")
    with pytest.raises(ArtifactError, match="directory: "):
        collect([other])
    nan = {"low": float("nan"), "high": 1.0, "half_width": None, "noisy": None, "rounds": 1}
    with pytest.raises(ArtifactError, match=r"load_s\.low: must be a finite number.*; kl_interval_nats\.1: must be a"):
        measured(noise={"load_s": nan}, kl_interval_nats=[0.0, float("inf")])
    for absent in ("absent", "absent.json"):
        with pytest.raises(UsageError, match="give stage directories"):
            collect([tmp_path / absent])
    with output_directory(tmp_path / "runs" / "export", Stage("export", {})):
        pass
    text = markdown("", collect([tmp_path / "runs" / "export"]))  # a stage without a model
    assert "0 MB" not in text and "bench EXPORT" in text
    with pytest.raises(ArtifactError, match=f"give directories that have one, such as {tmp_path / 'runs' / 'export'}$"):
        collect([tmp_path / "runs"])
    (tmp_path / "metrics.jsonl").write_text("{broken\n", encoding="utf-8")
    other.unlink()
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl: line 1"):
        collect([tmp_path])
