"""Prompt lookup: tokens that followed the same words before are proposed and read in one pass.

The model's choice after each is kept up to the first that is another one, so that the text is the same, token by token,
greedy or sampled. (https://github.com/apoorvumang/prompt-lookup-decoding)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

_SHORTEST, _LONGEST = 3, 8  # tokens that must have come before, and that are compared
_PRIOR_COST = {1: 1.0, 2: 1.3, 4: 2.0, 8: 3.5}  # of a pass of so many tokens, against one (SmolLM2-135M INT4)
_DRIFT, _LEARN = 0.01, 0.15


class PromptLookup:
    """Proposes continuations of one text, as long as the time of passes and what was accepted say that they pay.

    Attributes:
        passes, accepted: passes so far, and the tokens that were proposed and taken.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._after = list[int](), dict[tuple[int, ...], int]()
        self._chance = {n: 0.4 + 0.08 * (n - _SHORTEST) for n in range(_SHORTEST, _LONGEST + 1)}
        self._cost_s = dict[int, float]()
        self._match, self._began = 0, 0.0
        self.passes = self.accepted = 0
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens to the text."""
        for token in ids:
            if len(self._ids) >= _SHORTEST:
                self._after[tuple(self._ids[-_SHORTEST:])] = len(self._ids)
            self._ids.append(token)

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens to read together with the last one; none if that would not pay. A pass begins."""
        self._began, self._match = time.perf_counter(), 0
        at = self._after.get(tuple(self._ids[-_SHORTEST:]))
        if at is None:
            return []
        match, here = _SHORTEST, len(self._ids)
        while match < _LONGEST and at > match and self._ids[at - 1 - match] == self._ids[here - 1 - match]:
            match += 1
        chance, room = self._chance[match], min(most, here - at)
        rows = max(
            (rows for rows in _PRIOR_COST if rows - 1 <= room),
            key=lambda rows: sum(chance**place for place in range(rows)) / self._cost(rows),
        )
        if rows == 1:  # the chance may have become better since
            self._chance[match] += _DRIFT * (0.5 - chance)
            return []
        self._match = match
        return self._ids[at : at + rows - 1]

    def _cost(self, rows: int) -> float:
        return self._cost_s.get(rows, _PRIOR_COST[rows] * self._cost_s.get(1, 1.0))

    def read(self, proposed: int) -> None:
        """The pass has ended."""
        seconds, rows = time.perf_counter() - self._began, proposed + 1
        before = self._cost_s.get(rows, seconds)
        self._cost_s[rows] = before + _LEARN * (min(seconds, 3 * before) - before)
        self.passes += 1

    def learn(self, proposed: int, accepted: int) -> None:
        """So many of the proposed tokens were taken."""
        self.accepted += accepted
        for place in range(min(accepted + 1, proposed)):
            self._chance[self._match] += _LEARN * ((place < accepted) - self._chance[self._match])
