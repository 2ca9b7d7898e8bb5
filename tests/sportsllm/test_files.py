"""Text files that are there whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from sportsllm.files import atomic_write_text


def test_a_file_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "bench.json"
    atomic_write_text(out, "whole")
    assert out.read_text() == "whole"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        atomic_write_text(tmp_path / "new" / "second.json", "cut")
    assert list((tmp_path / "new").iterdir()) == [out]
