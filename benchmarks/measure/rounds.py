"""Several measurements in turns, A B C A B C, each in a fresh process, and again while they do not agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure.process import ChildFailure, ChildResult, run_child, wait_for_quiet
from sportsllm import console

LOOK_EVERY = 3
"""Rounds between two looks at the noise. Looking after each one, and stopping at the first that pleases, would
flatter the interval."""
Payloads = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Turn:
    """One measurement: its name, the command that prints its result, and what changes in the environment."""

    name: str
    command: Sequence[str]
    what: str
    environment: Mapping[str, str | None] = field(default_factory=dict)


def looks(rounds: int, most_rounds: int) -> list[int]:
    """After how many rounds the noise is looked at: `rounds`, then every `LOOK_EVERY`, at last `most_rounds`."""
    most = max(rounds, most_rounds)
    return sorted({*range(rounds, most, LOOK_EVERY), most})


def take_turns(
    title: str,
    turns: Sequence[Turn],
    look_after: Sequence[int],
    settled: Callable[[Payloads], bool],
    timeout_s: float,
    failed: Callable[[str, ChildFailure], None] | None = None,
) -> Payloads:
    """Every turn's results, a round after the other, until `settled` or the last look.

    Args:
        title: names the whole in progress bar and messages.
        turns: the order within a round.
        look_after: see `looks`.
        settled: whether the rounds so far agree.
        timeout_s: after which one process counts as hung.
        failed: told of a turn that gave no result; that turn is then left out. Where not given, the failure is raised.

    Returns:
        By the turn's name what each round printed, with `seconds` and `other_cpu_cores` beside it. Of a turn that
        failed, what it gave before.
    """
    raw: Payloads = {turn.name: [] for turn in turns}
    left, done = list(turns), 0
    for look in look_after:
        if done:
            console.say(f"{title}: the rounds do not agree yet, {look - done} more")
        with console.progress_bar(title, (look - done) * len(left)) as progress:
            for number in range(done, look):
                wait_for_quiet(3.0 if number == 0 else 1.0)
                for turn in list(left):
                    progress.advance(0, turn.name)
                    try:
                        raw[turn.name].append(take_turn(turn, timeout_s))
                    except ChildFailure as failure:
                        if failed is None:
                            raise
                        failed(turn.name, failure)
                        left.remove(turn)
                    progress.advance(1)
        done = look
        if not left or settled(raw):
            break
    return raw


def take_turn(turn: Turn, timeout_s: float, waiting: Callable[[float], None] | None = None) -> dict[str, Any]:
    """One turn's result, with `seconds` and `other_cpu_cores`; see `run_child`."""
    child: ChildResult = run_child(turn.command, turn.what, timeout_s, turn.environment, waiting)
    return {
        **child.payload,
        "seconds": round(child.seconds, 3),
        "other_cpu_cores": round(child.other_cpu_cores, 3),
    }
