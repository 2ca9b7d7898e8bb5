"""The verb `generate`: stream text from a checkpoint or an export, or its answer to a message."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.commands import Result
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from sportsllm.text.tokenizer import TextTokenizer

_sampling: Any = partial(typer.Option, rich_help_panel="Sampling")


@dataclass(frozen=True, kw_only=True)
class GenerateResult(Result):
    """A continued prompt.

    Attributes:
        prompt, text: as given, and what was generated.
        ids, tokens: ids of the generated tokens, and their number.
        context_full: generation ended since the context was full.
        ttft_ms: time to the first token.
        tokens_per_s: of those after it; None for one token.
        kernels, provider, placement: what ran an export, and where.
    """

    prompt: str
    text: str
    tokens: int
    ids: list[int]
    context_full: bool
    ttft_ms: float
    tokens_per_s: float | None
    kernels: str | None = None
    provider: str | None = None
    placement: dict[str, object] | None = None


def generate(
    directory: options.Directory,
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.", show_default="empty")] = "",
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to continue, from a file.", show_default="none")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer --prompt as a user's message, by the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    top_k: Annotated[int, _sampling(help="Sample from the k most likely tokens; 0 is off.")] = 50,
    top_p: Annotated[
        float, _sampling(help="Sample from the most likely tokens of this total probability; 1 is off.")
    ] = 0.9,
    repetition_penalty: Annotated[float, _sampling(help="Above 1 discourages repeated tokens; 1 is off.")] = 1.0,
    stop: Annotated[
        list[str] | None, _sampling(help="Text that ends generation; may be repeated.", show_default="the model's own")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids instead of text.")] = False,
    seed: options.Seed = 0,
    kernels: options.Kernels = "auto",
    provider: options.Provider = "cpu",
    threads: options.Threads = None,
) -> GenerateResult:
    """Stream text from a checkpoint or an export, or its answer to a message."""
    from sportsllm.inference.decoder import Sampling

    if prompt and prompt_file is not None:
        raise UsageError("give --prompt or --prompt-file, not both")
    try:
        if prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        elif prompt_file is not None:
            prompt = prompt_file.read_text(encoding="utf-8").removesuffix("\n")
        prompt.encode("utf-8")
    except UnicodeError:
        raise UsageError("the prompt is not valid UTF-8") from None
    if "" in (stop or []):
        raise UsageError("--stop is empty; give the text that ends generation")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)

    from sportsllm.console import log, output
    from sportsllm.inference.decoder import generate as sample_tokens
    from sportsllm.inference.decoder import log_runtime, open_decoder, until
    from sportsllm.text.chat import render_chat
    from sportsllm.text.tokenizer import load_tokenizer

    decoder = open_decoder(directory, threads, kernels, provider)
    ran, placement = log_runtime(decoder)
    tokenizer = load_tokenizer(directory, decoder.config)
    stops = [*decoder.config.stop_token_ids, *_single_tokens(tokenizer, stop or [])]
    if chat:
        rendered = render_chat(directory, [{"role": "user", "content": prompt}])
        begin, shown = tokenizer.encode(rendered, special=True), f"{prompt}\n\n"
    else:
        begin, shown = [tokenizer.begin_id, *tokenizer.encode(prompt)], prompt
    if len(begin) >= (context := decoder.config.max_position_embeddings):  # before the prompt is printed
        raise UsageError(f"the prompt has {len(begin):,} tokens, the model's context is {context:,}; shorten it")
    found: list[int] = []
    started = first = time.perf_counter()
    target = output().file

    def write(text: str) -> None:
        target.write(text)
        target.flush()

    def collect() -> Iterator[int]:
        nonlocal first
        for token in sample_tokens(decoder, begin, max_new_tokens, sampling, stops):
            if not found:
                first = time.perf_counter()
            found.append(token)
            if ids:
                write(f"{token} ")
            yield token

    if not ids:
        write(shown)
    pieces = []
    for piece in until(tokenizer.decode_stream(begin, collect()), stop or []):
        pieces.append(piece)
        if not ids:
            write(piece)
    seconds = time.perf_counter() - first
    write("\n")
    full = len(found) < max_new_tokens and len(begin) + len(found) >= context
    if full:
        log(f"the context of {context:,} tokens is full: {len(found):,} of {max_new_tokens:,} were generated")
    return GenerateResult(
        prompt=shown,
        text="".join(pieces),
        tokens=len(found),
        ids=found,
        context_full=full,
        ttft_ms=(first - started) * 1e3,
        tokens_per_s=(len(found) - 1) / seconds if len(found) > 1 else None,
        kernels=ran,
        provider=None if ran is None else provider,
        placement=placement,
    )


def _single_tokens(tokenizer: TextTokenizer, texts: list[str]) -> list[int]:
    """Ids of the texts that are one token, as special ones are, which decoding leaves out."""
    return [ids[0] for ids in (tokenizer.encode(text, special=True) for text in texts) if len(ids) == 1]
