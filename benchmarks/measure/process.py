"""Run one measurement in a fresh process. Standard library and psutil only: it runs on the smallest device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.measure.memory import watched_memory
from sportsllm.errors import ResourceError, SportsLLMError

DEFAULT_TIMEOUT_S = 900.0
QUIET_CORES = 0.2
"""Other programs that use more cores than this disturb a measurement."""
_ROOT = Path(__file__).resolve().parents[2]
_MEMORY_WORDS = ("MemoryError", "bad_alloc", "bad allocation", "can't allocate memory", "Cannot allocate memory")

FailureKind = Literal["memory", "hang", "crash", "refused"]


class ChildFailure(SportsLLMError):
    """A measuring process gave no result: it ran out of memory, hung, crashed or refused its input."""

    def __init__(self, message: str, kind: FailureKind, exit_code: int = SportsLLMError.exit_code) -> None:
        super().__init__(message)
        self.kind, self.exit_code = kind, exit_code

    def advising(self, flag: str) -> ChildFailure:
        """This failure; if the process hung, with the advice to raise the command's `flag`."""
        if self.kind != "hang":
            return self
        return ChildFailure(f"{self}, or give it longer with {flag}", self.kind, self.exit_code)


@dataclass(frozen=True)
class ChildResult:
    """The JSON object that a child printed, its seconds, and its memory where that was watched (`watched_memory`).

    `other_cpu_cores` is the processor time that other programs and the hypervisor took meanwhile, in cores.
    """

    payload: dict[str, Any]
    seconds: float
    other_cpu_cores: float
    memory: dict[str, int]


def child_command(specification: Mapping[str, Any], module: str = "benchmarks.measure.worker") -> list[str]:
    """The command line that measures `specification` in `benchmarks.measure.worker` or in another such module."""
    # -P: a folder called `benchmarks` where the user happens to stand is not ours.
    return [sys.executable, "-P", "-m", module, json.dumps(dict(specification))]


def run_child(
    command: Sequence[str],
    what: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environment: Mapping[str, str | None] | None = None,
    waiting: Callable[[float], None] = lambda seconds: None,
    watch_memory: bool = False,
    cpus: Sequence[int] | None = None,
) -> ChildResult:
    """Run `command` and read the JSON object on its last line of standard output.

    Args:
        command: see `child_command`.
        what: names the measurement in messages.
        timeout_s: after which the child counts as hung and is killed.
        environment: variables set on top of this process's own; None removes one.
        waiting: called about once a second with the seconds since the last call, for a progress bar.
        watch_memory: sample what the child's memory consists of. Not for what is timed.
        cpus: processors that the child is pinned to: only what others do on these counts as noise; None means all.

    Raises:
        ChildFailure: no result; a child's own one-line error keeps its text and exit code.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    changed: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    variables = {name: value for name, value in changed.items() if value is not None}
    others_before, started = _others_seconds(cpus), time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            with watched_memory(process.pid) if watch_memory else nullcontext(dict[str, int]()) as memory:
                stdout, stderr = _communicate(process, timeout_s, waiting)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ChildFailure(
                f"{what}: no result within {timeout_s:g} s, the process was stopped; measure a smaller model",
                "hang",
                ResourceError.exit_code,
            ) from None
        except BaseException:
            process.kill()
            raise
    seconds = time.perf_counter() - started
    others = _others_seconds(cpus) - others_before
    payload = _payload(what, process.returncode, stdout, stderr)
    return ChildResult(payload, seconds, max(0.0, others / seconds), memory)


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


def _payload(what: str, code: int, stdout: str, stderr: str) -> dict[str, Any]:
    last_line = (stderr.strip().splitlines() or ["it printed no error"])[-1]
    if code == -int(getattr(signal, "SIGKILL", 9)) or (code != 0 and any(word in stderr for word in _MEMORY_WORDS)):
        raise ChildFailure(
            f"{what}: the process was killed or stopped for memory; close other programs or use a smaller model",
            "memory",
            ResourceError.exit_code,
        )
    if code < 0:
        name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
        raise ChildFailure(f"{what}: the process crashed with {name} ({last_line})", "crash")
    if code > 0:
        sys.stderr.write(stderr)
        raise ChildFailure(f"{what}: the process failed with exit code {code} ({last_line})", "crash")
    try:
        payload = json.loads(stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        payload = None
    if not isinstance(payload, dict):
        raise ChildFailure(f"{what}: the process ended without a result", "crash")
    if "error" in payload:
        raise ChildFailure(str(payload["error"]), "refused", int(payload["exit_code"]))
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
