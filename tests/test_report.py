"""The report: nothing is loaded from outside, nothing in it runs as code, and parts may be missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import StageSummary, collect, number, write_report
from benchmarks.report_plots import plots
from sportsllm import cli
from sportsllm.artifacts import Stage, output_directory
from sportsllm.errors import ArtifactError, UsageError

EVIL = "</script><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)>"
LIMITS = (("file_mb", 1.0, 0.5, True), ("ttft_ms", 100.0, 150.0, False), ("tpot_p50_ms", 10.0, None, None))


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
        "memory_floor_tpot_ms": 0.5,
        "memory_floor": {"by_depth_ms": {"32": 0.4, "512": 0.5}},
        "noisy": ["ttft_ms.128"],
        "machine": {"processor": "tested", "cores": 2},
        "raw": {"speed": [{"step_ms": {depth: [[0.9, 1.0, 1.4]] for depth in times}}]},
        "budget": {
            "device": "host",
            "passed": False,
            "limits": [
                {"name": name, "limit": limit, "value": value, "unit": "x", "passed": passed, "source": "measured"}
                for name, limit, value, passed in LIMITS
            ],
        },
    }


def stage(name: str, size: int, quality: float | None) -> StageSummary:
    metrics = [{"step": n, "tokens": 100 * n, "loss": 5 / n, "lr": 1e-3} for n in range(1, 20)]
    metrics += [{"step": n, "tokens": 100 * n, "valid_bits_per_byte": 3 / n} for n in (5, 10, 15)]
    manifest = {
        "settings": {"steps": 19, "note": EVIL},
        "versions": {"torch": "2"},
        "parents": [{"path": "corpus", "sha256": "ab" * 32}],
        "files": {"model.safetensors": {"bytes": size, "sha256": "cd" * 32}},
    }
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
            if name in ("src", "href", "srcset", "data", "action", "poster") or name.startswith("on"):
                self.loads.append(f"{tag} {name}={value}")
            if name == "id" and value:
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if not self._in_script:
            self.text += data


def written(tmp_path: Path, *arguments: Any) -> tuple[str, Page]:
    out = tmp_path / "report.html"
    write_report(out, *arguments)
    html = out.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    return html, Page(html)


def test_the_page_loads_nothing_and_says_what_it_was_given(tmp_path: Path) -> None:
    stages = [stage("teacher", 4_000_000, 1.5), stage("student", 500_000, 1.6)]
    html, page = written(tmp_path, "A title", stages, bench_result(), [("sample", "Some text")])
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
        "Some text",
    ):
        assert words in page.text
    assert {"quality-size", "loss", "valid_bits_per_byte", "speed-depth", "step-times"} <= set(page.ids)


def test_text_stays_text(tmp_path: Path) -> None:
    stages = [stage(EVIL, 4_000_000, 1.5), stage("b", 500_000, 1.6)]
    html, page = written(tmp_path, EVIL, stages, bench_result(EVIL), [(EVIL, EVIL)])
    assert EVIL not in html
    assert page.tags.count("script") == 2 and "img" not in page.tags and page.loads == []
    assert page.text.count(EVIL) >= 5  # title, heading, stage, setting, sample


@pytest.mark.parametrize("parts", ["nothing", "stages", "bench", "samples", "bare stage"])
def test_missing_parts_are_left_out(tmp_path: Path, parts: str) -> None:
    stages = [stage("only", 10, None)] if parts == "stages" else []
    if parts == "bare stage":
        stages = [StageSummary("bare", "checkpoint", "runs/bare")]
    samples = [("a", "b")] if parts == "samples" else []
    html, page = written(tmp_path, "T", stages, bench_result() if parts == "bench" else None, samples)
    assert "None" not in page.text and "undefined" not in page.text
    assert ("Stages" in page.text) == bool(stages)
    assert ("Sample text" in page.text) == bool(samples)
    assert ("Does not fit" in page.text) == (parts == "bench")
    assert len(html) < 100_000 or parts in ("stages", "bench")  # no charts, no plotly


def test_the_last_stages_measurement_gives_the_verdict(tmp_path: Path) -> None:
    measured = bench_result()
    for limit in measured["budget"]["limits"]:
        limit["passed"] = True
    stages = [StageSummary("a", "export", "a", bench=bench_result()), StageSummary("b", "export", "b", bench=measured)]
    _, page = written(tmp_path, "T", stages, None, [])
    assert "Fits host" in page.text


def test_charts_skip_what_is_not_finite() -> None:
    metrics = [{"tokens": n, "loss": value} for n, value in enumerate((3.0, float("nan"), 2.0, float("inf"), 1.0))]
    (plot,) = plots([StageSummary("a", "train", "a", metrics=metrics)], None)
    assert plot["figure"]["data"][0]["y"] == [3.0, 2.0, 1.0]
    assert json.loads(json.dumps(plot, allow_nan=False)) == plot


def test_numbers_have_three_digits() -> None:
    shown = [number(value) for value in (0, 0.01234, 1.234, 12.34, 123.4, 12_345.6, float("nan"))]
    assert shown == ["0", "0.0123", "1.23", "12.3", "123", "12,346", "\u2013"]


def test_the_command_sorts_what_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "stage"
    record = Stage("train", {"steps": 3}, results={"parameters": 77, "valid_bits_per_byte": 2.5})
    with output_directory(made, record) as partial:
        (partial / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "loss": 2.0}\n', encoding="utf-8")
    bench, sample, out = tmp_path / "bench.json", tmp_path / "before.txt", tmp_path / "out.html"
    bench.write_text(json.dumps(bench_result(str(made))), encoding="utf-8")
    sample.write_text("The ball is round.", encoding="utf-8")
    stages, measured, samples = collect([made, bench, sample])
    assert (stages[0].parameters, stages[0].bits_per_byte, stages[0].bench) == (77, 2.5, measured)
    assert stages[0].metrics == [{"step": 1, "tokens": 5, "loss": 2.0}]
    assert samples == [("before", "The ball is round.")]
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(made), str(bench), str(sample), "--out", str(out), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stages"] == ["stage"]
    assert "The ball is round." in out.read_text(encoding="utf-8")


def test_inputs_that_are_no_stage_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="no result of `bench`"):
        collect([other])
    with pytest.raises(UsageError, match="give stage directories"):
        collect([tmp_path / "absent"])
    (tmp_path / "metrics.jsonl").write_text("{broken\n", encoding="utf-8")
    other.unlink()
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl:1"):
        collect([tmp_path])
