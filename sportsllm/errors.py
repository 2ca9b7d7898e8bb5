"""Errors for users: one line that says what failed, where, and what to do, with an exit code."""

import difflib
from collections.abc import Iterable


class SportsLLMError(Exception):
    """Base class of all errors that a user can act on. The message is one line."""

    exit_code = 1


class UsageError(SportsLLMError):
    """Invalid option, setting or recipe."""

    exit_code = 2


class ArtifactError(SportsLLMError):
    """A checkpoint, export or text file is missing or damaged, or does not fit."""

    exit_code = 3


class GateError(SportsLLMError):
    """A gate was missed: parity with the original model, or a device budget."""

    exit_code = 4


class ResourceError(SportsLLMError):
    """A problem of the environment: memory, disk, permissions, or a missing package."""

    exit_code = 5


class ConflictError(SportsLLMError):
    """The output exists already, or another run is writing it."""

    exit_code = 6


class DivergedError(SportsLLMError):
    """The training loss is not finite."""

    exit_code = 7


class InterruptedRun(SportsLLMError):
    """Interrupted by Ctrl-C or SIGTERM; the message says how to continue."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST?` for an error about an unknown name; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else ""
