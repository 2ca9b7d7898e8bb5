"""The interface of a language model to `generate`, `eval` and `bench`, whatever runs it, and sampling over it.

Shape suffixes: B sequences, T tokens, V vocabulary. Arrays are numpy's, so that a device needs no torch.
"""

import importlib
import math
from bisect import bisect, bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject, require_directory
from sportsllm.inference.lookup import Draft, DraftLookup, PromptLookup
from sportsllm.models.config import ModelConfig

Logits = npt.NDArray[np.float32]


def logits_at_once(vocab_size: int) -> int:
    """Tokens whose logits `stream_logits` holds at once: 128, or fewer, so that they take 32 MB at most."""
    return max(1, min(128, 2**23 // vocab_size))


class Decoder(Protocol):
    """A causal language model with a key/value cache."""

    config: ModelConfig

    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
        """Forget the cache, read one prompt per sequence, and return the logits after its last token, (B, V).

        Args:
            rows: token ids of each prompt; lengths may differ.
            max_length: room to keep in the cache, prompt included; the context length by default.
        """

    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one further token per sequence and return the logits after it, (B, V)."""

    def score(self, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Natural-log probability of every token given those before it, per row; shape (len(row) - 1,).

        Neither reads nor changes the cache.
        """

    def stream_logits(self, row: Sequence[int]) -> Iterator[Logits]:
        """Logits after every token of a sequence, in order: (`logits_at_once`, V), the last may be shorter.

        The next array may overwrite the one before. Neither reads nor changes the cache.
        """


class Verifier(Decoder, Protocol):
    """A decoder that reads several tokens of one sequence at once and can take the last ones back.

    Attributes:
        exact_rows: so many tokens have the same logits, bit by bit, as if they were read one by one.
    """

    exact_rows: int

    def read(self, tokens: Sequence[int]) -> Logits:
        """Read further tokens of the only sequence; returns the logits after each, (T, V)."""

    def rewind(self, count: int) -> None:
        """Forget the last tokens of the only sequence."""


def is_onnx_directory(directory: Path) -> bool:
    """Whether `directory` holds an export rather than a PyTorch checkpoint."""
    return (directory / "model.onnx").exists() or bool(web_graphs(directory))


def web_graphs(directory: Path) -> list[Path]:
    """Graphs where transformers.js looks for them; none in a directory with PyTorch weights."""
    return [] if any(directory.glob("*.safetensors")) else sorted((directory / "onnx").glob("model*.onnx"))


def open_decoder(directory: Path, threads: int | None = None, kernels: str = "auto", provider: str = "cpu") -> Decoder:
    """Open a checkpoint (PyTorch) or an export (ONNX Runtime) for generation and scoring.

    Args:
        kernels: for an export, `auto`, `native` or `portable`: see `export.runtime.session`.
        provider: for an export, `cpu` or another: see `export.runtime.providers`; of PyTorch for a checkpoint.

    Raises:
        ArtifactError: no such directory, or its files are damaged.
        UsageError: kernels for a checkpoint or for a graph that calls none, an unknown provider or device.
        ResourceError: `native` but the kernels are not built, or a provider that is not installed or does not start.
    """
    require_directory(directory, "a checkpoint or an export")
    # By name, so that this package depends neither on `export` nor, on a device, on torch.
    if is_onnx_directory(directory):
        decoder: Decoder = importlib.import_module("export.runtime.decoder").open(directory, threads, kernels, provider)
        return decoder
    if kernels != "auto":
        raise UsageError(f"--kernels {kernels}: {directory} is a checkpoint, which PyTorch runs; export it first")
    decoder = importlib.import_module("sportsllm.inference.torch_decoder").open(directory, threads, provider)
    return decoder


def open_draft(
    directory: Path, target: Path, decoder: Decoder, threads: int | None = None, kernels: str = "auto"
) -> Draft:
    """Open an export whose choices are proposed to the one in `target`.

    Raises:
        UsageError: a checkpoint, other tokens than the target's, or a target that reads tokens one by one.
        ArtifactError, ResourceError, UsageError: see `open_decoder`.
    """
    from sportsllm.text.tokenizer import load_tokenizer

    if not is_onnx_directory(directory):
        raise UsageError(f"--draft {directory}: not an export; make one of a checkpoint with `export`")
    if getattr(decoder, "exact_rows", 1) == 1:
        raise UsageError(
            f"--draft: {target} cannot check several tokens in one step; export INT4 or INT8 blocks, for native kernels"
        )
    draft = open_decoder(directory, threads, kernels)
    if load_tokenizer(directory, draft.config).fingerprint() != load_tokenizer(target, decoder.config).fingerprint():
        raise UsageError(f"--draft {directory}: its tokenizer or chat template is not that of {target}")
    ours, theirs = draft.config.vocab_size, decoder.config.vocab_size
    if ours != theirs:  # rows beyond the tokenizer's tokens, which either could choose
        raise UsageError(f"--draft {directory}: its vocabulary has {ours} rows, that of {target} {theirs}")
    return cast(Draft, draft)


def kernels_of(decoder: Decoder) -> tuple[str, str] | None:
    """What runs an export, `native` or `portable`, and a line for people; None for a checkpoint, which PyTorch runs."""
    chosen = getattr(decoder, "kernels", None)
    return None if chosen is None else (chosen.name, str(chosen))


def placement_of(decoder: Decoder) -> tuple[JsonObject, str] | None:
    """Where an export's nodes run, and a line for people; None on the CPU provider, and for a checkpoint."""
    found = getattr(decoder, "placement", None)
    return None if found is None else (found.to_dict(), str(found))


def log_runtime(decoder: Decoder, provider: str) -> JsonObject:
    """Log what runs an export and where its nodes run; returns the results' `kernels`, `provider` and `placement`."""
    from sportsllm.console import log  # not in a measured process, whose memory counts

    kernels, placement = kernels_of(decoder), placement_of(decoder)
    for found in (kernels, placement):
        if found is not None:
            log(found[1])
    return {
        "kernels": kernels and kernels[0],
        "provider": kernels and provider,
        "placement": placement and placement[0],
    }


def log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    """Natural-log probabilities along the last axis, stable for large logits."""
    shifted: npt.NDArray[np.float64] = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def log_softmax(logits: Logits) -> Logits:
    """`log_probabilities` in float32."""
    return log_probabilities(logits).astype(np.float32)


def require_finite(figure: float, model: str = "the model") -> None:
    """Refuse a figure of logits that are infinite or no numbers: of those every choice is arbitrary.

    Raises:
        ArtifactError: the figure is not finite.
    """
    if not math.isfinite(figure):
        raise ArtifactError(
            f"{model}'s logits are not finite: its weights are damaged, or its activations overflow the type "
            "that it computes or caches in; use float32"
        )


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
        ids = _largest(weights_V, count)
        ranked = weights_V[ids] if not top_k else weights_V[ids[:top_k]]
        cumulative = np.cumsum(ranked) / (ranked.sum() if top_k else total)
        if top_k or cumulative[-1] >= top_p or count >= len(weights_V):
            return ids[: 1 + int(np.count_nonzero(cumulative[:-1] < top_p))]
        count *= 8


def _largest(weights_V: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Ids of positive weights in falling order, ties by id, at least the `count` largest if there are so many."""
    least, _ = _bound(weights_V, count)
    ids = np.flatnonzero(weights_V >= least if least > 0 else weights_V > 0)
    return ids[np.argsort(-weights_V[ids], kind="stable")]


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
    total = cumulative[:, -1]
    target = np.minimum(uniform * total, np.nextafter(total, 0.0))  # stays below the total despite rounding
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
    return ids[places[bisect(cumulative, min(uniform * cumulative[-1], math.nextafter(cumulative[-1], 0)))]]


def choose(logits: Logits, seen: Sequence[int], sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token id from one row of logits, (V,)."""
    return draw_token(penalize(logits, seen, sampling.repetition_penalty), sampling, rng.random())


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
            token = choose(logits_V, seen, sampling, rng)
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
