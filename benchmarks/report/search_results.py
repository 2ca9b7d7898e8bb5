"""What a search for the best model under a budget (`fit`) tried, read from its fit.json with tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.devices.schema import LIMIT_UNITS
from benchmarks.labels import LIMIT_LABELS, MISSING, Table, is_number, number, part, with_unit
from sportsllm.errors import ArtifactError
from sportsllm.models.hf_config import read_json

FIT_FILE = "fit.json"
_NAMES_SHOWN = 6
_CANDIDATES_SHOWN = 20
_LEGEND = (
    "Figures with ~ are predicted, qualities with ~ an estimated loss against the teacher; the others are measured. "
    "The chosen one is marked \u2605. Names give layers, hidden size, FFN, heads, key/value heads and vocabulary."
)


@dataclass(frozen=True)
class Candidate:
    """One model that a search looked at. Figures go by the limits' names; `measured` are those not just predicted.

    `loss_percent` is what the search estimated before it measured `bits_per_byte`.
    `within` and `dominated` are None where the search does not say.
    """

    name: str
    precision: str
    parameters: int | None
    figures: dict[str, float]
    measured: frozenset[str]
    bits_per_byte: float | None
    loss_percent: float | None
    within: bool | None
    dominated: bool | None
    chosen: bool


@dataclass(frozen=True)
class Fit:
    """A search's result. `limits` are its budget, `cut` what each limit cut away: a count or names, as text.

    `bench` is the measurement of the model it finished.
    """

    directory: str
    device: str
    candidates: list[Candidate]
    limits: dict[str, float]
    cut: list[tuple[str, str, str]]
    bench: dict[str, Any] | None = None

    @property
    def shown(self) -> list[Candidate]:
        """Those of tables and plots: all that something was measured of, and of the others the first ones."""
        seen = [one for one in self.candidates if one.chosen or one.measured or one.bits_per_byte is not None]
        others = [one for one in self.candidates if one not in seen]
        return [*seen, *others[: max(0, _CANDIDATES_SHOWN - len(seen))]]


def read_fit(directory: Path) -> Fit:
    """Read the fit.json of a directory.

    Raises:
        ArtifactError: the file is damaged or lists no candidates.
    """
    path = directory / FIT_FILE
    data = read_json(path)
    records = data.get("candidates")
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise ArtifactError(f"{path}: has no list of candidates; run fit again")
    chosen = data.get("chosen")
    chosen_name = str(chosen.get("name")) if isinstance(chosen, Mapping) else str(chosen) if chosen else ""
    device = data.get("device")
    bench = data.get("bench")
    limits = _limits(data.get("limits"))
    return Fit(
        directory=str(directory),
        device=str(device.get("name") if isinstance(device, Mapping) else device or MISSING),
        candidates=[_candidate(record, chosen_name) for record in records],
        limits=limits,
        cut=[_cut(name, value, limits) for name, value in (data.get("cut_by_limit") or {}).items()],
        bench=bench if isinstance(bench, dict) and isinstance(bench.get("tpot_ms"), Mapping) else None,
    )


def _candidate(record: Mapping[str, Any], chosen: str) -> Candidate:
    predicted = {name: float(v) for name, v in (record.get("predicted") or {}).items() if is_number(v)}
    measured = {name: float(v) for name, v in (record.get("measured") or {}).items() if is_number(v)}
    bits, parameters, loss = (record.get(key) for key in ("bits_per_byte", "parameters", "estimated_loss_percent"))
    name = str(record.get("name", MISSING))
    return Candidate(
        name=name,
        precision=str(record.get("precision") or MISSING),
        parameters=int(parameters) if is_number(parameters) else None,
        figures=predicted | measured,
        measured=frozenset(measured),
        bits_per_byte=float(bits) if is_number(bits) else None,
        loss_percent=float(loss) if is_number(loss) else None,
        within=_flag(record.get("within")),
        dominated=_flag(record.get("dominated")),
        chosen=bool(chosen) and name == chosen,
    )


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _limits(value: Any) -> dict[str, float]:
    """By name, from a mapping or from a list of records as `bench` writes them."""
    if isinstance(value, list):
        value = {str(part(record, "name")): part(record, "limit") for record in value}
    known = value if isinstance(value, Mapping) else {}
    return {name: float(known[name]) for name in LIMIT_UNITS if is_number(known.get(name))}


def _cut(name: str, value: Any, limits: Mapping[str, float]) -> tuple[str, str, str]:
    """Label, allowed value, and how many candidates the limit cut away (with the first names where they are known)."""
    allowed = with_unit(limits.get(name), LIMIT_UNITS.get(name, ""))
    if isinstance(value, Mapping) and is_number(value.get("misses")):
        alone = value.get("alone")
        value = f"{value['misses']:,}" + (f", {alone:,} of them alone" if is_number(alone) else "")
    if isinstance(value, Mapping):
        value = value.get("names", value.get("count"))
    if isinstance(value, list):
        names = [str(part(item, "name") or item) for item in value]
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", \u2026" if len(names) > _NAMES_SHOWN else "")
        value = f"{len(names)}: {shown}" if names else "0"
    return LIMIT_LABELS.get(name, name), allowed, MISSING if value is None else str(value)


def fit_tables(fits: Sequence[Fit], first_number: int) -> list[Table]:
    """Each search's candidates, numbered on from `first_number` as in the plots, and what each limit cut away."""
    tables = []
    for fit in fits:
        rows = list(_candidate_rows(fit, first_number))
        first_number += len(rows)
        tables.append(
            Table(
                f"Candidates for {fit.device}",
                ("#", "candidate", "precision", "parameters", "file MB", "memory MB", "first token ms",
                 "per token ms", "bits per byte", "budget", "dominated"),
                rows,
                texts=(1, 2, 9, 10),
                caption=_legend(fit),
            )
        )  # fmt: skip
        if fit.cut:
            tables.append(Table("What each limit cut away", ("limit", "allowed", "candidates"), fit.cut, texts=(0, 2)))
    return tables


def _legend(fit: Fit) -> str:
    more = len(fit.candidates) - len(fit.shown)
    return _LEGEND + (f" {more} more, all predicted, are in {FIT_FILE}." if more else "")


def _candidate_rows(fit: Fit, first_number: int) -> Iterator[tuple[str, ...]]:
    for index, candidate in enumerate(fit.shown, start=first_number):
        shown = [
            MISSING if name not in candidate.figures
            else ("" if name in candidate.measured else "~") + number(candidate.figures[name])
            for name in ("file_mb", "peak_memory_mb", "ttft_ms", "tpot_p50_ms")
        ]  # fmt: skip
        yield (
            str(index),
            candidate.name + (" \u2605" if candidate.chosen else ""),
            candidate.precision,
            MISSING if candidate.parameters is None else f"{candidate.parameters:,}",
            *shown,
            _quality(candidate),
            {True: "within", False: "outside", None: MISSING}[candidate.within],
            {True: "yes", False: "no", None: MISSING}[candidate.dominated],
        )


def _quality(candidate: Candidate) -> str:
    if candidate.bits_per_byte is not None:
        return f"{candidate.bits_per_byte:.4f}"
    return MISSING if candidate.loss_percent is None else f"~{candidate.loss_percent:+.2g}%"
