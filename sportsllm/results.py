"""Results of commands: typed records for Python, and their JSON form for `--json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_NOT_IN_JSON = ("exit_code", "complaint")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command returns.

    Attributes:
        exit_code: of the command line; 4 if a gate was missed.
        complaint: why, in one line.
    """

    exit_code: int = 0
    complaint: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """A record from a mapping, for example one read back from a manifest. Unknown keys are ignored.

        Raises:
            TypeError: a field without a default is missing.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        if isinstance(given.get("out"), str):
            given["out"] = Path(given["out"])
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them; paths are strings."""
        return {
            field.name: plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in _NOT_IN_JSON
        }


@dataclass(frozen=True, kw_only=True)
class StageResult(Result):
    """What a command returns that wrote a directory.

    Attributes:
        out: the directory.
        cached: it was there already, made from the same inputs.
        parameters: of the model in it.
        size_bytes: of its weight files.
        seconds: that the work took, also if cached.
    """

    out: Path
    cached: bool = False
    parameters: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


def plain(value: Any) -> Any:
    """A value as JSON has it: records as objects, paths as strings."""
    if isinstance(value, Result):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
