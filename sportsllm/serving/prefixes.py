"""What finished sequences have left in the cache, kept within a bound in bytes for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Prefix(NamedTuple):
    """Token ids, copies of all cached tensors of theirs, and the size of these."""

    ids: npt.NDArray[np.int64]
    arrays: list[Array]
    bytes: int


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
        return sum(each.bytes for each in self._kept)

    def keep(self, ids: Sequence[int], view: Sequence[Array]) -> None:
        """Copy what a slot holds, unless it is larger than the bound or known; shorter versions of it go."""
        size_bytes = sum(array.nbytes for array in view)
        tokens = np.array(ids, dtype=np.int64)
        if not 0 < size_bytes <= self._most_bytes or any(
            len(each.ids) >= len(tokens) and shared_length(each.ids, tokens) == len(tokens) for each in self._kept
        ):
            return
        if not self._whole:
            self._kept = [each for each in self._kept if shared_length(each.ids, tokens) < len(each.ids)]
        while self.size_bytes + size_bytes > self._most_bytes:  # before the copy, which would exceed the bound
            del self._kept[0]
        self._kept.append(Prefix(tokens, [array.copy() for array in view], size_bytes))

    def find(self, tokens: npt.NDArray[np.int64]) -> tuple[int, list[Array]]:
        """How many first tokens the kept prefix that shares most has in common, and its arrays."""
        best, found = 0, None
        for prefix in self._kept:
            shared = shared_length(prefix.ids, tokens)
            if shared > best and not (self._whole and shared < len(prefix.ids)):
                best, found = shared, prefix
        if found is None:
            return 0, []
        self._kept = [each for each in self._kept if each is not found] + [found]
        return best, found.arrays


def shared_length(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """How many first tokens of two sequences are the same."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
