"""Tokens that are proposed and read in one pass: those that followed the same words before (prompt lookup), or those
that a smaller model chooses.

The model's choice after each is kept up to the first that is another one, so that the text is the same, token by token,
greedy or sampled. (https://github.com/apoorvumang/prompt-lookup-decoding, https://arxiv.org/abs/2211.17192)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from sportsllm.models.config import ModelConfig

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
        return self._ids[at : at + self._count(match, min(most, here - at))]

    def _count(self, match: int, most: int, extra_s: float = 0.0) -> int:
        """How many tokens to propose if each costs `extra_s`, by the chance that those after such a match are taken."""
        chance, most = self._chance[match], most if 1 in self._cost_s else 0  # the first pass is measured alone
        rows = max(
            (rows for rows in _PRIOR_COST if rows - 1 <= most),
            key=lambda rows: sum(chance**place for place in range(rows)) / (self._cost(rows) + extra_s * (rows - 1)),
        )
        if rows == 1:  # the chance may have become better since
            self._chance[match] += _DRIFT * (0.5 - chance)
        else:
            self._match = match
        return rows - 1

    def _cost(self, rows: int) -> float:
        """Time of a pass: at most that of a longer one, so that a single slow measurement cannot favour proposals."""
        own = self._cost_s.get(rows, _PRIOR_COST[rows] * min(self._cost_s.values(), default=1.0))
        return min([own, *(seconds for longer, seconds in self._cost_s.items() if longer > rows)])

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


class Draft(Protocol):
    """A smaller model; see `export.runtime.decoder.OnnxDecoder`."""

    config: ModelConfig
    prefill_chunk: int

    def held(self, text: Sequence[int]) -> int: ...
    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None, reuse: bool = False) -> Any: ...
    def step(self, tokens: Sequence[int]) -> Any: ...


class DraftLookup(PromptLookup):
    """Proposes what prompt lookup finds, else what a smaller model with the same tokenizer would choose.

    Args:
        draft: the smaller model; its cache is used.
        room: tokens that the text may have.
        ids: the text.
    """

    def __init__(self, draft: Draft, room: int, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self._draft, self._room = draft, min(room, draft.config.max_position_embeddings)
        self._draft_s, self._chance[0] = 0.0, 0.7

    def propose(self, most: int) -> list[int]:
        """As `PromptLookup.propose`; none as long as the draft reads the text, a chunk before each pass."""
        found, most = super().propose(most), min(most, self._room - len(self._ids))
        if found or most < 1 or not (count := self._count(0, most, self._draft_s)):
            return found
        began, held = time.perf_counter(), self._draft.held(self._ids)
        read = min(len(self._ids), held + self._draft.prefill_chunk)
        tokens = [int(self._draft.prefill([self._ids[:read]], self._room, reuse=True)[0].argmax())]
        if read < len(self._ids):
            self._match, self._began = 0, time.perf_counter()
            return []
        while len(tokens) < count:
            tokens.append(int(self._draft.step(tokens[-1:])[0].argmax()))
        self._began = time.perf_counter()
        if read - held <= 8:  # else it has read a prompt
            seconds = (self._began - began) / count
            before = self._draft_s or seconds
            self._draft_s = before + _LEARN * (min(seconds, 3 * before) - before)
        return tokens
