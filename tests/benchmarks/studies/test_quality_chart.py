"""The chart of quality against bytes and speed: a run over real formats of a tiny model, and where its points lie."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.labels import read_csv
from benchmarks.reporting.charts import COLORS
from benchmarks.studies import quality_chart
from benchmarks.studies.quality_chart import COLUMNS, draw
from sportsllm.commands import load_command
from sportsllm.formats.checkpoint import save_checkpoint
from tests.support.models import tiny_model

ROWS = [
    dict(zip(COLUMNS, line, strict=True))
    for line in (
        ("ours", "INT4", "100000000", "0.01", "0.001", "12.1", "200", "512", "Zen 5", "2026-11-27"),
        ("ours", "INT8", "200000000", "0.001", "0.0001", "12", "100", "512", "Zen 5", "2026-11-27"),
        ("llama.cpp", "Q4_0 <b>", "100000000", "0.1", "0.001", "13", "", "", "Zen 5", "2026-11-26"),
    )
]


def test_points_lie_where_the_axes_say() -> None:
    image = draw(ROWS, "model")
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5" fill="(#\w+)"/>', image)
    legend, points = found[:2], [(float(x), float(y), color) for x, y, color in found[2:]]
    assert [color for *_, color in legend] == list(COLORS[:2])
    (x4, y4, ours), (x8, y8, _), (x0, y0, theirs), (fast, y, _), (slow, _, _) = points  # no speed of the last
    assert x4 == x0 < x8 and y0 < y4 < y8 and y4 == y and slow < fast
    assert y4 - y0 == pytest.approx(y8 - y4, abs=0.2), "a factor of ten each, on a logarithmic axis"
    assert (ours, theirs) == tuple(COLORS[:2])
    assert "Q4_0 &lt;b&gt;" in image and "Zen 5, 2026-11-27; Zen 5, 2026-11-26" in image
    ticks = dict(re.findall(r'<text x="([\d.]+)" y="376.0" text-anchor="middle">([\d.,]+)</text>', image))
    assert f"{x4:.1f}" in ticks and ticks[f"{x4:.1f}"] == "100", "megabytes"


@pytest.mark.parametrize("peer", ["nothing+INT4", "optimum+INT4", "genai"])
def test_a_peer_that_cannot_be_scored_is_refused_first(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["--text", "text", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "x.csv")]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), *rest, "--peer", f"{peer}={tmp_path}"])
    with pytest.raises(SystemExit, match="2"):
        quality_chart.main()
    assert peer in capsys.readouterr().err and not (tmp_path / "work").exists()


def test_one_command_makes_measures_and_draws(
    corpus_file: Path, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp", reason="needs llama.cpp's engine: pip install xllamacpp")
    monkeypatch.setattr(quality_chart, "ONNX", {"INT8": {"bits": 8, "method": "rtn"}})
    monkeypatch.setattr(quality_chart, "GGUF", ("q8_0",))
    model, table, text = tmp_path / "model", tmp_path / "tiny.csv", tmp_path / "text.jsonl"
    model.mkdir()
    save_checkpoint(model, tiny_model(max_position_embeddings=160), tokenizer_directory)
    text.write_text("".join(corpus_file.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    own = tmp_path / "work" / "q8_0" / "model.gguf"
    load_command("export")(model, out=own.parent, format="gguf", dtype="q8_0", threads=2)  # kept by the study
    command = ["", str(model), "--text", str(text), "--work", str(tmp_path / "work"), "--out", str(table)]
    monkeypatch.setattr(
        sys, "argv", [*command, "--rounds", "1", "--peer", f"llama.cpp+Q8_0={own},python={sys.executable}"]
    )
    quality_chart.main()
    rows = {(row["tool"], row["format"]): row for row in read_csv(table)}
    int8, gguf, again = (
        rows[key] for key in (("sportsllm-compress", "INT8"), ("sportsllm-compress", "Q8_0"), ("llama.cpp", "Q8_0"))
    )
    assert len(rows) == 3 and gguf["kl"] == again["kl"] and int(gguf["file_bytes"]) == own.stat().st_size
    for row in (int8, gguf):
        assert 0 < float(row["kl_error"]) < float(row["kl"]) < 0.05  # 8 bits of a random model
        assert float(row["tokens_per_s"]) > 0 and row["depth"] == "32"
    image = table.with_suffix(".svg").read_text(encoding="utf-8")
    assert image.count(">Q8_0<") == 4 and ">llama.cpp<" in image
    monkeypatch.setattr(sys, "argv", ["", "--out", str(table)])
    before = table.read_text(encoding="utf-8")
    quality_chart.main()
    assert (table.read_text(encoding="utf-8"), table.with_suffix(".svg").read_text(encoding="utf-8")) == (before, image)
