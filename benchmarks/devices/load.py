"""Device budgets: what a model may cost on a device, and whether it keeps to that.

A budget is a TOML file, `benchmarks/devices/*.toml` or a user's own by path; `benchmarks.devices.schema` says what it
holds. 1 MB = 10^6 bytes everywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from benchmarks.devices.recognise import instruction_set, processor_name
from benchmarks.devices.schema import LIMIT_UNITS, Device, Figure, Limits
from sportsllm.errors import ArtifactError, UsageError

__all__ = [
    "LIMIT_UNITS",
    "BudgetResult",
    "Device",
    "Figure",
    "Limits",
    "Verdict",
    "is_this_machine",
    "judge",
    "list_devices",
    "load_device",
    "read_device",
    "recognise_host",
]

DEVICES = Path(__file__).parent
Source = Literal["measured", "predicted"]


def list_devices() -> list[str]:
    """Names of the devices that are shipped, sorted."""
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def load_device(name_or_path: str) -> Device:
    """Read a device's budget.

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
        ArtifactError: missing, no TOML, or with mistakes, all of them in one message.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; give a device file, or a name from `devices`") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path}: is a directory; give a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not valid TOML ({error}); correct it") from None
    try:
        return Device.model_validate(data)
    except ValidationError as error:
        raise ArtifactError("; ".join(_problems(path, text, error))) from None


_MESSAGES = {"missing": "is missing", "extra_forbidden": "is no field of a device file"}
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
            message += f", not {item['input']!r}"
        problems.append(f"{where}: {field}: {message}")
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


@dataclass(frozen=True)
class Verdict:
    """One limit and what became of it; `value`, `passed` and `source` are None where there is no figure."""

    name: str
    limit: float
    value: float | None
    unit: str
    passed: bool | None
    source: Source | None


@dataclass(frozen=True)
class BudgetResult:
    """All limits of a budget. `passed` is False where a known figure misses; unknown ones do not decide."""

    verdicts: tuple[Verdict, ...]
    passed: bool

    @property
    def complete(self) -> bool:
        """Whether every limit had a figure."""
        return all(verdict.passed is not None for verdict in self.verdicts)

    @property
    def missed(self) -> tuple[Verdict, ...]:
        """The limits that were missed."""
        return tuple(verdict for verdict in self.verdicts if verdict.passed is False)

    def as_dict(self, device: str) -> dict[str, Any]:
        """For `--json`: the keys device, limits (one record each) and passed."""
        return {"device": device, "limits": [asdict(v) for v in self.verdicts], "passed": self.passed}


def judge(
    limits: Limits,
    figures: Mapping[str, float | None],
    predicted: Mapping[str, float | None] | None = None,
) -> BudgetResult:
    """Compare figures with limits; a value equal to its limit passes.

    Args:
        limits: the budget.
        figures: measured values by the limit's name (`file_mb`, `ttft_ms`, …); absent or None is unknown.
        predicted: values that stand in where nothing was measured.

    Raises:
        ValueError: a figure that no limit has.
    """
    predicted = predicted or {}
    if unknown := (set(figures) | set(predicted)) - set(LIMIT_UNITS):
        raise ValueError(f"no limit is called {sorted(unknown)}; the limits are {list(LIMIT_UNITS)}")
    verdicts = []
    for name, unit in LIMIT_UNITS.items():
        limit: float = getattr(limits, name)
        value, source = figures.get(name), "measured"
        if value is None:
            value, source = predicted.get(name), "predicted"
        if value is None:
            verdicts.append(Verdict(name, limit, None, unit, None, None))
        else:
            verdicts.append(Verdict(name, limit, value, unit, value <= limit, source))  # type: ignore[arg-type]
    return BudgetResult(tuple(verdicts), all(verdict.passed is not False for verdict in verdicts))


def is_this_machine(device: Device, processor: str = "cpu") -> bool:
    """Whether the program runs on `device` itself, so that its own measurements decide.

    Args:
        device: the device asked about.
        processor: what the measured work runs on; a GPU's budget is not judged by the CPU beside it.
    """
    rule = device.recognise
    if rule is None or processor != device.processor:
        return False
    if rule.always:
        return True
    names = (
        (rule.device_tree_model, _read_text(Path("/proc/device-tree/model"))),
        (rule.android_product, _android_product()),
    )
    wanted = [(pattern, found) for pattern, found in names if pattern is not None]
    if any(pattern.lower() not in found.lower() for pattern, found in wanted):
        return False
    exact = ((rule.processor, processor_name()), (rule.instruction_set, instruction_set()))
    same = [(name, found) for name, found in exact if name is not None]
    if not (wanted or same) or any(name != found for name, found in same):
        return False
    return rule.min_memory_mb <= total_memory_mb() <= rule.max_memory_mb


def recognise_host(processor: str = "cpu") -> str | None:
    """Name of the shipped device that this machine is, or None. `host`, being any machine, does not count."""
    for name in list_devices():
        device = read_device(DEVICES / f"{name}.toml")
        if not (device.recognise and device.recognise.always) and is_this_machine(device, processor):
            return name
    return None


def total_memory_mb() -> float:
    """Physical memory of this machine in MB (10^6 bytes)."""
    import psutil

    return float(psutil.virtual_memory().total) / 1e6


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace").strip("\0\n ")
    except OSError:
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
