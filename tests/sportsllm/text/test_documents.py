import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sportsllm.errors import ArtifactError
from sportsllm.text.documents import log_files, read_documents


def test_every_kind_of_file_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "c.md").write_text("# marked", encoding="utf-8")
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n', encoding="utf-8")
    with gzip.open(tmp_path / "e.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write('{"text": "zipped"}\n')
    table = pyarrow.table({"text": ["column", ""], "other": [1, 2]})
    (tmp_path / "sub").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "sub" / "f.parquet")
    (tmp_path / "ignored.png").write_bytes(b"\x89PNG")
    (tmp_path / "README.md").write_text("About these files", encoding="utf-8")
    assert list(read_documents([tmp_path])) == ["plain", "# marked", "one", "two", "zipped", "column"]
    log_files([tmp_path, tmp_path / "b.txt"])
    said = capsys.readouterr().err.replace("\n", " ")
    assert "reading b.txt, c.md, d.jsonl, e.jsonl.gz, sub/f.parquet; not reading README.md, ignored.png" in said


def test_long_plain_text_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path) -> None:
    text = "\n\n".join(f"paragraph {i} " + "x" * 500 for i in range(100))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    pieces = list(read_documents([tmp_path / "book.txt"]))
    assert len(pieces) > 2
    assert "\n\n".join(pieces) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", "not UTF-8 at byte 5"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "not UTF-8 at byte 25"),
        ("a.jsonl", b'{"text": "ok"}\n{oops\n', "line 2: not valid JSON"),
        ("a.jsonl", b'{"body": "ok"}\n', "line 1 has no 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogate"),
        ("a.txt.gz", b"not gzip", "damaged gzip"),
        ("a.parquet", b"PAR1", "parquet"),
        ("a.docx", b"x", "kind of file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as caught:
        list(read_documents([path]))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not found"):
        list(read_documents([tmp_path / "nothing.txt"]))
    with pytest.raises(ArtifactError, match="holds no"):
        list(read_documents([tmp_path]))


def test_a_simulated_folder_is_its_training_part(tmp_path: Path) -> None:
    for name in ("train", "valid", "questions"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("a card", encoding="utf-8")
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    assert list(read_documents([tmp_path])) == ["train"]
