"""Tables for people: the one way to draw a table, and what `plan`, `devices` and `calibrate` print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.devices.figures import Fact, Figure
from benchmarks.devices.schema import Device
from benchmarks.labels import LIMITS
from benchmarks.predict.coefficients import Efficiency
from benchmarks.predict.latency import reliability

_LIMIT_TITLES = tuple(limit.title for limit in LIMITS.values())


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    texts: Sequence[int] = (0,),
    title: str | None = None,
    ratios: Sequence[int] | None = None,
) -> Table:
    """A plain table.

    Args:
        headers: of the columns.
        rows: cells as text.
        texts: the columns that are text; the others are numbers.
        title: a line above it.
        ratios: the columns' shares of the width, for long texts; else the first column keeps to one line.
    """
    table = Table(title=title and f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, header in enumerate(headers):
        justify: Literal["left", "right"] = "left" if index in texts else "right"
        ratio, first = ratios[index] if ratios else None, index == 0 and not ratios
        table.add_column(header, justify=justify, overflow="fold", no_wrap=first, ratio=ratio)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


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
            f"{row['ttft_ms']:,.0f}",
            f"{row['tpot_ms']:.2f}",
            f"{1000 / row['tpot_ms']:,.0f}",
            megabytes(row["peak_rss_bytes"]),
        )
        for row in result["predicted"]
    ]
    prompt = result["predicted"][0]["prompt_tokens"]
    headers = ("precision", "depth", f"TTFT({prompt}) ms", "TPOT ms", "tokens/s", "peak MB")
    console.print(table(headers, rows, title=f"predicted on {result['device']} (nothing was run)"))
    budgets = [
        (precision, "fits" if budget["passed"] else "misses", *map(_judged, budget["limits"]))
        for precision, budget in result["predicted_budget"].items()
    ]
    titles = ("precision", "budget", *_LIMIT_TITLES)
    console.print(table(titles, budgets, (0, 1), "against the budget (limit in brackets, ! where missed)"))
    console.print(f"\n{reliability_line(result['efficiency'])}", markup=False)


def _judged(limit: Mapping[str, Any]) -> str:
    value = "?" if limit["value"] is None else f"{limit['value']:,.4g}"
    return f"{'!' if limit['passed'] is False else ''}{value} [{limit['limit']:,g}]"


def reliability_line(efficiency: Mapping[str, Any]) -> str:
    """How far predictions are off, as `benchmarks.predict.latency.reliability` gives it, in one sentence."""
    error = efficiency["error"]
    made_with = f"{efficiency['source']}, {efficiency['date']}, {efficiency['kind']}"
    if error is None:
        return f"Error of these predictions: not measured (efficiencies: {made_with})."
    parts = []
    for name, words in (("decode", "time per token"), ("ttft", "first token"), ("memory", "memory")):
        median, largest = error[f"{name}_median_percent"], error[f"{name}_largest_percent"]
        known = median is not None and largest is not None
        parts.append(f"{words} {median:.0f}% (at most {largest:.0f}%)" if known else f"{words} not measured")
    where = "" if efficiency["own"] else ", another machine: no error is known for this one"
    return (
        f"Error of such predictions, median (largest): {', '.join(parts)}; {error['combinations']} combinations that "
        f"were not fitted, on {error['machine']}, {error['date']}{where}. Efficiencies: {made_with}."
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
    """What `calibrate` measured, where it stands, and what it could not read."""
    curve = [(size, f"{speed:,.1f}") for size, speed in result["bandwidth_gb_per_s"].items()]
    console.print(table(("working set MB", "GB/s"), curve, title="memory bandwidth"))
    rates = [
        (form.replace("_", " "), *(f"{rate:,.4g}" for rate in by_rows.values()))
        for form, by_rows in result["gop_per_s"].items()
    ]
    rows = next(iter(result["gop_per_s"].values()))
    console.print(table(("form", *(f"{count} rows" for count in rows)), rates, title="products, GOP/s"))
    if not result["clean"]:
        used = f"{result['other_cpu_cores']:.1f} cores"
        console.print(f"noisy: other programs used up to {used}; repeat it on a quiet machine", style="yellow")
    absent = f"; cannot be read here: {', '.join(result['absent'])}" if result["absent"] else ""
    made = f"{result['out']}: device {result['device']}, {result['threads']} threads"
    took = f"limits of {result['limits_from']}, {result['seconds']:.0f} s"
    console.print(f"\n{made}, {took}{absent}", markup=False)


def print_device(console: Console, device: Device) -> None:
    """Everything a device file says."""
    console.print(Text(device.title, style="bold"))
    console.print(device.description.strip(), markup=False)
    figures = [(name, getattr(device.hardware, name)) for name in type(device.hardware).model_fields]
    rows = [_evidence(name.replace("_", " "), figure) for name, figure in figures if isinstance(figure, Figure | Fact)]
    rows += [
        _evidence(f"bandwidth, {figure.working_set_mb:,g} MB read again and again", figure)
        for figure in device.hardware.bandwidth_by_working_set
    ]
    rows += [_evidence(published.what, published) for published in device.published]
    headers = ("figure", "value", "kind", "date", "source")
    console.print(table(headers, rows, range(5), "figures", ratios=(3, 2, 1, 1, 5)))
    if device.efficiency is not None:
        console.print(table(("share or cost", "value"), _efficiency(device.efficiency), (0, 1), "efficiency"))
    console.print(f"\n{reliability_line(reliability(device))}", markup=False)
    limits = device.limits
    allowed = [(name, f"{getattr(limits, name):,g} {limit.unit}", limit.note) for name, limit in LIMITS.items()]
    console.print(table(("limit", "at most", "measured"), allowed, (0, 1, 2), "limits (1 MB = 10^6 bytes)"))
    console.print(f"\n{limits.reason}\n{limits.source}, {limits.date}.", markup=False)


def _efficiency(efficiency: Efficiency) -> list[tuple[str, str]]:
    rows = []
    for name, value in efficiency.model_dump(exclude={"source", "date", "kind", "error"}, exclude_none=True).items():
        words = name.replace("_", " ")
        if isinstance(value, dict):
            rows += [(f"{words}, {form.replace('_', ' ')}", f"{share:,.3g}") for form, share in value.items()]
        else:
            rows.append((words, value if isinstance(value, str) else f"{value:,.3g}"))
    return rows


def _evidence(name: str, figure: Any) -> tuple[str, str, str, str, str]:
    value = f"{figure.value:,g} {figure.unit}" if isinstance(figure, Figure) else str(figure.value)
    source = f"{figure.source} ({figure.note})" if figure.note else figure.source
    return name, value, figure.kind, str(figure.date), source
