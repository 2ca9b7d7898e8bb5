"""The command prune-vocabulary. Heavy imports are inside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags as options
from sportsllm.cli.flag_groups import FlagGroup


@dataclass(frozen=True)
class VocabularyFlags(FlagGroup):
    """The flags of prune-vocabulary that `prune` understands too, without listing them."""

    vocab_size: Annotated[int | None, typer.Option(min=1, hidden=True)] = None
    min_count: Annotated[int | None, typer.Option(min=1, hidden=True)] = None
    text: Annotated[list[Path] | None, typer.Option(hidden=True)] = None


def prune_vocabulary(
    *,
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False), options.BY_NAME],
    out: options.Out,
    calibration: options.Calibration,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens to keep: those that save the calibration text most tokens.")
    ] = None,
    min_count: Annotated[
        int | None, typer.Option(min=1, help="Instead: keep tokens that each save the text at least this many tokens.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text to score before and after.")] = None,
    threads: options.Threads = None,
) -> dict[str, Any]:
    """Cut the vocabulary to a domain's tokens, in model and tokenizer; fine-tune the result with train CHECKPOINT."""
    from compress.pruning import vocabulary_run
    from sportsllm.console import output
    from sportsllm.processors import set_threads

    set_threads(threads)
    result = vocabulary_run.prune_vocabulary(checkpoint, out, vocab_size, min_count, calibration, text or [])
    output().print(
        f"{out}: {result['vocab_size']:,} of {result['vocab_size_before']:,} tokens, {result['parameters']:,} "
        f"parameters; {result['tokens_per_byte_before']:.4f} -> {result['tokens_per_byte_after']:.4f} tokens per byte"
    )
    if text:
        output().print(
            f"bits per byte {result['bits_per_byte_before']:.4f} -> {result['bits_per_byte_after']:.4f} held out"
        )
    return result
