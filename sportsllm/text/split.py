"""A corpus' split into training and held-out text, and whether a text was trained on.

A document is held out by the hash of its own text, so the split survives renamed and reordered files, and copies of a
document never end up on both sides: they are read once. The chunks of a long plain file stay together. The corpus is
never in memory: one pass over the files keeps 24 bytes of each document, and the documents are read again when needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.files import validate
from sportsllm.formats.manifest import MANIFEST, Ancestor, ancestors, manifest_of
from sportsllm.text.conversations import Document, plain_text
from sportsllm.text.documents import (
    HELD_OUT,
    USUAL,
    cut_document,
    document_digest,
    left_out,
    log_files,
    place_to_cut,
    read_chunks,
    recorded,
)

_LEAST_TO_CUT = 2_000  # characters of a single document that is cut to hold out its end
HELD_OUT_FRACTION = 0.02
_ENOUGH_FOR_TWO = 4  # documents of which two are held out
_MOST_HELD_OUT = 2**25  # characters of held-out text in memory
_DOCUMENTS_A_STEP = 1_000  # of the progress bar

Keys = npt.NDArray[np.uint64]
Paths = Sequence[Path]
Sides = dict[int, bool | None]
"""Keys of documents on another side than their hash says: True held out, False trained on, None a document in two."""


def known_sides(checkpoints: Paths) -> Sides:
    """What models recorded of small corpora, and the models that they were made from; the first counts."""
    manifests = [(each, manifest_of(each)) for each in checkpoints]
    stages = [stage for each, made in manifests for stage in (Ancestor(each, made), *ancestors(made, each))]
    sides: Sides = {}
    for directory, made in reversed(stages):
        sides |= validate(Sides, made.results.get("sides", {}), directory / MANIFEST, "make the directory again")
    return sides


def _keys(sides: Sides, side: bool | None) -> Keys:
    return np.array([key % 2**64 for key, value in sides.items() if value is side], np.uint64)


@dataclass(frozen=True, eq=False)
class DocumentStream:
    """Documents in files, which each iteration reads again.

    Attributes:
        paths, field: see `read_chunks`.
        table: (documents, 3) uint64, a row for each document of the files: its key, which is the first eight bytes of
            its digest, the key of the text that it was cut from, and its characters.
        chosen: rows of the documents that are in the stream, rising.
    """

    paths: tuple[Path, ...]
    field: str
    table: Keys
    chosen: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Document]:
        row, chosen = -1, np.isin(np.arange(len(self.table)), self.chosen)
        for row, chunk in enumerate(read_chunks(self.paths, self.field)):
            if row == len(chosen) or _key(chunk.digest) != int(self.table[row, 0]):
                raise ArtifactError(f"{chunk.path}: changed while this command read it; run it again")
            if chosen[row]:
                yield chunk.text
        if row + 1 < len(chosen):
            raise ArtifactError(f"{self.paths[-1]}: shrank while this command read the corpus; run it again")

    def __getitem__(self, places: slice | npt.NDArray[Any]) -> DocumentStream:
        return replace(self, chosen=self.chosen[places])

    @property
    def keys(self) -> Keys:
        """The documents' keys."""
        return np.asarray(self.table[self.chosen, 0])

    @property
    def keys_and_sources(self) -> Keys:
        """The keys of all documents of the files, and of the texts that they were cut from."""
        return np.asarray(self.table[:, :2]).ravel()

    def without(self, known: Keys) -> DocumentStream:
        """The documents that are not known, by their text or by the text that they were cut from."""
        return self[np.asarray(~np.isin(self.table[self.chosen, :2], known).any(axis=1))]

    def distinct(self) -> DocumentStream:
        """Without copies of earlier documents."""
        return self[np.sort(np.unique(self.keys, return_index=True)[1])]

    def sample(self, characters: int) -> DocumentStream:
        """Random documents of about so many characters, those with the smallest digests."""
        order = np.argsort(self.keys)
        sizes = np.cumsum(self.table[self.chosen[order], 2])
        return self[np.sort(order[: np.searchsorted(sizes, characters) + 1])]


