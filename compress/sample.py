"""The verb `data sample`: synthetic text from a model, to recover it if its training text is missing.

Heavy imports are inside the functions.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.results import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sportsllm.files import JsonObject
    from sportsllm.models.language_model import SportsLLM
    from sportsllm.text.tokenizer import TextTokenizer

CORPUS = "corpus.jsonl"
QUESTION_TOKENS, _ANSWER_TOKENS = 96, 128  # at most, and about
_PLACE = "[the question]"
BEGINNING_TOKENS = 16
"""Tokens of a document that serve as a prompt."""
_BEGINNING_CHARACTERS = 64 * BEGINNING_TOKENS


@dataclass(frozen=True, kw_only=True)
class SampleResult(Result):
    """A corpus that a model wrote.

    Attributes:
        out: path of the directory.
        cached: whether it existed already.
        documents, tokens, bytes: size of the corpus.
        ended: number of documents that the model ended with a stop token.
        seconds, tokens_per_s: time and speed of the work.
    """

    out: Path
    cached: bool = False
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    ended: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0


def sample(
    checkpoint: options.Checkpoint,
    *,
    out: options.Out,
    tokens: Annotated[
        int, typer.Option(parser=options.count, metavar="N", help="Write at least this many tokens.")
    ] = 1_000_000,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Longest text, in tokens.", show_default="up to 512")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Texts to continue: the lines of a .txt file, or the first tokens of the documents of another file.",
            show_default="none: from the begin token",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Write conversations: answers to --prompts, or to questions of its own.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 1 is the model's own distribution.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total; 1 is off.")] = 1.0,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Texts to write at once.", show_default="up to 128, by cache size"),
    ] = None,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> SampleResult:
    """Write synthetic text from a model, to calibrate and recover it if its training text is missing.

    Text n of a seed does not depend on the number of threads.
    """
    import numpy as np

    from sportsllm.console import log, output, progress_bar
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.formats.checkpoint import load_checkpoint
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.packed import quantization_config
    from sportsllm.inference.batch_sampling import NO_TEXT, default_rows, sampled_batches
    from sportsllm.inference.sampling import Sampling
    from sportsllm.processors import set_threads, training_device
    from sportsllm.text.chat import find_template
    from sportsllm.text.tokenizer import load_tokenizer
    from sportsllm.training.settings import TrainConfig

    set_threads(threads)
    sampling = Sampling(temperature, top_k=0, top_p=top_p)
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; sample from the unquantized checkpoint")
    config = load_config(checkpoint)
    longest = min(TrainConfig.sequence, config.max_position_embeddings) if sequence is None else sequence
    if longest > config.max_position_embeddings:
        raise UsageError(f"--sequence is {longest}; the model's context is {config.max_position_embeddings}")
    if temperature == 0:
        raise UsageError("--temperature is 0, which writes the same text each time; give one above 0")
    if chat and find_template(checkpoint)[0] is None:
        raise UsageError(f"--chat: {checkpoint} has no chat template, so it was not trained to chat; leave --chat out")
    rows = batch_size or default_rows(config, longest, tokens)
    asked = {"chat": True} if chat else {}
    settings = {"checkpoint": str(checkpoint), "tokens": tokens, "length": longest, "temperature": temperature}
    settings |= {"top_p": top_p, "prompts": str(prompts) if prompts else None, "batch_size": rows, **asked}

    def make(directory: Path) -> JsonObject:
        started = time.perf_counter()
        tokenizer = load_tokenizer(checkpoint, config)
        model = load_checkpoint(checkpoint).to(training_device()).eval()
        questions, starts, ends = list[str](), [[tokenizer.begin_id]], tokenizer.turn_ends if chat else []
        if chat:
            questions, starts = _asked(prompts, model, tokenizer, tokens, longest, rows, seed)
        elif prompts:
            starts = read_prompts(prompts, tokenizer, longest)
        order = np.random.default_rng(seed).permutation(len(starts)).tolist()
        starts, places = [starts[place] for place in order], cycle(order)
        counts = Counter(documents=0, tokens=0, bytes=0, ended=0)
        with (
            (directory / CORPUS).open("w", encoding="utf-8") as file,
            progress_bar("sample", tokens) as bar,
            closing(sampled_batches(model, tokenizer, starts, sampling, longest, rows, seed, ends)) as batches,
        ):
            while counts["tokens"] < tokens:
                before = counts["tokens"]
                for (start, text), place in zip(next(batches), places, strict=False):
                    written = tokenizer.decode(text.tokens[start if chat else 1 :])
                    if not written.strip() or len(text.tokens) == start or (chat and not text.ended):
                        continue  # an answer that is cut off would teach a student not to end
                    file.write(_line(written, questions[place] if chat else None))
                    size, new = len(written.encode()), len(text.tokens) - start
                    counts.update(documents=1, tokens=new, bytes=size, ended=int(text.ended))
                    if counts["tokens"] >= tokens:
                        break
                if counts["tokens"] == before:
                    raise ArtifactError(NO_TEXT.format(checkpoint))
                bar.advance(min(counts["tokens"], tokens) - before)
        if not counts["ended"] and not chat:
            log(f"no text ended within {longest} tokens: all are cut off")
        seconds = time.perf_counter() - started
        return {**counts, "seconds": seconds, "tokens_per_s": counts["tokens"] / seconds}

    inputs = [checkpoint, *([prompts] if prompts else [])]
    result = SampleResult.of(run_stage(out, Stage("data sample", settings, inputs, seed=seed), make))
    output().print(
        f"{out / CORPUS}: {result.documents:,} texts, {result.tokens:,} tokens, {result.bytes / 1e6:.2f} MB, "
        f"{result.tokens_per_s:,.0f} tokens/s",
    )
    return result


def read_prompts(path: Path, tokenizer: TextTokenizer, longest: int) -> list[list[int]]:
    """Token ids of each prompt, starting with the begin token.

    Raises:
        UsageError: a line leaves no room for a continuation.
        ArtifactError: the file has no text, or cannot be read.
    """
    texts, most = read_questions(path), None
    if not _has_lines(path):
        texts, most = [text[:_BEGINNING_CHARACTERS] for text in texts], min(1 + BEGINNING_TOKENS, longest - 1)
    return _checked([[tokenizer.begin_id, *tokenizer.encode(text)][:most] for text in texts], longest, path)


def _has_lines(path: Path) -> bool:
    return path.is_file() and path.name.lower().removesuffix(".gz").endswith((".txt", ".md"))


def _checked(prompts: list[list[int]], longest: int, path: Path) -> list[list[int]]:
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) >= longest:
            raise UsageError(f"{path}: prompt {number} has {len(prompt)} tokens of a text's {longest}; shorten it")
    return prompts


def _line(written: str, question: str | None) -> str:
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": written}]
    return json.dumps({"text": written} if question is None else {"messages": said}, ensure_ascii=False) + "\n"


def _asked(
    path: Path | None, model: SportsLLM, tokenizer: TextTokenizer, tokens: int, longest: int, rows: int, seed: int
) -> tuple[list[str], list[list[int]]]:
    """Questions of a file, or of the model's own, and the tokens of each as the chat template puts it."""
    count = math.ceil(tokens / _ANSWER_TOKENS)
    questions = own_questions(model, tokenizer, count, longest, rows, seed) if path is None else read_questions(path)
    starts = [tokenizer.encode(text, special=True) for text in _chat_prompts(tokenizer, questions)]
    return questions, _checked(starts, longest, path or Path("own questions"))


