"""What a training leaves out, and how the next command knows."""

from pathlib import Path

import pytest

from sportsllm.formats.manifest import Manifest
from sportsllm.text import documents as provenance
from sportsllm.text.documents import (
    HELD_OUT,
    held_out_files,
    held_out_setting,
    left_out,
    load_corpus,
    trained_on,
    warn_if_trained_on,
)
from sportsllm.verbs.train import train


def test_what_checkpoints_hold_out_is_left_out_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, theirs, further = (tmp_path / name for name in ("own.txt", "theirs.txt", "further.txt"))
    for path in (own, theirs, further):
        path.write_text("text", encoding="utf-8")
    named = {
        ("teacher", "valid"): [str(theirs), str(tmp_path / "gone.txt")],
        ("start", "valid"): [str(own)],
        ("start", HELD_OUT): [str(own), str(theirs), str(further)],
    }
    monkeypatch.setattr(
        provenance,
        "manifest_of",
        lambda made: Manifest(settings={key: paths for (name, key), paths in named.items() if name == made.name}),
    )
    teacher, start = tmp_path / "teacher", tmp_path / "start"
    assert held_out_files(teacher) == [theirs]
    assert left_out([], teacher) == (theirs,) and left_out([own], teacher, start) == (own, theirs, further)
    assert held_out_setting([], [theirs]) == {HELD_OUT: [str(theirs)]}
    assert held_out_setting([own], [own]) == {} and held_out_setting([own, theirs], [own]) == {}


def test_scored_text_is_compared_with_the_training_corpus(
    checkpoint: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out documents of the same corpus file are not training text."""
    out = tmp_path / "tuned"
    train(checkpoint, corpus=[corpus_file], out=out, steps=0, sequence=64)
    split = load_corpus([corpus_file], [])
    assert trained_on(out, split.train[:3]) == 3 and trained_on(out, split.held_out) == 0
    assert warn_if_trained_on(out, [split.train[0], "another text"]) == 1
    assert "1 of 2 documents are training text" in capsys.readouterr().err
    assert trained_on(tmp_path, split.train) == 0
