"""`fit` from start to end: search, finish the winner, fall back to the next finalist, write what happened."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices.load import load_device
from benchmarks.devices.verdict import check_on_device
from benchmarks.search.candidates import Candidate
from benchmarks.search.held_out import held_out_text
from benchmarks.search.measure import measured_estimates, suggested_vocabularies, usual_estimates
from benchmarks.search.rounds import fits_whole, probe_cuts, try_briefly, try_longer
from benchmarks.search.search import nothing_fits, start_search
from benchmarks.search.stages import Effort, Source, Target
from benchmarks.search.summary import summary
from benchmarks.search.trials import LOG, Trials
from benchmarks.search.winner_recipe import write_recipe
from sportsllm.console import log, logged
from sportsllm.errors import ArtifactError, ConflictError, GateError, UsageError
from sportsllm.files import atomic_write_text
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.json_files import read_json
from sportsllm.formats.manifest import digest
from sportsllm.formats.safetensors import quantization_config
from sportsllm.text.packing import kept_tokens
from sportsllm.verbs.run import run

RESULT, SETTINGS, RECIPE = "fit.json", "search.json", "recipe.toml"
_QUALITY = "quality_loss_percent"


def run_fit(
    source: Source,
    target: Target,
    out: Path,
    effort: Effort,
    *,
    vocabularies: Sequence[int] = (),
    dry_run: bool = False,
) -> dict[str, Any]:
    """Find and make the best model of `source.teacher` that fits a device.

    Args:
        source: teacher and text.
        target: the device.
        out: directory of everything; a search that is run again resumes in it.
        effort: tokens and time.
        vocabularies: smaller vocabularies to consider beside the teacher's own.
        dry_run: predict and rank only; nothing is made.

    Returns:
        `benchmarks.search.summary.summary`'s keys, `out`, `line` (the recipe), `bench` of the finished model, and
        `gave_up`: other finalists that missed limits once finished, with those limits. If all of them do, the one that
        misses by least is the result.

    Raises:
        GateError: nothing fits; the nearest miss is named.
        ConflictError: `out` holds another search.
        UsageError, ArtifactError: settings or inputs that cannot work.
    """
    started = time.monotonic()
    device = load_device(target.device)
    check_on_device(device, target.on_device, target.processor)
    teacher = load_config(source.teacher)
    if quantization_config(source.teacher) is not None:
        raise ArtifactError(f"{source.teacher}: is quantized; give the unquantized teacher")
    asked = _vocabularies(teacher.vocab_size, vocabularies)
    suggested = [size for size in suggested_vocabularies(teacher) if size not in asked]
    usual = usual_estimates(teacher, effort.tokens, [*asked, *suggested])
    search = start_search(teacher, device, usual, target, effort.tokens)
    if dry_run:
        front = search.front(effort.finalists)
        if not front:
            raise GateError(nothing_fits(search))
        return {"out": None, "dry_run": True, **summary(search, front[0])}
    _claim(out, source, target, effort, asked)
    text = held_out_text(source, out / "text")
    where = target.provider, target.processor
    trials = Trials(source, device, out / "trials", text.choosing, effort.search_tokens, *where)

    def time_left() -> float:
        # Half is kept for the winner: its recovery takes longer than all brief ones together.
        return 60 * (effort.minutes or float("inf")) / 2 - (time.monotonic() - started)

    with kept_tokens(out / "trials" / "tokens"):
        if not fits_whole(search):
            measured = measured_estimates(teacher, effort.tokens, trials, asked, suggested)
            search = start_search(teacher, device, measured, target, effort.tokens)
            probe_cuts(search, trials, effort, time_left)
        log(f"{device.name}: {len(search.inside()):,} of {len(search.found):,} candidates inside the budget")
        try_briefly(search, trials, effort, time_left)
        try_longer(search, trials, effort, time_left)

        def finish(candidate: Candidate) -> dict[str, Any]:
            recipe = out / candidate.name / RECIPE
            write_recipe(recipe, candidate, source, effort, target, text.reporting)
            log(f"{candidate.name}: finishing it on {effort.tokens:,} tokens")
            with logged(trials.directory / LOG):
                made = run(recipe).to_json()
            found = summary(search, candidate, trials.bits_per_byte(source.teacher))
            files = {"out": str(recipe.parent / "export"), "line": str(recipe)}
            return files | found | {"bench": made["bench"], "stages": made["stages"]}

        ranking = search.ranking()
        ranking += [one for one in search.front(effort.finalists) if one not in ranking]  # should the tried ones miss
        result = finish_first_inside(ranking[: effort.finalists], finish)
    result["seconds"] = round(time.monotonic() - started, 1)
    atomic_write_text(out / RESULT, json.dumps(result, indent=1, default=str) + "\n")
    return result


def finish_first_inside(ranking: Sequence[Candidate], finish: Callable[[Candidate], dict[str, Any]]) -> dict[str, Any]:
    """Finish candidates in their order until one keeps to the budget.

    A model that misses the quality limit alone is final too, since a smaller one would be worse.

    Args:
        ranking: best first, at least one.
        finish: makes and measures a candidate.

    Returns:
        What `finish` returned, of the one that misses by least if all do, and `gave_up`: the limits that the others
        missed, by name.
    """
    attempts: list[tuple[dict[str, Any], dict[str, float]]] = []
    for candidate in ranking:
        result = finish(candidate)
        missed = {one["name"]: one["value"] / one["limit"] for one in _missed(result)}
        attempts.append((result, missed))
        if not missed or set(missed) == {_QUALITY}:
            break
        after = "; the next finalist is made" if candidate is not ranking[-1] else ""
        log(f"{candidate.name} misses {', '.join(missed)} as finished{after}")
    else:
        result = min(attempts, key=lambda attempt: max(attempt[1].values()))[0]
    return result | {"gave_up": {other["chosen"]: list(missed) for other, missed in attempts if other is not result}}


def _missed(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The records of the limits that a finished model misses."""
    return [limit for limit in result["bench"]["budget"]["limits"] if limit["verdict"] == "fail"]


