"""Measure this machine: what its memory and ONNX Runtime's operators reach on it, as a device file.

Every figure comes from a process of its own. What a model costs here is put together from them by
`benchmarks.predict.latency`; how far off that is, only models can tell: see `benchmarks.studies.prediction_error`.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from benchmarks.devices.load import list_devices, load_device
from benchmarks.devices.recognise import instruction_set
from benchmarks.devices.schema import FORMAT, Device
from benchmarks.devices.write import write_device
from benchmarks.measure.bench import default_threads, machine
from benchmarks.measure.process import QUIET_CORES, child_command, run_child, wait_for_quiet
from benchmarks.predict import calibrate_figures as figures
from benchmarks.predict.coefficients import CPU_CACHES, CPU_FORMS
from benchmarks.predict.probes import attention, chain, gated, layers, product
from benchmarks.predict.small_models import ProbeGraph
from benchmarks.spread import lower_quartile
from sportsllm import console
from sportsllm.errors import ConflictError, ResourceError, UsageError

SECONDS_PER_FIGURE = 0.25
TIMEOUT_S = 300.0
ROUNDS = 3  # over all that is timed: other programs, and where pages lie, halve some rates
MOST_OF_MEMORY = 0.1  # of what is free, for a chain's weights: they are drawn, packed, mapped and prepacked
FOOTPRINT_BYTES, FOOTPRINT_WIDTH = 50_000_000, 1_536


@dataclass(frozen=True)
class Probe:
    """A graph to make, and what the process that runs it is told besides."""

    make: Callable[[], ProbeGraph]
    mode: str = "time"
    end: int = 0


@dataclass
class Readings:
    """What the probes gave.

    Attributes:
        seconds: of one run, by probe; `lower_quartile` of the rounds.
        footprints: peak memory and weight bytes, by form and `none`.
        rounds: what each round took, in seconds, by the same keys.
        other_cpu_cores: the most that other programs used beside a probe.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    footprints: dict[str, tuple[int, int]] = field(default_factory=dict)
    other_cpu_cores: float = 0.0
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Another round's time of a probe."""
        self.rounds.setdefault(name, []).append(seconds)
        self.seconds[name] = lower_quartile(self.rounds[name])


def probes() -> dict[str, Probe]:
    """What is run, by the names that `benchmarks.predict.calibrate_figures` reads."""
    found = {"footprint.none": Probe(partial(chain, "int4", figures.BLOCK, 1), "footprint")}
    width = figures.STEP_WIDTH
    for form in CPU_FORMS:
        for count in figures.EMPTY_COUNTS:
            found[f"empty.{form}.{count}"] = Probe(partial(chain, form, figures.EMPTY_WIDTH[form], count))
        for rows in figures.PROMPT_ROWS:
            found[f"product.{form}.{rows}"] = Probe(partial(product, form, rows, *figures.PRODUCT))
        for count in figures.STEP_COUNTS:
            found[f"step.{form}.{count}"] = Probe(partial(chain, form, width, count))
        count = max(2, round(FOOTPRINT_BYTES / (figures.BYTES[form] * FOOTPRINT_WIDTH**2)))
        found[f"footprint.{form}"] = Probe(partial(chain, form, FOOTPRINT_WIDTH, count), "footprint")
    free = psutil.virtual_memory().available * MOST_OF_MEMORY
    for narrow, count in figures.READS:
        if (narrow, count) in figures.READS[:2] or figures.read_bytes("fp32", narrow, count) <= free:
            found[f"read.{narrow}.{count}"] = Probe(partial(chain, "fp32", narrow, count))
    for narrow, count in figures.LAYERS:
        if f"read.{narrow}.{count}" in found:
            found[f"layers.{narrow}.{count}"] = Probe(partial(layers, narrow, count), end=figures.LAYER_DEPTH)
    if free >= figures.FAR_BYTES:
        for form in figures.FAR_FORMS:
            found[f"far.{form}"] = Probe(partial(chain, form, width, figures.far_count(form)))
    found["between"] = Probe(partial(gated, *figures.GATED))
    heads, size = figures.HEADS, figures.HEAD_DIM
    new, end, deep = figures.PROMPT_NEW, figures.PROMPT_END, figures.DEEP
    for cache in CPU_CACHES:
        found[f"prompt.{cache}"] = Probe(partial(attention, cache, new, end, heads, heads, size), end=end)
        for shared in figures.KV_HEADS:
            found[f"attention.{cache}.{shared}"] = Probe(
                partial(attention, cache, 1, deep, heads, shared, size), end=deep
            )
    return found


