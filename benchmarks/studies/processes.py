"""A study that measures in processes of its own module and prints a table: its flags, its children and its end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from benchmarks.measure import worker
from benchmarks.measure.process import ChildResult, child_command, run_child
from sportsllm.console import output, use_stderr

TIMEOUT_S = 3600.0


def flag_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the module's docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_integers(parser: argparse.ArgumentParser, **flags: tuple[int, str]) -> None:
    """Add flags of whole numbers: each one's default and help."""
    for name, (default, text) in flags.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{text} [default: %(default)s]")


def measure_apart(module: str, what: str, settings: Mapping[str, Any], mode: str, **more: Any) -> ChildResult:
    """One of `module`'s modes in a fresh process; `what` names it in messages."""
    command = child_command({**settings, "mode": mode, **more}, module)
    return run_child(command, f"{what}, {mode}", TIMEOUT_S, {"OMP_NUM_THREADS": str(settings["threads"])})


def run_study(
    parser: argparse.ArgumentParser,
    modes: Mapping[str, worker.Mode],
    measure: Callable[[dict[str, Any]], list[dict[str, Any]]],
    draw: Callable[[list[dict[str, Any]]], Table],
    key: str,
) -> None:
    """Measure what the command line asks for and draw it; in a process that `measure_apart` started, one of `modes`.

    `--json` prints the results under `key`.
    """
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        sys.exit(worker.main(sys.argv[1:], modes))
    parser.add_argument("--json", action="store_true", help="Print one JSON object on standard output.")
    settings = vars(parser.parse_args())
    as_json = settings.pop("json")
    use_stderr(as_json)
    results = measure(settings)
    output().print(draw(results))
    if as_json:
        print(json.dumps({key: results}))
