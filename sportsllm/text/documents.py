"""Documents from files and folders, their split into training and held-out text, and what a model was made from.

Files are .txt, .md, .jsonl, each also as .gz, and .parquet; the last two have their text in a field, `text` if no other
is named, or are conversations. A document is held out by the hash of its own text, so the split
survives renamed and reordered files, and two copies of a document never end up on both sides. The chunks of a long
plain file stay together.
"""

import functools
import gzip
import hashlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, clip, parse_json
from sportsllm.formats.manifest import ancestors, manifest_of
from sportsllm.text.conversations import FIELDS, Document, plain_text, read_conversation
from sportsllm.text.reading import USUAL, recorded

_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
_CHUNK_BYTES = 16_384  # a long plain file is cut near this size, at blank lines, so that it can be split
_LONGEST_PARAGRAPH = 4 * _CHUNK_BYTES
_LEAST_TO_CUT = 2_000  # characters of a single document that is cut to hold out its end
_NO_TEXT = ("readme", "license", "licence", "notice", "changelog")  # files of a folder that describe its text
HELD_OUT_FRACTION = 0.02
_ENOUGH_FOR_TWO = 4  # documents of which two are held out
_SHOWN_NAMES = 5
HELD_OUT = "held_out"
"""In a manifest: all held-out text, if that is more than `valid`."""


def _field_of(names: Collection[str], path: Path, field: str) -> str:
    """The field to read in a file whose records have these fields."""
    if field in names or USUAL.text_field not in names:
        return field
    log(f"{path}: no field {field!r}; reading {USUAL.text_field!r}")
    return USUAL.text_field


