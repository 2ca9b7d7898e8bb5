"""Documents from files and folders, one at a time, how their text is read, and what a model was made from.

Files are .txt, .md, .jsonl, each also as .gz, and .parquet; the last two have their text in a field, `text` if no other
is named, or are conversations.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sportsllm.console import log, log_once
from sportsllm.errors import ArtifactError, UsageError, did_you_mean
from sportsllm.files import JsonObject, clip, parse_json, visible_files
from sportsllm.formats.manifest import Manifest, manifest_of
from sportsllm.settings import TEXT
from sportsllm.text.conversations import FIELDS, Document, chat_field, plain_text, read_conversation

_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
_KINDS = ".txt, .md, .jsonl (each also as .gz) or .parquet"
_CHUNK_BYTES = 16_384  # a long plain file is cut near this size, at blank lines, so that it can be split
_LONGEST_PARAGRAPH = 4 * _CHUNK_BYTES
_BLOCK_BYTES, _ROWS_AT_ONCE = 2**20, 1_000  # of a file in memory
_NO_TEXT = ("readme", "license", "licence", "notice", "changelog")  # files of a folder that describe its text
_SHOWN_NAMES = 5
HELD_OUT = "held_out"
"""In a manifest: all held-out text, if that is more than `valid`."""


@dataclass(frozen=True)
class Reading:
    """The settings `TEXT` of a command.

    Attributes:
        text_field: field of .jsonl records, and column of .parquet, that holds plain text.
        parse_special: plain text that spells a special token becomes that token.
        loss_on: which tokens of a conversation are learned and scored, `assistant` or `all`.
    """

    text_field: str = "text"
    parse_special: bool = False
    loss_on: str = "assistant"

    def record(self) -> dict[str, Any]:
        """The manifest's entries: what is not as usual."""
        return {name: value for name, value in asdict(self).items() if value != getattr(USUAL, name)}


USUAL = Reading()


def recorded(manifest: Manifest) -> Reading:
    """How the text of a finished stage was read."""
    found: dict[str, Any] = {name: manifest.settings.get(name) for name in TEXT}
    return Reading(**{name: value for name, value in found.items() if type(value) is type(getattr(USUAL, name))})


def take_reading(settings: dict[str, Any], *models: Path | None) -> Reading:
    """Take how text is read out of a command's settings; by default as the text of a model was, the first unusual."""
    known = (recorded(manifest_of(model)) for model in models if model is not None)
    usual = next((reading for reading in known if reading != USUAL), USUAL)
    return Reading(**asdict(usual) | {name: settings.pop(name) for name in TEXT if name in settings})


def _field_of(names: Sequence[str], path: Path, field: str) -> str:
    """The field to read in a record, or a file, with these fields."""
    if field in names or USUAL.text_field not in names:
        return field
    log_once(f"{path}: reading {USUAL.text_field!r} of records without a field {field!r}")
    return USUAL.text_field


def check_field(paths: Sequence[Path], field: str) -> None:
    """Refuse a mistyped field: none of the files' first records has it.

    Raises:
        UsageError: the message has the names of the fields that are there.
    """
    names = dict[str, None]()
    for path in corpus_files(paths):
        for found in islice(_fields(path), _ROWS_AT_ONCE):
            names.update(dict.fromkeys(found))
        if field in names:
            return
    if names:
        known = f"the fields are {clip(', '.join(names), 200)}; {did_you_mean(field, names)}".removesuffix("; ")
        raise UsageError(f"text_field={field}: no record has such a field; {known}")


def _fields(path: Path) -> Iterator[Iterable[str]]:
    """The names in each record of a .jsonl file, or in the schema of a .parquet file."""
    if _kind(path) == ".parquet":
        import pyarrow.parquet

        with suppress(pyarrow.ArrowException, OSError):  # a damaged file is refused when it is read
            yield pyarrow.parquet.read_schema(path).names
    elif _kind(path) == ".jsonl":
        yield from (record if isinstance(record, dict) else () for _, record in _records(path))


