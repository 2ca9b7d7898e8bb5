"""The commands eval and generate. Heavy imports are inside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm.cli import flags
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from sportsllm.inference.decoder import Decoder
    from sportsllm.text.tokenizer import TextTokenizer


def evaluate(
    directory: flags.Directory,
    text: Annotated[list[Path] | None, typer.Option(help="Held-out text to score.", show_default="none")] = None,
    questions: Annotated[
        list[Path] | None, typer.Option(help="Multiple-choice questions, .jsonl.", show_default="none")
    ] = None,
    first_window: Annotated[
        bool, typer.Option("--first-window", help="Score only the first context-length tokens of each document.")
    ] = False,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first N of each file.", show_default="all")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Tokens that are read at once.", show_default="the model's")
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE:FACTOR",
            help="Lengthen a checkpoint's context as `train` does, or none to go beyond it unscaled (with --context).",
            show_default="as the model is",
        ),
    ] = None,
    kernels: flags.Kernels = "auto",
    provider: flags.Provider = "cpu",
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Perplexity, bits per byte and multiple-choice accuracy of a checkpoint or an export."""
    from sportsllm.console import output
    from sportsllm.inference.evaluate import question_accuracy, read_questions, score_documents
    from sportsllm.inference.longer_context import open_with_context
    from sportsllm.text.documents import read_documents
    from sportsllm.text.tokenizer import load_tokenizer

    if not text and not questions:
        raise UsageError("give --text FILE, --questions FILE, or both")
    decoder = open_with_context(directory, context, rope_scaling, threads, kernels, provider)
    ran = _say_what_runs(decoder, provider)
    tokenizer = load_tokenizer(directory, decoder.config)
    result: dict[str, Any] = {"directory": str(directory), **ran}
    result["context"] = decoder.config.max_position_embeddings
    if text:
        score = score_documents(decoder, tokenizer, list(read_documents(text)), first_window=first_window)
        result |= {
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "tokens": score.tokens,
            "bytes": score.bytes,
            "text": [str(path) for path in text],
        }
        output().print(
            f"{directory}: perplexity {score.perplexity:.4f}, bits per byte {score.bits_per_byte:.4f} "
            f"({score.tokens:,} tokens, {score.bytes:,} bytes)"
        )
    asked = {}
    for path in questions or []:
        items = read_questions(path)[:max_questions]
        asked[str(path)] = {"accuracy": question_accuracy(decoder, tokenizer, items), "questions": len(items)}
        chance = sum(1 / len(item.choices) for item in items) / len(items)
        output().print(f"{path}: {asked[str(path)]['accuracy']:.1%} of {len(items)} questions (chance {chance:.1%})")
    if asked:
        result["question_files"] = asked
        if len(asked) == 1:
            result |= next(iter(asked.values()))
    return result


def generate(
    directory: flags.Directory,
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default="empty")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer --prompt as a user's message, by the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is off.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total; 1 is off.")] = 0.9,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repeated tokens; 1 is off.")] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends generation; may be repeated.", show_default="the model's own"),
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids instead of text.")] = False,
    seed: flags.Seed = 0,
    kernels: flags.Kernels = "auto",
    provider: flags.Provider = "cpu",
    threads: flags.Threads = None,
) -> dict[str, Any]:
    """Stream text from a checkpoint or an export, or its answer to a message."""
    from sportsllm import console
    from sportsllm.inference.decoder import open_decoder
    from sportsllm.inference.sampling import Sampling
    from sportsllm.inference.sampling import generate as stream
    from sportsllm.text.chat import render_chat
    from sportsllm.text.stopping import until
    from sportsllm.text.tokenizer import load_tokenizer

    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("--prompt is not valid UTF-8") from None
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    decoder = open_decoder(directory, threads, kernels, provider)
    ran = _say_what_runs(decoder, provider)
    tokenizer = load_tokenizer(directory, decoder.config)
    stops = [*decoder.config.stop_token_ids, *_single_tokens(tokenizer, stop or [])]
    if chat:
        message = {"role": "user", "content": prompt}
        begin, prompt = tokenizer.encode(render_chat(directory, [message]), special=True), f"{prompt}\n\n"
    else:
        begin = [tokenizer.begin_id, *tokenizer.encode(prompt)]
    tokens: list[int] = []
    started = time.perf_counter()
    first = started
    target = console.output().file

    def collect() -> Any:
        nonlocal first
        for token in stream(decoder, begin, max_new_tokens, sampling, stops):
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)
            if ids:
                target.write(f"{token} ")
                target.flush()
            yield token

    pieces = []
    if not ids:
        target.write(prompt)
    for piece in until(tokenizer.decode_stream(begin, collect()), stop or []):
        pieces.append(piece)
        if not ids:
            target.write(piece)
            target.flush()
    target.write("\n")
    seconds = time.perf_counter() - first
    return {
        "prompt": prompt,
        "text": "".join(pieces),
        "tokens": len(tokens),
        "ids": tokens,
        "context_full": _say_if_full(decoder, len(begin), len(tokens), max_new_tokens),
        "ttft_ms": (first - started) * 1e3,
        "tokens_per_s": (len(tokens) - 1) / seconds if len(tokens) > 1 else None,
        **ran,
    }


def _single_tokens(tokenizer: TextTokenizer, texts: list[str]) -> list[int]:
    """The tokens of texts that are one token, as special ones are, which decoding leaves out."""
    if "" in texts:
        raise UsageError("--stop is empty; give the text that ends generation")
    return [ids[0] for ids in (tokenizer.encode(text, special=True) for text in texts) if len(ids) == 1]


def _say_if_full(decoder: Decoder, prompt: int, generated: int, wanted: int) -> bool:
    """Whether generation ended because the context was full, and a line about it."""
    from sportsllm.console import log

    context = decoder.config.max_position_embeddings
    full = generated < wanted and prompt + generated >= context
    if full:
        log(f"the context of {context:,} tokens is full: {generated:,} of {wanted:,} were generated")
    return full


def _say_what_runs(decoder: Decoder, provider: str) -> dict[str, Any]:
    """Lines about what runs an export; and `kernels`, `provider` and `placement`, None for a checkpoint."""
    from sportsllm.console import log
    from sportsllm.inference.decoder import kernels_of, placement_of

    kernels, placement = kernels_of(decoder), placement_of(decoder)
    for found in (kernels, placement):
        if found is not None:
            log(found[1])
    return {
        "kernels": None if kernels is None else kernels[0],
        "provider": None if kernels is None else provider,
        "placement": None if placement is None else placement[0],
    }
