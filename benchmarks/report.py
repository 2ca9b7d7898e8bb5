"""The verb `report`: finished stages and their measurements as one HTML page, Markdown or CSV."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.errors import ArtifactError, SportsLLMError, UsageError
from sportsllm.files import atomic_write_text, require_directory, require_new
from sportsllm.results import Result

if TYPE_CHECKING:
    from benchmarks.reporting.inputs import Sample, StageSummary

_SUFFIXES = {"html": (".html", ".htm"), "md": (".md", ".markdown"), "csv": (".csv",)}


@dataclass(frozen=True, kw_only=True)
class ReportResult(Result):
    """A report.

    Attributes:
        out, bytes: path and size of the file.
        stages: names of the stages shown.
        saved: a sentence that compares the last measured stage with the first; None unless two were measured.
        candidates: number of models that the given searches considered.
        cards: directories whose model cards were updated.
    """

    out: Path
    bytes: int
    stages: list[str]
    saved: str | None = None
    candidates: int = 0
    cards: list[Path] = field(default_factory=list)


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Stage directories, GGUF files, directories of `fit`, bench results (.json) and texts (.txt).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New file; .html, .md or .csv selects the format.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(metavar="TEXT", help="Heading of the page.")] = "sportsllm-compress report",
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Prompt that the first and the last stage continue, to compare them; may be repeated."
        ),
    ] = None,
    cards: Annotated[
        bool,
        typer.Option("--cards", help="Also write the measurements into the model cards of the measured directories."),
    ] = False,
) -> ReportResult:
    """Write one HTML page that works offline: verdict, stages, trade-offs, measurements, training, samples.

    Raises:
        UsageError: an unknown suffix, or a path that is no input.
        ConflictError: `out` exists.
        ArtifactError: an input is missing or damaged.
    """
    from benchmarks.reporting.inputs import collect
    from benchmarks.reporting.page import html_page, markdown, savings_line, stage_table, stages_csv
    from sportsllm.console import output

    format = next((name for name, suffixes in _SUFFIXES.items() if out.suffix.lower() in suffixes), None)
    if format is None:
        raise UsageError(f"--out {out}: the suffix names no format; end it in .html, .md or .csv")
    require_new(out)
    inputs = collect(directories)
    if sample:
        texts, skipped = before_and_after(inputs.stages, sample)
        inputs = replace(inputs, samples=[*inputs.samples, *texts], skipped=skipped)
    text = stages_csv(inputs) if format == "csv" else (html_page if format == "html" else markdown)(title, inputs)
    atomic_write_text(out, text)
    written = _write_cards(inputs.stages, directories) if cards else []
    console, saved = output(), savings_line(inputs.stages)
    stage_table(inputs.stages).print(console)
    for path in [out, *written]:
        console.print(f"{path}: written")
    if saved is not None:
        console.print(saved)
    return ReportResult(
        out=out,
        bytes=out.stat().st_size,
        stages=[stage.name for stage in inputs.stages],
        saved=saved,
        candidates=sum(len(fit.candidates) for fit in inputs.fits),
        cards=written,
    )


def before_and_after(
    stages: Sequence[StageSummary], prompts: Sequence[str], new_tokens: int = 60
) -> tuple[list[Sample], list[str]]:
    """Greedy continuations of `prompts` by the first and by the last stage that can be opened.

    Returns:
        Each prompt's texts, one if only one stage opens, and a line for every stage that could not be opened.

    Raises:
        UsageError: a prompt is not valid UTF-8, or fills a model's context.
        ArtifactError: no stage can be opened.
    """
    from benchmarks.reporting.inputs import Sample
    from sportsllm.console import log
    from sportsllm.model import LoadedModel, load

    if any("\ud800" <= letter <= "\udfff" for prompt in prompts for letter in prompt):
        raise UsageError("--sample is not valid UTF-8")
    skipped = list[str]()

    def first_of(candidates: Iterable[StageSummary]) -> tuple[StageSummary, LoadedModel] | None:
        for stage in candidates:
            try:
                if not Path(stage.directory).is_file():
                    require_directory(Path(stage.directory), "a model")  # `load` would look for a name in the hub
                return stage, load(stage.directory)
            except (SportsLLMError, ModuleNotFoundError) as error:
                skipped.append(f"No sample from {stage.name}: {error}")
        return None

    first = first_of(stages)
    if first is None:
        reasons = "; ".join(skipped) or "none was given"
        raise ArtifactError(f"--sample: no stage can be opened to write text with: {reasons}")
    last = first_of(reversed(stages[list(stages).index(first[0]) + 1 :]))
    if last is None:
        skipped.append(f"There is no text to compare with: {first[0].name} alone could be opened.")
    for reason in skipped:
        log(reason)
    opened = [("Before", *first)] + ([] if last is None else [("After", *last)])
    samples = []
    for prompt, (word, stage, model) in itertools.product(prompts, opened):
        text = "".join(model.generate(prompt, max_new_tokens=new_tokens, temperature=0))
        samples.append(Sample(f"{word}: {stage.name}", text, prompt))
    return samples, skipped


def _write_cards(stages: Sequence[StageSummary], given: Sequence[Path]) -> list[Path]:
    """Update the model cards of the measured directories with the results of `bench` and `fit` among `given`."""
    from benchmarks.reporting.fits import FIT_FILE
    from sportsllm.formats.manifest import CARD, manifest_of
    from sportsllm.formats.model_card import write_card

    measured = dict.fromkeys(Path(one.directory) for one in stages if one.bench is not None)
    models = [path for path in measured if manifest_of(path).files]
    files = [path / FIT_FILE if path.is_dir() else path for path in given]
    for path in models:
        write_card(path, [file for file in files if file.suffix == ".json" and file.is_file()])
    return [path / CARD for path in models]
