"""Synthetic text: a corpus that a model writes, to recover it where its training text is missing."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sportsllm.console import log, progress_bar
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import quantization_config
from sportsllm.inference.batch_sampling import NO_TEXT, OWN_DISTRIBUTION, default_rows, sampled_batches
from sportsllm.inference.sampling import Sampling
from sportsllm.processors import training_device
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.training.settings import TrainConfig

CORPUS = "corpus.jsonl"
BEGINNING_TOKENS = 16
"""What is read of a document that is a prompt."""
_BEGINNING_CHARACTERS = 64 * BEGINNING_TOKENS


@dataclass(frozen=True)
class Request:
    """What to write.

    Attributes:
        tokens: at least this many, prompts not counted.
        length: most tokens of a text, prompt and begin token included; if None as many as a training sequence has, or
            the context.
        sampling: temperature and top p; the model's own distribution by default.
        prompts: a file to continue: a line each of .txt and .md, else the documents' first `BEGINNING_TOKENS`.
        batch_size: texts written side by side; by default at most 128, and what fits in 1 GB of cache.
        seed: of the draws and of the prompts' order.
    """

    tokens: int
    length: int | None = None
    sampling: Sampling = OWN_DISTRIBUTION
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
    longest = min(TrainConfig.sequence, config.max_position_embeddings) if request.length is None else request.length
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
                    raise ArtifactError(NO_TEXT.format(checkpoint))
                bar.advance(min(counts["tokens"], request.tokens) - before)
        if not counts["ended"]:
            log(f"no text ended within {longest} tokens: all are cut off")
        seconds = time.perf_counter() - started
        return {**counts, "seconds": seconds, "tokens_per_s": counts["tokens"] / seconds}

    inputs = [checkpoint, *([request.prompts] if request.prompts else [])]
    return run_stage(out, Stage("sample", settings, inputs, seed=request.seed), make)


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