class Chunk(NamedTuple):
    """A document, or a chunk of a long plain file.

    Attributes:
        digest: of the text, see `document_digest`.
        source: digest of the whole text that it was cut from, which decides on which side of a split it falls.
        path: its file.
    """

    text: Document
    digest: bytes
    source: bytes
    path: Path


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """All readable files in `paths`, folders in sorted order. Their hidden files, README and LICENSE are not read.

    Raises:
        ArtifactError: a path is missing, a file's kind is not known, or a folder has nothing to read.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir() and (path / "manifest.json").exists() and (path / "train.jsonl").exists():
            files.append(path / "train.jsonl")  # written by `data simulate`: the rest is held out
        elif path.is_dir():
            found = [item for item in visible_files(path) if _kind(item) and item.stem.lower() not in _NO_TEXT]
            if not found:
                raise ArtifactError(f"{path}: holds no file that is {_KINDS}")
            files += found
        elif not path.exists():
            raise ArtifactError(f"{path}: not found; give a text file or a folder")
        elif _kind(path) is None:
            raise ArtifactError(f"{path}: unknown type of file; use {_KINDS}")
        else:
            files.append(path)
    return files


def log_files(paths: Sequence[Path]) -> None:
    """Log which files of each folder are read, and which are not."""
    for path in paths:
        if path.is_dir():
            read = corpus_files([path])
            left = sorted({*visible_files(path)} - {*read})
            log(f"{path}: reading {_names(read, path)}" + (f"; not reading {_names(left, path)}" if left else ""))


def _names(files: Sequence[Path], folder: Path) -> str:
    names = [str(path.relative_to(folder)) for path in files]
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {len(names) - _SHOWN_NAMES} more" if names[_SHOWN_NAMES:] else "")


def _kind(path: Path) -> str | None:
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    return kind if kind in _SUFFIXES and (kind != ".parquet" or path.suffix.lower() == kind) else None


def read_documents(paths: Sequence[Path], field: str = USUAL.text_field) -> Iterator[Document]:
    """Every document, see `read_chunks`."""
    return (chunk.text for chunk in read_chunks(paths, field))


def read_chunks(paths: Sequence[Path], field: str = USUAL.text_field) -> Iterator[Chunk]:
    """Every document, in a fixed order and one at a time; plain files are cut near 16 KB, empty texts are left out.

    `field` of .jsonl and .parquet records holds the text, if they have it.

    Raises:
        ArtifactError: a file is missing, is not UTF-8 (with the byte offset), or is of another kind than its name says.
    """
    for path in corpus_files(paths):
        kind, source = _kind(path), None
        if kind == ".parquet":
            texts = _parquet(path, field)
        elif kind == ".jsonl":
            texts = _jsonl(path, field)
        else:
            whole = hashlib.sha256()
            for block in decoded(path, _BLOCK_BYTES):
                whole.update(block.encode())
            texts, source = cut_text(decoded(path, _BLOCK_BYTES)), whole.digest()
        for text in texts:
            if plain_text(text).strip():
                digest = document_digest(text)
                yield Chunk(text, digest, source or digest, path)


def document_digest(document: Document) -> bytes:
    """SHA-256 of a text, or of a conversation's messages."""
    return hashlib.sha256(str(document).encode()).digest()


def decoded(path: Path, least: int = 0) -> Iterator[str]:
    """A file's text in pieces of `least` bytes and the line that these end in."""
    read = 0
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            while data := file.read(least) + file.readline():
                yield data.decode("utf-8")
                read += len(data)
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: not UTF-8 at byte {read + error.start}; convert the file to UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ArtifactError(f"{path}: damaged gzip file ({error}); copy it again") from None


def cut_document(document: Document) -> Iterable[Document]:
    """`cut_text` of a text; a conversation stays whole."""
    return cut_text([document]) if isinstance(document, str) else [document]


def cut_text(blocks: Iterable[str]) -> Iterator[str]:
    """Chunks of about 16 KB, cut at blank lines, and inside paragraphs of four times that size at white space.

    The text comes in blocks that end with a line.
    """
    chunk: list[str] = []
    size = 0
    for part, goes_on in _paragraphs(blocks):
        if goes_on:
            yield "\n\n".join([*chunk, part])
            chunk, size = [], 0
            continue
        if size >= _CHUNK_BYTES:
            yield "\n\n".join(chunk)
            chunk, size = [], 0
        chunk.append(part)
        size += len(part) + 2
    yield "\n\n".join(chunk)


