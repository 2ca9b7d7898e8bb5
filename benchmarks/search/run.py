"""`fit` from start to end: search, finish the winner, fall back to the next finalist, write what happened."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.devices.limits import check_on_device
from benchmarks.devices.load import load_device
from benchmarks.files import write_whole
from benchmarks.search.candidates import Candidate
from benchmarks.search.search import Search, choose_finalists, compare_finalists, nothing_fits, start_search, summary
from benchmarks.search.trials import Source, Trials
from benchmarks.search.winner_recipe import write_line
from sportsllm.cli.recipe import load_recipe, run_recipe
from sportsllm.console import say
from sportsllm.errors import ArtifactError, ConflictError, GateError, UsageError
from sportsllm.models.hf_config import load_config, read_json
from sportsllm.storage.artifact import digest
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.packing import kept_tokens

RESULT, SETTINGS, LINE = "fit.json", "search.json", "recipe.toml"
_QUALITY = "quality_loss_percent"


@dataclass(frozen=True)
class Effort:
    """How much work a search may be.

    Attributes:
        tokens: of the winner's recovery.
        search_tokens: of a finalist's brief recovery.
        finalists: candidates that are recovered.
        minutes: for the whole of it; None is no limit.
    """

    tokens: int
    search_tokens: int
    finalists: int = 3
    minutes: float | None = None


def run_fit(
    source: Source,
    device_name: str,
    out: Path,
    effort: Effort,
    *,
    valid: Sequence[Path] = (),
    vocabularies: Sequence[int] = (),
    on_device: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Find and make the best model of `source.teacher` that fits a device.

    Args:
        source: teacher and text.
        device_name: a shipped device's name, or a device file.
        out: directory of everything; a search that is run again goes on in it.
        effort: tokens and time.
        valid: held-out text that the finished model's quality is measured on.
        vocabularies: smaller vocabularies to consider beside the teacher's own.
        on_device: this machine is the device, whether it is recognised or not.
        dry_run: predict and rank only; nothing is made.

    Returns:
        `benchmarks.search.search.summary`'s keys, `out`, `bench` of the finished model, `line`, its recipe, and
        `gave_up`:
        other finalists that missed limits as finished, with those. Where all of them do, the one that misses least
        is the result.

    Raises:
        GateError: nothing fits; the nearest miss is named.
        ConflictError: `out` holds another search.
        UsageError, ArtifactError: settings or inputs that cannot work.
    """
    started = time.monotonic()
    device = load_device(device_name)
    check_on_device(device, on_device)
    teacher = load_config(source.teacher)
    if quantization_config(source.teacher) is not None:
        raise ArtifactError(f"{source.teacher}: is quantized; give the unquantized teacher")
    sizes = _vocabularies(teacher.vocab_size, vocabularies)
    search = start_search(teacher, device, sizes, on_device)
    if dry_run:
        front = search.front(effort.finalists)
        if not front:
            raise GateError(nothing_fits(search))
        return {"out": None, "dry_run": True, **summary(search, front[0])}
    _claim(out, source, device_name, effort, sizes, on_device)
    trials = Trials(source, device, out / "trials", effort.search_tokens)

    def time_left() -> float:
        if effort.minutes is None:
            return float("inf")
        # Half is kept for the winner: its recovery is longer than all brief ones together.
        return 60 * effort.minutes / 2 - (time.monotonic() - started)

    say(f"{device.name}: {len(search.inside()):,} of {len(search.found):,} candidates inside the budget by prediction")
    with kept_tokens(out / "trials" / "tokens"):
        finalists = choose_finalists(search, trials, effort.finalists)
        say(f"finalists: {', '.join(candidate.name for candidate in finalists)}")
        ranking = compare_finalists(search, trials, finalists, time_left)
        attempts: list[tuple[dict[str, Any], dict[str, float]]] = []
        for candidate in ranking:
            result = _finish(search, candidate, source, device_name, out, effort, list(valid), on_device)
            missed = _missed(result)
            attempts.append((result, missed))
            if not missed or set(missed) == {_QUALITY}:  # a smaller one would be worse
                break
            after = "; the next finalist is made" if candidate is not ranking[-1] else ""
            say(f"{candidate.name} misses {', '.join(missed)} as finished{after}")
        else:
            result = min(attempts, key=lambda attempt: max(attempt[1].values()))[0]
    result["gave_up"] = {other["chosen"]: list(missed) for other, missed in attempts if other is not result}
    result["seconds"] = round(time.monotonic() - started, 1)
    write_whole(out / RESULT, json.dumps(result, indent=1, default=str) + "\n")
    return result


