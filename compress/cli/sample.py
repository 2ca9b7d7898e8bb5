"""The command `sample`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False)],
    out: flags.Out,
    tokens: Annotated[int, typer.Option(min=1, help="Write at least this many tokens.")] = 1_000_000,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of one text.", show_default="the model's context")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts written side by side.")] = 64,
    seed: flags.Seed = 0,
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Write synthetic text from a model, to calibrate and recover it where its training text is missing."""
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
