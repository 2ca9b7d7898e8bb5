"""Runs an exported graph with ONNX Runtime. Needs neither torch nor onnx: it is what a device has.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, V vocabulary, K key/value heads,
L room in the cache, E head_dim.

Each layer has one key and one value buffer, (B, K, L, E), bound both as `past` and as `present`: the graph
writes new entries in place and nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export.session import KEEP_LOGITS, PROMPT_FILE, cache_type, open_session, raise_if_out_of_memory
from sportsllm.config import ModelConfig, load_config
from sportsllm.decoder import Logits, log_softmax
from sportsllm.errors import ArtifactError, UsageError

# Prompts are read in pieces of this many tokens, so that memory does not grow with the prompt. Time for 512 tokens
# and peak memory of a 97M INT4 model, 2 threads: 405 ms and 179 MB at 64, 342 and 186 at 128, 340 and 200 at 256.
PREFILL_CHUNK = 128
# Scoring holds every position's logits of a piece, vocab_size floats a token.
SCORE_CHUNK = 128


def open(directory: Path, threads: int | None = None) -> OnnxDecoder:
    """Open an export for generation and scoring.

    Args:
        directory: what `export` wrote.
        threads: CPU threads; all cores where not given.

    Raises:
        ArtifactError: a file is missing, cut short or longer than it was written, or the graph is no decoder.
    """
    return OnnxDecoder(directory, threads)


class Cache:
    """Key and value buffers of B sequences, bound to a session once.

    Sequences lie one after the other in memory, so that one sequence, or all of them, can be bound: prompts are
    read one by one, since the operator takes a batch only for single tokens, and then decoded together.
    """

    def __init__(self, config: ModelConfig, dtype: type[np.float32] | type[np.int8], batch: int, length: int) -> None:
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        names = [f"{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")]
        # The system maps zeroed memory when it is first written, 4 kB or 2 MB at once, so unused room costs little.
        self.buffers = {name: np.zeros(shape, dtype=dtype) for name in names}
        self.length = length
        self.lengths = np.zeros(batch, dtype=np.int64)

    def bind(self, session: ort.InferenceSession, first: int, count: int) -> ort.IOBinding:
        """A session's binding of `count` sequences' buffers, starting at sequence `first`."""
        binding = session.io_binding()
        for name, buffer in self.buffers.items():
            rows = buffer[first : first + count]
            for bind, side in ((binding.bind_input, "past_key_values"), (binding.bind_output, "present")):
                bind(f"{side}.{name}", "cpu", 0, buffer.dtype, rows.shape, rows.ctypes.data)
        return binding


class OnnxDecoder:
    """An exported model as `sportsllm.decoder.Decoder`.

    Attributes:
        config: the model's shape.
        prefill_chunk: tokens of a prompt that are read at once.
        use_prompt_graph: whether prompts go through `prompt.onnx`, where the directory has one.
    """

    def __init__(
        self,
        directory: Path,
        threads: int | None = None,
        graph: bytes | None = None,
        prompt_graph: bytes | None = None,
    ) -> None:
        """Load the graph.

        Args:
            directory: see `open`.
            threads: see `open`.
            graph: a variant of the directory's graph to run on its weights instead of `model.onnx`.
            prompt_graph: the same of `prompt.onnx`.

        Raises:
            ArtifactError: see `open`.
        """
        self.config = load_config(directory)
        self.prefill_chunk = PREFILL_CHUNK
        self._directory = directory
        self._session = open_session(directory, self.config, threads, graph)
        self._cache_type = cache_type(self._session, directory)
        self._prompt_session: ort.InferenceSession | None = None
        if (directory / PROMPT_FILE).exists():
            self._prompt_session = open_session(directory, self.config, threads, prompt_graph, PROMPT_FILE)
        self.use_prompt_graph = self._prompt_session is not None
        self._cache: Cache | None = None
        self._decode: ort.IOBinding | None = None

    def prefill(self, rows: Sequence[Sequence[int]], max_length: int | None = None) -> Logits:
        """See `Decoder.prefill`.

        Raises:
            UsageError: no row, an empty one, or one longer than `max_length` or the context.
            ArtifactError: a token id lies outside the vocabulary.
        """
        context = self.config.max_position_embeddings
        room = min(max_length or context, context)
        prompts = [self._checked(row, room) for row in rows]
        if not prompts:
            raise UsageError("no prompt given; give at least one")
        cache = self._emptied_cache(len(prompts), room)
        logits_BV = np.empty((len(prompts), self.config.vocab_size), dtype=np.float32)
        for row, prompt in enumerate(prompts):
            binding, first = cache.bind(self._session, row, 1), 0
            if self.use_prompt_graph:
                first = len(prompt) - 1
                self._fill(cache, row, prompt[:first])
            for start in range(first, len(prompt), self.prefill_chunk):
                piece = prompt[None, start : start + self.prefill_chunk]
                mask = np.ones((1, start + piece.shape[1]), dtype=np.int64)
                self._run(binding, piece, mask, logits_BV[row : row + 1, None], keep=1)
            cache.lengths[row] = len(prompt)
        self._decode = cache.bind(self._session, 0, len(prompts))
        return logits_BV

    def _fill(self, cache: Cache, row: int, ids: npt.NDArray[np.int64], before: int = 0) -> None:
        """Read tokens into a sequence's cache behind `before` others, with the graph that reads prompts."""
        assert self._prompt_session is not None, "asked for before"
        binding = cache.bind(self._prompt_session, row, 1)
        for start in range(0, len(ids), self.prefill_chunk):
            piece = ids[None, start : start + self.prefill_chunk]
            mask = np.ones((1, before + start + piece.shape[1]), dtype=np.int64)
            self._run_bound(self._prompt_session, binding, {"input_ids": piece, "attention_mask": mask})

    def _emptied_cache(self, batch: int, room: int) -> Cache:
        """The old cache where it has the right size, since what lies beyond `lengths` is never read; else a new one."""
        self._decode = None
        if self._cache is None or (len(self._cache.lengths), self._cache.length) != (batch, room):
            self._cache = None  # freed before the new one is made
            self._cache = Cache(self.config, self._cache_type, batch, room)
        self._cache.lengths[:] = 0
        return self._cache

    def step(self, tokens: Sequence[int]) -> Logits:
        """See `Decoder.step`.

        Raises:
            UsageError: there was no `prefill`, the number of tokens is not that of its rows, or the cache is full.
            ArtifactError: a token id lies outside the vocabulary.
        """
        if self._cache is None or self._decode is None:
            raise UsageError("step without a prompt; call prefill first")
        lengths = self._cache.lengths
        if len(tokens) != len(lengths):
            raise UsageError(f"{len(tokens)} tokens for {len(lengths)} sequences; give one for each")
        if int(lengths.max()) >= self._cache.length:
            raise UsageError(
                f"the cache is full at {self._cache.length} tokens; prefill with a larger max_length or stop here"
            )
        ids = self._checked(tokens, len(tokens))[:, None]
        lengths += 1
        # Padding on the right: the operator reads each sequence's length from its sum.
        mask = (np.arange(int(lengths.max())) < lengths[:, None]).astype(np.int64)
        logits_BV = np.empty((len(tokens), self.config.vocab_size), dtype=np.float32)
        self._run(self._decode, ids, mask, logits_BV[:, None], keep=1)
        return logits_BV

    def score(self, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """See `Decoder.score`; a cache of its own is used, and logits of at most `SCORE_CHUNK` tokens are held.

        In the latency profile each piece, once scored, is read again as a prompt, so that what follows it sees
        the cache that prompts leave.

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

    def _all_logits(self, ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, Logits]]:
        """Yield (start, (T, V) logits) piece by piece; a piece is overwritten by the next one."""
        cache = Cache(self.config, self._cache_type, 1, max(len(ids), 1))
        binding = cache.bind(self._session, 0, 1)
        buffer = np.empty((1, min(len(ids), SCORE_CHUNK), self.config.vocab_size), dtype=np.float32)
        for start in range(0, len(ids), SCORE_CHUNK):
            piece = ids[None, start : start + SCORE_CHUNK]
            mask = np.ones((1, start + piece.shape[1]), dtype=np.int64)
            out = buffer[:, : piece.shape[1]]
            self._run(binding, piece, mask, out, keep=0)
            yield start, out[0]
            if self.use_prompt_graph:
                self._fill(cache, 0, piece[0], start)

    def _run(
        self,
        binding: ort.IOBinding,
        ids_BT: npt.NDArray[np.int64],
        mask_BS: npt.NDArray[np.int64],
        logits: Logits,
        keep: int,
    ) -> None:
        """Run the graph on bound buffers; `logits` (B, T or 1, V) is written in place."""
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        kept = np.array([keep], dtype=np.int64)
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BS, KEEP_LOGITS: kept}
        self._run_bound(self._session, binding, inputs)

    def _run_bound(
        self, session: ort.InferenceSession, binding: ort.IOBinding, inputs: Mapping[str, npt.NDArray[np.int64]]
    ) -> None:
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        try:
            session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise_if_out_of_memory(error, self._directory)
            raise

    def _checked(self, row: Sequence[int], limit: int) -> npt.NDArray[np.int64]:
        ids = np.array(row, dtype=np.int64)
        if not 0 < len(ids) <= limit:
            raise UsageError(f"a sequence of {len(ids)} tokens; it must have 1 to {limit}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= self.config.vocab_size)][0])
            raise ArtifactError(
                f"{self._directory}: token id {wrong} lies outside the model's vocabulary of "
                f"{self.config.vocab_size}; use the tokenizer that belongs to this model"
            )
        return ids