def read_machine(threads: int, rounds: int = ROUNDS, seconds_per_figure: float = SECONDS_PER_FIGURE) -> Readings:
    """Run every probe, each in a process of its own, and what is timed several times over.

    Args:
        threads: CPU threads.
        rounds: through everything that is timed.
        seconds_per_figure: of timing each graph.

    Raises:
        ChildFailure: a process crashed, hung or was killed.
        OSError: no room for 300 MB in the temporary folder.
    """
    readings, wanted = Readings(), probes()
    timed = sum(probe.mode == "time" for probe in wanted.values())
    total = len(wanted) - timed + rounds * timed
    wait_for_quiet()
    with console.progress_bar("calibrate", total) as progress:
        for _ in range(rounds):
            for name in read_round(readings, threads, seconds_per_figure):
                progress.advance(1, name)
    return readings


def read_round(readings: Readings, threads: int, seconds_per_figure: float = SECONDS_PER_FIGURE) -> Iterator[str]:
    """Run every probe once more and add that to `readings`; memory is read the first time only.

    Yields:
        What was read, after each.

    Raises:
        ChildFailure, OSError: see `read_machine`.
    """
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        graph = Path(folder) / "probe.onnx"
        for name, probe in probes().items():
            form = name.partition(".")[2]
            if probe.mode == "footprint" and form in readings.footprints:
                continue
            weights = probe.make().write(graph)
            specification = {"mode": probe.mode, "graph": str(graph), "threads": threads, "end": probe.end}
            specification["seconds_per_figure"] = seconds_per_figure
            payload = _run(readings, specification, name)
            if probe.mode == "footprint":
                readings.footprints[form] = (int(payload["peak_rss_bytes"]), weights)
            else:
                readings.add(name, float(payload["seconds"]))
            yield name


def _run(readings: Readings, specification: dict[str, Any], what: str) -> dict[str, Any]:
    variables = {"OMP_NUM_THREADS": str(specification["threads"]), "OPENBLAS_NUM_THREADS": "1"}
    child = run_child(
        child_command(specification, "benchmarks.predict.probes"), f"calibrate ({what})", TIMEOUT_S, variables
    )
    readings.other_cpu_cores = max(readings.other_cpu_cores, child.other_cpu_cores)
    return child.payload


