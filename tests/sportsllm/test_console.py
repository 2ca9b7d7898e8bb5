"""Where lines for people go."""

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from sportsllm import console
from sportsllm.console import log, logged, output, progress_bar, silenced


def test_the_lines_of_many_steps_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    with pytest.raises(ValueError), ThreadPoolExecutor(1) as another, logged(path):
        log("one")
        another.submit(log, "elsewhere").result()
        another.submit(lambda: output().print("a result elsewhere")).result()
        with silenced(False):  # what is silent around it stays so
            output().print("a table")
        raise ValueError
    log("two of runs[a]:key:")
    output().print(f"a result of runs[a]:key:{60 * ' and'}")  # one line, though longer than a table may be
    shown = capsys.readouterr()
    assert path.read_text(encoding="utf-8") == "one\n"
    assert shown.err == "elsewhere\ntwo of runs[a]:key:\n"
    assert shown.out == f"a result elsewhere\na result of runs[a]:key:{60 * ' and'}\n"


def test_progress_away_from_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 30.0, 240.0, 250.0, 480.0, 0.0, 30.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress_bar("train", 400) as bar:
        bar.advance(50)
        bar.advance(50, "loss 2.0")
        bar.advance(100)
        bar.advance(200)
    with progress_bar("resumed", 400, done=100) as bar:
        bar.advance(50)
    lines = ["train · 12%, about 4 min left", "train · 25%, about 12 min left · loss 2.0"]
    lines.append("resumed · 38%, about 2 min left")
    assert capsys.readouterr().err.splitlines() == lines


def test_a_line_stands_above_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("train", 2) as bar:
        bar.advance(note="a note")
        log("a line")
    assert "\x1b[2Ka line\n" in terminal.getvalue()


def test_progress_of_unknown_length_has_no_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.0)
    with progress_bar("tokens", None) as bar:
        bar.advance(3, "3 files")
    assert capsys.readouterr().err == "tokens · 3 files\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal with GNU readline")
def test_a_typed_line_may_be_pasted_and_is_recalled() -> None:
    """A terminal alone ends a line at 4,095 characters and at each line break of a paste."""
    import pty

    pasted, program = "word " * 1_000, "from sportsllm.console import typed_line\n"
    program += "print([len(typed_line('> ')), typed_line('> '), typed_line('> ')], flush=True)"
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        for line in (f"{pasted}\r", "\x1b[200~one\ntwo\x1b[201~\r", "\x1b[A\r"):
            before = shown.count(b"> ")
            while shown.count(b"> ") == before:
                shown += os.read(ours, 65_536)
            os.write(ours, line.encode())
        with suppress(OSError):  # the end, on Linux
            while b"]\r\n" not in shown:
                shown += os.read(ours, 65_536)
    os.close(ours)
    assert b"[5000, 'one\\ntwo', 'one\\ntwo']" in shown, shown[-500:]
