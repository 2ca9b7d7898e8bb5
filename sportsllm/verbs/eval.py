"""The verb `eval`: perplexity, bits per byte, multiple choice and tasks of lm-evaluation-harness."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import Result
from sportsllm.settings import TASKS, TEXT, parse_settings

if TYPE_CHECKING:
    from sportsllm.inference.decoder import Decoder
    from sportsllm.inference.divergence import Divergence
    from sportsllm.inference.scoring import TaskScore
    from sportsllm.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class QuestionScore:
    """Accuracy on a file of multiple-choice questions, with a 95% interval (Wilson's) and that of guessing."""

    accuracy: float
    questions: int
    chance: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class EvalResult(Result):
    """Scores of a model; None for those that were not asked for.

    Attributes:
        directory: the model.
        context: context length that texts were scored with, in tokens.
        perplexity, bits_per_byte, tokens, bytes: scores and size of the text; only the assistant's tokens of
            conversations count.
        text: files of the text.
        conversations: number of documents that are conversations.
        trained_documents: number of documents that the model was trained on.
        against, divergence: the base model, and the difference from it.
        accuracy, questions: score and number of questions, if there is one file of them.
        question_files: scores of each file.
        tasks: scores of lm-evaluation-harness by task.
        kernels, provider, placement: kernels and execution provider of an export, and the operators that it runs.
    """

    directory: Path
    context: int
    perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    bytes: int | None = None
    text: list[Path] = field(default_factory=list)
    conversations: int | None = None
    trained_documents: int | None = None
    against: Path | None = None
    divergence: Divergence | None = None
    accuracy: float | None = None
    questions: int | None = None
    question_files: dict[str, QuestionScore] = field(default_factory=dict)
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    kernels: str | None = None
    provider: str | None = None
    placement: dict[str, object] | None = None


def eval(
    directory: options.Directory,
    *,
    text: options.Text = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="BASE",
            help="Also compare with this model on --text: KL, top-1 agreement, perplexity.",
            show_default="no comparison",
        ),
        options.BY_NAME,
    ] = None,
    questions: Annotated[
        list[Path] | None, typer.Option(help="Multiple-choice questions, .jsonl.", show_default="none")
    ] = None,
    tasks: options.Tasks = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Context length to score with, in tokens.", show_default="the model's"),
    ] = None,
    rope_scaling: options.RopeScaling = None,
    kernels: options.Kernels = "auto",
    provider: options.Provider = "cpu",
    threads: options.Threads = None,
    settings: options.Settings = None,
) -> EvalResult:
    """Score perplexity, bits per byte and multiple-choice accuracy of a checkpoint or an export."""
    if not text and not questions and not tasks:
        raise UsageError("give --text FILE, --questions FILE or --tasks NAME")
    if against is not None and not text:
        raise UsageError(f"--against {against}: needs --text FILE, which both models score")
    found = parse_settings(settings, TEXT, TASKS)
    from sportsllm.console import output
    from sportsllm.files import require_directory
    from sportsllm.formats.manifest import source_gguf
    from sportsllm.inference.decoder import is_onnx_directory, log_runtime, require_finite
    from sportsllm.inference.divergence import compare_documents
    from sportsllm.inference.scoring import question_accuracy, read_questions, score_documents, wilson_interval
    from sportsllm.text.conversations import Conversation
    from sportsllm.text.documents import read_documents, take_reading
    from sportsllm.text.split import warn_if_trained_on
    from sportsllm.text.tokenizer import load_tokenizer

    for each in [directory] if against is None else [directory, against]:
        require_directory(each, "a checkpoint or an export")
    question_files = {path: read_questions(path) for path in questions or []}
    decoder = _open(directory, context, rope_scaling, threads, kernels, provider)
    runtime = log_runtime(decoder, provider)
    reading = take_reading(found, directory, against)
    tokenizer = load_tokenizer(directory, decoder.config, reading)
    base = None
    if against is not None:
        model = getattr(decoder, "model", None)  # of a checkpoint; another one runs on the same device
        device = "cpu" if model is None or is_onnx_directory(against) else str(model.device)
        base = _open(against, context, rope_scaling, threads, provider=device)
    scores, divergence, chats = dict[str, Any](), None, None
    if text:
        documents = list(tokenizer.warn_if_special(read_documents(text, reading.text_field)))
        chats = sum(isinstance(document, Conversation) for document in documents)
        scores["trained_documents"] = warn_if_trained_on(directory, documents)
        if against is None or base is None:
            score = score_documents(decoder, tokenizer, documents)
        else:
            theirs = load_tokenizer(against, base.config, reading)
            score, divergence = compare_documents(decoder, base, tokenizer, theirs, documents)
        require_finite(score.nats + (0.0 if divergence is None else divergence.kl))
        scores |= {name: getattr(score, name) for name in ("perplexity", "bits_per_byte", "tokens", "bytes")}
        of_chats = f"the assistant's in {chats:,} of {len(documents):,} documents, " if chats else ""
        output().print(
            f"{source_gguf(directory) or directory}: perplexity {score.perplexity:.4f}, bits per byte "
            f"{score.bits_per_byte:.4f} ({score.tokens:,} tokens, {of_chats}{score.bytes:,} bytes)"
        )
    if against is not None and divergence is not None:
        output().print(f"against {source_gguf(against) or against}: {divergence}")
    asked: dict[str, QuestionScore] = {}
    for path, items in question_files.items():
        accuracy = question_accuracy(decoder, tokenizer, items)
        chance = sum(1 / len(item.choices) for item in items) / len(items)
        interval = wilson_interval(accuracy, len(items))
        asked[str(path)] = QuestionScore(accuracy=accuracy, questions=len(items), chance=chance, interval=interval)
        output().print(
            f"{path}: {accuracy:.1%} of {len(items)} questions (95% interval {interval[0]:.1%} to {interval[1]:.1%}, "
            f"chance {chance:.1%})"
        )
    harness: dict[str, TaskScore] = {}
    if tasks:
        from sportsllm.inference.harness import run_tasks

        harness = {name: score for name, (score, _) in run_tasks(decoder, tokenizer, tasks, found).items()}
    for name, task in harness.items():
        output().print(f"{name}: {task.metric} {task} ({task.documents:,} documents, {task.shots} shots)")
    only = next(iter(asked.values())) if len(asked) == 1 else None
    return EvalResult(
        **scores,
        directory=directory,
        context=min(each.config.max_position_embeddings for each in (decoder, base or decoder)),
        text=text or [],
        conversations=chats,
        against=against,
        divergence=divergence,
        accuracy=None if only is None else only.accuracy,
        questions=None if only is None else only.questions,
        question_files=asked,
        tasks=harness,
        **runtime,
    )