class Chunk(NamedTuple):
    """A document, or a chunk of a long plain file.

    `source` is the whole text that it was cut from, which decides on which side of a split it falls.
    """

    text: Document
    source: Document


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """All readable files in `paths`, folders walked in sorted order. A folder's README or LICENSE is not read.

    Raises:
        ArtifactError: a path is missing, a file's kind is not known, or a folder has nothing to read.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir() and (path / "manifest.json").exists() and (path / "train.jsonl").exists():
            files.append(path / "train.jsonl")  # written by `data simulate`: the rest is held out
        elif path.is_dir():
            found = [item for item in _files(path) if _kind(item) and item.stem.lower() not in _NO_TEXT]
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


def log_files(paths: Sequence[Path]) -> None:
    """Log which files of each folder are read, and which are not."""
    for path in paths:
        if path.is_dir():
            read = corpus_files([path])
            left = [item for item in _files(path) if item not in read]
            log(f"{path}: reading {_names(read, path)}" + (f"; not reading {_names(left, path)}" if left else ""))


def _files(folder: Path) -> list[Path]:
    return [item for item in sorted(folder.rglob("*")) if item.is_file()]


def _names(files: Sequence[Path], folder: Path) -> str:
    names = [str(path.relative_to(folder)) for path in files]
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {len(names) - _SHOWN_NAMES} more" if names[_SHOWN_NAMES:] else "")


def _kind(path: Path) -> str | None:
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return kind if kind in _SUFFIXES and not path.name.endswith(".parquet.gz") else None


def read_documents(paths: Sequence[Path], field: str = USUAL.text_field) -> Iterator[Document]:
    """Every document, see `read_chunks`."""
    return (chunk.text for chunk in read_chunks(paths, field))


def read_chunks(paths: Sequence[Path], field: str = USUAL.text_field) -> Iterator[Chunk]:
    """Every document, in a fixed order; plain files are cut near 16 KB, and empty texts are left out.

    `field` of .jsonl and .parquet records holds the text, if they have it.

    Raises:
        ArtifactError: a file is missing, is not UTF-8 (with the byte offset), or is of another kind than its name says.
    """
    for path in corpus_files(paths):
        kind = _kind(path)
        if kind == ".parquet":
            chunks = (Chunk(text, text) for text in _parquet(path, field))
        else:
            try:
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ArtifactError(f"{path}: damaged gzip file ({error}); copy it again") from None
            if kind == ".jsonl":
                chunks = (Chunk(text, text) for text in list(_jsonl(path, data, field)))
            else:
                whole = _decode(data, path)
                chunks = (Chunk(text, whole) for text in cut_text(whole))
        yield from (chunk for chunk in chunks if plain_text(chunk.text).strip())


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None


def cut_document(document: Document) -> Iterable[Document]:
    """`cut_text` of a text; a conversation stays whole."""
    return cut_text(document) if isinstance(document, str) else [document]


def cut_text(text: str) -> Iterator[str]:
    """Chunks of about 16 KB, cut at blank lines, and inside paragraphs of four times that size at white space."""
    chunk: list[str] = []
    size = 0
    for paragraph in text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n\n"):
        *long, paragraph = _cut_paragraph(paragraph)
        for part in long:
            yield "\n\n".join([*chunk, part])
            chunk, size = [], 0
        if size >= _CHUNK_BYTES:
            yield "\n\n".join(chunk)
            chunk, size = [], 0
        chunk.append(paragraph)
        size += len(paragraph) + 2
    yield "\n\n".join(chunk)


def _cut_paragraph(text: str) -> Iterator[str]:
    start, longest = 0, _LONGEST_PARAGRAPH if len(text) <= _LONGEST_PARAGRAPH else 2 * _CHUNK_BYTES
    while len(text) - start > longest:
        end = _place_to_cut(text, start + _CHUNK_BYTES)
        yield text[start:end]
        start = end
    yield text[start:]


def _place_to_cut(text: str, place: int) -> int:
    """Behind the last white space close before a place, or the place itself."""
    return max(text.rfind(space, place - 1_000, place) + 1 for space in "\n ") or place


def _jsonl(path: Path, data: bytes, asked: str) -> Iterator[Document]:
    field: str | None = None
    for number, line in enumerate(_decode(data, path).split("\n"), start=1):
        if line.strip():
            record = parse_json(line, where := f"{path}: line {number}", "fix or delete the line")
            names = list(record) if isinstance(record, dict) else []
            field = field or _field_of(names, path, asked)
            document = _document(record, field, where) if names else None
            if document is None:
                others = f"; it has {clip(', '.join(names))}, of which --set text_field=NAME takes one" if names else ""
                raise ArtifactError(f"{where} has no {field!r} string{others}")
            yield document


def _parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        field = _field_of(names := table.schema_arrow.names, path, field)
        columns = [name for name in (field, *FIELDS) if name in names]
        if not columns:
            raise ArtifactError(
                f"{path}: no column {field!r}; it has {clip(', '.join(names))}: give --set text_field=NAME"
            )
        batches = table.iter_batches(columns=columns)
        for row, record in enumerate((each for batch in batches for each in batch.to_pylist()), start=1):
            if (document := _document(record, field, f"{path}: row {row}")) is not None:
                yield document
            elif field not in names:
                raise ArtifactError(f"{path}: row {row} is no conversation; correct or delete it")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:  # OSError: a damaged page
        raise ArtifactError(f"{path}: no readable parquet file ({clip(error, 200)}); copy it again") from None


def _document(record: JsonObject, field: str, where: str) -> Document | None:
    """The text or the conversation of a record, None if it has neither."""
    text = record.get(field)
    return text if isinstance(text, str) else read_conversation(record, where)


@dataclass(frozen=True)
class TextSplit:
    """Training and held-out documents; the held-out ones are never trained on."""

    train: list[Document]
    held_out: list[Document]

    def parts(self) -> tuple[list[Document], list[Document]]:
        """The selection split, for choices (best step, rate, shape), and the report split.

        Both are in the order of their hashes, so that the first few come from all files. Long documents are cut, and
        lie on one side if there are several.
        """
        ordered = sorted(set(self.held_out), key=document_digest)
        if len(ordered) == 1:
            ordered = sorted(set(cut_document(ordered[0])), key=document_digest)
        selection_split, report_split = ordered[1::2] or ordered, ordered[::2]
        return [*_cut(selection_split)], [*_cut(report_split)]


def load_corpus(
    corpus: Sequence[Path], valid: Sequence[Path], known: Sequence[Path] = (), field: str = USUAL.text_field
) -> TextSplit:
    """Read the training text; held-out documents come from `valid`, or by hash out of the corpus itself.

    Args:
        corpus, valid: files.
        known: held-out text of the models that training starts from or learns from; not trained on either.
        field: see `read_chunks`.

    Documents of `valid` and `known` are left out of the corpus, and counted in a line.

    Raises:
        ArtifactError: nothing to train on, or nothing to hold out.
    """
    log_files(corpus)
    documents = list(read_chunks(corpus, field))
    if not documents:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: the corpus is empty; give files with text in them")
    held_out = list(read_documents(valid, field)) if valid else []
    if valid and not held_out:
        raise ArtifactError(f"{', '.join(map(str, valid))}: the held-out text is empty; give files with text in them")
    further = [path for path in known if path not in valid]
    train = without(documents, [*held_out, *read_documents(further, field)])
    if not train:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: all of it is held out; give other training text")
    if len(train) < len(documents):
        log(f"{len(documents) - len(train):,} of {len(documents):,} documents are held out and not trained on")
    if valid:
        return TextSplit([chunk.text for chunk in train], held_out)
    split = split_documents(train)
    if not split.held_out:
        raise ArtifactError("the corpus is a single short document; give more text, or --valid FILE too")
    held = (
        f"{len(split.held_out):,} of {len(train):,} documents are" if len(train) > 1 else "the end of the document is"
    )
    log(f"no held-out text was given: {held} held out")
    return split


def training_side(files: Sequence[Path], valid: Sequence[Path], field: str = USUAL.text_field) -> list[Document]:
    """The documents of `files` that no split holds out: neither those of `valid`, nor those held out by hash.

    Raises:
        ArtifactError: all of them are held out.
    """
    documents = list(read_chunks(files, field))
    left = without(documents, read_documents(valid, field))
    if documents and not left:
        raise ArtifactError(f"{', '.join(map(str, files))}: all of it is held-out text; give other text")
    return split_documents(left).train


def without(documents: Sequence[Chunk], held_out: Iterable[Document]) -> list[Chunk]:
    """The documents that are not held out, by their text or by the text that they were cut from."""
    known = {document_digest(text) for text in held_out}
    return [chunk for chunk in documents if not known & {document_digest(chunk.text), _source_digest(chunk.source)}]


def split_documents(documents: Sequence[Chunk]) -> TextSplit:
    """About 2% of the documents held out, by the SHA-256 of the text that each was cut from.

    If that leaves one side empty, or a single held-out document of four or more, the last 2% are held out: at least
    one document, or two of four. A single document holds out its own last 2%, at least 200 characters, unless it is
    shorter than 2,000 characters: then it is trained on.
    """
    if len(documents) == 1 and isinstance(text := documents[0].text, str) and len(text) >= _LEAST_TO_CUT:
        place = _place_to_cut(text, len(text) - max(round(HELD_OUT_FRACTION * len(text)), 200))
        return TextSplit([text[:place]], [text[place:]])
    parts: tuple[list[Document], list[Document]] = ([], [])
    for chunk in documents:
        draw = int.from_bytes(_source_digest(chunk.source)[:8])
        parts[draw < HELD_OUT_FRACTION * 2**64].append(chunk.text)
    least = 2 if len(documents) >= _ENOUGH_FOR_TWO else 1
    if (not parts[0] or len(parts[1]) < least) and len(documents) > 1:
        last = max(least, round(HELD_OUT_FRACTION * len(documents)))
        held_out = [chunk.text for chunk in documents[-last:]]
        return TextSplit([chunk.text for chunk in without(documents[:-last], held_out)], held_out)
    return TextSplit(*parts) if parts[0] or not documents else TextSplit(parts[1], [])


def document_digest(document: Document) -> bytes:
    """SHA-256 of a text, or of a conversation's messages."""
    return hashlib.sha256(str(document).encode()).digest()


