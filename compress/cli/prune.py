"""The command prune. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli import flags
from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import check_not_given, expand_flag_groups
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from sportsllm.training.loop import TrainConfig


_SHARE_OF_PEAK = 0.25
_UNKNOWN_PEAK_RATE = 3e-4


def recovery_rate(source: Path) -> tuple[float, bool]:
    """The recovery's learning rate where none is given, and whether the peak rate of the teacher `source` is known."""
    from sportsllm.training.setup import manifest_setting

    peak = manifest_setting(source, "learning_rate")
    return (_SHARE_OF_PEAK * peak, True) if isinstance(peak, float) else (_UNKNOWN_PEAK_RATE, False)


def _recovery_defaults(seed: int, source: Path, lora_rank: int | None) -> TrainConfig:
    """AdamW at a quarter of the peak rate that the teacher was trained with, ten times that for adapters.

    Found by experiment on a repaired model (docs/log.md); Minitron's recipe is about a fifth.
    """
    from sportsllm.console import say
    from sportsllm.training.loop import TrainConfig
    from sportsllm.training.lora import adapted_rate

    rate, known = recovery_rate(source)
    origin = "a quarter of its teacher's peak" if known else "its teacher's peak is not known"
    if lora_rank is not None:
        rate, origin = adapted_rate(rate, lora_rank), f"{origin}, and more for adapters"
    say(f"recovery's learning rate, if not given: {rate:g} ({origin})")
    return TrainConfig(seed=seed, learning_rate=rate)


@expand_flag_groups
def prune(
    *,
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
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Instead: tokens to keep, those that the calibration text needs most.")
    ] = None,
    min_count: Annotated[
        int | None, typer.Option(min=1, help="Instead: keep tokens that spare the calibration text so many others.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="With --vocab-size or --min-count: held-out text to score before and after."),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --params or --size-mb: recover the best shapes on so many tokens, take the winner."
        ),
    ] = None,
    finalists: Annotated[int, typer.Option(min=1, help="Shapes that --search recovers.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Cut and recover in so many steps; --recover is shared out.")] = 1,
    importance: Annotated[
        str, typer.Option(help="output, activation (Minitron's), or the baselines magnitude and random.")
    ] = "output",
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
    documents: options.TextFlags,
    distillation: flags.DistillationFlags,
    lora: options.LoraFlags,
    training: options.TrainingFlags,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Cut width, depth or vocabulary; the result is an ordinary LLaMA checkpoint."""
    from compress.distillation.recovery import Recovery
    from compress.distillation.run import teacher_corpus
    from compress.pruning.plan import Plan, prune_line
    from compress.pruning.run import Cut
    from sportsllm.console import output
    from sportsllm.training.setup import set_threads

    set_threads(threads)
    given = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads, "layers": layers}
    if recover is None:
        check_not_given("--recover TOKENS", documents, distillation, lora, training)
        if teacher is not None:
            raise UsageError("--teacher belongs to --recover TOKENS; add it or leave it out")
    if vocab_size is not None or min_count is not None:
        others = (params, size_mb, search, recover, scores, *given.values())
        if any(value is not None for value in others):
            raise UsageError(
                "the vocabulary is cut alone, since the result no longer shares its teacher's tokens: cut it first "
                "(--vocab-size or --min-count), fine-tune it with train --init, then prune that"
            )
        return _prune_vocabulary(checkpoint, out, vocab_size, min_count, calibration, text or [])
    if text:
        raise UsageError("--text belongs to --vocab-size or --min-count; recovery is scored on --valid")
    recovery = None
    if recover is not None:
        source = teacher or checkpoint
        config = training.config(_recovery_defaults(seed, source, lora.lora_rank), recover)
        recovery = Recovery(
            config=config,
            corpus=tuple(documents.corpus or teacher_corpus(source, "corpus")),
            valid=tuple(documents.valid or ([] if documents.corpus else teacher_corpus(source, "valid"))),
            objective=distillation.config(fresh=False),
            teacher=teacher,
            adapters=lora.adapters(config.optimizer),
        )
    result = prune_line(
        checkpoint=checkpoint,
        out=out,
        plan=Plan(params, size_mb, given, rounds, search, finalists),
        how=Cut(importance, repair, kv_merge, samples, seed),
        calibration=calibration,
        scores=scores,
        recovery=recovery,
        resume=training.resume,
    )
    shape = ", ".join(f"{key} {value}" for key, value in result["shape"].items())
    output().print(
        f"{out}: {result['parameters']:,} parameters ({shape}), "
        f"{result['share_of_block_parameters']:.1%} of the non-embedding parameters"
    )
    if result.get("valid_bits_per_byte"):
        output().print(
            f"bits per byte {result['bits_per_byte_before_recovery']:.4f} after the cut, "
            f"{result['valid_bits_per_byte']:.4f} recovered on {result['tokens']:,} tokens"
        )
    return result


def _prune_vocabulary(
    checkpoint: Path,
    out: Path,
    vocab_size: int | None,
    min_count: int | None,
    calibration: list[Path],
    text: list[Path],
) -> dict[str, Any]:
    from compress.pruning.vocabulary_run import prune_vocabulary
    from sportsllm.console import output

    result = prune_vocabulary(
        checkpoint=checkpoint, out=out, vocab_size=vocab_size, min_count=min_count, calibration=calibration, text=text
    )
    output().print(
        f"{out}: {result['vocab_size']:,} of {result['vocab_size_before']:,} tokens, {result['parameters']:,} "
        f"parameters; {result['tokens_per_byte_before']:.4f} -> {result['tokens_per_byte_after']:.4f} tokens per byte"
    )
    if text:
        output().print(
            f"bits per byte {result['bits_per_byte_before']:.4f} -> {result['bits_per_byte_after']:.4f} held out"
        )
    return result
