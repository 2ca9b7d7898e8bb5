"""The rows that the teacher cache stores, as training batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sportsllm.text.packing import Batch, PackedSequences, TokenizedDocuments


class CachedBatches(PackedSequences):
    """Rows 0 to `rows` - 1 of a packed corpus, over and over: batch i holds rows (i * batch_size + position) % rows.

    Row r is row r of `PackedSequences` with the same documents, length and seed, whatever its batch size; where `rows`
    is more than an epoch of the corpus, rows of its next epochs follow.
    """

    def __init__(self, documents: TokenizedDocuments, length: int, batch_size: int, seed: int, rows: int) -> None:
        super().__init__(documents, length, batch_size, seed)
        self.rows = rows
        self._single = PackedSequences(documents, length, 1, seed)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens seen in one pass over the stored rows."""
        return self.rows * self.length

    def row_numbers(self, index: int) -> list[int]:
        """The rows of batch `index`, counted from 0 over all passes."""
        first = index * self.batch_size
        return [(first + position) % self.rows for position in range(self.batch_size)]

    def batch(self, index: int) -> Batch:
        """Batch number `index`."""
        return self.gather(self.row_numbers(index), index)

    def gather(self, rows: Sequence[int], index: int = 0) -> Batch:
        """A batch of the given rows."""
        parts = [self._single.batch(row) for row in rows]
        ends = [place * self.length + end for place, part in enumerate(parts) for end in part.documents]
        tokens, targets = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "targets"))
        return Batch(tokens, targets, tuple(ends), index)
