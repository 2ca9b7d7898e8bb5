"""Texts sampled side by side with PyTorch, for calibration and for recovery without the model's own training text.

Samples come from the distribution that a student of the model learns (data-free distillation with generated text:
LLM-QAT, https://arxiv.org/abs/2305.17888). Shape suffixes: B sequences, T tokens of the longest text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.formats.checkpoint import open_model
from sportsllm.inference.sampling import Sampling, draw
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.layers import KVCache
from sportsllm.models.memory import kv_cache_bytes_per_token, state_bytes
from sportsllm.processors import batch_threads, training_device
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer

OWN_DISTRIBUTION = Sampling(temperature=1.0, top_k=0, top_p=1.0)
NO_TEXT = "{}: the model produced only empty texts; check the checkpoint and its tokenizer"
_MOST_ROWS, _FEWEST_ROWS, _CHEAP_ROWS, _CACHE_BYTES = 128, 32, 8, 2**30  # 8 rows take 1.2 times as long as 2


class SampledText(NamedTuple):
    """Token ids of a prompt and its continuation, and whether a stop token, which is left out, ended them."""

    tokens: list[int]
    ended: bool


@torch.inference_mode()
def sample_texts(
    model: SportsLLM,
    prompts: Sequence[Sequence[int]],
    stop_tokens: Sequence[int],
    sampling: Sampling,
    uniform_BT: npt.NDArray[np.float64],
    cancelled: Event | None = None,
) -> list[SampledText]:
    """Continue each prompt to a stop token or to T tokens.

    All rows are at one position, so attention needs no mask. Prompts longer than the shortest are read token by token,
    in place of drawn tokens. A row that has ended leaves the batch and the cache.

    Args:
        model: in evaluation mode.
        prompts: each of 1 to T tokens.
        sampling: temperature, top k and top p; there is no repetition penalty.
        uniform_BT: in [0, 1); value (b, t) chooses token t of text b, independent of the other rows.
        cancelled: once set, the unfinished texts are returned.
    """
    device = model.head_weight.device
    longest = uniform_BT.shape[-1]
    tokens_BT = np.zeros((len(prompts), longest), dtype=np.int64)
    starts = np.array([len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
    ends, live = np.full(len(prompts), longest), np.arange(len(prompts))
    cache = KVCache(model.config, len(prompts), longest, device=device)
    first = 0
    for place in range(starts.min(), longest):
        if cancelled is not None and cancelled.is_set():
            ends[live] = place
            break
        read = torch.from_numpy(tokens_BT[live, first:place]).to(device)
        logits_BV = model.logits(model.hidden(read, cache=cache)[:, -1]).float().cpu().numpy()
        first = place
        drawn = place >= starts[live]
        chosen = np.where(drawn, draw(logits_BV, sampling, uniform_BT[live, place]), tokens_BT[live, place])
        tokens_BT[live, place] = chosen
        stopped = drawn & np.isin(chosen, stop_tokens)
        if stopped.any():
            ends[live[stopped]] = place
            going = np.flatnonzero(~stopped)
            if not len(going):
                break
            kept = np.arange(len(going))  # the last rows in the places of those that stopped, so that few move
            kept[stopped[: len(going)]] = going[going >= len(going)]
            live = live[kept]
            cache.keep(torch.from_numpy(kept).to(device))
    return [SampledText(tokens_BT[row, :end].tolist(), bool(end < longest)) for row, end in enumerate(ends)]


def self_generated_text(checkpoint: Path, config: ModelConfig, count: int, length: int) -> list[Tensor]:
    """Token ids of texts that a checkpoint writes from the begin token, (1, T) each with T at most `length`.

    Calibration text if no other is known: a model's own text leads it through the states of its use
    (https://arxiv.org/abs/2410.17170). Sampling stops at `count` times `length` tokens or four times `count` texts.
    """
    tokenizer, samples, tokens = load_tokenizer(checkpoint, config), list[Tensor](), 0
    model = open_model(checkpoint).to(training_device()).eval()
    rows = min(default_rows(config, length, count * length), max(count // 2, min(count, _CHEAP_ROWS)))
    prompts = [[tokenizer.begin_id]]
    with (
        progress_bar("sample", count * length) as bar,
        closing(sampled_batches(model, tokenizer, prompts, OWN_DISTRIBUTION, length, rows, seed=0)) as batches,
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
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    longest: int,
    rows: int,
    seed: int,
    stops: Sequence[int] = (),
) -> Generator[list[tuple[int, SampledText]]]:
    """Endless batches of `rows` texts, each with the length of its prompt, from several threads on a CPU.

    Text n continues prompt n modulo the number of prompts; the seed and n decide the draws. `stops` end a text too.
    """
    ends = sorted({*model.config.stop_token_ids, *stops, tokenizer.begin_id})

    def batch(number: int) -> list[tuple[int, SampledText]]:
        texts = range(number * rows, (number + 1) * rows)
        uniform = np.stack([np.random.default_rng([seed, text]).random(longest) for text in texts])
        starts = [prompts[text % len(prompts)] for text in texts]
        sampled = sample_texts(model, starts, ends, sampling, uniform, cancelled)
        return [(len(start), text) for start, text in zip(starts, sampled, strict=True)]

    cancelled, threads = Event(), torch.get_num_threads() if model.head_weight.device.type == "cpu" else 1
    with batch_threads(threads) as pool:
        if pool is None:
            yield from map(batch, count())
            return
        # Twice as many are queued as are computed, so that short calls do not wait for long ones.
        begun = deque(pool.submit(batch, number) for number in range(2 * threads))
        try:
            for number in count(2 * threads):
                yield begun.popleft().result()
                begun.append(pool.submit(batch, number))
        finally:
            cancelled.set()
            for future in begun:
                future.cancel()


def default_rows(config: ModelConfig, longest: int, tokens: int) -> int:
    """Texts of a batch: as many as the cache holds, but few enough for two batches.

    Independent of the machine, since it decides which texts are kept.
    """
    row_bytes = longest * kv_cache_bytes_per_token(config)["fp32"] + state_bytes(config)["fp32"]
    wanted = max(_FEWEST_ROWS, min(_MOST_ROWS, math.ceil(1.25 * tokens / (2 * longest))))
    return max(1, min(wanted, _CACHE_BYTES // row_bytes))
