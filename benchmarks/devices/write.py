"""Write a device file: TOML that `benchmarks.devices.load.read_device` reads back as the same device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.devices.load import read_device
from benchmarks.devices.schema import Device

HEADER = "# 1 MB = 10^6 bytes. Fields, units and what `date` stands for: benchmarks/device.py.\n"


def write_device(device: Device, path: Path, note: str = "") -> None:
    """Write a device file, whole or not at all, after reading it back.

    Args:
        device: what it says.
        path: the file; one that is there is replaced.
        note: a comment of one line for its head.

    Raises:
        ArtifactError: what was written does not read back, which is a mistake here.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.partial.toml")
    comment = f"# {note}\n" if note else ""
    partial.write_text(HEADER + comment + "\n".join(_table(device.model_dump(exclude_none=True), "")), encoding="utf-8")
    try:
        again = read_device(partial)
        assert again == device, "a device file must say what it was made from"
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _table(values: Mapping[str, Any], name: str) -> Iterator[str]:
    """Lines of a table: its own keys first, then the tables in it."""
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping) or _tables(value)}
    own = {key: value for key, value in values.items() if key not in inner and value not in ((), "")}
    if name and own:
        yield f"\n[{name}]"
    for key, value in own.items():
        yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, Mapping):
            yield from _table(value, path)
        else:
            for each in value:
                yield f"\n[[{path}]]"
                yield from (f"{part} = {_value(content)}" for part, content in each.items() if content != "")
    if not name:
        yield ""


def _tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's too
    if isinstance(value, date):
        return value.isoformat()
    return repr(value)
