"""Read device files: the shipped `benchmarks/devices/*.toml`, or a user's own by path."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from benchmarks.devices.schema import Device
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.json_files import clip, read_toml

DEVICES = Path(__file__).parent


def list_devices() -> list[str]:
    """Names of the devices that are shipped, sorted."""
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def load_device(name_or_path: str) -> Device:
    """Read a device file.

    Args:
        name_or_path: a shipped name, a beginning that only one shipped name has, or the path of a .toml file.

    Raises:
        UsageError: no such device; the message lists the names.
        ArtifactError: the file is missing or wrong; the message has every mistake with line and field.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path:
        return read_device(Path(name_or_path))
    names = list_devices()
    matches = [n for n in names if n == name_or_path] or [n for n in names if n.startswith(name_or_path)]
    if len(matches) == 1 and name_or_path:
        return read_device(DEVICES / f"{matches[0]}.toml")
    if len(matches) > 1 and name_or_path:
        raise UsageError(f"device {name_or_path!r} can mean {', '.join(matches)}; write one of them in full")
    raise UsageError(
        f"device {name_or_path!r} is not known; choose one of {', '.join(names)}, or give the path of a .toml file"
    )


def read_device(path: Path) -> Device:
    """Parse and check one device file.

    Raises:
        ArtifactError: the file is missing, not TOML, or has mistakes; the message lists all of them.
    """
    data, text = read_toml(path), path.read_text(encoding="utf-8")
    try:
        return Device.model_validate(data)
    except ValidationError as error:
        raise ArtifactError("; ".join(_problems(path, text, error))) from None


_MESSAGES = {"missing": "is missing", "extra_forbidden": "unknown field"}
_COMPLETE = {*_MESSAGES, "value_error"}  # messages that need no value after them


def _problems(path: Path, text: str, error: ValidationError) -> list[str]:
    lines = _field_lines(text)
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in item["loc"])
        known = field
        while known and known not in lines:  # a missing field is reported at its table
            known = known.rpartition(".")[0]
        where = f"{path}:{lines[known]}" if known else f"{path}"
        message = _MESSAGES.get(item["type"]) or item["msg"].removeprefix("Value error, ")
        if item["type"] not in _COMPLETE and isinstance(item["input"], str | int | float):
            message += f", not {clip(repr(item['input']))}"
        problems.append(f"{where}: {clip(field)}: {message}")
    return problems


def _field_lines(text: str) -> dict[str, int]:
    """Line of each table and key, by dotted name; elements of arrays of tables are counted from 0."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[{1,2})\s*([\w.-]+)\s*\]", line):
            table = header[2]
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines
