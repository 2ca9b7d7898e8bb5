"""Packed training sequences: a pure function of the seed and the batch number, so resuming needs no state."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.processes import own_share
from sportsllm.text.tokens import Id, TokenizedDocuments

IGNORE = -100  # a target that is not scored
_BATCHES_IN_MEMORY = 16  # of the mapped ids that were read for them


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens, several documents in each.

    Attributes:
        tokens: (B, T) int64 inputs.
        targets: (B, T) int64, the token that follows each input; IGNORE where a document ends or no reply is.
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


def whole_rows(documents: TokenizedDocuments, length: int) -> list[list[tuple[int, int]]]:
    """Conversations whole in as few rows of `length` + 1 tokens as best-fit decreasing finds, as places in `ids`.

    A reply cut off from its question would be learned without it (best-fit packing, https://arxiv.org/abs/2404.10830).
    Longer conversations are cut at that length, from their end on. Parts without a scored token are left out.
    """
    assert documents.scored is not None, "there are conversations"
    starts = np.concatenate([[0], documents.ends[:-1]])
    parts = [
        (max(start, stop - length - 1), stop)
        for start, end in zip(starts.tolist(), documents.ends.tolist(), strict=True)
        for stop in range(end, start + 1, -length)
    ]
    parts = [part for part in parts if documents.scored[part[0] + 1 : part[1]].any()]
    rows, space = list[list[tuple[int, int]]](), list[tuple[int, int]]()  # space: tokens left and row, rising
    for begin, end in sorted(parts, key=lambda part: part[0] - part[1]):
        place = bisect_left(space, (end - begin, -1))
        left, row = space.pop(place) if place < len(space) else (length + 1, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append((begin, end))
        insort(space, (left - (end - begin), row))
    return rows


class PackedSequences:
    """Cuts a corpus into rows of `length` tokens, documents and then rows in a new seeded order every epoch.

    Without the second shuffle, one long book would fill batch after batch. Rows of conversations are `whole_rows`.
    """

    def __init__(self, documents: TokenizedDocuments, length: int, batch_size: int, seed: int) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self._documents = documents
        self._starts = np.concatenate([[0], documents.ends[:-1]])
        self._lengths = documents.ends - self._starts
        self._whole = None if documents.scored is None else whole_rows(documents, length)
        self.rows_per_epoch = int((documents.ids.size - 1) // length) if self._whole is None else len(self._whole)
        if self.rows_per_epoch < 1:
            raise ArtifactError(
                f"the corpus has {documents.ids.size} tokens, shorter than one sequence of {length}; "
                "add text or use a smaller --sequence"
            )
        self._epoch, self._batches = -1, 0
        self._order = self._order_ends = self._rows = np.empty(0, dtype=np.int64)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of scored text per scored token, begin and end tokens included."""
        return self._documents.text_bytes / self._documents.scored_tokens

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens seen in one pass over the corpus."""
        return self.rows_per_epoch * self.length

    def batch(self, index: int) -> Batch:
        """Batch number `index`, counted from 0 over all epochs."""
        return self.gather(range(index * self.batch_size, (index + 1) * self.batch_size), index)

    def step(self, number: int, accumulation: int) -> list[Batch]:
        """The batches of step `number`, counted from 0; of several processes, this one's."""
        size = accumulation * self.batch_size
        own = own_share(range(number * size, (number + 1) * size))
        parts = [own[start : start + self.batch_size] for start in range(0, len(own), self.batch_size)]
        return [self.gather(part, part.start // self.batch_size) for part in parts]

    def gather(self, numbers: Sequence[int], index: int = 0) -> Batch:
        """A batch of the given rows, counted from 0 over all epochs."""
        rows, targets, ends = [], [], []
        for position, number in enumerate(numbers):
            ids, target, boundaries = self._row(*divmod(number, self.rows_per_epoch))
            inside = [end for end in boundaries if 0 < end <= self.length]
            target[[end - 1 for end in inside]] = IGNORE  # the next document's begin token
            offset = position * self.length
            ends += [offset + end for end in inside if end < self.length] + [offset + self.length]
            rows.append(ids[:-1].astype(np.int64))
            targets.append(target)
        self._batches += 1  # `index` may skip: several processes share a step
        if self._batches % _BATCHES_IN_MEMORY == 0:
            self._documents.unload()
        return Batch(torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(targets)), tuple(ends), index)

    def _row(self, epoch: int, row: int) -> tuple[npt.NDArray[Id], npt.NDArray[np.int64], list[int]]:
        """`length` + 1 ids, the target of each but the last, and the document ends among them."""
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._order = rng.permutation(len(self._lengths))
            self._order_ends = np.cumsum(self._lengths[self._order])
            self._rows = rng.permutation(self.rows_per_epoch)
            self._epoch = epoch
        row = int(self._rows[row])
        if self._whole is not None:
            return self._filled(self._whole[row])
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
        ids = np.concatenate(chunks)
        return ids, ids[1:].astype(np.int64), boundaries

    def _filled(self, parts: list[tuple[int, int]]) -> tuple[npt.NDArray[Id], npt.NDArray[np.int64], list[int]]:
        """A row of `whole_rows`; what is left of it is a document of its own without targets."""
        assert self._documents.scored is not None, "there are conversations"
        places = np.concatenate([np.arange(begin, end) for begin, end in parts])
        left, ids = (0, self.length + 1 - len(places)), self._documents.ids[places]
        targets = np.where(self._documents.scored[places], ids.astype(np.int64), IGNORE)
        ends = np.cumsum([end - begin for begin, end in parts]).tolist()
        return np.pad(ids, left), np.pad(targets, left, constant_values=IGNORE)[1:], ends
