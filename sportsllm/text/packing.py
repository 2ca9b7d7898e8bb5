"""Packed training sequences: a pure function of the seed and the batch number, so resuming needs no state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.text.tokenizer import TextTokenizer

IGNORE = -100  # a target that is not scored
_TEXTS_AT_ONCE = 1_000


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, several documents in each.

    Attributes:
        tokens: (B, T) int64 inputs.
        targets: (B, T) int64, the token that follows each input; IGNORE where a document ends.
        documents: ends of the documents in `tokens` read as one row of B * T, rising.
        index: number of the batch, counted over all epochs.
    """

    tokens: Tensor
    targets: Tensor
    documents: tuple[int, ...]
    index: int = 0

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(self.tokens.to(device), self.targets.to(device), self.documents, self.index)


@dataclass(frozen=True)
class TokenizedDocuments:
    """All documents' ids in one row, each as begin token, text, end token.

    Attributes:
        ids: (total,) uint32.
        ends: (documents,) int64, where each document ends in `ids`.
        text_bytes: UTF-8 bytes of all texts.
    """

    ids: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]
    text_bytes: int


def tokenize(documents: Sequence[str], tokenizer: TextTokenizer) -> TokenizedDocuments:
    """Turn texts into ids, on all cores, or read them from the directory of `kept_tokens`.

    Raises:
        ArtifactError: there are no documents.
    """
    if not documents:
        raise ArtifactError("the corpus is empty; give files with text in them")
    size = sum(len(text.encode()) for text in documents)
    if _kept is None:
        return _tokenize(documents, tokenizer, size)
    digest = hashlib.sha256(tokenizer.fingerprint().encode())
    for text in documents:
        digest.update(f"{len(text)}:{text}".encode())
    path = _kept / f"{digest.hexdigest()}.safetensors"
    if path.exists():
        try:
            tensors = load_file(str(path))
            return TokenizedDocuments(tensors["ids"], tensors["ends"], size)
        except (SafetensorError, KeyError, OSError) as error:
            log(f"{path}: damaged ({error}); the corpus is tokenized again")
    found = _tokenize(documents, tokenizer, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two runs may write the same at once
    try:
        save_file({"ids": found.ids, "ends": found.ends}, str(fresh))
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return found


_kept: Path | None = None


@contextmanager
def kept_tokens(directory: Path) -> Iterator[None]:
    """Keep the tokens in `directory`, so that runs on one corpus tokenize it only once.

    Inside another `kept_tokens` the outer one's directory is used.
    """
    global _kept
    before = _kept
    _kept = before or directory
    try:
        yield
    finally:
        _kept = before


def _tokenize(documents: Sequence[str], tokenizer: TextTokenizer, size: int) -> TokenizedDocuments:
    rows: list[npt.NDArray[np.uint32]] = []
    end = [] if tokenizer.end_id is None else [tokenizer.end_id]
    with progress_bar("tokenize", len(documents)) as bar:
        for start in range(0, len(documents), _TEXTS_AT_ONCE):
            part = documents[start : start + _TEXTS_AT_ONCE]
            for ids in tokenizer.encode_batch(part):
                rows.append(np.array([tokenizer.begin_id, *ids, *end], dtype=np.uint32))
            bar.advance(len(part))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return TokenizedDocuments(np.concatenate(rows), np.cumsum(lengths), size)


class PackedSequences:
    """Cuts a corpus into rows of `length` tokens, documents and then rows in a new seeded order every epoch.

    Without the second shuffle, one long book would fill batch after batch.
    """

    def __init__(self, documents: TokenizedDocuments, length: int, batch_size: int, seed: int) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self._documents = documents
        self._starts = np.concatenate([[0], documents.ends[:-1]])
        self._lengths = documents.ends - self._starts
        self.rows_per_epoch = int((documents.ids.size - 1) // length)
        if self.rows_per_epoch < 1:
            raise ArtifactError(
                f"the corpus has {documents.ids.size} tokens, shorter than one sequence of {length}; "
                "add text or use a smaller --sequence"
            )
        self._epoch = -1
        self._order = self._order_ends = self._rows = np.empty(0, dtype=np.int64)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, begin and end tokens included."""
        return self._documents.text_bytes / self._documents.ids.size

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens seen in one pass over the corpus."""
        return self.rows_per_epoch * self.length

    def batch(self, index: int) -> Batch:
        """Batch number `index`, counted from 0 over all epochs."""
        return self.gather(range(index * self.batch_size, (index + 1) * self.batch_size), index)

    def gather(self, numbers: Sequence[int], index: int = 0) -> Batch:
        """A batch of the given rows, counted from 0 over all epochs."""
        rows, targets, ends = [], [], []
        for position, number in enumerate(numbers):
            ids, boundaries = self._row(*divmod(number, self.rows_per_epoch))
            target = ids[1:].astype(np.int64)
            inside = [end for end in boundaries if 0 < end <= self.length]
            target[[end - 1 for end in inside]] = IGNORE  # the next document's begin token
            offset = position * self.length
            ends += [offset + end for end in inside if end < self.length] + [offset + self.length]
            rows.append(ids[:-1].astype(np.int64))
            targets.append(target)
        return Batch(torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(targets)), tuple(ends), index)

    def _row(self, epoch: int, row: int) -> tuple[npt.NDArray[np.uint32], list[int]]:
        """`length` + 1 ids and the document ends among them."""
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._order = rng.permutation(len(self._lengths))
            self._order_ends = np.cumsum(self._lengths[self._order])
            self._rows = rng.permutation(self.rows_per_epoch)
            self._epoch = epoch
        row = int(self._rows[row])
        start, stop = row * self.length, row * self.length + self.length + 1
        chunks, boundaries = [], []
        place = int(np.searchsorted(self._order_ends, start, side="right"))
        position = start
        while position < stop:
            document = self._order[place]
            begin = int(self._order_ends[place] - self._lengths[document])
            take = min(stop, int(self._order_ends[place]))
            source = int(self._starts[document])
            chunks.append(self._documents.ids[source + position - begin : source + take - begin])
            if take == int(self._order_ends[place]):
                boundaries.append(take - start)
            position, place = take, place + 1
        return np.concatenate(chunks), boundaries
