"""How far predictions are off on this machine: measured on models whose shapes were not fitted.

    python -m benchmarks.prediction_check --out DIR [--device my-machine.toml] [--threads N] [--rounds N]

Takes the device file that `calibrate` wrote here, or calibrates first. Measures untrained models of several shapes,
forms and depths in fresh processes, as `bench` does but shorter; fits the efficiencies on some shapes, from what the
probes gave; and compares predictions with measurements of the others. Writes into DIR `prediction.json` (everything),
`prediction.csv` (a line a figure) and `device.toml`: the device with the fitted efficiencies and the errors found, for
`plan --device`. Exits 4 where a largest error is above its bound.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.bench import default_threads, machine
from benchmarks.bench_tables import table
from benchmarks.budget import load_device
from benchmarks.calibrate import run_calibrate
from benchmarks.device import FORMAT, Device
from benchmarks.device_file import write_device
from benchmarks.efficiency import EFFICIENCIES, PredictionError
from benchmarks.efficiency_fit import Measured, fit_efficiency, with_efficiency
from benchmarks.prediction_models import FITTED, FORMS, OTHERS, OTHERS_OF, SCORED, Form, make_checkpoint, make_export
from benchmarks.process import QUIET_CORES, child_command, run_child, wait_for_quiet
from benchmarks.stats import percentile
from benchmarks.stored import Stored
from sportsllm import console
from sportsllm.config import ModelConfig
from sportsllm.errors import ConflictError, GateError, SportsLLMError, UsageError

BOUNDS_PERCENT = {"decode": 20.0, "ttft": 25.0, "memory": 20.0}
PROMPTS, DEPTHS, MEMORY_TOKENS = (128, 512), (32, 512, 1_024), 1_024
STEPS, WARM_UP_STEPS = 24, 6
QUICK = {
    "seed": 0,
    "prompts": PROMPTS,
    "depths": DEPTHS,
    "steps": STEPS,
    "warm_up_steps": WARM_UP_STEPS,
    "repeats": 3,
    "seconds_per_figure": 0.1,
    "context_tokens": MEMORY_TOKENS,
    "memory_steps": 8,
}
"""Fewer steps and repeats than `bench` takes: two dozen models have to be through in minutes."""
TIMEOUT_S = 300.0


def combinations() -> Iterator[tuple[str, ModelConfig, dict[str, Form]]]:
    """Each shape with the forms it is measured in."""
    for name, config in {**FITTED, **SCORED}.items():
        yield name, config, {**FORMS, **{other: OTHERS[other] for other in OTHERS_OF.get(name, ())}}


@dataclass
class Model:
    """An export that is measured, and the samples so far: milliseconds by kind and tokens."""

    shape: str
    form: str
    config: ModelConfig
    stored: Stored
    directory: Path
    samples: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    peak_rss_bytes: float = 0.0


def measure(threads: int, rounds: int, percent: float = 50) -> tuple[list[Measured], float]:
    """Every figure of every model, and the most cores that other programs used beside one.

    All models are there before the first is measured, and each round goes through all of them, so that a machine that
    is slower for a while is so for all.

    Args:
        threads: CPU threads.
        rounds: fresh processes that measure each model's speed.
        percent: which percentile of their samples is the figure.

    Raises:
        ChildFailure: a measuring process failed.
        OSError: no room for 2.5 GB in the temporary folder.
    """
    wanted = list(combinations())
    count = sum(len(forms) for *_, forms in wanted)
    busiest = 0.0
    with (
        console.progress_bar("prediction check", count * (rounds + 2)) as progress,
        tempfile.TemporaryDirectory(prefix="prediction-") as folder,
    ):
        models = []
        for shape, config, forms in wanted:
            checkpoint = make_checkpoint(config, Path(folder) / shape)
            for name, form in forms.items():
                progress.advance(1, f"making {shape} {name}")
                directory = Path(folder) / f"{shape}-{name}"
                models.append(Model(shape, name, config, make_export(checkpoint, form, directory), directory))
            shutil.rmtree(checkpoint)
        wait_for_quiet()
        for mode in ["speed"] * rounds + ["memory"]:
            for model in models:
                progress.advance(0, f"{mode} of {model.shape} {model.form}")
                busiest = max(busiest, _measure_one(model, mode, threads))
                progress.advance()
    return [figure for model in models for figure in _figures(model, percent)], busiest


def _measure_one(model: Model, mode: str, threads: int) -> float:
    """Add a process's samples to a model's; returns the cores that other programs used."""
    specification = {**QUICK, "mode": mode, "directory": str(model.directory), "threads": threads}
    what = f"{model.shape} {model.form} ({mode})"
    child = run_child(child_command(specification), what, TIMEOUT_S, {"OMP_NUM_THREADS": str(threads)})
    if mode == "memory":
        model.peak_rss_bytes = float(child.payload["peak_rss_bytes"])
        return child.other_cpu_cores
    for prompt in PROMPTS:
        model.samples.setdefault(("ttft", prompt), []).extend(child.payload["ttft_ms"][str(prompt)])
    for depth in DEPTHS:
        # A step is timed behind the warm-up ones: the middle one sees that many more tokens.
        middle = depth + WARM_UP_STEPS + STEPS // 2
        steps = [sample for sweep in child.payload["step_ms"][str(depth)] for sample in sweep]
        model.samples.setdefault(("decode", middle), []).extend(steps)
    return child.other_cpu_cores


def _figures(model: Model, percent: float) -> Iterator[Measured]:
    found = {("memory", MEMORY_TOKENS): model.peak_rss_bytes}
    found |= {name: percentile(samples, percent) for name, samples in model.samples.items()}
    for (kind, tokens), value in found.items():
        yield Measured(model.shape, model.form, model.config, model.stored, kind, tokens, value)


def errors(measured: Sequence[Measured], device: Device) -> dict[str, dict[str, float]]:
    """Median and largest error by kind, in percent either way, and how many stay within the bound."""
    found = {}
    for kind, bound in BOUNDS_PERCENT.items():
        off = [abs(each.error_percent(device)) for each in measured if each.kind == kind]
        if off:
            within = sum(error <= bound for error in off)
            found[kind] = {
                "figures": len(off),
                "within": within,
                "median_percent": round(statistics.median(off), 1),
                "largest_percent": round(max(off), 1),
            }
    return found


def check(device: Device, measured: Sequence[Measured], source: str, where: str) -> dict[str, Any]:
    """Fit on the fitted shapes, score on the others.

    Args:
        device: with the efficiencies that the fit starts from.
        measured: of all shapes.
        source: how the fitted set came about.
        where: the machine that it was measured on.

    Returns:
        `device` (a `Device` with the fitted set and its errors), `errors` by set (`fitted`, on scored shapes; `probes`,
        before the fit; `default`, the shipped set; `fitted_shapes`), `passed`, and `rows`, a dict a figure.
    """
    fitting = [each for each in measured if each.shape in FITTED]
    scoring = [each for each in measured if each.shape not in FITTED]
    today = datetime.now(UTC).date()
    efficiency = fit_efficiency(device, fitting).model_copy(
        update={"source": source, "date": today, "kind": "measured", "error": None}
    )
    fitted = with_efficiency(device, efficiency)
    default = with_efficiency(device, EFFICIENCIES["cpu"])
    found = {
        "fitted": errors(scoring, fitted),
        "probes": errors(scoring, device),
        "default": errors(scoring, default),
        "fitted_shapes": errors(fitting, fitted),
    }
    figures = {
        f"{kind}_{which}_percent": values[f"{which}_percent"]
        for kind, values in found["fitted"].items()
        for which in ("median", "largest")
    }
    depths = len({(each.shape, each.form, each.tokens) for each in scoring if each.kind == "decode"})
    error = PredictionError(combinations=depths, machine=where, source=source, date=today, **figures)
    carrying = efficiency.model_copy(update={"error": error})
    return {
        "device": with_efficiency(device, carrying).model_copy(update={"format": FORMAT}),
        "errors": found,
        "passed": all(found["fitted"][kind]["largest_percent"] <= bound for kind, bound in BOUNDS_PERCENT.items()),
        "rows": [_row(each, fitted, device, default) for each in measured],
    }


def _row(each: Measured, fitted: Device, probes: Device, default: Device) -> dict[str, Any]:
    return {
        "shape": each.shape,
        "form": each.form,
        "figure": each.kind,
        "tokens": each.tokens,
        "used_for": "fitting" if each.shape in FITTED else "scoring",
        "measured": float(f"{each.value:.5g}"),
        "predicted": float(f"{each.predicted(fitted):.5g}"),
        "error_percent": round(each.error_percent(fitted), 1),
        "error_probes_percent": round(each.error_percent(probes), 1),
        "error_default_percent": round(each.error_percent(default), 1),
    }


def run_check(
    out: Path, device_file: Path | None = None, threads: int | None = None, rounds: int = 1, percent: float = 50
) -> dict[str, Any]:
    """Measure, fit, score and write; see the module. Returns what `prediction.json` holds.

    Raises:
        ConflictError: `out` exists and is not empty.
        UsageError: a device file of no CPU.
        ChildFailure: a measuring process failed; nothing is written then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out}: exists already; choose another --out or move it away")
    threads, started = threads or default_threads(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if device_file is None:
            device_file = Path(folder) / "this-machine.toml"
            run_calibrate(device_file, threads=threads)
        device = load_device(str(device_file))
    if device.processor != "cpu":
        raise UsageError(f"--device {device_file}: is a {device.processor.upper()}'s; models are measured on the CPU")
    measured, busiest = measure(threads, rounds, percent)
    here = machine()
    quiet = "" if busiest <= QUIET_CORES else f", other programs used up to {busiest:.1f} cores"
    figure = "" if percent == 50 else f", percentile {percent:g} of the samples"
    source = f"`benchmarks.prediction_check`, {len(FITTED)} shapes fitted, {threads} threads{figure}{quiet}"
    result = check(device, measured, source, f"{here['processor']}, {threads} threads")
    out.mkdir(parents=True, exist_ok=True)
    write_device(result["device"], out / "device.toml", "Written by benchmarks.prediction_check.")
    result |= {"device": str(out / "device.toml"), "machine": here, "threads": threads, "rounds": rounds}
    result |= {"percentile": percent, "start": device.efficiency and device.efficiency.model_dump(mode="json")}
    result |= {"bounds_percent": BOUNDS_PERCENT, "clean": busiest <= QUIET_CORES, "other_cpu_cores": round(busiest, 2)}
    result["shapes"] = {name: asdict(config) for name, config in {**FITTED, **SCORED}.items()}
    result["seconds"] = round(time.perf_counter() - started, 1)
    (out / "prediction.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    with (out / "prediction.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(result["rows"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(result["rows"])
    return result


def print_check(result: Mapping[str, Any]) -> None:
    """The scored figures and the errors by set."""
    shown = ("shape", "form", "figure", "tokens", "measured", "predicted", "error_percent")
    rows = [[f"{row[name]:,.4g}" if isinstance(row[name], float) else str(row[name]) for name in shown]
            for row in result["rows"] if row["used_for"] == "scoring"]  # fmt: skip
    console.output().print(table([name.replace("_", " ") for name in shown], rows, (0, 1, 2)))
    sets = {
        "fitted": "scored shapes, fitted set",
        "probes": "scored shapes, device file's set",
        "default": "scored shapes, shipped set",
        "fitted_shapes": "fitted shapes, fitted set",
    }
    rows = []
    for name, words in sets.items():
        for kind, each in result["errors"][name].items():
            within = f"{each['within']:.0f} of {each['figures']:.0f}"
            bound = f"{result['bounds_percent'][kind]:g}%"
            rows.append([words, kind, f"{each['median_percent']}%", f"{each['largest_percent']}%", bound, within])
    headers = ("errors", "figure", "median", "largest", "bound", "within")
    console.output().print(table(headers, rows, (0, 1)))
    if not result["clean"]:
        used = f"{result['other_cpu_cores']:.1f} cores"
        console.output().print(f"noisy: other programs used up to {used}; repeat it on a quiet machine", style="yellow")
    verdict = "every error is within its bound" if result["passed"] else "errors above their bound"
    console.output().print(f"{verdict}; {result['device']}, {result['seconds']:.0f} s", markup=False)


def main() -> int:
    """Run the check; the exit code is the program's own kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="New folder for the results.")
    parser.add_argument("--device", type=Path, help="This machine's device file; calibrated anew if not given.")
    parser.add_argument("--threads", type=int, help="CPU threads; all physical cores if not given.")
    parser.add_argument("--rounds", type=int, default=1, help="Fresh processes that measure each model's speed.")
    parser.add_argument(
        "--percentile", type=float, default=50, help="Of the samples; a low one leans less on other programs. [50]"
    )
    parser.add_argument("--json", action="store_true", help="One JSON object on standard output.")
    arguments = parser.parse_args()
    console.use_stderr(arguments.json)
    try:
        result = run_check(arguments.out, arguments.device, arguments.threads, arguments.rounds, arguments.percentile)
    except SportsLLMError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print_check(result)
    if arguments.json:
        print(json.dumps(result))
    return 0 if result["passed"] else GateError.exit_code


if __name__ == "__main__":
    sys.exit(main())
