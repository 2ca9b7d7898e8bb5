"""Read device files: the shipped `benchmarks/devices/*.toml`, or a user's own by path; `extends` names a base."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.devices.schema import Device
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.json_files import clip, describe, read_toml

DEVICES = Path(__file__).parent
ALIASES = {"raspberry-pi-5": "raspberry-pi-5-8gb"}
MOST_EXTENDED = 8


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
    names, name_or_path = list_devices(), ALIASES.get(name_or_path, name_or_path)
    matches = [n for n in names if n == name_or_path] or [n for n in names if n.startswith(name_or_path)]
    if len(matches) == 1 and name_or_path:
        return read_device(DEVICES / f"{matches[0]}.toml")
    if len(matches) > 1 and name_or_path:
        raise UsageError(f"device {name_or_path!r} can mean {', '.join(matches)}; write one of them in full")
    raise UsageError(
        f"device {clip(name_or_path)!r} is not known; {_advice(name_or_path, names)}, or give the path of a .toml file"
    )


def _advice(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}? Choose one of {', '.join(names)}" if near else f"choose one of {', '.join(names)}"


def load_target(name_or_path: str, limits: Mapping[str, float]) -> Device:
    """A device with some of its limits replaced.

    Raises:
        UsageError, ArtifactError: see `load_device`; or limits that contradict one another or the device.
    """
    device = load_device(name_or_path)
    if not limits:
        return device
    fields = device.model_dump()
    fields["limits"] |= limits
    try:
        return Device.model_validate(fields)
    except ValidationError as error:
        given = " ".join(f"--set {name}={value:g}" for name, value in limits.items())
        raise UsageError(f"{given}: {describe(error)}; change the other limit too, or choose another value") from None


def read_device(path: Path) -> Device:
    """Parse and check one device file.

    Raises:
        ArtifactError: the file is missing, not TOML, or has mistakes; the message lists all of them.
    """
    data, text = _read_extended(path), path.read_text(encoding="utf-8")
    try:
        return Device.model_validate(data)
    except ValidationError as error:
        raise ArtifactError("; ".join(_problems(path, text, error))) from None


def _read_extended(path: Path, depth: int = 0) -> dict[str, Any]:
    """A file's fields over those of the device that it `extends`, by name or by a path beside it."""
    data = read_toml(path)
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str) or depth == MOST_EXTENDED:
        raise ArtifactError(f"{path}: extends: give the name of a device or a .toml file, at most {MOST_EXTENDED} deep")
    found = path.parent / base if base.endswith(".toml") else DEVICES / f"{ALIASES.get(base, base)}.toml"
    if not found.is_file():
        raise ArtifactError(f"{path}: extends {clip(base)!r}: no such device; {_advice(base, list_devices())}")
    name = re.sub(r"[^a-z0-9.-]+", "-", path.stem.lower()).strip("-.")
    return _merged(_read_extended(found, depth + 1), {"name": name} | data)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **own}
    for key in base.keys() & own.keys():
        if isinstance(base[key], dict) and isinstance(own[key], dict):
            merged[key] = _merged(base[key], own[key])
    return merged


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