def _vocabularies(full: int, wanted: Sequence[int]) -> list[int]:
    for size in wanted:
        if not 0 < size < full:
            raise UsageError(f"--vocab-size {size}: must be below the teacher's {full:,} and above 0")
    return sorted(set(wanted), reverse=True)


def _claim(out: Path, source: Source, target: Target, effort: Effort, vocabularies: Sequence[int]) -> None:
    """Write the search's settings into `out`, or check that the search there has the same."""
    inputs = [source.teacher, *source.corpus, *source.calibration]
    if Path(target.device).is_file():
        inputs.append(Path(target.device))
    settings = {
        "teacher": str(source.teacher),
        "corpus": [str(path) for path in source.corpus],
        "calibration": [str(path) for path in source.calibration],
        "device": target.device,
        "on_device": target.on_device,
        "tokens": effort.tokens,
        "search_tokens": effort.search_tokens,
        "vocabularies": list(vocabularies),
        "seed": source.seed,
        "training": dict(source.settings),
        **({"provider": target.provider} if target.provider != "cpu" else {}),
        "inputs": hashlib.sha256("".join(map(digest, inputs)).encode()).hexdigest(),
    }
    kept = out / SETTINGS
    if kept.exists():
        old = read_json(kept)
        changed = sorted(key for key in settings if old.get(key) != settings[key])
        if changed:
            raise ConflictError(
                f"{out}: holds a search with other {', '.join(changed)}; choose another --out, or remove it"
            )
        log(f"{out}: resuming the search there")
        return
    if out.exists() and any(out.iterdir()):
        raise ConflictError(f"{out}: exists and holds no search; choose another --out")
    atomic_write_text(kept, json.dumps(settings, indent=1) + "\n")


def passed(result: Mapping[str, Any]) -> bool:
    """Whether the finished model keeps to the budget."""
    return bool(result["bench"]["budget"]["verdict"] == "pass")


def complaint(result: Mapping[str, Any]) -> str:
    """One line about a finished model that misses its budget: by how much, and what to do."""
    missed = _missed(result)
    words = ", ".join(f"{one['name']} {one['value']:.4g} of {one['limit']:g} {one['unit']}" for one in missed)
    if [one["name"] for one in missed] == [_QUALITY]:
        advice = "raise --tokens, relax that limit, or relax the limits that rule out larger models"
    else:
        advice = f"relax {', '.join(one['name'] for one in missed)}, or repeat it on a quiet machine"
    return f"{result['chosen']}: the best found misses {words}; {advice}"
