"""Where words and progress bars for people go.

With `--json` standard output carries one JSON object and nothing else, so everything else moves to standard error.
`--quiet` leaves errors and results; `--verbose` adds the time to each line, and shows progress more often.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_to_stderr = False
_silent = ContextVar("silent", default=False)  # these two of a thread
_log = ContextVar[Path | None]("log", default=None)

_quiet = _verbose = False
_began = time.monotonic()

FIRST_LINE_S, SECONDS_A_LINE, VERBOSE_SECONDS_A_LINE = 3.0, 60.0, 5.0
"""Until the first line of progress, and between two, if standard error is no terminal."""


def set_verbosity(quiet: bool, verbose: bool) -> None:
    """How much is said of the work: nothing, or with times and more often."""
    global _quiet, _verbose
    _quiet, _verbose = quiet, verbose


def use_stderr(enabled: bool) -> None:
    """Send everything meant for people to standard error (True) or tables to standard output (False)."""
    global _to_stderr
    _to_stderr = enabled


@contextmanager
def silenced(enabled: bool = True) -> Iterator[None]:
    """Inside, `output` prints nothing in this thread: for a step whose figures are shown elsewhere."""
    before = _silent.set(_silent.get() or enabled)
    try:
        yield
    finally:
        _silent.reset(before)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Inside, lines of this thread are appended to a file and `output` prints nothing: for the steps of a search."""
    before = _log.set(path)
    try:
        with silenced():
            yield
    finally:
        _log.reset(before)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """The reader has enough: rich's own answer is exit code 1."""
        raise BrokenPipeError


def output() -> Console:
    """Console for results: standard output, or standard error under `--json`."""
    stream = sys.stderr if _to_stderr else sys.stdout
    if _silent.get():
        return Console(quiet=True)
    piped = not stream.isatty()
    width = 120 if piped else None  # of tables; a piped line stays one line, and paths may hold [a] or :b:
    return _Output(file=stream, width=width, soft_wrap=piped, highlight=False, markup=False, emoji=False)


def typed_line(prompt: str) -> str:
    """A line that is typed; on a terminal with history and editing, of any length, and a paste of several lines whole.

    Raises:
        EOFError: the input has ended.
    """
    console = output()
    if console.file is not sys.stdout or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return console.input(prompt, markup=False)
    with suppress(ImportError):  # Windows
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    return input(prompt)


def log(message: str) -> None:
    """Print one line of status on standard error."""
    if (path := _log.get()) is not None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{message}\n")
        return
    if _quiet:
        return
    message = f"[{time.monotonic() - _began:.1f} s] {message}" if _verbose else message
    with suppress(BrokenPipeError):  # work goes on without a reader
        sys.stderr.write(f"{message}\n")  # above a progress bar, behind which a console of rich's would print


@cache
def log_once(message: str) -> None:
    """`log` a message that reading a file again would repeat."""
    log(message)


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    texts: Sequence[int] = (0,),
    title: str | None = None,
    ratios: Sequence[int] | None = None,
) -> Table:
    """A plain table.

    Args:
        texts: the columns that are text; the others are numbers.
        ratios: the columns' shares of the width, for long texts; else names, in the first column or behind its
            numbers `#`, keep to one line.
    """
    table = Table(title=title and f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, header in enumerate(headers):
        justify: Literal["left", "right"] = "left" if index in texts else "right"
        ratio, named = ratios[index] if ratios else None, not ratios and index == int(headers[0] == "#")
        table.add_column(header, justify=justify, overflow="fold", no_wrap=named, ratio=ratio)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


@contextmanager
def progress_bar(description: str, total: float | None, done: int = 0) -> Iterator["ProgressBar"]:
    """A progress bar on standard error; if that is no terminal, a line after three seconds and then a minute.

    Args:
        total: the number of steps, or None if it is unknown.
        done: steps that an earlier run has taken.
    """
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    console, plain = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, disable=plain or _quiet, transient=True) as progress:
        progress.add_task(description, total=total, completed=done, note="")
        yield ProgressBar(progress, plain, done)


class ProgressBar:
    """Handle that `progress_bar` yields."""

    def __init__(self, progress: Progress, plain: bool, done: int) -> None:
        self._progress, self._plain, self._done = progress, plain, done
        self._started = time.monotonic()
        self._next_line = self._started + FIRST_LINE_S

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Move on by `amount`; a `note` replaces the one behind the bar."""
        (task,), now = self._progress.tasks, time.monotonic()
        self._progress.update(task.id, advance=amount, note=task.fields["note"] if note is None else note)
        if self._plain and now >= self._next_line and not task.finished:
            self._next_line = now + (VERBOSE_SECONDS_A_LINE if _verbose else SECONDS_A_LINE)
            parts = [task.description, str(task.fields["note"])]
            if task.total and task.completed > self._done:
                left_s = (now - self._started) * (task.total - task.completed) / (task.completed - self._done)
                parts[1:1] = [f"{task.percentage:.0f}%, about {duration(left_s)} left"]
            log(" · ".join(filter(None, parts)))


def duration(seconds: float) -> str:
    """A time for people: `40 s`, `12 min`, `3.5 h` or `2.1 days`."""
    for size, unit, format in ((86_400, "days", ".1f"), (3_600, "h", ".1f"), (60, "min", ".0f")):
        if seconds >= 2 * size:
            return f"{seconds / size:{format}} {unit}"
    return f"{max(seconds, 1):.0f} s"
