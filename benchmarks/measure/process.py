"""Measurements in fresh processes: one child and how it can fail, and several in turns, A B C A B C, while they do not
agree. Needs no more than psutil and rich: it runs on the smallest device."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sportsllm import console
from sportsllm.errors import ResourceError, SportsLLMError

DEFAULT_TIMEOUT_S = 900.0
QUIET_CORES = 0.2
"""Other programs that use more cores than this disturb a measurement."""
CHECK_EVERY = 3
"""Rounds between two checks of the noise. Checking after each round, and stopping at the first that agrees, would
flatter the interval."""
_ROOT = Path(__file__).resolve().parents[2]
_MEMORY_WORDS = ("MemoryError", "bad_alloc", "bad allocation", "can't allocate memory", "Cannot allocate memory")

Payloads = dict[str, list[dict[str, Any]]]


class ChildFailure(SportsLLMError):
    """A measuring process gave no result: it ran out of memory, hung, crashed or refused its input."""

    def __init__(self, message: str, exit_code: int = SportsLLMError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Turn:
    """One measurement in a fresh process.

    Attributes:
        name: of its figures.
        command: prints a JSON object on its last line of standard output.
        what: names it in messages.
        environment: variables set on top of this process's own; None removes one.
        cpus: processors that it is pinned to: only what others do on these counts as noise; None means all.
    """

    name: str
    command: Sequence[str]
    what: str
    environment: Mapping[str, str | None] = field(default_factory=dict)
    cpus: Sequence[int] | None = None


def worker_turn(settings: Mapping[str, Any], mode: str) -> Turn:
    """The turn that measures `settings` by a mode of `benchmarks.measure.worker`."""
    # -P: a folder called `benchmarks` where the user happens to stand is not ours.
    command = [sys.executable, "-P", "-m", "benchmarks.measure.worker", json.dumps({**settings, "mode": mode})]
    environment = {"OMP_NUM_THREADS": str(settings["threads"])}
    if mode == "bandwidth":
        environment["OPENBLAS_NUM_THREADS"] = "1"  # the probe has threads of its own
    what = f"{mode} of {settings['threads']} threads"
    if "directory" in settings:
        what = f"bench {Path(settings['directory']).name} ({mode})"
    return Turn(mode, command, what, environment, settings.get("cpus"))


def run_child(
    turn: Turn, timeout_s: float = DEFAULT_TIMEOUT_S, waiting: Callable[[float], None] = lambda seconds: None
) -> dict[str, Any]:
    """The JSON object that a turn's process printed.

    Adds its `seconds` and `other_cpu_cores`, the processor time that other programs and the hypervisor took meanwhile,
    in cores.

    Args:
        timeout_s: after which the child counts as hung and is killed.
        waiting: called about once a second with the seconds since the last call, for a progress bar.

    Raises:
        ChildFailure: no result; a child's own one-line error keeps its text and exit code.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    changed: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **turn.environment}
    variables = {name: value for name, value in changed.items() if value is not None}
    others_before, started = _others_seconds(turn.cpus), time.perf_counter()
    with subprocess.Popen(
        turn.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            if turn.cpus is not None:
                with suppress(OSError):  # a container's rules, or a processor that was taken away meanwhile
                    os.sched_setaffinity(process.pid, turn.cpus)
            stdout, stderr = _communicate(process, timeout_s, waiting)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise ChildFailure(
                f"{turn.what}: no result within {timeout_s:g} s, the process was stopped; measure a smaller model, or "
                "give `bench` longer with --set timeout=SECONDS",
                ResourceError.exit_code,
            ) from None
        except BaseException:
            _kill(process)
            raise
    seconds = time.perf_counter() - started
    others = max(0.0, (_others_seconds(turn.cpus) - others_before) / seconds)
    payload = _payload(turn.what, process.returncode, stdout, stderr)
    return payload | {"seconds": round(seconds, 3), "other_cpu_cores": round(others, 3)}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and the programs that it runs, which would disturb what is measured next."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        for each in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _communicate(process: subprocess.Popen[str], timeout_s: float, waiting: Callable[[float], None]) -> tuple[str, str]:
    """What the process printed; `TimeoutExpired` after `timeout_s`."""
    started = before = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=min(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if now - started >= timeout_s:
                raise
            waiting(now - before)
            before = now


def _payload(what: str, code: int, stdout: str, stderr: str) -> dict[str, Any]:
    last_line = (stderr.strip().splitlines() or ["it printed no error"])[-1]
    if code == -int(getattr(signal, "SIGKILL", 9)) or (code != 0 and any(word in stderr for word in _MEMORY_WORDS)):
        raise ChildFailure(
            f"{what}: the process was killed or stopped for memory; close other programs or use a smaller model",
            ResourceError.exit_code,
        )
    if code < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
        raise ChildFailure(f"{what}: the process crashed with {name} ({last_line})")
    if code > 0:
        sys.stderr.write(stderr)
        raise ChildFailure(f"{what}: the process failed with exit code {code} ({last_line})")
    try:
        payload = json.loads(stdout.strip().splitlines()[-1], parse_constant=int)  # refuses NaN and infinity
    except (IndexError, ValueError):
        payload = None
    if not isinstance(payload, dict):
        raise ChildFailure(f"{what}: the process ended without a result")
    if "error" in payload:
        raise ChildFailure(str(payload["error"]), int(payload["exit_code"]))
    return payload


def _others_seconds(cpus: Sequence[int] | None = None) -> float:
    """Processor seconds of all programs and the hypervisor less those of this process and its ended children.

    With `cpus` only what these processors did; this process and its children are taken to run there, so that what
    they do elsewhere makes others look quieter, never busier.
    """
    every = psutil.cpu_times(percpu=True)
    counted = every if cpus is None else [every[cpu] for cpu in cpus if cpu < len(every)]
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    busy = sum(getattr(times, name, 0.0) for times in counted for name in names)
    own = psutil.Process().cpu_times()
    return float(busy - (own.user + own.system + own.children_user + own.children_system))


def wait_for_quiet(longest_s: float = 3.0, cpus: Sequence[int] | None = None) -> bool:
    """Wait until other programs use at most `QUIET_CORES` of the processors `cpus` (all if None), or for `longest_s`.

    Returns whether they do.
    """
    deadline = time.monotonic() + longest_s
    while True:
        others, started = _others_seconds(cpus), time.perf_counter()
        time.sleep(0.25)
        cores = (_others_seconds(cpus) - others) / (time.perf_counter() - started)
        if cores <= QUIET_CORES or time.monotonic() > deadline:
            return cores <= QUIET_CORES


def disturbed(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether other programs took more than `QUIET_CORES` in half of the rounds or more: medians bear less."""
    return statistics.median_high(float(one["other_cpu_cores"]) for one in rounds) > QUIET_CORES


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
        turns: the order within a round.
        check_after_rounds: after how many rounds their noise is checked, ascending; the last is the most.
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
                        raw[turn.name].append(run_child(turn, timeout_s))
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
