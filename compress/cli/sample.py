"""The command `sample`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="An unquantized checkpoint.", show_default=False), flags.BY_NAME],
    out: flags.Out,
    tokens: Annotated[int, typer.Option(min=1, help="Write at least this many tokens.")] = 1_000_000,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of one text.", show_default="up to 512")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Texts to continue: a .txt file's lines, or the first tokens of another file's documents.",
            show_default="none: from the begin token",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 1 is the model's own distribution.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total; 1 is off.")] = 1.0,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Texts that a thread writes side by side.", show_default="up to 128, by cache size"),
    ] = None,
    seed: flags.Seed = 0,
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Write synthetic text from a model, to calibrate and recover it where its training text is missing."""
    from compress.distillation.synthetic_text import CORPUS, Request, write_corpus
    from sportsllm.console import output
    from sportsllm.inference.sampling import Sampling
    from sportsllm.processors import set_threads

    set_threads(threads)
    sampling = Sampling(temperature, top_k=0, top_p=top_p)
    result = write_corpus(checkpoint, out, Request(tokens, sequence, sampling, prompts, batch_size, seed))
    output().print(
        f"{out / CORPUS}: {result['documents']:,} texts, {result['tokens']:,} tokens, {result['bytes'] / 1e6:.2f} MB, "
        f"{result['tokens_per_s']:,.0f} tokens/s"
    )
    return result
