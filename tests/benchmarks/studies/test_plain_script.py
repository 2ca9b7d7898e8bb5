"""The plain script beside the toolkit, on a tiny teacher that names its text."""

import sys
from pathlib import Path

import pytest

from benchmarks.labels import read_csv
from benchmarks.studies import plain_script
from sportsllm.verbs.train import train


@pytest.mark.slow
def test_every_start_is_compared_once(tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own training lowers the loss, gets the time of the command, and nothing is made twice."""
    text = tmp_path / "matches.jsonl"
    text.write_text("".join(corpus_file.read_text(encoding="utf-8").splitlines(keepends=True)[:12]), encoding="utf-8")
    shape = {"layers": 2, "hidden": 64, "intermediate": 160, "heads": 2, "kv_heads": 1, "head_dim": 32}
    train(model="tiny-300k", corpus=[text], out=tmp_path / "teacher", vocab_size=300, tokens=8_192, settings=[
        f"{name}={size}" for name, size in shape.items()
    ])  # fmt: skip
    monkeypatch.setattr(plain_script, "RATES", (1e-3, 1e-5))
    monkeypatch.setattr(plain_script, "_SEQUENCE", 128)
    arguments = ["", str(tmp_path / "teacher"), "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--tokens", "1024"])
    plain_script.main()
    rows = read_csv(tmp_path / "plain_script.csv")
    assert [row["start"] for row in rows[::4]] == list(plain_script.STARTS) and len(rows) == 12
    assert rows[4]["method"] == "not distilled" and float(rows[6]["bits_per_byte"]) < float(rows[4]["bits_per_byte"])
    assert {row["learning_rate"] for row in rows if "plain" in row["method"]} <= {"0.001", "1e-05"}
    for before, command, equal, longer in (rows[at : at + 4] for at in range(0, 12, 4)):
        assert float(before["seconds"]) == 0 and command["tokens"] == equal["tokens"] == "1024"
        ratio = float(command["seconds"]) / float(equal["seconds"])
        assert int(longer["tokens"]) == pytest.approx(1_024 * ratio, rel=0.1)  # seconds are rounded
    monkeypatch.setattr(plain_script, "compare", lambda *_: pytest.fail("compared again"))
    plain_script.main()