Documents = Sequence[Document] | DocumentStream


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8])


def index_documents(paths: Sequence[Path], field: str = USUAL.text_field) -> DocumentStream:
    """All documents of files, which are read once for it."""
    rows = array("Q")
    with progress_bar("read", None) as bar:
        for number, chunk in enumerate(read_chunks(paths, field), start=1):
            rows.extend((_key(chunk.digest), _key(chunk.source), len(plain_text(chunk.text))))
            if number % _DOCUMENTS_A_STEP == 0:
                bar.advance(note=f"{number:,} documents")
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return DocumentStream(tuple(paths), field, table, np.arange(len(table)))


def document_keys(documents: Documents) -> Keys:
    """The documents' keys, see `DocumentStream`."""
    if isinstance(documents, DocumentStream):
        return documents.keys
    return np.array([_key(document_digest(document)) for document in documents], np.uint64)


@dataclass(frozen=True)
class TextSplit:
    """Training and held-out documents; the held-out ones are never trained on. A manifest records `sides`."""

    train: Documents
    held_out: Documents
    sides: Sides = field(default_factory=dict)

    def parts(self) -> tuple[list[Document], list[Document]]:
        """The selection split, for choices (best step, rate, shape), and the report split.

        Both are in the order of their hashes, so that the first few come from all files. Long documents are cut, and
        lie on one side if there are several. Of more than 34 million characters a random part is read.
        """
        held_out = self.held_out
        sample = held_out.sample(_MOST_HELD_OUT) if isinstance(held_out, DocumentStream) else held_out
        ordered = sorted(set(sample), key=document_digest)
        if len(ordered) == 1:
            ordered = sorted(set(_cut(ordered)), key=document_digest)
        selection_split, report_split = ordered[1::2] or ordered, ordered[::2]
        return [*_cut(selection_split)], [*_cut(report_split)]


def load_corpus(corpus: Paths, valid: Paths, field: str = USUAL.text_field, checkpoints: Paths = ()) -> TextSplit:
    """The training text; held-out documents come from `valid`, or by hash out of the corpus itself.

    `checkpoints` are the models that training starts from or learns from: their held-out text is not trained on either,
    and a document that they held out of a small corpus stays held out. Held-out documents are left out of the corpus,
    as are copies, and both are counted in a line.

    Raises:
        ArtifactError: nothing to train on, or nothing to hold out.
    """
    log_files(corpus)
    documents = index_documents(corpus, field)
    if not documents:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: the corpus is empty; give files with text in them")
    held_out = index_documents(valid, field)
    if valid and not held_out:
        raise ArtifactError(f"{', '.join(map(str, valid))}: the held-out text is empty; give files with text in them")
    further = index_documents([path for path in left_out(valid, *checkpoints) if path not in valid], field)
    sides = known_sides(checkpoints)
    own = _keys(sides if valid else {}, True)
    left = documents.without(np.concatenate([held_out.keys_and_sources, further.keys_and_sources, own]))
    left = left.without(_keys(sides, None)) if len(left.distinct()) > 1 else left
    train = left.distinct()
    split = TextSplit(train, held_out, sides) if valid else split_documents(train, sides)
    if not split.train:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: all of it is held out; give other training text")
    if len(left) < len(documents):
        log(f"{len(documents) - len(left):,} of {len(documents):,} documents are held out and not trained on")
    if len(train) < len(left):
        log(f"{len(left) - len(train):,} of {len(left):,} documents are copies of others and are left out")
    if valid:
        return split
    if not split.held_out:
        raise ArtifactError("the corpus is a single short document; give more text, or --valid FILE too")
    held = f"{len(split.held_out):,} of {len(train):,} documents are" if len(train) > 1 else "the document's end is"
    log(f"no held-out text was given: {held} held out")
    return split