def _paragraphs(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Paragraphs, a long one in several parts, and whether the paragraph goes on behind the part."""
    rest, is_long = "", False
    for number, block in enumerate(blocks):
        text = block if number else block.removeprefix("\ufeff")
        *whole, rest = (rest + text.replace("\r\n", "\n")).split("\n\n")
        for paragraph in whole:
            *parts, last = _cut_paragraph(paragraph, is_long)
            yield from ((part, True) for part in parts)
            yield last, False
            is_long = False
        *parts, rest = _cut_paragraph(rest, is_long, len(rest) - rest.endswith("\n"))  # half of a blank line
        yield from ((part, True) for part in parts)
        is_long = is_long or bool(parts)
    *parts, last = _cut_paragraph(rest, is_long)
    yield from ((part, True) for part in parts)
    yield last, False


def _cut_paragraph(text: str, is_long: bool, length: int | None = None) -> Iterator[str]:
    """Parts of a paragraph of `length` characters at least, which `is_long` if parts of it were cut off before."""
    start, length = 0, len(text) if length is None else length
    longest = 2 * _CHUNK_BYTES if is_long or length > _LONGEST_PARAGRAPH else _LONGEST_PARAGRAPH
    while length - start > longest:
        end = place_to_cut(text, start + _CHUNK_BYTES)
        yield text[start:end]
        start = end
    yield text[start:]


def place_to_cut(text: str, place: int) -> int:
    """Behind the last white space close before a place, or the place itself."""
    return max(text.rfind(space, place - 1_000, place) + 1 for space in "\n ") or place


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a .jsonl file's lines, each with its place for errors."""
    for number, line in enumerate(decoded(path), start=1):
        if line.strip():
            where = f"{path}: line {number}"
            yield where, parse_json(line.removeprefix("\ufeff"), where, "fix or delete the line")


def _jsonl(path: Path, asked: str) -> Iterator[Document]:
    for where, record in _records(path):
        names = list(record) if isinstance(record, dict) else []
        field = _field_of(names, path, asked)
        document = _document(record, field, where, path) if names else None
        if document is None:
            others = f"; it has {clip(', '.join(names))}, of which --text-field NAME takes one" if names else ""
            if field in names:
                others = f" but {clip(json.dumps(record[field]))}; correct or delete the line"
            raise ArtifactError(f"{where} has no {field!r} string{others}")
        yield document


def _parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path, buffer_size=_BLOCK_BYTES)
        field = _field_of(names := table.schema_arrow.names, path, field)
        columns = [name for name in dict.fromkeys((field, *FIELDS)) if name in names]
        if not columns:
            raise ArtifactError(f"{path}: no column {field!r}; it has {clip(', '.join(names))}: give --text-field NAME")
        batches = table.iter_batches(_ROWS_AT_ONCE, columns=columns)
        for row, record in enumerate((each for batch in batches for each in batch.to_pylist()), start=1):
            if (document := _document(record, field, f"{path}: row {row}", path)) is not None:
                yield document
            elif field not in names:
                raise ArtifactError(f"{path}: row {row} is not a conversation; correct or delete it")
            elif record[field] is not None:
                kind = table.schema_arrow.field(field).type
                raise ArtifactError(f"{path}: column {field!r} has the type {kind}, not string; convert it")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:  # OSError: a damaged page
        raise ArtifactError(f"{path}: not a readable parquet file ({clip(error, 200)}); copy it again") from None


def _document(record: JsonObject, field: str, where: str, path: Path) -> Document | None:
    """The text or the conversation of a record, None if it has neither. The field `prompt` names a conversation if
    the record has a `completion`.
    """
    text, chats = record.get(field), chat_field(record)
    if not isinstance(text, str) or chats == field:
        return read_conversation(record, where)
    if chats is not None:
        log_once(f"{path}: reading {field!r}; to read the conversations, give --text-field {chats}")
    return text


def manifest_setting(directory: Path, key: str) -> Any:
    """A setting that a directory's manifest records, or None."""
    return manifest_of(directory).settings.get(key)


def recorded_text(checkpoint: Path, key: str, option: str = "--corpus") -> list[Path]:
    """The corpus (`corpus`) or held-out text (`valid`) that a checkpoint's manifest names.

    Errors advise `option`. If held-out text is gone, a part of the corpus is held out instead, and a line says so.

    Raises:
        UsageError: no corpus is named.
        ArtifactError: it is gone.
    """
    paths = [Path(item) for item in manifest_setting(checkpoint, key) or []]
    missing = [path for path in paths if not path.exists()]
    if missing and key == "valid":
        log(f"{missing[0]}: held-out text of {checkpoint}, not found; 2% of the corpus is held out by hash instead")
        return []
    if missing:
        raise ArtifactError(f"{missing[0]}: training text of {checkpoint}, not found; give {option} PATH")
    if not paths and key == "corpus":
        raise UsageError(f"{checkpoint}: no training text is known; give {option} PATH")
    return paths


def tokens_per_parameter(directory: Path) -> float | None:
    """Tokens per parameter that a checkpoint has read since its random weights; None if that is not known."""
    manifest = manifest_of(directory)
    from_scratch = not manifest.text("init") and (manifest.command == "train" or manifest.text("start") == "fresh")
    return manifest.figure("tokens_per_parameter") if from_scratch else None


def held_out_files(directory: Path) -> list[Path]:
    """Held-out text that a directory's manifest names, if it exists."""
    manifest = manifest_of(directory)
    return [path for path in map(Path, manifest.paths(HELD_OUT) or manifest.paths("valid")) if path.exists()]


def left_out(valid: Sequence[Path], *checkpoints: Path) -> tuple[Path, ...]:
    """Held-out text of a training, and of the checkpoints that it starts from or learns from."""
    return tuple(dict.fromkeys([*valid, *(path for one in checkpoints for path in held_out_files(one))]))


def held_out_setting(valid: Sequence[Path], left: Sequence[Path]) -> dict[str, list[str]]:
    """The manifest's entry for `left_out`, if that is more than `valid`."""
    return {HELD_OUT: [str(path) for path in left]} if set(left) - set(valid) else {}
