"""Texts that a model writes, many side by side: for calibration, and for recovery where its own text is missing.

The samples come from the distribution that a student of the model has to learn (data-free distillation with generated
text: LLM-QAT, https://arxiv.org/abs/2305.17888).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Event
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.inference.batch_sampling import SampledText, sample_texts
from sportsllm.inference.sampling import Sampling
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.size import kv_cache_bytes_per_token, state_bytes
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.training.batch_threads import batch_threads
from sportsllm.training.setup import training_device

OWN_DISTRIBUTION = Sampling(temperature=1.0, top_k=0, top_p=1.0)
NO_TEXT = "{}: the model produced only empty texts; check the checkpoint and its tokenizer"
_MOST_ROWS, _FEWEST_ROWS, _CACHE_BYTES = 128, 32, 2**30
Result = TypeVar("Result")


def self_generated_text(checkpoint: Path, config: ModelConfig, count: int, length: int, seed: int = 0) -> list[Tensor]:
    """Token ids of texts that a checkpoint writes from the begin token, (1, T) each with T at most `length`.

    For statistics where no text is known: what a model writes passes through the states that it computes when it is
    used (https://arxiv.org/abs/2410.17170). They have `count` times `length` tokens together, or there are four times
    `count` of them.
    """
    words, samples, tokens = load_tokenizer(checkpoint, config), list[Tensor](), 0
    model = load_checkpoint(checkpoint).to(training_device()).eval()
    rows = min(default_rows(config, length, count * length), max(1, count // 2))
    with (
        progress_bar("sample", count * length) as bar,
        closing(sampled_batches(model, words, [[words.begin_id]], OWN_DISTRIBUTION, length, rows, seed)) as batches,
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
        raise ArtifactError(NO_TEXT.format(checkpoint))
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
    """Texts of a batch: what the cache has room for, but no more than leaves two batches.

    Whatever the machine: which texts are kept follows from it.
    """
    row_bytes = longest * kv_cache_bytes_per_token(config)["fp32"] + state_bytes(config)["fp32"]
    wanted = max(_FEWEST_ROWS, min(_MOST_ROWS, math.ceil(1.25 * tokens / (2 * longest))))
    return max(1, min(wanted, _CACHE_BYTES // row_bytes))


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
