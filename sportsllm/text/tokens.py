"""A corpus as token ids, in files that training maps into memory, so that it is tokenized once and never loaded.

    token_cache/DIGEST/ids          the ids of all documents in one row, two bytes each if the vocabulary allows it
                       ends         (documents,) int64, where each document ends in `ids`
                       scored       (tokens,) bool, which tokens are learned; missing without conversations
                       tokens.json  `_Written`: what of these files counts

DIGEST names the documents, the tokenizer and the program's version. A run that was killed or found the disk full leaves
what it wrote, and the next one goes on behind it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from sportsllm import __version__
from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.files import atomic_write_text, naming, read_json, validate
from sportsllm.text.split import Documents, document_keys
from sportsllm.text.tokenizer import EncodedDocument, TextTokenizer, take

_INDEX = "tokens.json"
_TOKENS_AT_ONCE = 2**20
_BLOCK_BYTES = 2**20
Id = np.uint16 | np.uint32


@dataclass(frozen=True)
class TokenizedDocuments:
    """All documents' ids in one row, each as begin token, text, end token, or as a chat template writes it.

    Attributes:
        ids: (total,) uint16 or uint32.
        ends: (documents,) int64, where each document ends in `ids`.
        text_bytes: UTF-8 bytes of all scored text.
        scored: (total,) bool, which tokens are learned; None for all, if no document is a conversation.
        maps: the files behind the arrays, if these are not in memory.
    """

    ids: npt.NDArray[Id]
    ends: npt.NDArray[np.int64]
    text_bytes: int
    scored: npt.NDArray[np.bool_] | None = None
    maps: tuple[mmap.mmap, ...] = ()

    @cached_property
    def scored_tokens(self) -> int:
        """How many tokens are learned, begin and end tokens included."""
        return int(self.ids.size if self.scored is None else self.scored.sum())

    def unload(self) -> None:
        """Take what was read of mapped files out of the process' memory; the system's cache may keep it."""
        for each in self.maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                each.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class _Written:
    """How much of a corpus is in the files; of each file the bytes that count, and their CRC-32."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    files: dict[str, tuple[int, int]] = field(default_factory=dict)


def token_cache(out: Path) -> Path:
    """Where a run that writes the directory `out` keeps tokens: beside it, for other runs on the same corpus."""
    return out.parent / "token_cache"


def tokenize(documents: Documents, tokenizer: TextTokenizer, cache: Path) -> TokenizedDocuments:
    """Turn texts into ids, on all cores, in files of the directory `cache`, or find them there.

    Raises:
        ArtifactError: there are no documents.
    """
    if not documents:
        raise ArtifactError("the corpus is empty; give files with text in them")
    names = hashlib.sha256(f"{__version__} {tokenizer.fingerprint()}".encode() + document_keys(documents).tobytes())
    directory = cache / names.hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    largest = max(tokenizer.vocab_size - 1, tokenizer.begin_id, tokenizer.end_id or 0)
    kind: type[Id] = np.uint16 if largest < 2**16 else np.uint32
    with FileLock(str(directory / "lock")):  # another run that tokenizes the same text is waited for
        written = _found(directory)
        if written.documents < len(documents):
            written = _write(directory, documents, tokenizer, kind, written)
    maps = dict[str, mmap.mmap]()
    for name, (size, _) in written.files.items():
        with (directory / name).open("rb") as file:
            maps[name] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    ids: npt.NDArray[Any] = np.frombuffer(maps["ids"], kind)
    scored = np.frombuffer(maps["scored"], np.bool_) if "scored" in maps else None
    ends = np.frombuffer(maps["ends"], np.int64)
    return TokenizedDocuments(ids, ends, written.text_bytes, scored, tuple(maps.values()))


def _found(directory: Path) -> _Written:
    """What earlier runs wrote; nothing if a file is missing, cut or changed."""
    if not (path := directory / _INDEX).exists():
        return _Written()
    try:
        written = validate(_Written, read_json(path), path)
        for name, (size, expected) in written.files.items():
            if crc32(directory / name, size) != expected:
                raise ArtifactError(f"{directory / name}: truncated or changed")
    except (ArtifactError, OSError) as error:
        log(f"{error}; the corpus is tokenized again")
        return _Written()
    return written


def crc32(path: Path, size: int) -> int:
    """CRC-32 of the first `size` bytes of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(min(size, _BLOCK_BYTES)):
            value, size = zlib.crc32(block, value), size - len(block)
    return value


def _write(
    directory: Path, documents: Documents, tokenizer: TextTokenizer, kind: type[Id], written: _Written
) -> _Written:
    """Write the tokens of the documents behind those that are written."""
    if written.documents:
        log(f"{directory}: continuing after {written.tokens:,} tokens of an earlier run")
    rest = tokenizer.warn_if_special(islice(documents, written.documents, None))
    encoded = tokenizer.encode_documents(rest, end=True)
    with progress_bar("tokenize", len(documents)) as bar:
        bar.advance(written.documents)
        while part := list(take(encoded, _TOKENS_AT_ONCE, lambda each: len(each.ids))):
            written = _append(directory, part, kind, written)
            bar.advance(len(part))
            atomic_write_text(directory / _INDEX, json.dumps(asdict(written)))
    return written


def _append(directory: Path, part: list[EncodedDocument], kind: type[Id], written: _Written) -> _Written:
    """Write the tokens of some documents behind what counts of the files."""
    ids = np.concatenate([np.array(each.ids, kind) for each in part])
    ends = written.tokens + np.cumsum([len(each.ids) for each in part], dtype=np.int64)
    columns: dict[str, npt.NDArray[Any]] = {"ids": ids, "ends": ends}
    if "scored" in written.files or any(each.scored is not None for each in part):
        scored = [np.ones(len(each.ids), bool) if each.scored is None else np.array(each.scored) for each in part]
        before = 0 if "scored" in written.files else written.tokens  # plain text alone until now
        columns["scored"] = np.concatenate([np.ones(before, bool), *scored])
    files = dict[str, tuple[int, int]]()
    for name, column in columns.items():
        (size, checksum), data = written.files.get(name, (0, 0)), column.tobytes()
        path = directory / name
        if name not in written.files:  # another run may still read a damaged file
            path.unlink(missing_ok=True)
            path.touch()
        with naming(path), path.open("r+b") as file:
            file.seek(size)
            file.write(data)
        files[name] = size + len(data), zlib.crc32(data, checksum)
    text_bytes = written.text_bytes + sum(each.bytes for each in part)
    return _Written(written.documents + len(part), written.tokens + len(ids), text_bytes, files)