def read_questions(path: Path) -> list[str]:
    """The lines of a .txt file, another file's documents, or what conversations begin by asking.

    Raises:
        ArtifactError: there are none, or the file cannot be read.
    """
    from sportsllm.text.documents import decoded, read_documents

    lines = _has_lines(path)  # documents of a long file end inside lines
    texts = [line.removeprefix("\ufeff").strip() for line in decoded(path)] if lines else list[str]()
    for document in () if lines else read_documents([path]):
        if isinstance(document, str):
            texts.append(document)
        else:
            texts += [content for role, content in document.messages if role == "user"][:1]
    if not (found := [text for text in texts if text.strip()]):
        raise ArtifactError(f"{path}: holds no text; give --prompts a file with prompts in it")
    return found


def own_questions(
    model: SportsLLM, tokenizer: TextTokenizer, count: int, longest: int, rows: int, seed: int
) -> list[str]:
    """Questions that a model writes itself after the beginning of a user's turn (Magpie, arxiv.org/abs/2406.08464).

    Raises:
        ArtifactError: it ends none within half of `longest` tokens, or nothing is written before a user's message.
        UsageError: the chat template leaves no room for a question.
    """
    from sportsllm.inference.batch_sampling import NO_TEXT, OWN_DISTRIBUTION, sampled_batches

    (turn,) = _chat_prompts(tokenizer, [_PLACE])
    start, end = (tokenizer.encode(part, special=True) for part in turn.split(_PLACE, 1))
    if not start:
        raise ArtifactError(
            f"{tokenizer.directory}: its chat template writes nothing before a user's message, so the model cannot "
            "make up questions; give --prompts"
        )
    own, found = len(start) + len(end), list[str]()
    if (room := min(longest // 2, longest - 1 - own)) < 1:
        raise UsageError(f"--chat: the template takes {own} tokens of a text's {longest}; give a longer --sequence")
    most = len(start) + min(QUESTION_TOKENS, room)
    batches = sampled_batches(model, tokenizer, [start], OWN_DISTRIBUTION, most, rows, seed, tokenizer.turn_ends)
    with closing(batches):
        for batch in islice(batches, 4 * math.ceil(count / rows)):
            ended = (tokenizer.decode(text.tokens[length:]).strip() for length, text in batch if text.ended)
            found += [each for each in ended if 0 < len(tokenizer.encode(each)) <= room]
            if len(found) >= count:
                return found
    if not found:
        raise ArtifactError(NO_TEXT.format(tokenizer.directory))
    return found


def _chat_prompts(tokenizer: TextTokenizer, questions: Sequence[str]) -> list[str]:
    """Questions as the chat template puts them to the model."""
    from sportsllm.text.chat import render_chats

    assert tokenizer.directory is not None, "the tokenizer is a checkpoint's"
    return list(render_chats(tokenizer.directory, [[{"role": "user", "content": each}] for each in questions]))
