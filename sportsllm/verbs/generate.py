"""The verb `generate`: stream text from a checkpoint or an export, its answer to a message, or a conversation."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import Result

if TYPE_CHECKING:
    from sportsllm.text.tokenizer import TextTokenizer

Message = dict[str, str]
_sampling: Any = partial(typer.Option, rich_help_panel="Sampling")


@dataclass(frozen=True, kw_only=True)
class GenerateResult(Result):
    """A prompt and its continuation.

    Attributes:
        prompt, text: the prompt, and the generated text.
        ids, tokens: ids of the generated tokens, and their number.
        context_full: whether generation ended because the context was full.
        ttft_ms: time to the first token.
        tokens_per_s: speed after the first token; None for one token.
        kernels, provider, placement: kernels and execution provider of an export, and the operators that it runs.
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
        bool,
        typer.Option(
            "--chat", help="Answer --prompt in the model's chat template; without --prompt, start a conversation."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of --chat.", show_default="the chat template's")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
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
    draft: options.Draft = None,
    threads: options.Threads = None,
) -> GenerateResult:
    """Generate text with a checkpoint or an export, answer a message, or hold a conversation."""
    from sportsllm.inference.sampling import Sampling

    if prompt and prompt_file is not None:
        raise UsageError("give --prompt or --prompt-file, not both")
    try:
        if prompt == "-":
            prompt = sys.stdin.read().removesuffix("\n")
        elif prompt_file is not None:
            prompt = prompt_file.read_text(encoding="utf-8-sig").removesuffix("\n")
        prompt.encode("utf-8")
    except UnicodeError:
        raise UsageError("the prompt is not valid UTF-8") from None
    if "" in (stop or []):
        raise UsageError("--stop is empty; give the text that ends generation")
    if system is not None and not chat:
        raise UsageError("--system is for conversations; add --chat")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)

    from sportsllm.console import log
    from sportsllm.inference.decoder import log_runtime, open_decoder, open_draft
    from sportsllm.inference.sampling import full_context
    from sportsllm.inference.sampling import generate as sample_tokens
    from sportsllm.text.chat import ChatRenderer
    from sportsllm.text.tokenizer import load_tokenizer

    decoder = open_decoder(directory, threads, kernels, provider)
    runtime = log_runtime(decoder, provider)
    proposer = None if draft is None else open_draft(draft, directory, decoder, threads, kernels)
    tokenizer = load_tokenizer(directory, decoder.config)
    stops = [*decoder.config.stop_token_ids, *tokenizer.special_ids(stop or [])]
    stops += tokenizer.turn_ends if chat else []
    context = decoder.config.max_position_embeddings
    before = [{"role": "system", "content": system}] if system else []
    render = ChatRenderer(directory) if chat else None

    def reply(begin: list[int], shown: str) -> _Reply:
        if len(begin) >= context:  # before the prompt is printed
            raise UsageError(f"the prompt has {len(begin):,} tokens, the model's context is {context:,}; shorten it")
        made = sample_tokens(decoder, begin, max_new_tokens, sampling, stops, proposer)
        found = _stream(tokenizer, begin, made, stop or [], ids, "" if ids else shown)
        if found.exhausted and (full := full_context(context, len(begin), len(found.ids), max_new_tokens)):
            log(full)
            found.context_full = True
        if chat and found.exhausted and len(found.ids) == max_new_tokens:
            log(f"the reply was cut off at --max-new-tokens {max_new_tokens:,}")
        return found

    def answer(messages: list[Message], shown: str = "") -> _Reply:
        assert render is not None, "a conversation"
        return reply(tokenizer.encode(render(messages), special=True), shown)

    shown = f"{prompt}\n\n" if chat and prompt else prompt
    try:
        if chat and not prompt:
            last = _converse(before, answer)
        elif chat:
            last = answer([*before, {"role": "user", "content": prompt}], shown)
        else:
            last = reply([tokenizer.begin_id, *tokenizer.encode(prompt)], shown)
    finally:
        if render is not None:
            render.close()
    if last.stopped:
        raise KeyboardInterrupt
    return GenerateResult.of(vars(last) | {"prompt": prompt, "tokens": len(last.ids)} | runtime)


@dataclass
class _Reply:
    """What was generated, see `GenerateResult`; `exhausted` if no stop text or Ctrl-C ended it, `stopped` by Ctrl-C."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    tokens_per_s: float | None = None
    context_full: bool = False
    exhausted: bool = False
    stopped: bool = False


def _converse(messages: list[Message], answer: Callable[[list[Message]], _Reply]) -> _Reply:
    """Answer what is typed, with all that was said before, until the input ends; returns the last reply."""
    from sportsllm.console import log, typed_line

    commands = "/reset begins anew, Ctrl-C stops a reply, Ctrl-D ends"
    log(f"type a message; {commands}")
    said, last, left = list(messages), _Reply(), False
    while True:
        try:
            text = typed_line("> ").strip()
        except KeyboardInterrupt:
            if left or not sys.stdin.isatty():
                return last
            left = True
            log("press Ctrl-C again, or Ctrl-D, to end")
            continue
        except EOFError:
            return last
        left = False
        if text == "/reset":
            said = list(messages)
            log("new conversation")
        elif re.fullmatch(r"/\w+", text):
            log(f"{text}: unknown command; {commands}")
        elif text:
            said.append({"role": "user", "content": text})
            try:
                reply = answer(said)
            except KeyboardInterrupt:  # before the reply began
                said.pop()
                log("stopped")
                continue
            except UsageError as error:
                log(f"{error}, or type /reset")
                said.pop()
                continue
            last = replace(reply, stopped=False)
            said.append({"role": "assistant", "content": last.text})
            if last.tokens_per_s is not None:
                log(f"{len(last.ids)} tokens, {last.tokens_per_s:.1f} tokens/s")


def _stream(
    tokenizer: TextTokenizer, begin: list[int], made: Iterator[int], stops: list[str], ids: bool, shown: str
) -> _Reply:
    """Print `shown`, then tokens as they are made, as text or `ids`; Ctrl-C stops it."""
    from sportsllm.console import output
    from sportsllm.inference.sampling import until

    reply, target = _Reply(), output().file
    started = first = time.perf_counter()

    def write(text: str) -> None:
        target.write(text)
        target.flush()

    def collect() -> Iterator[int]:
        nonlocal first
        for token in made:
            if not reply.ids:
                first = time.perf_counter()
            reply.ids.append(token)
            if ids:
                write(f"{token} ")
            yield token
        reply.exhausted = True

    write(shown)
    try:
        for piece in until(tokenizer.decode_stream(begin, collect()), stops):
            reply.text += piece
            if not ids:
                write(piece)
    except KeyboardInterrupt:
        reply.stopped = True
    seconds = time.perf_counter() - first
    write("\n")
    reply.ttft_ms = (first - started) * 1e3
    reply.tokens_per_s = (len(reply.ids) - 1) / seconds if len(reply.ids) > 1 else None
    return reply