def _missed(result: Mapping[str, Any]) -> dict[str, float]:
    """The limits that a finished model misses, with value / limit."""
    limits = [limit for limit in result["bench"]["budget"]["limits"] if limit["passed"] is False]
    return {limit["name"]: limit["value"] / limit["limit"] for limit in limits}


def _finish(
    search: Search,
    candidate: Candidate,
    source: Source,
    device_name: str,
    out: Path,
    effort: Effort,
    valid: list[Path],
    on_device: bool,
) -> dict[str, Any]:
    line = out / candidate.name / LINE
    write_line(
        line,
        source,
        candidate,
        search.teacher,
        tokens=effort.tokens,
        search_tokens=effort.search_tokens,
        device=device_name,
        on_device=on_device,
        valid=valid,
    )
    say(f"{candidate.name}: finishing it as {line}")
    made = run_recipe(load_recipe(line))
    return {
        "out": str(line.parent / "export"),
        "line": str(line),
        **summary(search, candidate),
        "bench": made["bench"],
        "stages": made["stages"],
    }


def _vocabularies(full: int, wanted: Sequence[int]) -> list[int]:
    for size in wanted:
        if not 0 < size < full:
            raise UsageError(f"--vocab-size {size}: must be below the teacher's {full:,} and above 0")
    return [full, *sorted(set(wanted), reverse=True)]


def _claim(
    out: Path, source: Source, device_name: str, effort: Effort, vocabularies: Sequence[int], on_device: bool
) -> None:
    """Write what this search is into `out`, or check that it is the one there."""
    paths = [source.teacher, *source.corpus, *source.calibration]
    device = Path(device_name)
    settings = {
        "teacher": str(source.teacher),
        "corpus": [str(path) for path in source.corpus],
        "calibration": [str(path) for path in source.calibration],
        "device": device_name,
        "on_device": on_device,
        "tokens": effort.tokens,
        "search_tokens": effort.search_tokens,
        "vocabularies": list(vocabularies),
        "seed": source.seed,
        "training": dict(source.settings),
    }
    inputs = [digest(path) for path in [*paths, *([device] if device.is_file() else [])]]
    record = {**settings, "inputs": hashlib.sha256("".join(inputs).encode()).hexdigest()}
    kept = out / SETTINGS
    if kept.exists():
        old = read_json(kept)
        changed = sorted(key for key in record if old.get(key) != record[key])
        if changed:
            raise ConflictError(
                f"{out}: holds a search with other {', '.join(changed)}; choose another --out, or remove it"
            )
        say(f"{out}: going on with the search that is there")
        return
    if out.exists() and any(out.iterdir()):
        raise ConflictError(f"{out}: exists and holds no search; choose another --out")
    write_whole(kept, json.dumps(record, indent=1) + "\n")


def passed(result: dict[str, Any]) -> bool:
    """Whether the finished model keeps to the budget."""
    return bool(result["bench"]["budget"]["passed"])


def complaint(result: dict[str, Any]) -> str:
    """One line about a finished model that misses its budget: by how much, and what to do."""
    missed = [limit for limit in result["bench"]["budget"]["limits"] if limit["passed"] is False]
    words = ", ".join(f"{one['name']} {one['value']:.4g} of {one['limit']:g} {one['unit']}" for one in missed)
    if [one["name"] for one in missed] == [_QUALITY]:
        advice = "raise --tokens, relax that limit, or relax the limits that cut the larger models away"
    else:
        advice = f"relax {', '.join(one['name'] for one in missed)}, or repeat it on a quiet machine"
    return f"{result['chosen']}: the best found misses {words}; {advice}"
