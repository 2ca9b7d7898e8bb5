"""Read and write device files, shipped ones or a user's own, and recognise this machine."""

from __future__ import annotations

import math
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from benchmarks.devices.schema import Device
from benchmarks.labels import LIMITS
from sportsllm.errors import ArtifactError, UsageError, did_you_mean
from sportsllm.files import atomic_write_text, clip, describe, read_toml
from sportsllm.processors import cpuinfo

DEVICES = Path(__file__).parent
ALIASES = {"raspberry-pi-5": "raspberry-pi-5-8gb"}
MOST_EXTENDED = 8
_BOARD = Path("/proc/device-tree/model")
_HEADER = "# 1 MB = 10^6 bytes. Fields, units and the meaning of `date`: benchmarks/devices/schema.py.\n"
_EXTENSIONS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX-INT8",
    "asimd": "NEON",
    "asimdhp": "FP16",
    "asimddp": "int8 dot product",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
    "sve2": "SVE2",
}


def list_devices() -> list[str]:
    """Names of the devices that are shipped, sorted."""
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def load_device(name_or_path: str) -> Device:
    """Read a device file.

    Args:
        name_or_path: a shipped name, a beginning that only one shipped name has, or the path of a .toml file.

    Raises:
        UsageError: no such device; the message lists the names.
        ArtifactError: the file is missing or wrong; the message has the mistakes by field.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path:
        return read_device(Path(name_or_path))
    names, name_or_path = list_devices(), ALIASES.get(name_or_path, name_or_path)
    matches = [n for n in names if n == name_or_path] or [n for n in names if n.startswith(name_or_path)]
    if len(matches) == 1 and name_or_path:
        return read_device(DEVICES / f"{matches[0]}.toml")
    if len(matches) > 1 and name_or_path:
        raise UsageError(f"device {name_or_path!r} can mean {', '.join(matches)}; write one of them in full")
    advice = _advice(name_or_path, sorted([*ALIASES, *names]))
    raise UsageError(f"device {clip(name_or_path)!r} is not known; {advice}, or give the path of a .toml file")


def _advice(name: str, names: list[str]) -> str:
    near = did_you_mean(name, names)
    return f"{near} Choose one of {', '.join(names)}" if near else f"choose one of {', '.join(names)}"


def load_target(name_or_path: str | None, limits: Mapping[str, float]) -> Device:
    """A device with some of its limits replaced. None is this machine with no other limits than those given.

    Raises:
        UsageError, ArtifactError: see `load_device`; or limits that contradict one another or the device.
    """
    device = load_device(name_or_path or "host")
    if not limits:
        return device
    if name_or_path is None:
        unlimited = dict.fromkeys(LIMITS, math.inf)
        return device.model_copy(update={"limits": device.limits.model_copy(update=unlimited | dict(limits))})
    fields = device.model_dump()
    fields["limits"] |= limits
    try:
        return Device.model_validate(fields)
    except ValidationError as error:
        given = " ".join(f"--limit {name}={value:g}" for name, value in limits.items())
        raise UsageError(f"{given}: {describe(error)}; change the other limit too, or choose another value") from None


def read_device(path: Path) -> Device:
    """Parse and check one device file.

    Raises:
        ArtifactError: the file is missing, not TOML, or has mistakes.
    """
    try:
        return Device.model_validate(_read_extended(path))
    except ValidationError as error:
        raise ArtifactError(f"{path}: {describe(error)}") from None


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
    return _merged(_read_extended(found, depth + 1), {"name": name_of(path)} | data)


def name_of(path: Path) -> str:
    """The name of a device without one of its own: that of its file; empty without letters and digits."""
    return re.sub(r"[^a-z0-9.-]+", "-", path.stem.lower()).strip("-.")


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base, **own}
    for key in base.keys() & own.keys():
        if isinstance(base[key], dict) and isinstance(own[key], dict):
            merged[key] = _merged(base[key], own[key])
    return merged


def write_device(device: Device, path: Path, note: str) -> None:
    """Write a device file, whole or not at all; `note` is a line of comment for its head.

    Raises:
        OSError: the file cannot be written.
    """
    content = tomli_w.dumps(device.model_dump(exclude_none=True, exclude_defaults=True))
    assert Device.model_validate(tomllib.loads(content)) == device
    atomic_write_text(path, f"{_HEADER}# {note}\n\n{content}")


def is_this_machine(device: Device, processor: str = "cpu") -> bool:
    """Whether the program runs on `device` itself, so that its own measurements decide.

    Args:
        processor: where the measured work runs; a GPU's budget is not judged by the CPU beside it. A device that is
            always recognised is whatever runs here.
    """
    rule = device.recognise
    if rule is not None and rule.always:
        return True
    if rule is None or processor != device.processor:
        return False
    parts = [(rule.device_tree_model, _device_tree_model), (rule.android_product, _android_product)]
    whole = [(rule.processor, processor_name), (rule.instruction_set, instruction_set)]
    same = [wanted.lower() in read().lower() for wanted, read in parts if wanted is not None]
    same += [wanted == read() for wanted, read in whole if wanted is not None]
    return bool(same) and all(same) and rule.min_memory_mb <= total_memory_mb() <= rule.max_memory_mb


def instruction_set() -> str:
    """The architecture, and the extensions above that /proc/cpuinfo lists."""
    present = cpuinfo("flags", "Features")
    if present is None:
        return f"{platform.machine()}; extensions not readable here"
    found = [name for flag, name in _EXTENSIONS.items() if flag in present.split()]
    return f"{platform.machine()} with {', '.join(found)}" if found else platform.machine()


def processor_name() -> str:
    """The processor's model, on ARM boards often the board's; the architecture if the system names none."""
    return cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def total_memory_mb() -> float:
    """Physical memory of this machine in MB (10^6 bytes)."""
    import psutil

    return float(psutil.virtual_memory().total) / 1e6


def _device_tree_model() -> str:
    with suppress(OSError):  # absent on PCs, and not for every user elsewhere
        return _BOARD.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    return ""


def _android_product() -> str:
    command = shutil.which("getprop")  # Android's own; absent elsewhere
    if command is None:
        return ""
    try:
        done = subprocess.run([command, "ro.product.model"], capture_output=True, text=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()
