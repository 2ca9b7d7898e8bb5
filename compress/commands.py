"""The commands distill, prune and quantize. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from sportsllm.train import TrainConfig


def _recovery_defaults(seed: int) -> TrainConfig:
    """What recovery trains with unless told otherwise."""
    from sportsllm.train import TrainConfig

    return TrainConfig(seed=seed, learning_rate=3e-4)


def distill(
    teacher: Annotated[str, typer.Option(help="A checkpoint directory, or a preset's name for runs/<preset>.")],
    student: Annotated[str, typer.Option(help="A preset's name (fresh weights), or a checkpoint directory.")],
    corpus: options.Corpus | None = None,
    out: Annotated[Path | None, typer.Option(help="New directory; runs/<student> if not given.")] = None,
    init: Annotated[Path | None, typer.Option(help="Checkpoint whose weights the student starts from.")] = None,
    valid: options.Valid = None,
    teacher_precision: Annotated[str, typer.Option(help="auto, fp32, bf16, int8 or nf4.")] = "auto",
    kl_weight: Annotated[
        float | None, typer.Option(help="Share of KL in the loss; 0.9 for a fresh student, else 1.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the KL.")] = 1.0,
    steps: options.Steps = None,
    tokens: options.Tokens = None,
    batch_size: options.BatchSize = None,
    accumulation: options.Accumulation = None,
    sequence: options.Sequence = None,
    learning_rate: options.LearningRate = None,
    optimizer: options.Optimizer = None,
    schedule: options.ScheduleKind = None,
    precision: options.Precision = None,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    set: options.Set = None,
) -> dict[str, Any]:
    """Train a smaller student on a teacher's next-token distribution."""
    from compress.distill import distill as run_distill
    from compress.distill import resolve_teacher, teacher_corpus
    from sportsllm.commands import print_training
    from sportsllm.stages import set_threads, train_config
    from sportsllm.train import TrainConfig

    set_threads(threads)
    overrides = {
        "steps": steps,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "sequence": sequence,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "schedule": schedule,
        "precision": precision,
    }
    config = train_config(TrainConfig(seed=seed), tokens, overrides, set or [])
    teacher_directory = resolve_teacher(teacher)
    result = run_distill(
        teacher=teacher_directory,
        student=student,
        init=init,
        corpus=corpus or teacher_corpus(teacher_directory, "corpus"),
        valid=valid or ([] if corpus else teacher_corpus(teacher_directory, "valid")),
        out=out or Path("runs") / Path(student).name,
        config=config,
        teacher_precision=teacher_precision,
        kl_weight=kl_weight,
        temperature=temperature,
        resume=resume,
    )
    print_training(result)
    return result


def prune(
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False)],
    out: options.Out,
    calibration: options.Calibration,
    params: Annotated[float | None, typer.Option(help="Share of the non-embedding parameters to keep.")] = None,
    size_mb: Annotated[float | None, typer.Option(help="Size of the float32 weights to reach, in MB (10^6).")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden channels to keep.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="FFN neurons to keep in each layer.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads to keep in each layer.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads; with fewer and the same --heads they are merged.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers to keep; one contiguous run is dropped.")] = None,
    search: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --params or --size-mb: recover the best shapes on so many tokens, take the winner."
        ),
    ] = None,
    finalists: Annotated[int, typer.Option(min=1, help="Shapes that --search recovers.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Cut and recover in so many steps; --recover is shared out.")] = 1,
    importance: Annotated[str, typer.Option(help="activation, or the baselines magnitude and random.")] = "activation",
    repair: Annotated[
        bool, typer.Option("--repair/--no-repair", help="Refit what stays to the full model's values.")
    ] = True,
    kv_merge: Annotated[str, typer.Option(help="How key/value heads are merged: pca, mean or select.")] = "pca",
    scores: Annotated[
        Path | None, typer.Option(help="importance.safetensors of an earlier run, or its directory.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Pieces of calibration text; up to 256 if not given.")
    ] = None,
    recover: Annotated[
        int | None, typer.Option(min=1, help="Distil from the unpruned model on so many tokens.")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="What recovery distils from, if not the checkpoint itself.")
    ] = None,
    corpus: options.Corpus | None = None,
    valid: options.Valid = None,
    sequence: options.Sequence = None,
    batch_size: options.BatchSize = None,
    accumulation: options.Accumulation = None,
    learning_rate: options.LearningRate = None,
    optimizer: options.Optimizer = None,
    schedule: options.ScheduleKind = None,
    precision: options.Precision = None,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    set: options.Set = None,
) -> dict[str, Any]:
    """Cut width and depth by activation importance; the result is an ordinary LLaMA checkpoint."""
    from compress.distill import teacher_corpus
    from compress.prune_line import Plan, prune_line
    from compress.prune_stage import Cut
    from sportsllm.console import output
    from sportsllm.stages import set_threads, train_config

    set_threads(threads)
    overrides = {
        "sequence": sequence,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "schedule": schedule,
        "precision": precision,
    }
    config = None
    if recover is not None:
        config = train_config(_recovery_defaults(seed), recover, overrides, set or [])
        valid = valid or ([] if corpus else teacher_corpus(teacher or checkpoint, "valid"))
        corpus = corpus or teacher_corpus(teacher or checkpoint, "corpus")
    elif any((set, corpus, valid, teacher, resume, *(value for value in overrides.values()))):
        raise UsageError(
            "training settings, --corpus, --teacher and --resume belong to --recover TOKENS; add it or leave them out"
        )
    given = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads, "layers": layers}
    result = prune_line(
        checkpoint=checkpoint,
        out=out,
        plan=Plan(params, size_mb, given, rounds, search, finalists),
        how=Cut(importance, repair, kv_merge, samples, seed),
        calibration=calibration,
        scores=scores,
        teacher=teacher,
        recover=config,
        corpus=corpus or [],
        valid=valid or [],
        resume=resume,
    )
    shape = ", ".join(f"{key} {value}" for key, value in result["shape"].items())
    output().print(
        f"{out}: {result['parameters']:,} parameters ({shape}), "
        f"{result['share_of_block_parameters']:.1%} of the non-embedding parameters"
    )
    return result


def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False)],
    out: options.Out,
    bits: Annotated[int, typer.Option(help="Bits of the blocks' matrices: 8 or 4.")] = 4,
    method: Annotated[str, typer.Option(help="rtn: round to nearest.")] = "rtn",
    block_size: Annotated[int, typer.Option(help="Numbers that share a scale: 16, 32, 64, 128 or 256.")] = 32,
    head_bits: Annotated[int, typer.Option(help="Bits of embedding and head: 4, 8, or 32 for none.")] = 8,
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric/--asymmetric", help="Zero in the middle of the range, or a zero point a block."),
    ] = True,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Pack the matrices as INT8 or INT4 blocks, exactly as the runtime reads them."""
    from compress.quantize import quantize as run_quantize
    from sportsllm.console import output
    from sportsllm.stages import set_threads

    set_threads(threads)
    result = run_quantize(
        checkpoint=checkpoint,
        out=out,
        bits=bits,
        method=method,
        block_size=block_size,
        head_bits=head_bits,
        symmetric=symmetric,
    )
    output().print(
        f"{out}: {result['parameters']:,} parameters in {result['size_bytes'] / 1e6:.2f} MB, "
        f"INT{bits} blocks of {block_size}, embedding and head {head_bits} bits"
    )
    return result
