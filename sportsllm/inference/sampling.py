"""Sampling from a decoder: the next token, a text of them, and where it stops.

Shape suffixes: B sequences, T tokens, V vocabulary. Arrays are numpy's, so that a device needs no torch.
"""

import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sportsllm.errors import UsageError
from sportsllm.inference.decoder import Decoder, Logits, Verifier, require_finite
from sportsllm.inference.lookup import Draft, DraftLookup, PromptLookup


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
            raise UsageError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be in (0, 1], 1 is off")
        if not 0 < self.repetition_penalty < math.inf:
            raise UsageError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0, 1 is off")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}; it must be 0 or more")


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
        for weights_V in weights.reshape(-1, weights.shape[-1]):
            kept = _kept(weights_V, sampling.top_k, sampling.top_p)
            ranked = weights_V[kept]
            weights_V[:] = 0.0
            weights_V[kept] = ranked
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _kept(weights_V: npt.NDArray[np.float64], top_k: int, top_p: float) -> npt.NDArray[np.int64]:
    """Ids of the largest weights that a sampling keeps. Sorts few of them: all of 49,152 would take 15 ms a token."""
    count, total = top_k or 64, weights_V.sum()
    while True:
        least, _ = _bound(weights_V, count)  # which at least `count` weights reach, if so many are positive
        ids = np.flatnonzero(weights_V >= least if least > 0 else weights_V > 0)
        ids = ids[np.argsort(-weights_V[ids], kind="stable")]  # ties by id
        ranked = weights_V[ids[: top_k or None]]
        cumulative = np.cumsum(ranked) / (ranked.sum() if top_k else total)
        if top_k or cumulative[-1] >= top_p or count >= len(weights_V):
            return ids[: 1 + int(np.count_nonzero(cumulative[:-1] < top_p))]
        count *= 8


def _bound(values_V: npt.NDArray[Any], count: int) -> tuple[float, float]:
    """A value that at least `count` reach, by the maxima of a table's columns, and the largest."""
    rows = len(values_V) // (4 * count)
    if rows < 2:
        return -math.inf, float(values_V.max())
    whole = len(values_V) // rows * rows
    columns = np.maximum.reduce(values_V[:whole].reshape(rows, -1))
    if whole < len(values_V):
        columns[0] = np.maximum(columns[0], values_V[whole:].max())
    columns.sort()  # what is no number comes last
    return float(columns[-count]), float(columns[-1])