_source_digest = functools.lru_cache(maxsize=1)(document_digest)  # chunks of one source are adjacent


def _cut(documents: Iterable[Document]) -> Iterable[Document]:
    chunks = (chunk for document in documents for chunk in cut_document(document))
    return sorted((chunk for chunk in chunks if plain_text(chunk).strip()), key=document_digest)


def manifest_setting(directory: Path, key: str) -> Any:
    """A setting that a directory's manifest records, or None."""
    return manifest_of(directory).settings.get(key)


def tokens_per_parameter(directory: Path) -> float | None:
    """Tokens per parameter that a checkpoint of `train` has read; None if that is not known."""
    manifest = manifest_of(directory)
    from_scratch = manifest.command == "train" and not manifest.text("init")
    return manifest.figure("tokens_per_parameter") if from_scratch else None


def held_out_files(directory: Path) -> list[Path]:
    """Held-out text that a directory's manifest names, if it exists."""
    manifest = manifest_of(directory)
    named = manifest.paths(HELD_OUT) or manifest.paths("valid")
    return [path for path in map(Path, named) if path.exists()]


def left_out(valid: Sequence[Path], *checkpoints: Path) -> tuple[Path, ...]:
    """Held-out text of a training, and of the checkpoints that it starts from or learns from."""
    return tuple(dict.fromkeys([*valid, *(path for one in checkpoints for path in held_out_files(one))]))


def held_out_setting(valid: Sequence[Path], left: Sequence[Path]) -> dict[str, list[str]]:
    """The manifest's entry for `left_out`, if that is more than `valid`."""
    return {HELD_OUT: [str(path) for path in left]} if set(left) - set(valid) else {}


def trained_on(directory: Path, documents: Sequence[Document]) -> int:
    """How many documents were trained on, by a model or the models that it was made from.

    Documents are compared by hash. Training text that is gone is not compared.
    """
    asked, found, manifest = {document_digest(text) for text in documents}, set[bytes](), manifest_of(directory)
    manifests = [manifest, *(each.manifest for each in ancestors(manifest, directory))]
    for made in {str(each.settings): each for each in manifests}.values():
        corpus = [path for path in map(Path, made.paths("corpus")) if path.exists()]
        named = made.paths(HELD_OUT) or made.paths("valid")
        if corpus:
            held_out, field = [path for path in map(Path, named) if path.exists()], recorded(made).text_field
            chunks = without(list(read_chunks(corpus, field)), read_documents(held_out, field))
            texts = [chunk.text for chunk in chunks] if named else split_documents(chunks).train
            found |= asked & {document_digest(text) for text in texts}
    return sum(document_digest(text) in found for text in documents)


def warn_if_trained_on(directory: Path, documents: Sequence[Document]) -> int:
    """Log how many of the documents to score were trained on, if any; returns their number."""
    count = trained_on(directory, documents)
    if count:
        log(
            f"{count} of {len(documents)} documents are training text of {directory}: their score says little about "
            "other text; score held-out text"
        )
    return count