def _open(
    directory: Path,
    context: int | None,
    scaling: str | None,
    threads: int | None,
    kernels: str = "auto",
    provider: str = "cpu",
) -> Decoder:
    """The model, for windows of `context` tokens; by default of the most that `scaling` allows.

    Raises:
        UsageError: the context is beyond what the model reads, or the scaling is not possible.
    """
    from sportsllm.formats.huggingface import checkpoint_with, load_config
    from sportsllm.inference.decoder import is_onnx_directory, open_decoder

    if context is None and scaling is None:
        return open_decoder(directory, threads, kernels, provider)
    if scaling is not None and is_onnx_directory(directory):
        raise UsageError(
            f"--rope-scaling: the rotary table of {directory} is in its graph; export the checkpoint with "
            "--rope-scaling, or score the checkpoint"
        )
    config = load_config(directory)
    longest = _longest(directory, config, context, scaling)
    with checkpoint_with(directory, longest) as source:
        decoder = open_decoder(source, threads, kernels, provider)
    decoder.config = longest.with_changes(max_position_embeddings=context or longest.max_position_embeddings)
    return decoder


def _longest(directory: Path, config: ModelConfig, context: int | None, scaling: str | None) -> ModelConfig:
    """The model's config with the context that it is asked to read."""
    from sportsllm.inference.decoder import is_onnx_directory
    from sportsllm.models.rope import with_rope_scaling

    own = config.max_position_embeddings
    if config.position_kind == "none" and scaling is None and context is not None:
        return config.with_changes(max_position_embeddings=max(own, context))  # no position has a limit
    if config.position_kind != "rotary" and context is not None and context > own:
        raise UsageError(
            f"--context {context:,}: {directory} has learned positions for {own:,} tokens; give at most that"
        )
    longest = config if scaling is None else with_rope_scaling(config, scaling)
    reach = longest.max_position_embeddings
    if context is not None and context > reach:
        factor = math.ceil(context / own * (config.rope_scaling.factor if config.rope_scaling else 1))
        if is_onnx_directory(directory):
            advice = f"export the checkpoint with --rope-scaling yarn:{factor}"
        elif config.rope_scaling is not None:
            advice = "give at most that"
        else:
            advice = f"give --rope-scaling yarn:{factor}"
        by = f" with --rope-scaling {scaling}" if scaling is not None else ""
        raise UsageError(f"--context {context:,}: {directory} reads {reach:,} tokens{by}; {advice}")
    return longest
