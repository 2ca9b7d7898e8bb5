"""What a search for the best model under a budget (`fit`) tried, from its fit.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.labels import LIMITS, MISSING, number, with_unit
from benchmarks.report.text import Table
from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import read_json

FIT_FILE = "fit.json"
_CANDIDATES_SHOWN = 20
_LEGEND = (
    "Figures with ~ are predicted, qualities with ~ an estimated loss against the teacher; the others are measured. "
    "The chosen one is marked \u2605. Names give layers, hidden size, FFN, heads, key/value heads and vocabulary."
)
_HEADERS = (
    "#", "candidate", "precision", "parameters", "file MB", "memory MB", "first token ms", "per token ms",
    "bits per byte", "budget",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One model that a search looked at, `within` the budget or not. Metrics go by the limits' names.

    `measured` are those not just predicted, `loss_percent` is the estimate made before `bits_per_byte` was measured.
    """

    name: str
    precision: str
    parameters: int
    metrics: dict[str, float]
    measured: frozenset[str]
    bits_per_byte: float | None
    loss_percent: float
    within: bool
    chosen: bool


@dataclass(frozen=True)
class Fit:
    """A search's result: its budget, the candidates that miss each limit, the measurement of the finished model."""

    target: str
    candidates: list[Candidate]
    limits: dict[str, float]
    cut_by_limit: dict[str, dict[str, int]]
    bench: dict[str, Any]

    @property
    def shown(self) -> list[Candidate]:
        """Those of tables and plots: all that something was measured of, and of the others the first ones."""
        seen = [one for one in self.candidates if one.chosen or one.measured or one.bits_per_byte is not None]
        others = [one for one in self.candidates if one not in seen]
        return [*seen, *others[: max(0, _CANDIDATES_SHOWN - len(seen))]]


def read_fit(directory: Path) -> Fit:
    """Read the fit.json of a directory.

    Raises:
        ArtifactError: the file is damaged or another program's.
    """
    path = directory / FIT_FILE
    data = read_json(path)
    try:
        candidates = [_candidate(record, data["chosen"]) for record in data["candidates"]]
        return Fit(candidates=candidates, **{key: data[key] for key in ("target", "limits", "cut_by_limit", "bench")})
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: is not a result of `fit` ({error!r}); run fit again") from None


def _candidate(record: Mapping[str, Any], chosen: str) -> Candidate:
    measured = {name: value for name, value in (record["measured"] or {}).items() if value is not None}
    return Candidate(
        metrics=record["predicted"] | measured,
        measured=frozenset(measured),
        loss_percent=record["estimated_loss_percent"],
        chosen=record["name"] == chosen,
        **{key: record[key] for key in ("name", "precision", "parameters", "bits_per_byte", "within")},
    )


def fit_tables(fits: Sequence[Fit], first_number: int) -> list[Table]:
    """Each search's candidates, numbered from `first_number` as in the charts, and how many each limit cut away."""
    tables = []
    for fit in fits:
        rows = [_cells(number, one) for number, one in enumerate(fit.shown, start=first_number)]
        first_number += len(rows)
        more = len(fit.candidates) - len(rows)
        caption = _LEGEND + (f" {more} more, all predicted, are in {FIT_FILE}." if more else "")
        tables.append(Table(f"Candidates for {fit.target}", _HEADERS, rows, (1, 2, 9), caption))
        limits = {name: with_unit(fit.limits[name], LIMITS[name].unit) for name in fit.cut_by_limit}
        cut = [
            (LIMITS[name].label, limits[name], f"{count['misses']:,}, {count['alone']:,} of them alone")
            for name, count in fit.cut_by_limit.items()
        ]
        tables.append(Table("What each limit cut away", ("limit", "allowed", "candidates"), cut, (0, 2)))
    return tables


def _cells(place: int, candidate: Candidate) -> tuple[str, ...]:
    metrics = (
        ("" if name in candidate.measured else "~") + number(candidate.metrics[name])
        if name in candidate.metrics
        else MISSING
        for name in ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms")
    )
    bits = candidate.bits_per_byte
    return (
        str(place),
        candidate.name + (" \u2605" if candidate.chosen else ""),
        candidate.precision,
        f"{candidate.parameters:,}",
        *metrics,
        f"~{candidate.loss_percent:+.2g}%" if bits is None else f"{bits:.4f}",
        "within" if candidate.within else "outside",
    )
