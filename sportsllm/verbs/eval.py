"""The verb `eval`: perplexity, bits per byte and multiple-choice accuracy of a checkpoint or an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.results import Result


@dataclass(frozen=True, kw_only=True)
class QuestionScore:
    """Accuracy on a file of multiple-choice questions, with a 95% interval (Wilson's) and that of guessing."""

    accuracy: float
    questions: int
    chance: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class EvalResult(Result):
    """What was scored; None for what was not.

    Attributes:
        directory: the model.
        context: tokens that were read at once.
        perplexity, bits_per_byte, tokens, bytes: of the text.
        text: its files.
        accuracy, questions: of the questions, if there is one file of them.
        question_files: of each file.
        kernels, provider, placement: what ran an export, and where.
    """

    directory: Path
    context: int
    perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    bytes: int | None = None
    text: list[Path] = field(default_factory=list)
    accuracy: float | None = None
    questions: int | None = None
    question_files: dict[str, QuestionScore] = field(default_factory=dict)
    kernels: str | None = None
    provider: str | None = None
    placement: dict[str, Any] | None = None


def eval(
    directory: options.Directory,
    *,
    text: options.Text = None,
    questions: Annotated[
        list[Path] | None, typer.Option(help="Multiple-choice questions, .jsonl.", show_default="none")
    ] = None,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first N of each file.", show_default="all")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Tokens read at once.", show_default="the model's")
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE:FACTOR",
            help="Lengthen a checkpoint's context as `train` does, or none to go beyond it unscaled (with --context).",
            show_default="as the model is",
        ),
    ] = None,
    kernels: options.Kernels = "auto",
    provider: options.Provider = "cpu",
    threads: options.Threads = None,
) -> EvalResult:
    """Perplexity, bits per byte and multiple-choice accuracy of a checkpoint or an export."""
    if not text and not questions:
        raise UsageError("give --text FILE, --questions FILE, or both")
    for path in [*(text or []), *(questions or [])]:
        if not path.exists():
            raise ArtifactError(f"{path}: not found; give an existing file")

    from sportsllm.console import output
    from sportsllm.files import require_directory
    from sportsllm.inference.decoder import log_runtime
    from sportsllm.inference.longer_context import open_with_context
    from sportsllm.inference.scoring import question_accuracy, read_questions, score_documents, wilson_interval
    from sportsllm.text.documents import read_documents
    from sportsllm.text.tokenizer import load_tokenizer

    require_directory(directory, "a checkpoint or an export")
    decoder = open_with_context(directory, context, rope_scaling, threads, kernels, provider)
    ran, placement = log_runtime(decoder)
    tokenizer = load_tokenizer(directory, decoder.config)
    score = None
    if text:
        score = score_documents(decoder, tokenizer, list(read_documents(text)))
        output().print(
            f"{directory}: perplexity {score.perplexity:.4f}, bits per byte {score.bits_per_byte:.4f} "
            f"({score.tokens:,} tokens, {score.bytes:,} bytes)"
        )
    asked: dict[str, QuestionScore] = {}
    for path in questions or []:
        items = read_questions(path)[:max_questions]
        accuracy = question_accuracy(decoder, tokenizer, items)
        chance = sum(1 / len(item.choices) for item in items) / len(items)
        interval = wilson_interval(accuracy, len(items))
        asked[str(path)] = QuestionScore(accuracy=accuracy, questions=len(items), chance=chance, interval=interval)
        output().print(
            f"{path}: {accuracy:.1%} of {len(items)} questions (95% interval {interval[0]:.1%} to {interval[1]:.1%}, "
            f"chance {chance:.1%})"
        )
    only = next(iter(asked.values())) if len(asked) == 1 else None
    return EvalResult(
        directory=directory,
        context=decoder.config.max_position_embeddings,
        perplexity=None if score is None else score.perplexity,
        bits_per_byte=None if score is None else score.bits_per_byte,
        tokens=None if score is None else score.tokens,
        bytes=None if score is None else score.bytes,
        text=text or [],
        accuracy=None if only is None else only.accuracy,
        questions=None if only is None else only.questions,
        question_files=asked,
        kernels=ran,
        provider=None if ran is None else provider,
        placement=placement,
    )
