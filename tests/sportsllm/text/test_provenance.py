"""What a training leaves out, and how the next command knows."""

from pathlib import Path

import pytest

from sportsllm.text import provenance
from sportsllm.text.provenance import HELD_OUT, held_out_files, held_out_setting, left_out


def test_what_checkpoints_hold_out_is_left_out_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, theirs, further = (tmp_path / name for name in ("own.txt", "theirs.txt", "further.txt"))
    for path in (own, theirs, further):
        path.write_text("text", encoding="utf-8")
    named = {
        ("teacher", "valid"): [str(theirs), str(tmp_path / "gone.txt")],
        ("start", "valid"): [str(own)],
        ("start", HELD_OUT): [str(own), str(theirs), str(further)],
    }
    monkeypatch.setattr(provenance, "manifest_setting", lambda directory, key: named.get((directory.name, key)))
    teacher, start = tmp_path / "teacher", tmp_path / "start"
    assert held_out_files(teacher) == [theirs]
    assert left_out([], teacher) == (theirs,) and left_out([own], teacher, start) == (own, theirs, further)
    assert held_out_setting([], [theirs]) == {HELD_OUT: [str(theirs)]}
    assert held_out_setting([own], [own]) == {} and held_out_setting([own, theirs], [own]) == {}
