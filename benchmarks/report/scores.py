"""Which qualities are of one text: bits per byte of different texts say nothing about each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.labels import is_number
from benchmarks.report.inputs import StageSummary
from benchmarks.report.text import get_nested


class Scored(NamedTuple):
    """What a quality is of: who scored it, and which text, by digest where that is known, else by name."""

    by: str  # "bench", "training" or "fit"
    text: tuple[str, ...]

    @staticmethod
    def of(stage: StageSummary) -> Scored | None:
        """None where the stage has no quality."""
        if not is_number(stage.bits_per_byte):
            return None
        if stage.scored_by_bench:
            found = get_nested(stage.bench, "text_digests") or get_nested(stage.bench, "text") or []
            return Scored("bench", tuple(map(str, found)))
        made = stage.manifest
        return Scored("training", tuple(made.paths("valid") or made.paths("corpus") or made.paths("text")))


def commonest(scored: Iterable[Scored | None]) -> Scored | None:
    """What most qualities are of; of two the one of `bench`, which reads the whole text."""
    counts = Counter(one for one in scored if one is not None)
    return max(counts, key=lambda one: (counts[one], one.by == "bench"), default=None)


def text_note(stages: Sequence[StageSummary]) -> str | None:
    """A sentence about which rows of the stages' table compare; None where all do."""
    groups: dict[Scored, list[int]] = {}
    for number, stage in enumerate(stages, start=1):
        if (scored := Scored.of(stage)) is not None:
            groups.setdefault(scored, []).append(number)
    if len(groups) < 2:
        return None
    parts = []
    for scored, numbers in groups.items():
        one = stages[numbers[0] - 1]
        names = (get_nested(one.bench, "text") or []) if scored.by == "bench" else scored.text
        text = " and ".join(Path(name).name for name in names) or "text that is not named"
        which = f"{text}, by bench" if scored.by == "bench" else f"half of what is held out of {text}"
        parts.append(f"{', '.join(map(str, numbers))}: {which}")
    return f"Bits per byte are of {len(groups)} texts and compare only within one ({'; '.join(parts)})."
