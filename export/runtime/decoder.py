"""Runs an exported graph with ONNX Runtime. Needs neither torch nor onnx: it is what a device has.

Shape suffixes: B sequences, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from export.runtime.kv_cache import Cache, bind_run, cache_maker
from export.runtime.providers import CPU, Provider, find_provider, one_line, placement
from export.runtime.session import Kernels, kernels_of_directory, open_session, raise_if_out_of_memory
from sportsllm.errors import ArtifactError, ResourceError, SportsLLMError, UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import Logits, log_softmax, logits_at_once
from sportsllm.models.description import block_state

# Prompts are read in chunks of this many tokens, so that memory does not grow with the prompt. Time for 512 tokens
# and peak memory of a 97M INT4 model, 2 threads: 405 ms and 179 MB at 64, 342 and 186 at 128, 340 and 200 at 256.
PREFILL_CHUNK = 128


def open(
    directory: str | Path, threads: int | None = None, kernels: str = "auto", provider: str = "cpu"
) -> OnnxDecoder:
    """Open a directory that `export` wrote for generation and scoring, on all cores if `threads` is not given.

    Raises:
        ArtifactError: a file is missing, truncated or too long, or the graph is not a decoder.
        UsageError, ResourceError: see `export.runtime.session.choose_kernels`, `export.runtime.providers`.
    """
    return OnnxDecoder(Path(directory), threads, kernels=kernels, provider=find_provider(provider))


class OnnxDecoder:
    """An exported model as `sportsllm.inference.decoder.Decoder`.

    Attributes:
        config: the model's shape.
        prefill_chunk: tokens of a prompt that are read at once.
        kernels: what runs the graph.
        exact_rows: see `sportsllm.inference.decoder.Verifier`.
        placement: where its nodes run; None on the CPU provider, which takes all of them.
    """

    def __init__(
        self,
        directory: Path,
        threads: int | None = None,
        graph: bytes | None = None,
        kernels: str | Kernels = "auto",
        provider: Provider = CPU,
    ) -> None:
        """See `open`; `graph` as in `open_session`, which runs portable."""
        self.config = load_config(directory)
        self.prefill_chunk = PREFILL_CHUNK
        self._directory = directory
        if isinstance(kernels, str):
            kernels = kernels_of_directory(directory, kernels if graph is None else "portable", provider)
        self.kernels = kernels
        self._session = open_session(directory, self.config, threads, graph, kernels.library, provider)
        self._make_cache = cache_maker(self._session, directory, self.config, provider)
        self._cache: Cache | None = None
        self._read: list[list[int]] = []  # tokens of the cache's sequences
        # The kernels give up to 16 tokens the logits of one alone; a recurrent state cannot go back.
        recurrent = not all(state.per_token for state in block_state(self.config))
        self.exact_rows = 8 if self.kernels.whole and not recurrent else 1
        self.placement = None if provider.is_cpu else placement(self._session, provider)
        self._keeps_last = provider.is_cpu or self._computes_kept_positions()

    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None, reuse: bool = False) -> Logits:
        """See `Decoder.prefill`.

        With `reuse` the beginning is skipped that a prompt shares with what its place in the cache holds from the last
        prompts and steps, if the cache has room for `max_length` tokens. The logits equal those of a fresh start up to
        the order of additions, which depends on how the text was cut into chunks and on which tokens `step` read.

        Raises:
            UsageError: no row, an empty one, or one longer than `max_length` or the context.
            ArtifactError: a token id lies outside the vocabulary.
        """
        context = self.config.max_position_embeddings
        room = min(max_length or context, context)
        prompts = [self._checked(row, room) for row in rows]
        if not prompts:
            raise UsageError("no prompt given; give at least one")
        cache = self._prepared_cache(prompts, room, reuse)
        logits_BV = np.empty((len(prompts), self.config.vocab_size), dtype=np.float32)
        for row, prompt in enumerate(prompts):
            one = slice(row, row + 1)
            for start in range(cache.lengths[row], len(prompt), self.prefill_chunk):
                self._run(cache, one, prompt[None, start : start + self.prefill_chunk], logits_BV[one, None], keep=1)
        self._cache, self._read = cache, [prompt.tolist() for prompt in prompts]  # only now complete
        return logits_BV

    def held(self, text: Sequence[int]) -> int:
        """How many first tokens of a text `prefill` would not read again as the only one that reuses the cache."""
        if self._cache is None or len(self._read) != 1:
            return 0
        same = _common(self._read[0], np.array(text, dtype=np.int64))
        return same if not self._cache.states or same == len(self._read[0]) else 0

    def _prepared_cache(self, prompts: Sequence[npt.NDArray[np.int64]], room: int, reuse: bool) -> Cache:
        """The old cache if its size fits, since nothing beyond `lengths` is read; else a new one."""
        cache, self._cache = self._cache, None
        fits = cache is not None and (cache.length == room or (reuse and cache.length > room))
        if cache is not None and fits and len(cache.lengths) == len(prompts):
            cache.keep([_common(*pair) if reuse else 0 for pair in zip(self._read, prompts, strict=True)])
            return cache
        cache = None  # freed before the new one is made
        return self._make_cache(len(prompts), room)

    def step(self, tokens: Sequence[int]) -> Logits:
        """See `Decoder.step`.

        Raises:
            UsageError: there was no `prefill`, the number of tokens is not that of its rows, or the cache is full.
            ArtifactError: a token id lies outside the vocabulary.
        """
        if self._cache is None:
            raise UsageError("step without a prompt; call prefill first")
        lengths = self._cache.lengths
        if len(tokens) != len(lengths):
            raise UsageError(f"{len(tokens)} tokens for {len(lengths)} sequences; give one for each")
        if max(lengths) >= self._cache.length:
            full = self._cache.length
            raise UsageError(f"the cache is full at {full} tokens; prefill with a larger max_length or stop here")
        logits_BV = self._step(self._cache, tokens).copy()
        for read, token in zip(self._read, tokens, strict=True):
            read.append(int(token))
        return logits_BV

    def _step(self, cache: Cache, tokens: Sequence[int], first: int = 0) -> Logits:
        """Read one token in each of the cache's sequences from `first`; (B, V), which their next step overwrites."""
        self._inside(tokens)
        rows = slice(first, first + len(tokens))
        try:
            logits_BV = cache.step(tokens, first)
        except RuntimeError as error:
            raise self._explained(error) from None
        if logits_BV is not None:
            cache.advance(rows, 1)
            return logits_BV
        logits_BV = np.empty((len(tokens), self.config.vocab_size), dtype=np.float32)
        self._run(cache, rows, np.array(tokens, dtype=np.int64)[:, None], logits_BV[:, None])
        return logits_BV

    def read(self, tokens: Sequence[int]) -> Logits:
        """See `sportsllm.inference.decoder.Verifier.read`."""
        if self._cache is None:
            raise UsageError("read without a prompt; call prefill first")
        ids = self._checked(tokens, self._cache.length - self._cache.lengths[0])
        logits_TV = np.empty((len(ids), self.config.vocab_size), dtype=np.float32)
        self._run(self._cache, slice(0, 1), ids[None], logits_TV[None], keep=0)
        self._read[0] += ids.tolist()
        return logits_TV

    def rewind(self, count: int) -> None:
        """See `sportsllm.inference.decoder.Verifier.rewind`."""
        assert self._cache is not None and self.exact_rows > 1
        self._cache.lengths[0] -= count
        del self._read[0][len(self._read[0]) - count :]

    def score(self, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """See `Decoder.score`; uses a cache of its own, and holds the logits of at most `logits_at_once` tokens.

        Raises:
            UsageError: an empty row, or one longer than the context.
            ArtifactError: a token id lies outside the vocabulary.
        """
        scores = []
        for row in rows:
            ids = self._checked(row, self.config.max_position_embeddings)
            parts = [np.zeros(0, dtype=np.float32)]
            for start, logits_TV in self._all_logits(ids[:-1]):
                targets = ids[start + 1 : start + 1 + len(logits_TV)]
                parts.append(log_softmax(logits_TV)[np.arange(len(targets)), targets])
            scores.append(np.concatenate(parts))
        return scores

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Logits of every position of one sequence, (T, V), without touching the cache of `prefill`."""
        ids = self._checked(tokens, self.config.max_position_embeddings)
        logits_TV = np.empty((len(ids), self.config.vocab_size), dtype=np.float32)
        for start, part in self._all_logits(ids):
            logits_TV[start : start + len(part)] = part
        return logits_TV

    def stream_logits(self, row: Sequence[int]) -> Iterator[Logits]:
        """See `Decoder.stream_logits`."""
        for _, part in self._all_logits(self._checked(row, self.config.max_position_embeddings)):
            yield part

    def _all_logits(self, ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, Logits]]:
        """Yield (start, (T, V) logits) chunk by chunk; a chunk is overwritten by the next one."""
        cache, most = self._make_cache(1, max(len(ids), 1)), logits_at_once(self.config.vocab_size)
        buffer = np.empty((1, min(len(ids), most), self.config.vocab_size), dtype=np.float32)
        for start in range(0, len(ids), most):
            chunk = ids[None, start : start + most]
            out = buffer[:, : chunk.shape[1]]
            self._run(cache, slice(0, 1), chunk, out, keep=0)
            yield start, out[0]

    def _run(self, cache: Cache, rows: slice, ids_BT: npt.NDArray[np.int64], logits: Logits, keep: int = 1) -> None:
        """Read new tokens of some of the cache's sequences.

        Args:
            cache, rows, ids_BT: the cache, its sequences, and their tokens.
            logits: (B, T or 1, V), written in place.
            keep: number of last positions with logits, 0 for all.
        """
        new, found = ids_BT.shape[1], logits
        if keep and new > keep and not self._keeps_last:
            keep, found = 0, np.empty((*ids_BT.shape, self.config.vocab_size), dtype=np.float32)
        binding, mask, kept = cache.bind(rows, new), cache.mask(rows, new), np.array([keep], dtype=np.int64)
        bind_run(binding, ids_BT, mask, kept, found)
        try:
            self._session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise self._explained(error) from None
        cache.advance(rows, new)
        if found is not logits:
            logits[:] = found[:, -logits.shape[1] :]

    def _explained(self, error: RuntimeError) -> SportsLLMError:
        """Why a run failed: for lack of memory, on a provider other than the CPU's, or in a damaged graph."""
        raise_if_out_of_memory(error, self._directory)
        if self.placement is not None:
            return ResourceError(f"--provider {self.placement.provider.name}: {self._directory}: {one_line(error)}")
        return ArtifactError(f"{self._directory}: ONNX Runtime cannot run it ({one_line(error)}); export it again")

    def _computes_kept_positions(self) -> bool:
        """Whether the provider heeds the optional input that says how many positions' logits are wanted.

        OpenVINO takes the default of such an input for a constant; ONNX Runtime then finds an output of another shape.
        """
        self._keeps_last = True
        one = np.empty((1, 1, self.config.vocab_size), dtype=np.float32)
        try:
            self._run(self._make_cache(1, 2), slice(0, 1), np.zeros((1, 2), dtype=np.int64), one)
        except ResourceError:
            return False
        return True

    def _checked(self, row: Sequence[int], limit: int) -> npt.NDArray[np.int64]:
        ids = np.array(row, dtype=np.int64)
        if not 0 < len(ids) <= limit:
            raise UsageError(f"a sequence of {len(ids)} tokens; it must have 1 to {limit}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            self._inside(ids.tolist())
        return ids

    def _inside(self, tokens: Sequence[int]) -> None:
        """Refuse tokens outside the vocabulary. Plain comparisons: numpy's code has left the caches."""
        for token in tokens:
            if not 0 <= token < self.config.vocab_size:
                raise ArtifactError(
                    f"{self._directory}: token id {token} lies outside the model's vocabulary of "
                    f"{self.config.vocab_size}; use the tokenizer that belongs to this model"
                )


def _common(old: Sequence[int], new: npt.NDArray[np.int64]) -> int:
    """How many of a prompt's first tokens were read before; the last is read again in any case, for its logits."""
    limit = min(len(old), len(new) - 1)
    differ = np.flatnonzero(np.asarray(old[:limit], dtype=np.int64) != new[:limit])
    return int(differ[0]) if len(differ) else limit
