"""Several measurements in turns, A B C A B C, each in a fresh process, with more rounds while they do not agree."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure.process import QUIET_CORES, ChildFailure, run_child, wait_for_quiet
from sportsllm import console

CHECK_EVERY = 3
"""Rounds between two checks of the noise. Checking after each round, and stopping at the first that agrees, would
flatter the interval."""
Payloads = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Turn:
    """One measurement: its name, and `run_child`'s arguments."""

    name: str
    command: Sequence[str]
    what: str
    environment: Mapping[str, str | None] = field(default_factory=dict)
    watch_memory: bool = False
    cpus: Sequence[int] | None = None


def stop_checks(rounds: int, most_rounds: int) -> list[int]:
    """After how many rounds the noise is checked: `rounds`, then every `CHECK_EVERY`, at last `most_rounds`."""
    most = max(rounds, most_rounds)
    return sorted({*range(rounds, most, CHECK_EVERY), most})


def disturbed(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether other programs took more than `QUIET_CORES` in half of the rounds or more: medians bear less."""
    return statistics.median(float(one["other_cpu_cores"]) for one in rounds) > QUIET_CORES


def take_turns(
    title: str,
    turns: Sequence[Turn],
    check_after_rounds: Sequence[int],
    converged: Callable[[Payloads], bool],
    timeout_s: float,
    failed: Callable[[str, ChildFailure], None] | None = None,
) -> Payloads:
    """What every turn printed by its name, round after round, until `converged` or the last check.

    Beside busy programs there are no further rounds and one wait for quiet: more would only measure those programs.

    Args:
        title: names the whole in progress bar and messages.
        turns: the order within a round.
        check_after_rounds: see `stop_checks`.
        converged: whether the rounds so far agree; it gets those of the turns that have not failed.
        timeout_s: after which one process counts as hung.
        failed: told of a turn that gave no result, which is left out from then on; None raises the failure.
    """
    raw: Payloads = {turn.name: [] for turn in turns}
    left, done, quiet = list(turns), 0, True
    for check in check_after_rounds:
        if done:
            console.log(f"{title}: the rounds do not agree yet, {check - done} more")
        with console.progress_bar(title, (check - done) * len(left)) as progress:
            for number in range(done, check):
                if quiet:
                    quiet = wait_for_quiet(3.0 if number == 0 else 1.0, turns[0].cpus)
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
        done = check
        if not left or converged({turn.name: raw[turn.name] for turn in left}):
            break
        if check != check_after_rounds[-1] and disturbed([one for turn in left for one in raw[turn.name]]):
            console.log(f"{title}: the rounds do not agree, and other programs are busy; no further rounds")
            break
    return raw


def take_turn(turn: Turn, timeout_s: float, waiting: Callable[[float], None] = lambda seconds: None) -> dict[str, Any]:
    """One turn's result, with `seconds`, `other_cpu_cores` and, where memory is watched, its `split`."""
    child = run_child(turn.command, turn.what, timeout_s, turn.environment, waiting, turn.watch_memory, turn.cpus)
    split = {"split": child.memory or None} if turn.watch_memory else {}
    busy = {"seconds": round(child.seconds, 3), "other_cpu_cores": round(child.other_cpu_cores, 3)}
    return {**child.payload, **split, **busy}