def draw(logits: Logits, sampling: Sampling, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """One token id of each row of logits (B, V), by the inverse of its cumulative distribution at `uniform` (B,).

    A token takes one random value in [0, 1); Gumbel or exponential noise would take V.

    Raises:
        ArtifactError: the largest logit is not finite.
    """
    require_finite(float(logits.max()))
    chosen: npt.NDArray[np.int64]
    if sampling.temperature == 0:
        chosen = logits.argmax(axis=-1)
        return chosen
    cumulative = np.cumsum(probabilities(logits, sampling), axis=-1)
    target = uniform * cumulative[:, -1]  # below the total also when rounded: `uniform` is at most 1 - 2**-53
    chosen = (cumulative > target[:, None]).argmax(axis=-1)
    return chosen


def draw_token(logits_V: Logits, sampling: Sampling, uniform: float) -> int:
    """`draw` of one row, which reads the logits as rarely as it can: exponentials and sums of 49,152 take 0.5 ms."""
    if sampling.temperature == 0:
        token = int(logits_V.argmax())  # the first that is no number, if there is one
        require_finite(float(logits_V[token]))
        return token
    if sampling.top_k:
        least, largest = _bound(logits_V, sampling.top_k)
        require_finite(largest)
        ids = np.flatnonzero(logits_V >= least)
        if len(ids) <= 8 * sampling.top_k:
            return _draw_among(ids.tolist(), logits_V[ids].tolist(), sampling, uniform)
    return int(draw(logits_V[None], sampling, np.array([uniform]))[0])


def _draw_among(ids: list[int], logits: list[float], sampling: Sampling, uniform: float) -> int:
    """`draw_token` among rising ids, in Python: after a pass no cache has numpy's many functions, each takes 10 us."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / sampling.temperature) for logit in logits]
    ranked = sorted(range(len(ids)), key=logits.__getitem__, reverse=True)[: sampling.top_k]  # ties by id
    cumulative = list(accumulate([weights[place] for place in ranked]))
    kept = 1 + bisect_left(cumulative, sampling.top_p * cumulative[-1], hi=len(cumulative) - 1)
    places = sorted(ranked[:kept])
    cumulative = list(accumulate([weights[place] for place in places]))
    return ids[places[bisect(cumulative, uniform * cumulative[-1])]]


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_tokens: Sequence[int] = (),
    draft: Draft | None = None,
) -> Iterator[int]:
    """Yield new tokens one by one until a stop token (not yielded), the context's end or `max_new_tokens`.

    The prompt begins with the begin token. The decoder's cache is used, and that of `draft`, a smaller model whose
    choices are proposed.

    Raises:
        UsageError: the prompt leaves no room in the context.
    """
    context = decoder.config.max_position_embeddings
    if len(prompt) >= context:
        raise UsageError(f"the prompt has {len(prompt)} tokens, the model's context is {context}; shorten the prompt")
    rng = np.random.default_rng(sampling.seed)
    seen, room = list(prompt), min(max_new_tokens, context - len(prompt))
    verifier = cast(Verifier, decoder) if getattr(decoder, "exact_rows", 1) > 1 and room > 1 else None
    lookup = None
    if verifier is not None:
        lookup = PromptLookup(prompt) if draft is None else DraftLookup(draft, len(prompt) + room, prompt)
    logits_TV, proposed = decoder.prefill([prompt], max_length=len(prompt) + room), list[int]()
    while True:
        for place, logits_V in enumerate(logits_TV):
            token = draw_token(penalize(logits_V, seen, sampling.repetition_penalty), sampling, rng.random())
            if token in stop_tokens:
                return
            yield token
            seen.append(token)
            if len(seen) - len(prompt) == room:
                return
            if proposed[place : place + 1] != [token]:
                break
        if verifier is None or lookup is None:
            logits_TV = decoder.step([token])
            continue
        if proposed:
            lookup.learn(len(proposed), place)
            verifier.rewind(len(proposed) - place)
        lookup.extend(seen[len(lookup) :])
        proposed = lookup.propose(min(verifier.exact_rows, room - len(seen) + len(prompt)) - 1)
        logits_TV = verifier.read([token, *proposed]) if proposed else decoder.step([token])
        lookup.read(len(proposed))


def full_context(context: int, prompt: int, made: int, asked: int) -> str | None:
    """A line for `made` of `asked` tokens that end because they fill the context behind the prompt, else None."""
    if made >= asked or prompt + made < context:
        return None
    return f"the context of {context:,} tokens is full: {made:,} of {asked:,} were generated"


class StopSearch:
    """Looks for the first complete one of `stops` in text that comes in chunks, however they cut it.

    Attributes:
        held: the end of what has come, held back as long as it may be the beginning of a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self.held = stops, ""

    def push(self, chunk: str) -> tuple[str, bool]:
        """The text that is now known to lie before any stop, and whether a stop follows it."""
        if not self._stops:
            return chunk, False
        self.held += chunk
        found = [(place + len(stop), place) for stop in self._stops if (place := self.held.find(stop)) >= 0]
        if found:
            return self.held[: min(found)[1]], True
        begins = (stop[:n] for stop in self._stops for n in range(min(len(stop), len(self.held) + 1)))
        keep = max((len(begin) for begin in begins if self.held.endswith(begin)), default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text, False


def until(chunks: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text as it comes, up to the one of `stops` that is complete first; see `StopSearch`.

    No chunk is asked for after a stop.
    """
    search = StopSearch(stops)
    for chunk in chunks:
        text, stopped = search.push(chunk)
        if text:
            yield text
        if stopped:
            return
    if search.held:
        yield search.held
