"""What `plan`, `devices` and `calibrate` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.devices.schema import Device, Quantity, SourcedText
from benchmarks.labels import LIMITS
from benchmarks.predict.coefficients import reliability
from sportsllm.console import table as table

_LIMIT_TITLES = tuple(limit.title for limit in LIMITS.values())


def megabytes(count: float) -> str:
    """Bytes as MB (10^6) with as many digits as help: 0.42, 51.7, 3,722."""
    value = count / 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_plan(console: Console, result: Mapping[str, Any]) -> None:
    """Parameters, memory and, where there is a device, predictions with what they mean for its budget."""
    parts = [(name, f"{count:,}") for name, count in result["parameters_by_component"].items()]
    total = ("total", f"{result['parameters']:,}")
    console.print(table(("part", "count"), [*parts, total], title=f"{result['model']}: parameters"))
    block = [(name, f"{count:,}") for name, count in result["parameters_per_block"].items()]
    console.print(table(("part", "count"), block, title=f"one of {result['layers']} blocks"))
    weights = [(name, megabytes(size)) for name, size in result["weight_bytes"].items()]
    console.print(table(("precision", "MB"), weights, title="weights"))
    cache = [(name, f"{size:,}") for name, size in result["kv_cache_bytes_per_token"].items()]
    console.print(table(("precision", "bytes a token"), cache, title="key/value cache"))
    training = result["training_memory"]
    step = f"training step, batch {training['batch']} x {training['length']}, {training['precision']}"
    sizes = [
        (name.removesuffix("_bytes").replace("_", " "), megabytes(size))
        for name, size in training.items()
        if name.endswith("_bytes")
    ]
    console.print(table(("part", "MB"), sizes, title=f"{step}, {training['optimizer']}"))
    if "shapes" in result:
        shapes = [
            (
                shape["name"] if shape["held"] else f"{shape['name']} (never made whole)",
                shape["kind"],
                " x ".join(f"{size:,}" for size in shape["shape"]),
                str(shape["layers"]),
                f"{shape['bytes']:,}",
            )
            for shape in result["shapes"]
        ]
        headers = ("tensor", "kind", "shape", "times", "bytes each")
        console.print(table(headers, shapes, (0, 1, 2), "tensors along the way, float32"))
    if "predicted" in result:
        _print_predictions(console, result)


def _print_predictions(console: Console, result: Mapping[str, Any]) -> None:
    rows = [
        (
            row["precision"],
            f"{row['depth']:,}",
            band(row["ttft_ms_low"], row["ttft_ms_high"]),
            band(row["tpot_ms_low"], row["tpot_ms_high"]),
            band(1000 / row["tpot_ms_high"], 1000 / row["tpot_ms_low"]),
            band(row["peak_rss_bytes_low"] / 1e6, row["peak_rss_bytes_high"] / 1e6),
        )
        for row in result["predicted"]
    ]
    if rows:  # in a very short context no step is timed
        prompt = result["predicted"][0]["prompt_tokens"]
        headers = ("precision", "depth", f"TTFT({prompt}) ms", "TPOT ms", "tokens/s", "peak MB")
        console.print(table(headers, rows, title=f"predicted on {result['device']} (the model was not run)"))
    budgets = [
        (precision, "fits" if budget["passed"] else "misses", *map(_judged, budget["limits"]))
        for precision, budget in result["predicted_budget"].items()
    ]
    titles = ("precision", "budget", *_LIMIT_TITLES)
    console.print(table(titles, budgets, (0, 1), "against the budget (limit in brackets, ! where missed)"))
    console.print(f"\n{reliability_line(result['efficiency'])}", markup=False)


def _judged(limit: Mapping[str, Any]) -> str:
    value = "?" if limit["value"] is None else f"{limit['value']:,.4g}"
    if limit["source"] == "predicted":
        value = band(limit["low"], limit["high"])
    return f"{'!' if limit['passed'] is False else ''}{value} [{limit['limit']:,g}]"


def band(low: float, high: float) -> str:
    """The two ends of a prediction, such as 0.41-0.62; one number where they are equal."""
    ends = [f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


def reliability_line(efficiency: Mapping[str, Any]) -> str:
    """What the bands mean, from `benchmarks.predict.coefficients.reliability`, in one or two sentences."""
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
    rows = []
    for name, value in coefficients.items():
        if isinstance(value, float | int):
            rows.append((name, f"{value:,.3g}"))
        elif isinstance(value, dict) and name != "band":
            rows += [(f"{name}, {each}", f"{number:,.3g}") for each, number in value.items()]
    return rows


def _evidence(name: str, figure: Quantity | SourcedText) -> tuple[str, str, str, str, str]:
    value = f"{figure.value:,g} {figure.unit}" if isinstance(figure, Quantity) else str(figure.value)
    source = f"{figure.source} ({figure.note})" if figure.note else figure.source
    return name, value, figure.kind, str(figure.date), source
