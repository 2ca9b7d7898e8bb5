"""A search for the best model under a budget (`fit`), from its fit.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.labels import LIMITS, MISSING, Table, bits, count, number
from benchmarks.reporting.measured import Bench, Figure
from sportsllm.files import read_json, validate

FIT_FILE = "fit.json"
_LEGEND = (
    "Figures with ~ are predicted, the others are measured. The chosen one is marked \u2605. "
    "Names give layers, hidden size, FFN, heads, key/value heads and vocabulary."
)
_METRICS = ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms")


@dataclass(frozen=True)
class Candidate:
    """A model that a search considered. Figures go by the limits' names; `measured` replace `predicted` ones."""

    name: str
    precision: str
    parameters: int
    predicted: dict[str, float]
    measured: dict[str, Figure] | None
    bits_per_byte: Figure
    within: bool

    def figure(self, name: str) -> tuple[float | None, bool]:
        """A figure and whether it was measured."""
        value = (self.measured or {}).get(name)
        return (self.predicted.get(name), False) if value is None else (value, True)

    @property
    def tried(self) -> bool:
        """Whether anything was measured of it."""
        return self.bits_per_byte is not None or any(value is not None for value in (self.measured or {}).values())


@dataclass(frozen=True)
class Fit:
    """A search's result: its budget, candidates, and the measurement of the finished model."""

    target: str
    chosen: str
    candidates: list[Candidate]
    limits: dict[str, float]
    bench: Bench

    @property
    def shown(self) -> list[Candidate]:
        """The chosen one and those of which something was measured."""
        return [one for one in self.candidates if one.tried or one.name == self.chosen]


def read_fit(directory: Path) -> Fit:
    """Read the fit.json of a directory."""
    path = directory / FIT_FILE
    return validate(Fit, read_json(path), path, "not a result of `fit`; run fit again")


def fit_tables(fits: Sequence[Fit], first_number: int) -> list[Table]:
    """Each search's candidates, numbered from `first_number` as in the charts."""
    metrics = (LIMITS[name].title for name in _METRICS)
    headers = ("#", "candidate", "precision", "parameters", *metrics, "bits per byte", "budget")
    tables = []
    for fit in fits:
        rows = [_cells(place, one, one.name == fit.chosen) for place, one in enumerate(fit.shown, start=first_number)]
        first_number += len(rows)
        more = len(fit.candidates) - len(rows)
        caption = _LEGEND + (f" {more} more, all predicted, are in {FIT_FILE}." if more else "")
        tables.append(Table(f"Candidates for {fit.target}", headers, rows, (1, 2, 9), caption))
    return tables


def _cells(place: int, candidate: Candidate, chosen: bool) -> tuple[str, ...]:
    cells = []
    for name in _METRICS:
        value, measured = candidate.figure(name)
        cells.append(MISSING if value is None else ("" if measured else "~") + number(value))
    return (
        str(place),
        candidate.name + (" \u2605" if chosen else ""),
        candidate.precision,
        count(candidate.parameters),
        *cells,
        bits(candidate.bits_per_byte),
        "within" if candidate.within else "outside",
    )
