"""A corpus' split into training and held-out text, and whether a text was trained on.

A document is held out by the hash of its own text, so the split survives renamed and reordered files, and copies of a
document never end up on both sides: they are read once. The chunks of a long plain file stay together. The corpus is
never in memory: one pass over the files keeps 24 bytes of each document, and the documents are read again when needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.manifest import ancestors, manifest_of
from sportsllm.text.conversations import Document, plain_text
from sportsllm.text.documents import HELD_OUT, cut_document, document_digest, log_files, place_to_cut, read_chunks
from sportsllm.text.reading import USUAL, recorded

_LEAST_TO_CUT = 2_000  # characters of a single document that is cut to hold out its end
HELD_OUT_FRACTION = 0.02
_ENOUGH_FOR_TWO = 4  # documents of which two are held out
_MOST_HELD_OUT = 2**25  # characters of held-out text in memory
_DOCUMENTS_A_STEP = 1_000  # of the progress bar

Keys = npt.NDArray[np.uint64]


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
    """Training and held-out documents; the held-out ones are never trained on."""

    train: Documents
    held_out: Documents

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


def load_corpus(
    corpus: Sequence[Path], valid: Sequence[Path], known: Sequence[Path] = (), field: str = USUAL.text_field
) -> TextSplit:
    """The training text; held-out documents come from `valid`, or by hash out of the corpus itself.

    Args:
        corpus, valid: files.
        known: held-out text of the models that training starts from or learns from; not trained on either.
        field: see `read_chunks`.

    Documents of `valid` and `known` are left out of the corpus, as are copies, and both are counted in a line.

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
    further = index_documents([path for path in known if path not in valid], field)
    left = documents.without(np.concatenate([held_out.keys_and_sources, further.keys_and_sources]))
    if not left:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: all of it is held out; give other training text")
    if len(left) < len(documents):
        log(f"{len(documents) - len(left):,} of {len(documents):,} documents are held out and not trained on")
    train = left.distinct()
    if len(train) < len(left):
        log(f"{len(left) - len(train):,} of {len(left):,} documents are copies of others and left out")
    if valid:
        return TextSplit(train, held_out)
    split = split_documents(train)
    if not split.held_out:
        raise ArtifactError("the corpus is a single short document; give more text, or --valid FILE too")
    held = f"{len(split.held_out):,} of {len(train):,} documents are" if len(train) > 1 else "the document's end is"
    log(f"no held-out text was given: {held} held out")
    return split


def training_side(files: Sequence[Path], valid: Sequence[Path], field: str = USUAL.text_field) -> Documents:
    """The documents of `files` that no split holds out: neither those of `valid`, nor those held out by hash.

    Raises:
        ArtifactError: all of them are held out.
    """
    documents = index_documents(files, field)
    left = documents.without(index_documents(valid, field).keys_and_sources)
    if documents and not left:
        raise ArtifactError(f"{', '.join(map(str, files))}: all of it is held-out text; give other text")
    return split_documents(left.distinct()).train


def split_documents(documents: DocumentStream) -> TextSplit:
    """About 2% of the documents held out, by the SHA-256 of the text that each was cut from.

    If that leaves one side empty, or a single held-out document of four or more, the last 2% are held out: at least
    one document, or two of four. A single document holds out its own last 2%, at least 200 characters, unless it is
    shorter than 2,000 characters: then it is trained on.
    """
    count = len(documents)
    if count == 1 and isinstance(text := next(iter(documents)), str) and len(text) >= _LEAST_TO_CUT:
        place = place_to_cut(text, len(text) - max(round(HELD_OUT_FRACTION * len(text)), 200))
        return TextSplit([text[:place]], [text[place:]])
    drawn = documents.table[documents.chosen, 1] < np.uint64(HELD_OUT_FRACTION * 2**64)
    train, held_out = documents[~drawn], documents[drawn]
    least = 2 if count >= _ENOUGH_FOR_TWO else 1
    if (not train or len(held_out) < least) and count > 1:
        last = max(least, round(HELD_OUT_FRACTION * count))
        held_out = documents[-last:]
        return TextSplit(documents[:-last].without(held_out.keys), held_out)
    return TextSplit(train, held_out) if train or not documents else TextSplit(held_out, [])


def _cut(documents: Iterable[Document]) -> Iterable[Document]:
    chunks = (chunk for document in documents for chunk in cut_document(document))
    return sorted((chunk for chunk in chunks if plain_text(chunk).strip()), key=document_digest)


def trained_on(directory: Path, documents: Documents) -> int:
    """How many documents were trained on, by a model or the models that it was made from.

    Documents are compared by hash. Training text that is gone is not compared.
    """
    asked, manifest = document_keys(documents), manifest_of(directory)
    found = np.zeros(len(asked), bool)
    manifests = [manifest, *(each.manifest for each in ancestors(manifest, directory))]
    for made in {str(each.settings): each for each in manifests}.values():
        corpus = [path for path in map(Path, made.paths("corpus")) if path.exists()]
        named = made.paths(HELD_OUT) or made.paths("valid")
        if corpus:
            held_out, field = [path for path in map(Path, named) if path.exists()], recorded(made).text_field
            left = index_documents(corpus, field).without(index_documents(held_out, field).keys_and_sources)
            found |= np.isin(asked, document_keys(left if named else split_documents(left.distinct()).train))
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
