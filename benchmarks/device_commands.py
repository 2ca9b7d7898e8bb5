"""The verbs `devices list`, `devices show` and `devices calibrate`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm.errors import UsageError
from sportsllm.files import require_new
from sportsllm.results import Result

if TYPE_CHECKING:
    from benchmarks.devices.schema import Device, Quantity, SourcedText
    from benchmarks.labels import Table


@dataclass(frozen=True, kw_only=True)
class DevicesResult(Result):
    """Devices.

    Attributes:
        devices: `name`, `kind`, `limits` and more of each device.
    """

    devices: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CalibrateResult(Result):
    """A device file of this machine.

    Attributes:
        out, device, limits_from, threads, rounds, coefficients, seconds: what was written, and how it was measured.
        read_bandwidth_gb_s: by number of threads.
        clean, other_cpu_cores: whether other programs left the measured processors alone, and how many they used.
    """

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
    from benchmarks.devices.load import is_this_machine, list_devices, load_device

    found = [load_device(each) for each in list_devices()]
    here = {each.name for each in found if is_this_machine(each)}
    _print_devices(found, here)
    devices = [
        {"name": each.name, "kind": each.kind, "title": each.title, "processor": each.processor}
        | {"limits": each.limits.given(), "this_machine": each.name in here}
        for each in found
    ]
    return DevicesResult(devices=devices)


def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="The device to explain.", show_default=False)],
) -> DevicesResult:
    """Explain one device, with the source of every figure."""
    from benchmarks.devices.load import load_device

    device = load_device(name)
    _print_device(device)
    return DevicesResult(devices=[device.model_dump(mode="json")])


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="New device file.")],
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
    """Time small models here, in a few minutes, and write this machine as a device file.

    Raises:
        UsageError: an invalid name or ending, no such device, or limits that cannot hold here.
        ConflictError: `out` exists.
        ChildFailure, OSError: a measuring process failed, or the disk is full; nothing is written then.
    """
    from benchmarks.devices.load import list_devices, load_device, name_of, write_device
    from benchmarks.measure.machine import default_threads
    from benchmarks.measure.process import QUIET_CORES
    from benchmarks.predict import calibrate as probes

    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: a device file ends in .toml; call it {out.with_suffix('.toml').name}")
    require_new(out)
    if not (name := name_of(out)):
        raise UsageError(f"--out {out}: use letters, digits, dots and hyphens, for example my-machine.toml")
    if name in list_devices():
        raise UsageError(f"--out {out}: {name} is a shipped device; choose another name")
    decided, started = load_device(limits_from), time.perf_counter()
    rates = probes.read_bandwidth([threads] if threads else probes.thread_counts(default_threads()))
    threads = probes.choose_threads(rates)
    device = probes.this_device(name, threads, decided)
    coefficients, busiest = probes.calibrate(threads, rounds)
    device = device.model_copy(update={"coefficients": coefficients})
    write_device(device, out, f"Written by `calibrate`. The limits are those of {decided.name}, not measured.")
    result = CalibrateResult(
        out=out,
        device=name,
        limits_from=decided.name,
        threads=threads,
        rounds=rounds,
        read_bandwidth_gb_s={str(count): round(rate / 1e9, 2) for count, rate in rates.items()},
        coefficients=coefficients.model_dump(mode="json"),
        clean=busiest <= QUIET_CORES,
        other_cpu_cores=round(busiest, 2),
        seconds=round(time.perf_counter() - started, 1),
    )
    _print_calibration(result)
    return result


def _print_devices(devices: Sequence[Device], here: Collection[str]) -> None:
    from benchmarks.devices.load import ALIASES
    from benchmarks.labels import LIMITS, MISSING, Table
    from sportsllm.console import output

    names = [name for name in LIMITS if any(name in each.limits.given() for each in devices)]
    headers = ("name", "kind", *(LIMITS[name].title for name in names), "here")
    rows = []
    for each in devices:
        limits = each.limits.given()
        values = (f"{limits[name]:,g}" if name in limits else MISSING for name in names)
        rows.append((each.name, each.kind, *values, "yes" * (each.name in here)))
    short = "; ".join(f"{each} is short for {name}" for each, name in ALIASES.items())
    advice = f"`devices show NAME` explains one, with the source of every figure. {short}."
    Table("device budgets", headers, rows, (0, 1), advice).print(output())


def _print_calibration(result: CalibrateResult) -> None:
    from sportsllm.console import output

    _coefficients(result.coefficients).print(output())
    if not result.clean:
        used = f"{result.other_cpu_cores:.1f} cores"
        output().print(f"noisy: other programs used up to {used}; run it again on a quiet machine", style="yellow")
    made = f"{result.out}: device {result.device}, {result.threads} threads"
    output().print(f"\n{made}, limits of {result.limits_from}, {result.seconds:.0f} s")


def _print_device(device: Device) -> None:
    """Everything a device file says."""
    from benchmarks.labels import LIMITS, Table, reliability_line
    from benchmarks.predict.latency import reliability
    from sportsllm.console import output, table

    console = output()
    console.print(device.title, style="bold")
    console.print(device.description.strip())
    rows = [_evidence(name.replace("_", " "), each) for name, each in device.hardware or () if each is not None]
    rows += [_evidence(published.what, published) for published in device.published]
    if device.hardware is not None:
        headers = ("figure", "value", "kind", "date", "source")
        console.print(table(headers, rows, range(5), "figures", ratios=(3, 2, 1, 1, 5)))
    if device.coefficients is not None:
        _coefficients(device.coefficients.model_dump(mode="json")).print(console)
    if device.hardware is not None:
        console.print(f"\n{reliability_line(reliability(device))}")
    limits = device.limits
    allowed = [(name, f"{value:,g} {LIMITS[name].unit}", LIMITS[name].note) for name, value in limits.given().items()]
    reason = f"\n{limits.reason}\n{limits.source}, {limits.date}."
    Table("limits (1 MB = 10^6 bytes)", ("limit", "at most", "measured"), allowed, (0, 1, 2), reason).print(console)


def _coefficients(coefficients: Mapping[str, Any]) -> Table:
    from benchmarks.labels import Table, number

    rows = [(name, number(value)) for name, value in coefficients.items() if isinstance(value, float | int)]
    return Table("coefficients of predictions", ("coefficient", "value"), rows)


def _evidence(name: str, figure: Quantity | SourcedText) -> tuple[str, str, str, str, str]:
    value = f"{figure.value:,g} {unit}" if (unit := getattr(figure, "unit", "")) else str(figure.value)
    source = f"{figure.source} ({figure.note})" if figure.note else figure.source
    return name, value, figure.kind, str(figure.date), source
