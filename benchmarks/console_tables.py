"""What `devices` and `calibrate` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.devices.schema import Device, Quantity, SourcedText
from benchmarks.labels import LIMITS
from benchmarks.predict.latency import reliability
from sportsllm.console import table

_LIMIT_TITLES = tuple(limit.title for limit in LIMITS.values())


def megabytes(count: float) -> str:
    """Bytes as MB (10^6) with as many digits as help: 0.42, 51.7, 3,722."""
    value = count / 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def band(low: float, high: float) -> str:
    """The two ends of a prediction, such as 0.41-0.62; one number where they are equal."""
    ends = [f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


def reliability_line(efficiency: Mapping[str, Any]) -> str:
    """What the bands mean, from `benchmarks.predict.latency.reliability`, in one or two sentences."""
    factors = efficiency["band"]
    words = {"tpot": "time per token", "ttft": "first token", "memory": "memory"}
    parts = ", ".join(f"{factors[name]:g} ({meaning})" for name, meaning in words.items())
    meaning = "hold 90% of measured figures" if factors["measured"] else "are estimates"
    advice = "" if efficiency["own"] else " `calibrate` measures the coefficients of the machine it runs on."
    return (
        f"Bands {meaning}: a factor, either way, of {parts}; {factors['source']}. "
        f"Coefficients: {efficiency['source']}, {efficiency['date']}, {efficiency['kind']}.{advice}"
    )


def print_devices(console: Console, devices: Sequence[Device], here: Sequence[str]) -> None:
    """One line a device with its limits; `here` are the names that this machine is."""
    rows = [
        (
            device.name,
            device.kind,
            *(f"{getattr(device.limits, name):,g}" for name in LIMITS),
            "yes" if device.name in here else "",
        )
        for device in devices
    ]
    console.print(table(("name", "kind", *_LIMIT_TITLES, "this machine"), rows, (0, 1), "device budgets"))
    console.print("`devices show NAME` explains one, with the source of every figure.", markup=False)


def print_calibration(console: Console, result: Mapping[str, Any]) -> None:
    """The coefficients that `calibrate` fitted, and where the file lies."""
    console.print(table(("coefficient", "value"), _coefficients(result["coefficients"])))
    if not result["clean"]:
        used = f"{result['other_cpu_cores']:.1f} cores"
        console.print(f"noisy: other programs used up to {used}; run it again on a quiet machine", style="yellow")
    made = f"{result['out']}: device {result['device']}, {result['threads']} threads"
    console.print(f"\n{made}, limits of {result['limits_from']}, {result['seconds']:.0f} s", markup=False)


def print_device(console: Console, device: Device) -> None:
    """Everything a device file says."""
    console.print(Text(device.title, style="bold"))
    console.print(device.description.strip(), markup=False)
    rows = [_evidence(name.replace("_", " "), each) for name, each in device.hardware or () if each is not None]
    rows += [_evidence(published.what, published) for published in device.published]
    headers = ("figure", "value", "kind", "date", "source")
    if device.hardware is not None:
        console.print(table(headers, rows, range(5), "figures", ratios=(3, 2, 1, 1, 5)))
    if device.coefficients is not None:
        fitted = _coefficients(device.coefficients.model_dump(mode="json"))
        console.print(table(("coefficient", "value"), fitted, title="coefficients of predictions"))
    if device.hardware is not None:
        console.print(f"\n{reliability_line(reliability(device))}", markup=False)
    limits = device.limits
    allowed = [(name, f"{getattr(limits, name):,g} {limit.unit}", limit.note) for name, limit in LIMITS.items()]
    console.print(table(("limit", "at most", "measured"), allowed, (0, 1, 2), "limits (1 MB = 10^6 bytes)"))
    console.print(f"\n{limits.reason}\n{limits.source}, {limits.date}.", markup=False)


def _coefficients(coefficients: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, f"{value:,.3g}") for name, value in coefficients.items() if isinstance(value, float | int)]


def _evidence(name: str, figure: Quantity | SourcedText) -> tuple[str, str, str, str, str]:
    value = f"{figure.value:,g} {figure.unit}" if isinstance(figure, Quantity) else str(figure.value)
    source = f"{figure.source} ({figure.note})" if figure.note else figure.source
    return name, value, figure.kind, str(figure.date), source
