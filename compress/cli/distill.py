"""The commands distill, prune, sample and quantize. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli import flags
from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import expand_flag_groups
from sportsllm.errors import UsageError

__all__ = ["distill", "sample"]


@expand_flag_groups
def distill(
    *,
    teacher: Annotated[str, typer.Option(help="A checkpoint directory, or a preset's name for runs/<preset>.")],
    student: Annotated[str, typer.Option(help="A preset's name (fresh weights), or a checkpoint directory.")],
    out: Annotated[Path | None, typer.Option(help="New directory; runs/<student> if not given.")] = None,
    init: Annotated[Path | None, typer.Option(help="Checkpoint whose weights the student starts from.")] = None,
    start: Annotated[
        str | None, typer.Option(help="fresh: random weights; of a checkpoint student only the shape is used.")
    ] = None,
    text: options.TextFlags,
    distillation: flags.DistillationFlags,
    lora: options.LoraFlags,
    length: options.LengthFlags,
    training: options.TrainingFlags,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Train a smaller student on a teacher's next-token distribution."""
    from compress.distillation.run import distill as run_distill
    from compress.distillation.run import resolve_teacher, teacher_corpus
    from sportsllm.cli.commands import print_training
    from sportsllm.training.loop import TrainConfig
    from sportsllm.training.lora import adapted_rate
    from sportsllm.training.setup import set_threads

    set_threads(threads)
    if start not in (None, "fresh"):
        raise UsageError(f"--start {start!r} is not known; use fresh, or leave it out")
    defaults = TrainConfig(seed=seed, learning_rate=adapted_rate(TrainConfig.learning_rate, lora.lora_rank))
    config = training.config(defaults, length.tokens, length.steps)
    teacher_directory = resolve_teacher(teacher)
    fresh = init is None and (start == "fresh" or not Path(student).is_dir())
    result = run_distill(
        teacher=teacher_directory,
        student=student,
        init=init,
        corpus=text.corpus or teacher_corpus(teacher_directory, "corpus"),
        valid=text.valid or ([] if text.corpus else teacher_corpus(teacher_directory, "valid")),
        out=out or Path("runs") / Path(student).name,
        config=config,
        objective=distillation.objective(fresh),
        adapters=lora.adapters(config.optimizer),
        fresh=start == "fresh",
        resume=training.resume,
    )
    print_training(result)
    return result


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False)],
    out: options.Out,
    tokens: Annotated[int, typer.Option(min=1, help="Write at least this many tokens.")] = 1_000_000,
    sequence: options.Sequence = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts written side by side.")] = 64,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Write a corpus of a model's own texts, to calibrate and recover it where its training text is not at hand."""
    from compress.distillation.synthetic_text import CORPUS, write_corpus
    from sportsllm.console import output
    from sportsllm.training.setup import set_threads

    set_threads(threads)
    result = write_corpus(
        checkpoint=checkpoint, out=out, tokens=tokens, length=sequence, batch_size=batch_size, seed=seed
    )
    output().print(
        f"{out / CORPUS}: {result['documents']:,} texts, {result['tokens']:,} tokens, {result['bytes'] / 1e6:.2f} MB"
    )
    return result
