"""The command `import`. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sportsllm.cli import flags


def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            help="A GGUF file of a LLaMA, Qwen2, Qwen3, SmolLM3, Gemma 3, Phi-3 or GPT-2 model.", show_default=False
        ),
    ],
    out: flags.Out,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Longest sequence (tokens) that is declared.", show_default="the model's own"),
    ] = None,
) -> dict[str, Any]:
    """Turn a GGUF file (llama.cpp's format) into a float32 checkpoint with its tokenizer and chat template."""
    from sportsllm.console import output
    from sportsllm.formats.gguf.run import import_gguf

    result = import_gguf(source, out, context)
    output().print(
        f"{out}: {result['name'] or source.stem}, {result['architecture']}, {result['parameters']:,} parameters, "
        f"{result['vocab_size']:,} tokens, {', '.join(result['formats'])} of {result['source_bytes'] / 1e6:.1f} MB "
        f"-> float32 of {result['size_bytes'] / 1e6:.1f} MB; licence: {result['license'] or 'not named'}"
    )
    return result
