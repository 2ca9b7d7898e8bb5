"""Write a device file that `benchmarks.devices.load.read_device` reads back as the same device."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from benchmarks.devices.load import read_device
from benchmarks.devices.schema import Device
from sportsllm.errors import ArtifactError

HEADER = "# 1 MB = 10^6 bytes. Fields, units and the meaning of `date`: benchmarks/devices/schema.py.\n"


def write_device(device: Device, path: Path, note: str) -> None:
    """Write a device file, whole or not at all, after reading it back.

    Args:
        device: its content.
        path: the file; an existing one is replaced.
        note: a comment of one line for its head.

    Raises:
        ArtifactError: the written file does not read back as the device.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.partial.toml")
    content = tomli_w.dumps(device.model_dump(exclude_none=True, exclude_defaults=True))
    try:
        partial.write_text(f"{HEADER}# {note}\n\n{content}", encoding="utf-8")
        if read_device(partial) != device:
            raise ArtifactError(f"{path}: not written, since it would not read back as the same device; report this")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
