"""The command `distill`. Heavy imports are inside."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli import flags
from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import expand_flag_groups
from sportsllm.errors import UsageError
from sportsllm.results import TrainingResult


@expand_flag_groups
def distill(
    *,
    teacher: Annotated[
        str, typer.Option(help="A checkpoint directory, or a preset's name for runs/<preset>."), options.BY_NAME
    ],
    student: Annotated[
        str | None,
        typer.Option(
            help="A preset's name, or a checkpoint directory.", show_default="with --select-tokens the teacher"
        ),
        options.BY_NAME,
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New directory.", show_default="runs/<student>, runs/<student>-selected")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose weights the student starts from.", show_default="none"),
        options.BY_NAME,
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="cut: the most important parts of the teacher; fresh: random weights. Of a checkpoint student only "
            "the shape is used.",
            show_default="the weights of --init or of a checkpoint student, else cut where nothing grows",
        ),
    ] = None,
    selection: flags.SelectionFlags,
    text: options.TextFlags,
    distillation: flags.DistillationFlags,
    lora: options.LoraFlags,
    length: options.LengthFlags,
    training: options.TrainingFlags,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Train a smaller student on a teacher's next-token distribution, or one that sees few tokens (--select-tokens).

    --steps 0 writes the student without training it, but for the indexer that selects tokens.
    """
    from compress.distillation.run import Checkpoint, check_no_larger, resolve_teacher, teacher_corpus
    from compress.distillation.run import distill as run_distill
    from compress.distillation.student_training import StudentTraining
    from compress.pruning.student_start import choose_start
    from sportsllm.console import output
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.manifest import plain_name
    from sportsllm.processors import set_threads
    from sportsllm.training.settings import Run

    set_threads(threads)
    source = resolve_teacher(teacher)
    if student is None:
        if selection.select_tokens is None:
            raise UsageError("give --student: a preset's name or a checkpoint directory")
        student = str(source)
    begin = selection.applied_to(choose_start(student, init, start, source))
    check_no_larger(begin.shape, load_config(source))  # before a word on settings
    if selection.select_tokens is not None:
        longest, (tokens, sequence) = begin.shape.max_position_embeddings, selection.lengths()
        training = dataclasses.replace(training, sequence=training.sequence or min(longest, sequence))
        if length.tokens is None and length.steps is None:
            length = dataclasses.replace(length, tokens=tokens)
    already_trained = isinstance(begin, Checkpoint) and begin.already_trained
    run = Run(begin.kind, begin.shape, lora.lora_rank is not None, already_trained)
    config = training.config(run, length.tokens, length.steps, seed=seed)
    plan = StudentTraining(
        teacher=source,
        config=config,
        corpus=tuple(text.corpus or teacher_corpus(source, "corpus")),
        valid=tuple(text.valid or ([] if text.corpus else teacher_corpus(source, "valid"))),
        distillation=distillation.config(begin.kind, source),
        adapters=lora.adapters(config.optimizer),
        beside=tuple(path for path in begin.inputs if path.is_dir()),
    )
    out = out or Path("runs") / (plain_name(Path(student)) + "-selected" * (selection.select_tokens is not None))
    result = run_distill(student, begin, plan, out, training.resume)
    output().print(TrainingResult.of(result).line(), markup=False)
    return result
