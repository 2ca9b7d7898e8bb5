"""Synthetic text: samples from a model, to calibrate and recover it where its training text is missing.

The samples come from the distribution that a recovered student has to learn (data-free distillation with generated
text: LLM-QAT, https://arxiv.org/abs/2305.17888).
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sportsllm.console import progress_bar, say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.inference.batch_sampling import SampledText, sample_texts
from sportsllm.inference.sampling import Sampling
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.kinds import block_state
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import load_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.training.batch_threads import batch_threads
from sportsllm.training.setup import training_device

CORPUS = "corpus.jsonl"
BEGINNING_TOKENS = 16
"""What is read of a document that is a prompt."""
_BEGINNING_CHARACTERS = 64 * BEGINNING_TOKENS
_MOST_ROWS, _FEWEST_ROWS, _CACHE_BYTES = 128, 32, 2**30
_EMPTY = "{}: the model produced only empty texts; check the checkpoint and its tokenizer"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """What to write.

    Attributes:
        tokens: at least this many, prompts not counted.
        length: most tokens of a text, prompt and begin token included; the context if None.
        sampling: temperature and top p; the model's own distribution by default.
        prompts: a file to continue: a line each of .txt and .md, else the documents' first `BEGINNING_TOKENS`.
        batch_size: texts written side by side; by default at most 128, and what fits in 1 GB of cache.
        seed: of the draws and of the prompts' order.
    """

    tokens: int
    length: int | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, top_k=0, top_p=1.0))
    prompts: Path | None = None
    batch_size: int | None = None
    seed: int = 0


def write_corpus(checkpoint: Path, out: Path, request: Request) -> dict[str, Any]:
    """Sample texts from a checkpoint, each from the begin token or a prompt to a stop token or the most tokens.

    Text n is the same for a seed whatever the number of threads; it depends on the batch's size only through the
    order of additions.

    Args:
        checkpoint: unquantized.
        out: directory to make; holds corpus.jsonl, one `{"text": ...}` a line, prompts included.

    Returns:
        documents, tokens, bytes, ended (texts that the model ended itself), seconds and tokens_per_s.

    Raises:
        UsageError: a length beyond the context, a temperature of 0, or a prompt that leaves no room.
        ArtifactError: quantized, no prompts in the file, or the model ends every text at once.
    """
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; sample from the unquantized checkpoint")
    config = load_config(checkpoint)
    longest = config.max_position_embeddings if request.length is None else request.length
    if longest > config.max_position_embeddings:
        raise UsageError(f"--sequence is {longest}; the model's context is {config.max_position_embeddings}")
    sampling = request.sampling
    if sampling.temperature == 0:
        raise UsageError("--temperature is 0, which writes the same text each time; give one above 0")
    settings = {"checkpoint": str(checkpoint), "tokens": request.tokens, "length": longest}
    settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    rows = request.batch_size or default_rows(config, longest, request.tokens)
    settings |= {"prompts": str(request.prompts) if request.prompts else None, "batch_size": rows}

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        words = load_tokenizer(checkpoint, config)
        prompts = read_prompts(request.prompts, words, longest) if request.prompts else [[words.begin_id]]
        prompts = [prompts[place] for place in np.random.default_rng(request.seed).permutation(len(prompts))]
        model = load_checkpoint(checkpoint).to(training_device()).eval()
        counts = {"documents": 0, "tokens": 0, "bytes": 0, "ended": 0}
        with (
            (directory / CORPUS).open("w", encoding="utf-8") as file,
            progress_bar("sample", request.tokens) as bar,
            closing(sampled_batches(model, words, prompts, sampling, longest, rows, request.seed)) as batches,
        ):
            while counts["tokens"] < request.tokens:
                before = counts["tokens"]
                for start, text in next(batches):
                    written = words.decode(text.tokens[1:])
                    if not written.strip() or len(text.tokens) == start:
                        continue
                    file.write(json.dumps({"text": written}, ensure_ascii=False) + "\n")
                    counts["documents"] += 1
                    counts["tokens"] += len(text.tokens) - start
                    counts["bytes"] += len(written.encode())
                    counts["ended"] += text.ended
                    if counts["tokens"] >= request.tokens:
                        break
                if counts["tokens"] == before:
                    raise ArtifactError(_EMPTY.format(checkpoint))
                bar.advance(min(counts["tokens"], request.tokens) - before)
        if not counts["ended"]:
            say(f"no text ended within {longest} tokens: all are cut off")
        seconds = time.perf_counter() - started
        return {**counts, "seconds": seconds, "tokens_per_s": counts["tokens"] / seconds}

    inputs = [checkpoint, *([request.prompts] if request.prompts else [])]
    return run_stage(out, Stage("sample", settings, inputs, seed=request.seed), make)


def own_text(checkpoint: Path, config: ModelConfig, count: int, length: int, seed: int = 0) -> list[Tensor]:
    """Token ids of texts that a checkpoint writes from the begin token, (1, T) each with T at most `length`.

    For statistics where no text is known: what a model writes passes through the states that it computes when it is
    used (https://arxiv.org/abs/2410.17170). They have `count` times `length` tokens together, or there are four times
    `count` of them.
    """
    words, samples, tokens = load_tokenizer(checkpoint, config), list[Tensor](), 0
    model = load_checkpoint(checkpoint).to(training_device()).eval()
    rows = min(default_rows(config, length, count * length), max(1, count // torch.get_num_threads()))
    plain = Request(count * length).sampling
    with (
        progress_bar("sample", count * length) as bar,
        closing(sampled_batches(model, words, [[words.begin_id]], plain, length, rows, seed)) as batches,
    ):
        while tokens < count * length and len(samples) < 4 * count:
            texts = [text.tokens for _, text in next(batches) if len(text.tokens) > 1]
            if not texts:
                break
            samples += [torch.tensor([ids]) for ids in texts]
            written = sum(map(len, texts))
            tokens += written
            bar.advance(written)
    if not samples:
        raise ArtifactError(_EMPTY.format(checkpoint))
    return samples


def sampled_batches(
    model: SportsLLM,
    words: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    longest: int,
    rows: int,
    seed: int,
) -> Generator[list[tuple[int, SampledText]]]:
    """Batches of `rows` texts without end, each with the length of its prompt, from several threads on a CPU.

    Text n continues prompt n, from the first again behind the last, by draws that the seed and n decide.
    """
    stops = sorted({*model.config.stop_token_ids, words.begin_id})

    def batch(number: int, cancelled: Event) -> list[tuple[int, SampledText]]:
        texts = range(number * rows, (number + 1) * rows)
        uniform = np.stack([np.random.default_rng([seed, text]).random(longest) for text in texts])
        starts = [prompts[text % len(prompts)] for text in texts]
        sampled = sample_texts(model, starts, stops, sampling, uniform, cancelled)
        return [(len(start), text) for start, text in zip(starts, sampled, strict=True)]

    return in_turn(batch, torch.get_num_threads() if model.head_weight.device.type == "cpu" else 1)


def default_rows(config: ModelConfig, longest: int, tokens: int) -> int:
    """Texts of a batch: what the cache has room for, but no more than gives every thread a batch."""
    row_bytes = 4 * longest * config.num_hidden_layers * sum(math.prod(state.shape) for state in block_state(config))
    wanted = max(_FEWEST_ROWS, min(_MOST_ROWS, math.ceil(1.25 * tokens / (torch.get_num_threads() * longest))))
    return max(1, min(wanted, _CACHE_BYTES // row_bytes))


def read_prompts(path: Path, words: TextTokenizer, longest: int) -> list[list[int]]:
    """Token ids of each prompt, the begin token first.

    Raises:
        UsageError: a line is so long that nothing can follow it.
        ArtifactError: the file has no text, or cannot be read.
    """
    documents = read_documents([path])
    if path.name.removesuffix(".gz").endswith((".txt", ".md")):
        lines = (line.strip() for document in documents for line in document.splitlines())
        prompts = [[words.begin_id, *words.encode(line)] for line in lines if line]
    else:
        most = min(1 + BEGINNING_TOKENS, longest - 1)
        prompts = [[words.begin_id, *words.encode(document[:_BEGINNING_CHARACTERS])][:most] for document in documents]
    if not prompts:
        raise ArtifactError(f"{path}: holds no text; give --prompts a file with prompts in it")
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) >= longest:
            raise UsageError(f"{path}: prompt {number} has {len(prompt)} tokens of a text's {longest}; shorten it")
    return prompts


def in_turn(work: Callable[[int, Event], Result], threads: int) -> Generator[Result]:
    """Results of work(0), work(1), ... in order, computed `threads` at a time, until the generator is closed.

    Twice as many are begun or wait, so that a short one need not wait for a long one. Closing sets the event that
    every call was given.
    """
    cancelled = Event()
    with batch_threads(threads) as pool:
        if pool is None:
            yield from (work(number, cancelled) for number in count())
            return
        numbers = count()
        begun = deque(pool.submit(work, next(numbers), cancelled) for _ in range(2 * threads))
        try:
            while True:
                yield begun.popleft().result()
                begun.append(pool.submit(work, next(numbers), cancelled))
        finally:
            cancelled.set()
            for future in begun:
                future.cancel()