def run_calibrate(
    out: Path,
    name: str | None = None,
    threads: int | None = None,
    limits_from: str = "host",
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Measure this machine and write it as a device file.

    Args:
        out: the file to write, .toml.
        name: the device's; the file's where not given.
        threads: CPU threads; all physical cores where not given.
        limits_from: the device whose limits the file gets: they are decisions, never taken from what was measured.
        rounds: through everything that is timed; `lower_quartile` counts.

    Returns:
        `out`, `device`, `limits_from`, `threads`, `rounds`, `bandwidth_gb_per_s` by MB of the working set, `gop_per_s`
        by form and rows, `efficiency`, `absent` (figures that cannot be read here), `clean`, `other_cpu_cores` and
        `seconds`.

    Raises:
        UsageError: a name or ending that cannot be, no such device, or limits that cannot hold here.
        ConflictError: `out` exists.
        ChildFailure: a measuring process failed; nothing is written then.
        ResourceError: figures that cannot be.
    """
    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: a device file ends in .toml; call it {out.with_suffix('.toml').name}")
    if out.exists():
        raise ConflictError(f"{out}: exists already; choose another --out or move it away")
    name = _checked_name(name or re.sub(r"[^a-z0-9.-]+", "-", out.stem.lower()).strip("-."))
    decided, started = load_device(limits_from), time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is no news after a minute
    threads = threads or default_threads()
    readings = read_machine(threads, rounds)
    device, absent = describe(readings, name, threads, decided)
    write_device(device, out, f"Written by `calibrate`. The limits are those of {decided.name}, not measured.")
    assert device.efficiency is not None
    by_form, curve = figures.rates(readings.seconds), figures.read_curve(readings.seconds)
    return {
        "out": str(out),
        "device": name,
        "limits_from": decided.name,
        "threads": threads,
        "rounds": rounds,
        "bandwidth_gb_per_s": {f"{size / 1e6:.4g}": speed / 1e9 for size, speed in curve.items()},
        "gop_per_s": {
            form: {str(rows): rate / 1e9 for rows, rate in by_rows.items()} for form, by_rows in by_form.items()
        },
        "efficiency": device.efficiency.model_dump(mode="json"),
        "absent": absent,
        "clean": readings.other_cpu_cores <= QUIET_CORES,
        "other_cpu_cores": round(readings.other_cpu_cores, 2),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise UsageError(f"--name {name!r}: use small letters, digits, dots and hyphens, for example my-machine")
    if name in list_devices():
        raise UsageError(f"--name {name}: is a shipped device's; choose another --name")
    return name


def describe(readings: Readings, name: str, threads: int, decided: Device) -> tuple[Device, list[str]]:
    """The device file's content, and the names of figures that this machine does not tell.

    Args:
        readings: what the probes gave.
        name: the device's.
        threads: that they ran on.
        decided: the device whose limits are taken over.

    Raises:
        UsageError: the limits cannot hold here.
        ResourceError: figures that cannot be.
    """
    import onnxruntime

    here, today = machine(), datetime.now(UTC).date()
    disturbed = "" if readings.other_cpu_cores <= QUIET_CORES else ", other programs running"
    source = f"`calibrate`, ONNX Runtime {onnxruntime.__version__}, {threads} threads{disturbed}"

    def figure(value: float, unit: str, how: str = source, **more: Any) -> dict[str, Any]:
        evidence = {"unit": unit, "source": how, "date": today, "kind": "measured"}
        return {"value": float(f"{value:.4g}"), **evidence, **more}

    by_form, curve = figures.rates(readings.seconds), figures.read_curve(readings.seconds)
    integer, real = figures.peaks(by_form)
    notes = {form: "/".join(f"{rate / 1e9:.4g}" for rate in rates.values()) for form, rates in by_form.items()}
    quantized = ", ".join(f"{form} {notes[form]}" for form in CPU_FORMS if form != "fp32")
    best = "the highest rate that an operator reached; at 1, 128 and 512 rows"
    memory, instructions = psutil.virtual_memory(), instruction_set()
    hardware: dict[str, Any] = {
        "memory_total": figure(memory.total / 1e6, "MB", "the operating system, by psutil"),
        "memory_usable": figure(memory.available / 1e6, "MB", "what was free when `calibrate` ran, by psutil"),
        "cores": figure(threads, "cores", f"threads that were used; {default_threads()} physical cores, by psutil"),
        "instruction_set": {"value": instructions, "source": "/proc/cpuinfo, or Python's platform module",
                            "date": today, "kind": "measured"},
        "memory_bandwidth": figure(curve[max(curve)] / 1e9, "GB/s"),
        "int8_matmul_rate": figure(integer / 1e9, "GOP/s", note=f"{best}: {quantized}"),
        "fp32_matmul_rate": figure(real / 1e9, "GFLOP/s", note=f"{best}: {notes['fp32']}"),
        "bandwidth_by_working_set": [
            figure(speed / 1e9, "GB/s", working_set_mb=float(f"{size / 1e6:.4g}"))
            for size, speed in sorted(curve.items())
        ],
    }  # fmt: skip
    if here["clock_mhz"]:
        hardware["clock"] = figure(here["clock_mhz"] / 1e3, "GHz", "the clock when `calibrate` ran, by psutil")
    try:
        efficiency = figures.derive(readings.seconds, readings.footprints, curve, source, today, threads)
        device = Device.model_validate(
            {
                "format": FORMAT,
                "name": name,
                "title": f"{here['processor']}, {threads} threads",
                "kind": "calibrated machine",
                "description": f"Measured by `calibrate` on {here['system']}.",
                "processor": "cpu",
                "recognise": _recognise(here["processor"], here["architecture"], instructions, memory.total / 1e6),
                "hardware": hardware,
                "efficiency": efficiency,
                "limits": decided.limits,
            }
        )
    except ValidationError as error:
        raise _refusal(error, decided.name) from None
    return device, [each for each in ("clock", "power") if each not in hardware]


def _recognise(processor: str, architecture: str, instructions: str, memory_mb: float) -> dict[str, Any] | None:
    """How this machine is told from others; not at all where the system gives no more than the architecture."""
    if processor == architecture:
        return None
    near = {"min_memory_mb": round(0.98 * memory_mb), "max_memory_mb": round(1.02 * memory_mb)}
    return {"processor": processor, "instruction_set": instructions, **near}


def _refusal(error: ValidationError, limits_from: str) -> UsageError | ResourceError:
    problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
    if all(item["loc"][:1] == ("limits",) for item in error.errors()):
        return UsageError(f"--limits-from {limits_from}: {'; '.join(problems)}; choose another device's limits")
    return ResourceError(f"calibrate: figures that cannot be ({'; '.join(problems)}); close other programs and repeat")
