"""Where lines for people go."""

from pathlib import Path

import pytest

from sportsllm.console import logged, output, say, silenced


def test_the_lines_of_many_steps_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(ValueError), logged(log):
        say("one")
        with silenced(False):  # what is silent around it stays so
            output().print("a table")
        raise ValueError
    say("two")
    output().print("a result")
    shown = capsys.readouterr()
    assert log.read_text(encoding="utf-8") == "one\n"
    assert shown.err == "two\n" and shown.out == "a result\n"
