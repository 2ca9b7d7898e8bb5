"""What finished sequences have left in the cache, kept within a bound in bytes for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Prefix(NamedTuple):
    """Token ids and their cached tensors."""

    ids: npt.NDArray[np.int64]
    arrays: list[Array]

    def shared(self, tokens: npt.NDArray[np.int64]) -> int:
        """Length of the beginning that another sequence shares."""
        length = min(len(self.ids), len(tokens))
        differ = np.flatnonzero(self.ids[:length] != tokens[:length])
        return int(differ[0]) if len(differ) else length


class PrefixCache:
    """The prefixes used last.

    Args:
        most_bytes: of all copies; 0 keeps nothing.
        whole: a prefix counts only if a prompt begins with all of it, as recurrent states demand.
    """

    def __init__(self, most_bytes: int, whole: bool) -> None:
        self._most_bytes, self._whole = most_bytes, whole
        self._kept: list[Prefix] = []  # the one used last at the end

    @property
    def size_bytes(self) -> int:
        """Size of all copies."""
        return sum(array.nbytes for each in self._kept for array in each.arrays)

    def keep(self, ids: Sequence[int], view: Sequence[Array]) -> None:
        """Copy what a slot holds, unless it is larger than the bound or known; shorter versions of it go."""
        size_bytes = sum(array.nbytes for array in view)
        tokens = np.array(ids, dtype=np.int64)
        if not 0 < size_bytes <= self._most_bytes or any(each.shared(tokens) == len(tokens) for each in self._kept):
            return
        if not self._whole:
            self._kept = [each for each in self._kept if each.shared(tokens) < len(each.ids)]
        while self.size_bytes + size_bytes > self._most_bytes:  # before the copy, which would exceed the bound
            del self._kept[0]
        self._kept.append(Prefix(tokens, [array.copy() for array in view]))

    def find(self, tokens: npt.NDArray[np.int64], others: Sequence[Prefix] = ()) -> tuple[int, list[Array]]:
        """How many first tokens a sequence shares with that of the kept prefixes and `others` which has most of them in
        common, and its arrays."""
        best, found = 0, Prefix(tokens[:0], [])
        for prefix in (*self._kept, *others):
            shared = prefix.shared(tokens)
            if shared > best and not (self._whole and shared < len(prefix.ids)):
                best, found = shared, prefix
        self._kept.sort(key=lambda each: each is found)  # to the end
        return best, found.arrays
