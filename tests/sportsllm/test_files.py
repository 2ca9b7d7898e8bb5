"""JSON, JSONL and TOML beyond what later code can handle are refused in one line; text is written whole or not."""

import errno
import os
from pathlib import Path

import pytest
from pydantic import BaseModel

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import atomic_write_text, clip, parse_json, read_json, read_json_lines, read_toml, validate

NESTED = 1_000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "holds a list, not a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b'{"a": ' + b"[" * NESTED + b"]" * NESTED + b"}", "nested deeper than 100"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 100"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "an integer of 5000 digits"),
        (b'{"a": 18446744073709551616}', "does not fit 64 bits"),
    ],
)
def test_damaged_json_is_one_short_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=problem) as error:
        read_json(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 400


def test_json_within_the_bounds_is_read() -> None:
    text = '{"a": ' + "[" * 99 + "]" * 99 + ', "b": 18446744073709551615, "c": "\\ud83d\\ude00", "d": NaN}'
    data = parse_json(text, "here")
    assert data["b"] == 2**64 - 1 and data["c"] == "\N{GRINNING FACE}"
    # transformers' tokenizers without a limit
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}', "")["model_max_length"] == int(1e30)


@pytest.mark.parametrize("content", ["a = " + "[" * NESTED, "a = " + "9" * 5_000, f"a = {2**64}", "a = '\xff'", "a"])
def test_damaged_toml_is_one_short_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match="not valid TOML") as error:
        read_toml(path, error_type=UsageError)
    assert len(str(error.value)) < 400
    for other, problem in ((tmp_path, "is a directory"), (tmp_path / "missing.toml", "not found")):
        with pytest.raises(ArtifactError, match=f"{problem}; give a .toml file"):
            read_toml(other)


def test_json_lines_come_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": 2}\n[]\n', encoding="utf-8")
    lines = read_json_lines(path)
    assert [next(lines), next(lines)] == [(1, {"a": 1}), (3, {"a": 2})]
    with pytest.raises(ArtifactError, match="line 4: holds a list"):
        next(lines)


class _Record(BaseModel, extra="forbid", strict=True):
    name: str
    rows: int


def test_clip_keeps_both_ends() -> None:
    assert clip("short\ntext") == "short text"
    assert clip("a" * 11, 11) == "a" * 11 and clip("a" * 6 + "b" * 6, 11) == "aaaa...bbbb"


def test_a_record_names_its_problems_and_clips_their_values() -> None:
    data = {"name": 3, "rows": "x" * 10_000, **dict.fromkeys("abcdef", 0)}
    with pytest.raises(ArtifactError, match=r"here: name: .* not 3; rows: .*xx\.\.\.xx.*; and 4 more; correct it"):
        validate(_Record, data, "here")


def test_a_file_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "bench.json"
    atomic_write_text(out, "whole")
    assert out.read_text() == "whole"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"no space: .*second\.json'"):
        atomic_write_text(tmp_path / "new" / "second.json", "cut")
    assert list((tmp_path / "new").iterdir()) == [out]
