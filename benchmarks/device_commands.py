"""The verbs `devices list`, `devices show` and `devices calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.results import Result


@dataclass(frozen=True, kw_only=True)
class DevicesResult(Result):
    """Devices: `name`, `kind`, `limits` and more of each."""

    devices: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CalibrateResult(Result):
    """A device file of this machine. `clean` is False if other programs used the measured processors;
    `read_bandwidth_gb_s` is by number of threads."""

    out: Path
    device: str
    limits_from: str
    threads: int
    read_bandwidth_gb_s: dict[str, float]
    rounds: int
    coefficients: dict[str, Any]
    clean: bool
    other_cpu_cores: float
    seconds: float


def list() -> DevicesResult:
    """List the device budgets."""
    from benchmarks.console_tables import print_devices
    from benchmarks.devices.load import is_this_machine, list_devices, load_device
    from benchmarks.labels import LIMITS
    from sportsllm.console import output

    found = [load_device(each) for each in list_devices()]
    print_devices(output(), found, [each.name for each in found if is_this_machine(each)])
    return DevicesResult(
        devices=[
            {
                "name": each.name,
                "kind": each.kind,
                "title": each.title,
                "processor": each.processor,
                "limits": {limit: getattr(each.limits, limit) for limit in LIMITS},
                "this_machine": is_this_machine(each),
            }
            for each in found
        ]
    )


def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="The device to explain.", show_default=False)],
) -> DevicesResult:
    """Explain one device, with the source of every figure."""
    from benchmarks.console_tables import print_device
    from benchmarks.devices.load import load_device
    from sportsllm.console import output

    device = load_device(name)
    print_device(output(), device)
    return DevicesResult(devices=[device.model_dump(mode="json")])


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="New device file.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The device's name.", show_default="the file's")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads.", show_default="the most that read memory within 10% of the fastest"),
    ] = None,
    limits_from: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device whose limits are copied.")] = "host",
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Fresh processes per model; the median of each timing is used."),
    ] = 3,
) -> CalibrateResult:
    """Time small models here, in about two minutes, and write this machine as a device file."""
    from benchmarks.console_tables import print_calibration
    from benchmarks.predict.calibrate import run_calibrate
    from sportsllm.console import output

    result = run_calibrate(out, name, threads, limits_from, rounds)
    print_calibration(output(), result)
    return CalibrateResult.of(result)
