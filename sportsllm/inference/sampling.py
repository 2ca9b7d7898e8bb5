"""Sampling and generation over any `Decoder` (numpy only)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from sportsllm.errors import UsageError
from sportsllm.inference.decoder import Decoder, Logits


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0 and top_p 1 switch a filter off."""

    temperature: float = 0.7
    top_k: int = 50
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"--top-k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p}; it must be in (0, 1], 1 is off")
        if not 0 < self.repetition_penalty < math.inf:
            raise UsageError(f"--repetition-penalty is {self.repetition_penalty}; it must be above 0, 1 is off")


def penalize(logits: Logits, seen: Sequence[int], penalty: float) -> Logits:
    """Divide positive and multiply negative logits of tokens already seen (CTRL, https://arxiv.org/abs/1909.05858)."""
    if penalty == 1.0 or not seen:
        return logits
    result = logits.copy()
    index = np.unique(np.asarray(seen))
    result[index] = np.where(result[index] > 0, result[index] / penalty, result[index] * penalty)
    return result


def probabilities(logits: Logits, sampling: Sampling) -> npt.NDArray[np.float64]:
    """The distributions sampled from, (..., V): temperature, then the top k, then the smallest set of mass top_p.

    Nucleus sampling: https://arxiv.org/abs/1904.09751. Ties at the k-th place keep the lower ids.
    """
    weights = logits.astype(np.float64)
    weights /= sampling.temperature
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    if sampling.top_k or sampling.top_p < 1.0:
        order = np.argsort(-weights, axis=-1, kind="stable")
        ranked = np.take_along_axis(weights, order, axis=-1)
        if sampling.top_k:
            ranked[..., sampling.top_k :] = 0.0
        cumulative = np.cumsum(ranked, axis=-1) / ranked.sum(axis=-1, keepdims=True)
        ranked[..., 1:][cumulative[..., :-1] >= sampling.top_p] = 0.0
        np.put_along_axis(weights, order, ranked, axis=-1)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def draw(logits: Logits, sampling: Sampling, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """One token id of each row of logits (B, V), by the inverse of its cumulative distribution at `uniform` (B,).

    A token takes one random value in [0, 1); Gumbel or exponential noise would take V.
    """
    if sampling.temperature == 0:
        return cast("npt.NDArray[np.int64]", logits.argmax(axis=-1))
    cumulative = np.cumsum(probabilities(logits, sampling), axis=-1)
    total = cumulative[:, -1]
    target = np.minimum(uniform * total, np.nextafter(total, 0.0))  # stays below the total despite rounding
    return cast("npt.NDArray[np.int64]", (cumulative > target[:, None]).argmax(axis=-1))


def choose(logits: Logits, seen: Sequence[int], sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token id from one row of logits, (V,)."""
    return int(draw(penalize(logits, seen, sampling.repetition_penalty)[None], sampling, rng.random(1))[0])


def generate(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, stop_tokens: Sequence[int] = ()
) -> Iterator[int]:
    """Yield new tokens one by one until a stop token (not yielded), the context's end or `max_new_tokens`.

    The prompt begins with the begin token. The decoder's cache is used.

    Raises:
        UsageError: the prompt leaves no room in the context.
    """
    context = decoder.config.max_position_embeddings
    if len(prompt) >= context:
        raise UsageError(f"the prompt has {len(prompt)} tokens, the model's context is {context}; shorten the prompt")
    rng = np.random.default_rng(sampling.seed)
    seen = list(prompt)
    room = min(max_new_tokens, context - len(prompt))
    logits = decoder.prefill([prompt], max_length=len(prompt) + room)[0]
    for position in range(room):
        token = choose(logits, seen, sampling, rng)
        if token in stop_tokens:
            return
        yield token
        seen.append(token)
        if position + 1 < room:
            logits = decoder.step([token])[0]


def until(chunks: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text as it comes, up to the one of `stops` that is complete first, however the chunks cut it.

    The end of what has come is held back as long as it may be the beginning of a stop. No chunk is
    asked for after a stop.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        complete = [(place + len(stop), place) for stop in stops if (place := held.find(stop)) >= 0]
        if complete:
            _, place = min(complete)
            if place:
                yield held[:place]
            return
        keep = max((n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n])), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held