def training_side(files: Paths, valid: Paths, field: str = USUAL.text_field, checkpoints: Paths = ()) -> Documents:
    """The documents of `files` that no split holds out: of `valid`, by hash, or of the checkpoints.

    Raises:
        ArtifactError: all of them are held out.
    """
    documents = index_documents(files, field)
    left = documents.without(index_documents(left_out(valid, *checkpoints), field).keys_and_sources)
    train = split_documents(left.distinct(), known_sides(checkpoints)).train
    if documents and not train:
        raise ArtifactError(f"{', '.join(map(str, files))}: all of it is held-out text; give other text")
    return train


def split_documents(documents: DocumentStream, known: Sides | None = None) -> TextSplit:
    """About 2% of the documents held out, by the SHA-256 of the text that each was cut from.

    If that leaves one side empty, or a single held-out document of four or more, the last 2% are held out: at least
    one document, or two of four. A single document holds out its own last 2%, at least 200 characters, unless it is
    shorter than 2,000 characters: then it is trained on. Documents of `known` stay on their sides instead, and a
    known document in two is left out if there are others.
    """
    sides = known or {}
    documents = documents.without(_keys(sides, None)) if len(documents) > 1 else documents
    count, (keys, sources) = len(documents), documents.table[documents.chosen, :2].T
    stay = np.isin(keys, _keys(sides, True))
    if count == 1 and not stay and isinstance(text := next(iter(documents)), str) and len(text) >= _LEAST_TO_CUT:
        place = place_to_cut(text, len(text) - max(round(HELD_OUT_FRACTION * len(text)), 200))
        return TextSplit([text[:place]], [text[place:]], {**sides, int(keys[0]): None})
    hashed = (sources < np.uint64(HELD_OUT_FRACTION * 2**64)) & (count > 1)
    drawn = stay | (hashed & ~np.isin(sources, _keys(sides, False)))
    least = 2 if count >= _ENOUGH_FOR_TWO else 1
    if count > 1 and not stay.any() and (drawn.all() or drawn.sum() < 2):
        if drawn.all() or drawn.sum() < least:
            drawn = np.arange(count) >= count - max(least, round(HELD_OUT_FRACTION * count))
        trained = dict.fromkeys(sources[hashed & ~drawn].tolist(), False)
        sides = {**sides, **trained, **dict.fromkeys(keys[drawn].tolist(), True)}
    return TextSplit(documents[~drawn].without(_keys(sides, True)), documents[drawn], sides)


def _cut(documents: Iterable[Document]) -> Iterable[Document]:
    chunks = (chunk for document in documents for chunk in cut_document(document))
    return sorted((chunk for chunk in chunks if plain_text(chunk).strip()), key=document_digest)


def trained_on(directory: Path, documents: Documents) -> int:
    """How many documents were trained on, by a model or the models that it was made from.

    Documents are compared by hash. Training text that is gone is not compared.
    """
    asked, manifest = document_keys(documents), manifest_of(directory)
    found = np.zeros(len(asked), bool)
    stages = [Ancestor(directory, manifest), *ancestors(manifest, directory)]
    for where, made in {str(each.manifest.settings): each for each in stages}.values():
        corpus = [path for path in map(Path, made.paths("corpus")) if path.exists()]
        named = made.paths(HELD_OUT) or made.paths("valid")
        if corpus:
            held_out, field = [path for path in map(Path, named) if path.exists()], recorded(made).text_field
            left = index_documents(corpus, field).without(index_documents(held_out, field).keys_and_sources)
            sides = known_sides([where])
            train = left.without(_keys(sides, True)) if named else split_documents(left.distinct(), sides).train
            found |= np.isin(asked, document_keys(train))
    return int(found.sum())


def warn_if_trained_on(directory: Path, documents: Documents) -> int:
    """Log how many of the documents to score were trained on, if any; returns their number."""
    count = trained_on(directory, documents)
    if count:
        log(
            f"{count} of {len(documents)} documents are training text of {directory}: their score says little about "
            "other text; score held-out text"
        )
    return count
