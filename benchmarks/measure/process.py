"""Run one measurement in a fresh process, and say plainly when it did not end well.

Standard library and psutil only: the parent of a measurement runs on the smallest device.
"""

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
    """What a child printed, and how busy the machine was beside it.

    Attributes:
        payload: the JSON object on its last line.
        seconds: from its start to its end.
        other_cpu_cores: processor time that other programs and the hypervisor took meanwhile, in cores.
        memory: its memory at the largest seen (see `watched_memory`); empty where it was not watched.
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
    waiting: Callable[[float], None] | None = None,
    watch_memory: bool = False,
) -> ChildResult:
    """Run `command` and read the JSON object on its last line of standard output.

    Args:
        command: the program and its arguments; see `child_command`.
        what: names the measurement in messages.
        timeout_s: seconds after which the child counts as hung and is killed.
        environment: variables set on top of this process's own; None removes one.
        waiting: called about once a second with the seconds so far, for a progress bar.
        watch_memory: sample what the child's memory consists of. Not for what is timed.

    Raises:
        ChildFailure: no result; `kind` says why. A child's own one-line error keeps its text and exit code.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    changed: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    variables = {name: value for name, value in changed.items() if value is not None}
    busy_before, own_before, started = _busy_seconds(), _own_seconds(), time.perf_counter()
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
    others = (_busy_seconds() - busy_before) - (_own_seconds() - own_before)
    payload = _payload(what, process.returncode, stdout, stderr)
    return ChildResult(payload, seconds, max(0.0, others / seconds), memory)


def _communicate(
    process: subprocess.Popen[str], timeout_s: float, waiting: Callable[[float], None] | None
) -> tuple[str, str]:
    """What the process printed; `TimeoutExpired` after `timeout_s`."""
    started = time.monotonic()
    while waiting is not None:
        try:
            return process.communicate(timeout=min(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - started
            if passed >= timeout_s:
                raise
            waiting(passed)
    return process.communicate(timeout=timeout_s)


def wait_for_quiet(longest_s: float = 3.0) -> None:
    """Wait until other programs use at most `QUIET_CORES` cores, or for `longest_s`."""
    deadline = time.monotonic() + longest_s
    while True:
        started, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
        time.sleep(0.25)
        others = (_busy_seconds() - busy) - (_own_seconds() - own)
        if others / (time.perf_counter() - started) <= QUIET_CORES or time.monotonic() > deadline:
            return


def _payload(what: str, code: int, stdout: str, stderr: str) -> dict[str, Any]:
    lines = stderr.strip().splitlines()
    last_line = lines[-1] if lines else "it printed no error"
    if code == -int(getattr(signal, "SIGKILL", 9)) or (code != 0 and any(word in stderr for word in _MEMORY_WORDS)):
        raise ChildFailure(
            f"{what}: the process was killed or stopped for memory; close other programs or use a smaller model",
            "memory",
            ResourceError.exit_code,
        )
    if code < 0:
        raise ChildFailure(f"{what}: the process crashed with {_signal_name(-code)} ({last_line})", "crash")
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _busy_seconds() -> float:
    """Processor seconds that all programs and the hypervisor have used since the machine started."""
    times = psutil.cpu_times()
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, field, 0.0)) for field in fields)


def _own_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
