"""How far predictions are off on this machine, on shapes that nothing was fitted to.

    python -m benchmarks.studies.prediction_error --out DIR [--rounds 5]

Calibrates, measures models of 20 random shapes, each in two formats, and compares them with predictions made with the
calibrated and with the shipped coefficients. Writes into DIR `prediction.csv`, a line a figure, and `summary.csv`: for
each kind of figure and set of coefficients the band, the factor, either way, that holds 90% of the figures.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.devices.load import load_device
from benchmarks.devices.schema import Coefficients
from benchmarks.labels import csv_text
from benchmarks.measure.machine import default_threads, machine, this_machine
from benchmarks.measure.process import QUIET_CORES
from benchmarks.model_size import ModelFormat
from benchmarks.predict.calibrate import (
    FORMATS,
    INT8_CACHE,
    SHAPES,
    Figure,
    band_of,
    calibrate,
    measure_models,
    shape,
    write_models,
)
from benchmarks.predict.latency import costs, resolve, total
from sportsllm.console import output
from sportsllm.errors import ConflictError
from sportsllm.files import atomic_write_text
from sportsllm.models.config import ModelConfig

SHAPE_COUNT, SEED, MOST_PARAMETERS = 20, 20261123, 60_000_000
DIMENSIONS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads")  # fmt: skip
ALL_FORMATS = (*FORMATS, ModelFormat("int4", 32), INT8_CACHE)


def random_shapes() -> list[ModelConfig]:
    """256 to 768 wide, 2 to 16 layers, heads of 32 or 64, any sharing of keys; none of those that are fitted."""
    dice, found = random.Random(SEED), list[ModelConfig]()
    while len(found) < SHAPE_COUNT:
        hidden, layers = 128 * dice.randint(1, 6), dice.randint(2, 16)
        heads = hidden // dice.choice((32, 64))
        shared = dice.choice([count for count in range(1, heads + 1) if heads % count == 0])
        inner, vocab = 128 * round(hidden * dice.uniform(2, 4) / 128), dice.choice((2_000, 4_000, 8_000, 16_000))
        config = shape(vocab, hidden, inner, layers, heads, shared)
        if config.parameters <= MOST_PARAMETERS and config not in (*SHAPES, *found):
            found.append(config)
    return found


def compare(figures: Sequence[Figure], sets: Mapping[str, Coefficients]) -> list[dict[str, Any]]:
    """A row a figure: what was measured, and what each set of coefficients predicts."""
    rows = []
    for figure in figures:
        row: dict[str, Any] = {name: getattr(figure.config, name) for name in DIMENSIONS}
        row |= {"format": figure.stored.name, "figure": figure.kind, "tokens": figure.tokens}
        numbers = {"measured": figure.value} | {name: total(figure.terms(), costs(each)) for name, each in sets.items()}
        rows.append(row | {name: float(f"{number:.5g}") for name, number in numbers.items()})
    return rows


def run_study(out: Path, rounds: int) -> list[dict[str, Any]]:
    """Calibrate, measure, compare and write; see the module. Returns the summary.

    Raises:
        ConflictError: `out` exists and is not empty.
        ChildFailure: a measuring process failed; nothing is written then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out}: exists already; choose another --out or move it away")
    threads = default_threads()
    shipped = resolve(load_device("host").model_copy(update={"hardware": this_machine(threads)}))
    sets = {"calibrated": calibrate(threads, rounds)[0], "shipped": shipped}
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        orders = ALL_FORMATS, ALL_FORMATS[3:] + ALL_FORMATS[:3]  # two formats for each shape
        wanted = [pair for order in orders for pair in zip(random_shapes(), cycle(order), strict=False)]
        figures, busiest = measure_models(write_models(Path(folder), wanted), threads, rounds)
    here, noisy = machine(), "" if busiest <= QUIET_CORES else f", noisy: others used up to {busiest:.1f} cores"
    where = f"{here['processor']}, {threads} threads, {rounds} rounds, {here['measured_at'][:10]}{noisy}"
    summary = [
        {"figure": kind, "coefficients": name, "factor_90": factor, "machine": where}
        for name, each in sets.items()
        for kind, factor in band_of(each, figures).items()
    ]
    for name, lines in (("prediction.csv", compare(figures, sets)), ("summary.csv", summary)):
        atomic_write_text(out / name, csv_text(list(lines[0]), lines))
    return summary


def main() -> None:
    """Run the study and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="New folder for the results.")
    parser.add_argument("--rounds", type=int, default=5, help="Fresh processes for each model.")
    given = parser.parse_args()
    for row in run_study(given.out, given.rounds):
        output().print(", ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
