"""The verb `fit`: find and make the best model of a teacher that fits a device's budget.

Resolve the inputs, try candidates (`benchmarks.search.rounds`), finish the winner as a recipe, or the next candidate if
it misses the budget, and explain the choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError, ConflictError, GateError, InterruptedRun, UsageError
from sportsllm.results import Result
from sportsllm.settings import FIT, LIMITS, TEXT, parse_settings

if TYPE_CHECKING:
    from benchmarks.search.candidates import Candidate
    from benchmarks.search.recipe import Effort, Source, Target
    from benchmarks.search.trials import Clock

RESULT, SETTINGS, RECIPE = "fit.json", "search.json", "recipe.toml"
_QUALITY = "quality_loss_percent"
_STANDING = {"pass": 0, "uncertain": 1, "fail": 2}


@dataclass(frozen=True, kw_only=True)
class FitResult(Result):
    """The result of a search. Losses are percent of the teacher's bits per byte.

    Attributes:
        target: name of the device.
        decided_by: `measurement` on the device itself, else `prediction`.
        uncertain: whether the prediction band of the chosen candidate reaches beyond the budget.
        limits: limits of the budget by name.
        candidates: all candidates with their cuts, predicted and measured figures, and losses if tried.
        chosen: name of the finished candidate; with `dry_run`, of the candidate to try first.
        whole_teacher: whether nothing is cut.
        band: by limit, the factor within which 90% of predictions lie, in either direction.
        dry_run: whether candidates were only listed.
        documents: number of held-out documents for the trials and for the final measurement.
        tokens: of the chosen's recovery; fewer than asked for if the time did not allow them.
        out, line: path of the export, and the recipe that makes it in a line.
        bench, stages: measurement of the export, and stages of its recipe.
        gave_up: other finished candidates with the limits that they miss.
        seconds: total time.
    """

    target: str
    decided_by: str
    uncertain: bool
    limits: dict[str, float]
    candidates: list[dict[str, Any]] = field(repr=False)
    chosen: str
    whole_teacher: bool
    band: dict[str, float]
    dry_run: bool = False
    documents: dict[str, int] = field(default_factory=dict)
    tokens: int | None = None
    out: Path | None = None
    line: str | None = None
    bench: dict[str, Any] | None = field(default=None, repr=False)
    stages: list[dict[str, Any]] = field(default_factory=list)
    gave_up: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def fit(
    *,
    teacher: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Unquantized checkpoint to shrink."),
        options.BY_NAME,
        options.TRAINABLE,
    ],
    target: Annotated[str, typer.Option(metavar="NAME|FILE", help="Device budget, for example raspberry-pi-5.")],
    limit: options.Limit = None,
    out: options.Out = Path("runs/fit"),
    corpus: options.Corpus = None,
    valid: options.Valid = None,
    calibration: options.Calibration = None,
    vocab_size: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="A smaller vocabulary to consider too; may be repeated."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=options.count,
            metavar="N",
            help="Tokens of the winner's recovery.",
            show_default="6% of the teacher's, or 1.2M if they are not known",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Time limit for everything: fewer candidates are tried and the recovery is shorter. One candidate is "
            "always made.",
            show_default="none",
        ),
    ] = None,
    on_device: options.OnDevice = False,
    provider: options.Provider = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the candidates; needs no text.")] = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    settings: options.Settings = None,
) -> FitResult:
    """Search for the best model that fits a device's budget, make it, and explain the choice."""
    from benchmarks.search.recipe import Effort, Source, Target, recovery_tokens
    from benchmarks.search.results import print_fit
    from export.runtime.providers import find_provider
    from sportsllm.console import output
    from sportsllm.files import require_directory
    from sportsllm.processors import set_threads
    from sportsllm.text.documents import recorded_text, take_reading

    rare = parse_settings(settings, FIT, TEXT)
    set_threads(threads)
    require_directory(teacher, "a checkpoint")
    text = () if dry_run else tuple(corpus or recorded_text(teacher, "corpus"))
    held_out = () if dry_run else tuple(valid or ([] if corpus else recorded_text(teacher, "valid")))
    tokens = tokens or recovery_tokens(teacher)
    search_tokens, finalists = rare.pop("search_tokens", max(1, tokens // 10)), rare.pop("finalists", 3)
    effort = Effort(tokens, search_tokens, finalists, minutes)
    reading = take_reading(rare, teacher)
    source = Source(teacher, text, tuple(calibration or text), held_out, threads, seed, rare, reading)
    limits = parse_settings(limit, LIMITS, option="--limit")
    device = Target(target, on_device, provider, find_provider(provider).processor, limits)
    try:
        result = run_fit(source, device, out, effort, vocabularies=vocab_size or [], dry_run=dry_run)
    except (KeyboardInterrupt, InterruptedRun):
        again = "" if dry_run else f"; run the same command again to continue the search in {out}"
        raise InterruptedRun(f"interrupted{again}") from None
    print_fit(output(), result.to_json())
    return result


def run_fit(
    source: Source,
    target: Target,
    out: Path,
    effort: Effort,
    *,
    vocabularies: Sequence[int] = (),
    dry_run: bool = False,
) -> FitResult:
    """Search and make.

    Args:
        out: directory of everything; a search that is run again resumes in it.
        vocabularies: smaller vocabularies to consider beside the teacher's own.

    Raises:
        GateError: nothing fits; the nearest miss is named.
        ConflictError: `out` holds another search.
        UsageError, ArtifactError: settings or inputs that cannot work.
    """
    from benchmarks.devices.load import load_target
    from benchmarks.devices.verdict import DISTANCES, check_on_device
    from benchmarks.search.recipe import held_out_text, with_samples
    from benchmarks.search.results import summary
    from benchmarks.search.rounds import run_rounds, start_search
    from benchmarks.search.trials import Clock, Trials
    from sportsllm.console import log
    from sportsllm.files import atomic_write_text
    from sportsllm.formats.artifact import only_run
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.packed import quantization_config
    from sportsllm.inference.scoring import LEAST_DOCUMENTS
    from sportsllm.training.base_model import training_seconds

    clock = Clock(effort.minutes)
    device = load_target(target.device, target.limits)
    check_on_device(device, target.on_device, target.processor)
    teacher = load_config(source.teacher)
    if quantization_config(source.teacher) is not None:
        raise ArtifactError(f"{source.teacher}: is quantized; give the unquantized teacher")
    for size in vocabularies:
        if not 0 < size < teacher.vocab_size:
            raise UsageError(f"--vocab-size {size}: must be below the teacher's {teacher.vocab_size:,} and above 0")
    if device.limits.accuracy_loss_points is not None:
        raise UsageError(
            "accuracy_loss_points: fit measures no tasks; leave that limit out, and measure the result with "
            f"bench --tasks NAME --teacher {source.teacher} --limit accuracy_loss_points="
            f"{device.limits.accuracy_loss_points:g}"
        )
    asked = sorted(set(vocabularies), reverse=True)
    if asked and not DISTANCES.isdisjoint(device.limits.given()):
        raise UsageError("--vocab-size: kl_nats and top1_changed_percent need the teacher's vocabulary; leave one out")
    search = start_search(teacher, device, target, effort.tokens, asked)
    if dry_run:
        planned = search.plain(sure=False) or [search.nearest()[0]]
        search.found |= {one.name: one for one in planned}
        return FitResult.of({**summary(search, planned[0]), "dry_run": True})
    with only_run(out):
        _claim(out, source, target, effort, asked)
        text = held_out_text(source, out / "text")
        if min(text.selection_documents, text.report_documents) < LEAST_DOCUMENTS:
            log(
                f"held-out text is short: {text.selection_documents} documents for choices and {text.report_documents} "
                f"for the final loss, which may differ much from the trials'; give {2 * LEAST_DOCUMENTS} or more with "
                "--valid"
            )
        source = with_samples(source)
        clock.token_s = training_seconds(teacher, 1, forwards=4)  # with a teacher; the student counts as large
        where = target.provider, target.processor
        patience = min(60.0, 0.05 * clock.left())  # seconds to wait for other programs before times are measured
        trials = Trials(source, device, out / "trials", text.selection_split, effort.search_tokens, *where, patience)

        def finish(candidate: Candidate) -> dict[str, Any]:
            made = _make(out, candidate, source, effort, target, text.report_split, clock)
            return {**summary(search, candidate, trials.bits_per_byte(source.teacher)), **made}

        ranking = run_rounds(search, trials, effort, clock)
        result = finish_best(ranking[: effort.finalists], finish, clock)
        documents = {"trials": trials.documents(), "final": text.report_documents}
        found = FitResult.of({**result, "documents": documents, "seconds": round(clock.seconds, 1)})
        atomic_write_text(out / RESULT, json.dumps(found.to_json(), indent=1, default=str) + "\n")
        if not found.bench or found.bench["budget"]["verdict"] == "pass":
            return found
        return replace(found, complaint=complaint(found, effort.tokens), exit_code=GateError.exit_code)


def _make(
    out: Path, candidate: Candidate, source: Source, effort: Effort, target: Target, text: Path, clock: Clock
) -> dict[str, Any]:
    """Finish a candidate by a recipe: on all tokens, or on as many as the time allows, in a directory of its own.

    A repeated search finishes the recipe that it began, unless it now has the time for all tokens.
    """
    from benchmarks.search.recipe import write_recipe
    from benchmarks.search.trials import BENCH_S, LOG
    from sportsllm.console import log, logged
    from sportsllm.verbs.run import run

    directory, tokens = out / candidate.name, effort.tokens
    if not (directory / RECIPE).exists():
        tokens = clock.affordable("trial", effort.tokens, min(effort.tokens, effort.search_tokens), BENCH_S)
    if tokens < effort.tokens:
        begun = (path.parent.name for path in out.glob(f"{candidate.name}-[0-9]*/{RECIPE}"))
        tokens = max((int(name.rpartition("-")[2]) for name in begun), default=tokens)
        directory = out / f"{candidate.name}-{tokens}"
    recipe = directory / RECIPE
    if not recipe.exists():
        write_recipe(recipe, candidate, source, replace(effort, tokens=tokens), target, text)
    short = f" instead of {effort.tokens:,}, which take too long" if tokens < effort.tokens else ""
    log(f"{candidate.name}: finishing it on {tokens:,} tokens{short}")
    with logged(out / "trials" / LOG), clock.step("trial", tokens):
        made = run(recipe).to_json()
    bench, stages = made["bench"], made["stages"]
    return {"tokens": tokens, "out": directory / "export", "line": str(recipe), "bench": bench, "stages": stages}


def finish_best(
    ranking: Sequence[Candidate], finish: Callable[[Candidate], dict[str, Any]], clock: Clock
) -> dict[str, Any]:
    """Finish candidates in their order until one fails no limit, or the time is up.

    Args:
        ranking: best first, at least one.

    Returns:
        The result of the best finished candidate (by verdict, then by how far its worst limit is missed, then by
        quality) and `gave_up`, the limits that the others fail, by name.

    Raises:
        SportsLLMError: that of the first candidate, if none could be finished.
    """
    from benchmarks.search.rounds import FAILURES
    from sportsllm.console import log

    attempts, errors = list[dict[str, Any]](), list[Exception]()
    for candidate in ranking:
        if attempts and not clock.allows(candidate.name, "finish"):
            break
        try:
            with clock.step("finish"):
                attempts.append(finish(candidate))
        except FAILURES as error:
            log(f"{candidate.name}: could not be finished, and the search goes on without it: {error}")
            errors.append(error)
            continue
        failed = failed_limits(attempts[-1])
        if not failed:
            break
        log(f"{candidate.name} misses {', '.join(failed)} as finished")

    def standing(result: Mapping[str, Any]) -> tuple[int, float, float]:
        quality = result["bench"][_QUALITY] or 0.0
        return _STANDING[result["bench"]["budget"]["verdict"]], max(failed_limits(result).values(), default=0), quality

    if not attempts:
        raise errors[0]
    best = min(attempts, key=standing)
    return best | {"gave_up": {one["chosen"]: list(failed_limits(one)) for one in attempts if one is not best}}


def failed_limits(result: Mapping[str, Any]) -> dict[str, float]:
    """The limits that a finished model fails, with value / limit."""
    limits = result["bench"]["budget"]["limits"]
    return {one["name"]: one["value"] / one["limit"] for one in limits if one["verdict"] == "fail"}


def complaint(result: FitResult, tokens: int) -> str:
    """One line about a finished model that does not pass, and what to do; `tokens` are those of --tokens."""
    from benchmarks.reporting.bench_tables import verdict_line
    from benchmarks.reporting.measured import as_budget

    assert result.bench is not None
    failed, limits = list(failed_limits({"bench": result.bench})), result.bench["budget"]["limits"]
    timed = any(one["verdict"] == "fail" and one["unit"] == "ms" and one["source"] == "measured" for one in limits)
    if not failed:
        advice = "measure it on the device (bench --on-device), or give more held-out text for the quality"
    elif _QUALITY in failed and (result.tokens or tokens) < tokens:
        advice = f"it was recovered on {result.tokens:,} of {tokens:,} tokens: run it again with more --minutes"
    elif failed == [_QUALITY]:
        advice = "raise --tokens, relax that limit, or relax the limits that rule out larger models"
    else:
        advice = f"relax {', '.join(failed)}" + ", or repeat it on a quiet machine" * timed
    return f"{result.chosen}: the best found; {verdict_line(as_budget(result.bench['budget']))}; {advice}"


def _claim(out: Path, source: Source, target: Target, effort: Effort, vocabularies: Sequence[int]) -> None:
    """Write the search's identity into `out`, or check that the search there has the same, --minutes aside."""
    from sportsllm.console import log
    from sportsllm.files import atomic_write_text, read_json
    from sportsllm.formats.artifact import Stage, difference

    inputs = [source.teacher, *source.corpus, *source.calibration, *source.valid]
    inputs += [Path(target.device)] if Path(target.device).is_file() else []
    settings = {**asdict(source), **asdict(target), **asdict(effort), "vocabularies": list(vocabularies)}
    settings = {name: value for name, value in settings.items() if name not in ("minutes", "threads", "processor")}
    identity, kept = Stage("fit", settings, inputs).fingerprint(), out / SETTINGS
    if kept.exists():
        if (there := read_json(kept)).pop("fingerprint", None) != identity:
            which = difference(there, settings)
            raise ConflictError(f"{out}: holds a search with other settings or inputs{which}; choose another --out")
        log(f"{out}: resuming the search there")
        return
    if out.exists() and any(out.iterdir()):
        raise ConflictError(f"{out}: exists and holds no search; choose another --out")
    atomic_write_text(kept, json.dumps({"fingerprint": identity, **settings}, indent=1, default=str) + "\n")
