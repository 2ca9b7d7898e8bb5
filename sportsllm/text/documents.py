"""Documents out of files and folders: .txt, .md, .jsonl (a `text` field), each also as .gz, and .parquet."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import clip, parse_json

_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
_PIECE_BYTES = 16_384  # a long plain file is cut near this size, at blank lines, so that it can be split


class Piece(NamedTuple):
    """A document, or a piece of a long plain file.

    `source` is the whole text that it was cut from, which decides on which side of a split it falls.
    """

    text: str
    source: str


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """All readable files in `paths`, folders walked in sorted order.

    Raises:
        ArtifactError: a path is missing, a file's kind is not known, or a folder has nothing to read.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir() and (path / "manifest.json").exists() and (path / "train.jsonl").exists():
            files.append(path / "train.jsonl")  # what `simulate` wrote: the rest is held out
        elif path.is_dir():
            found = [item for item in sorted(path.rglob("*")) if item.is_file() and _kind(item)]
            if not found:
                raise ArtifactError(f"{path}: holds no {', '.join(_SUFFIXES)} file (or .gz of one)")
            files += found
        elif not path.exists():
            raise ArtifactError(f"{path}: not found; give a text file or a folder")
        elif _kind(path) is None:
            raise ArtifactError(f"{path}: kind of file not known; use {', '.join(_SUFFIXES)} (or .gz of one)")
        else:
            files.append(path)
    return files


def _kind(path: Path) -> str | None:
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return kind if kind in _SUFFIXES and not path.name.endswith(".parquet.gz") else None


def read_documents(paths: Sequence[Path]) -> Iterator[str]:
    """The text of every document, see `read_pieces`."""
    return (piece.text for piece in read_pieces(paths))


def read_pieces(paths: Sequence[Path]) -> Iterator[Piece]:
    """Every document, in a fixed order; plain files are cut near 16 KB, and empty texts are left out.

    Raises:
        ArtifactError: a file is missing, is not UTF-8 (with the byte offset), or is of another kind than its name says.
    """
    for path in corpus_files(paths):
        kind = _kind(path)
        if kind == ".parquet":
            pieces = (Piece(text, text) for text in _parquet(path))
        else:
            with cast(IO[bytes], gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as stream:
                try:
                    if kind == ".jsonl":
                        pieces = (Piece(text, text) for text in list(_jsonl(path, stream)))
                    else:
                        whole = _decode(stream.read(), path, 0)
                        pieces = (Piece(text, whole) for text in cut_text(whole))
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise ArtifactError(f"{path}: damaged gzip file ({error}); copy it again") from None
        yield from (piece for piece in pieces if piece.text.strip())


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: not UTF-8 at byte {offset + error.start}; convert the file to UTF-8") from None


def cut_text(text: str) -> Iterator[str]:
    """Pieces of about 16 KB, cut at blank lines."""
    piece: list[str] = []
    size = 0
    for paragraph in text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n\n"):
        if size >= _PIECE_BYTES:
            yield "\n\n".join(piece)
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph) + 2
    yield "\n\n".join(piece)


def _jsonl(path: Path, stream: IO[bytes]) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(stream, start=1):
        text = _decode(line, path, offset)
        offset += len(line)
        if text.strip():
            yield _text_field(text, path, number)


def _text_field(line: str, path: Path, number: int) -> str:
    record = parse_json(line, f"{path}: line {number}", "fix or delete the line")
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ArtifactError(f"{path}: line {number} has no 'text' string; each line needs one")
    return text


def _parquet(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        for batch in table.iter_batches(columns=["text"]):
            yield from (text for text in batch.column("text").to_pylist() if text)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:  # OSError: a damaged page
        raise ArtifactError(f"{path}: no readable parquet file with a 'text' column ({clip(error, 200)})") from None
