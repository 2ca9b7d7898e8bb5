"""The command `fit`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags as options

_SHARE_OF_TEACHER = 0.05
_UNKNOWN_TOKENS = 1_000_000
_LEAST_STEPS = 500


def fit(
    teacher: Annotated[Path, typer.Option("--teacher", help="An unquantized checkpoint.")],
    device: Annotated[str, typer.Option("--device", help="Budget to fit: a name from `devices`, or a file.")],
    out: options.Out = Path("runs/fit"),
    corpus: options.Corpus | None = None,
    valid: options.Valid = None,
    calibration: options.CalibrationText = None,
    vocab_size: Annotated[
        list[int] | None, typer.Option(min=1, help="A smaller vocabulary to consider too; may be repeated.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Recover the winner on so many tokens; 5% of the teacher's if not given."),
    ] = None,
    search_tokens: Annotated[
        int | None, typer.Option(min=1, help="Recover a finalist on so many; a tenth of --tokens if not given.")
    ] = None,
    finalists: Annotated[int, typer.Option(min=1, help="Candidates that are recovered briefly.")] = 3,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Time for all of it: fewer finalists are compared if it runs short.")
    ] = None,
    sequence: options.Sequence = None,
    batch_size: options.BatchSize = None,
    accumulation: options.Accumulation = None,
    learning_rate: options.LearningRate = None,
    on_device: Annotated[
        bool, typer.Option("--on-device", help="This machine is the device: what is measured decides.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict and rank only; nothing is made.")] = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Find and make the best model that fits a device's budget, and explain the choice."""
    from benchmarks.search.run import Effort, complaint, passed, run_fit
    from benchmarks.search.tables import print_fit
    from benchmarks.search.trials import Source
    from compress.distillation.run import teacher_corpus
    from sportsllm.console import output
    from sportsllm.errors import ArtifactError, GateError
    from sportsllm.training.setup import set_threads

    set_threads(threads)
    if not teacher.is_dir():
        raise ArtifactError(f"{teacher}: no such directory; give a checkpoint")
    text = tuple(corpus or teacher_corpus(teacher, "corpus"))
    held_out = list(valid or ([] if corpus else teacher_corpus(teacher, "valid")))
    if tokens is None:
        tokens = _default_tokens(teacher)
    training = _training(teacher, tokens, sequence, batch_size, accumulation)
    source = Source(teacher, text, tuple(calibration or text), threads, seed, training | _given(learning_rate))
    result = run_fit(
        source,
        device,
        out,
        Effort(tokens, search_tokens or max(1, tokens // 10), finalists, minutes),
        valid=held_out,
        vocabularies=vocab_size or [],
        on_device=on_device,
        dry_run=dry_run,
    )
    print_fit(output(), result)
    if not dry_run and not passed(result):
        result["complaint"] = complaint(result)
        result["exit_code"] = GateError.exit_code
    return result


def _training(
    teacher: Path, tokens: int, sequence: int | None, batch_size: int | None, accumulation: int | None
) -> dict[str, Any]:
    """Sequence, batch and accumulation of every recovery: small steps where the tokens are few."""
    from sportsllm.console import say
    from sportsllm.models.hf_config import load_config
    from sportsllm.training.loop import TrainConfig

    length = sequence or min(TrainConfig.sequence, load_config(teacher).max_position_embeddings)
    batch = batch_size or TrainConfig.batch_size
    if accumulation is None:
        accumulation = min(TrainConfig.accumulation, max(1, tokens // (_LEAST_STEPS * batch * length)))
        if accumulation < TrainConfig.accumulation:
            say(f"{accumulation} x {batch} sequences a step, so that {tokens:,} tokens are more steps")
    return {"sequence": length, "batch_size": batch, "accumulation": accumulation}


def _given(learning_rate: float | None) -> dict[str, Any]:
    return {} if learning_rate is None else {"learning_rate": learning_rate}


def _default_tokens(teacher: Path) -> int:
    """5% of the tokens that the teacher was trained on, as its manifest says; else a million."""
    from sportsllm.console import say
    from sportsllm.storage.artifact import MANIFEST, read_manifest

    trained = read_manifest(teacher)["results"].get("tokens") if (teacher / MANIFEST).exists() else None
    tokens = round(_SHARE_OF_TEACHER * trained) if trained else _UNKNOWN_TOKENS
    why = "5% of the teacher's" if trained else "the teacher's own are not known"
    say(f"no --tokens given: the winner is recovered on {tokens:,} ({why})")
    return max(1, tokens)
