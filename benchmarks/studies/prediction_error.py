"""How far predictions are off on this machine: measured on models whose shapes were not fitted.

    python -m benchmarks.studies.prediction_error --out DIR [--device my-machine.toml] [--threads N] [--rounds 12]
    [--draw SEED]

Takes the device file that `calibrate` wrote here, or calibrates in the same rounds. Measures untrained models of
several shapes, forms and depths in fresh processes, as `bench` does but shorter; fits the efficiencies on some shapes,
from what the probes gave; and compares predictions with measurements of the others, with `--draw` of shapes by chance
as well, which nothing in the model of prediction can have been chosen on. Writes into DIR `prediction.json`
(everything), `prediction.csv` (a line a figure) and `device.toml`: the device with the fitted efficiencies and the
errors found, for `plan --device`. Exits 4 where a largest error is above its bound.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.console_tables import table
from benchmarks.devices.load import load_device
from benchmarks.devices.schema import FORMAT, Device
from benchmarks.devices.write import write_device
from benchmarks.measure.bench import default_threads, machine
from benchmarks.measure.process import QUIET_CORES
from benchmarks.predict.calibrate import Readings, describe
from benchmarks.predict.coefficients import EFFICIENCIES, PredictionError
from benchmarks.predict.efficiency_fit import Measured, fit_efficiency, with_efficiency
from benchmarks.spread import NOISY_WIDTH
from benchmarks.studies.prediction_measure import measure
from benchmarks.studies.prediction_models import DRAWN, FITTED, SCORED, drawn
from sportsllm import console
from sportsllm.errors import ConflictError, GateError, SportsLLMError, UsageError

LEAST_ROUNDS = 5
BOUNDS_PERCENT = {"decode": 20.0, "ttft": 25.0, "memory": 20.0}


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
        before the fit; `default`, the shipped set; `fitted_shapes`; `drawn`, the fitted set on drawn shapes alone,
        empty where there are none), `default_error` for the shipped set to carry, `passed`, and `rows`, a dict a
        figure.
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
        "drawn": errors([each for each in scoring if each.shape not in SCORED], fitted),
    }
    depths = len({(each.shape, each.form, each.tokens) for each in scoring if each.kind == "decode"})

    def error(name: str) -> PredictionError:
        figures = {
            f"{kind}_{which}_percent": values[f"{which}_percent"]
            for kind, values in found[name].items()
            for which in ("median", "largest")
        }
        return PredictionError(combinations=depths, machine=where, source=source, date=today, **figures)

    carrying = efficiency.model_copy(update={"error": error("fitted")})
    return {
        "device": with_efficiency(device, carrying).model_copy(update={"format": FORMAT}),
        "errors": found,
        "default_error": error("default").model_dump(mode="json"),
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
        "rounds_above_percent": round(each.rounds_above_percent, 1),
        "predicted": float(f"{each.predicted(fitted):.5g}"),
        "error_percent": round(each.error_percent(fitted), 1),
        "error_probes_percent": round(each.error_percent(probes), 1),
        "error_default_percent": round(each.error_percent(default), 1),
    }


def disturbances(measured: Sequence[Measured], rounds: int, busiest: float) -> list[str]:
    """Why the figures are not those of a quiet machine; empty where they are.

    Args:
        measured: of all shapes.
        rounds: that they come from.
        busiest: the most cores that other programs used.
    """
    found = [f"other programs used up to {busiest:.1f} cores"] if busiest > QUIET_CORES else []
    if rounds < LEAST_ROUNDS:
        return [*found, f"{rounds} of the {LEAST_ROUNDS} rounds that tell how far they differ"]
    # Another machine on the same caches and memory is no program here: only the times show it.
    apart = statistics.median(each.rounds_above_percent for each in measured if each.kind == "decode")
    if apart > 100 * NOISY_WIDTH:
        found.append(f"the rounds' median of half of the decode figures lies {apart:.0f}% or more above their quartile")
    return found


def run_check(
    out: Path,
    device_file: Path | None = None,
    threads: int | None = None,
    rounds: int = LEAST_ROUNDS,
    draw: int | None = None,
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
    device = load_device(str(device_file or "host"))
    if device.processor != "cpu":
        raise UsageError(f"--device {device_file}: is a {device.processor.upper()}'s; models are measured on the CPU")
    readings = None if device_file else Readings()
    more = {} if draw is None else drawn(draw)
    measured, busiest = measure(threads, rounds, readings, more)
    if readings is not None:
        device, _ = describe(readings, "this-machine", threads, device)
    here = machine()
    disturbed = disturbances(measured, rounds, busiest)
    source = ", ".join(
        [f"`benchmarks.studies.prediction_error`, {len(FITTED)} shapes fitted, {threads} threads", *disturbed]
    )
    result = check(device, measured, source, f"{here['processor']}, {threads} threads")
    out.mkdir(parents=True, exist_ok=True)
    write_device(result["device"], out / "device.toml", "Written by benchmarks.studies.prediction_error.")
    result |= {"device": str(out / "device.toml"), "machine": here, "threads": threads, "rounds": rounds}
    result["start"] = device.efficiency and device.efficiency.model_dump(mode="json")
    result |= {"bounds_percent": BOUNDS_PERCENT, "clean": not disturbed, "disturbances": disturbed}
    result["other_cpu_cores"] = round(busiest, 2)
    result["shapes"] = {name: asdict(config) for name, config in {**FITTED, **SCORED, **more}.items()}
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
        "drawn": "of these, shapes drawn by chance",
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
        why = "; ".join(result["disturbances"])
        console.output().print(f"noisy: {why}; repeat it on a quiet machine", style="yellow", markup=False)
    verdict = "every error is within its bound" if result["passed"] else "errors above their bound"
    console.output().print(f"{verdict}; {result['device']}, {result['seconds']:.0f} s", markup=False)


def main() -> int:
    """Run the check; the exit code is the program's own kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="New folder for the results.")
    parser.add_argument(
        "--device", type=Path, help="This machine's device file; calibrated in the same rounds if not given."
    )
    parser.add_argument("--threads", type=int, help="CPU threads; all physical cores if not given.")
    parser.add_argument(
        "--rounds", type=int, default=LEAST_ROUNDS, help="Fresh processes a model; the lower quartile counts."
    )
    parser.add_argument(
        "--draw", type=int, metavar="SEED", help=f"Score on {DRAWN} shapes drawn by this number as well."
    )
    parser.add_argument("--json", action="store_true", help="One JSON object on standard output.")
    arguments = parser.parse_args()
    console.use_stderr(arguments.json)
    try:
        result = run_check(arguments.out, arguments.device, arguments.threads, arguments.rounds, arguments.draw)
    except SportsLLMError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print_check(result)
    if arguments.json:
        print(json.dumps(result))
    return 0 if result["passed"] else GateError.exit_code


if __name__ == "__main__":
    sys.exit(main())
