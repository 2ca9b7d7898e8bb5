"""Errors meant for people: one line that says what, where and what to do, and an exit code.

The codes are part of the command line's interface; scripts rely on them.
"""

import difflib
from collections.abc import Iterable


class SportsLLMError(Exception):
    """Base of every error a person can act on. The message is one line."""

    exit_code = 1


class UsageError(SportsLLMError):
    """A flag, a setting or a recipe that cannot be meant."""

    exit_code = 2


class ArtifactError(SportsLLMError):
    """A checkpoint, an export or a text file that is missing, damaged or does not fit."""

    exit_code = 3


class GateError(SportsLLMError):
    """A gate was missed: parity with the original model, or a device budget."""

    exit_code = 4


class ResourceError(SportsLLMError):
    """The environment falls short: memory, disk, permissions, a package that is not installed."""

    exit_code = 5


class ConflictError(SportsLLMError):
    """The output exists already, or another run holds it."""

    exit_code = 6


class DivergedError(SportsLLMError):
    """Training met a loss that is not a number."""

    exit_code = 7


class InterruptedRun(SportsLLMError):
    """The user pressed Ctrl-C; the state was saved first."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST?` for an error about an unknown name; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else ""
