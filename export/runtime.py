"""Runs an exported graph with ONNX Runtime. Needs neither torch nor onnx: it is what a device has.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, V vocabulary, K key/value heads,
L room in the cache, E head_dim.

Each layer has one key and one value buffer, (B, K, L, E), bound both as `past` and as `present`: the graph
writes new entries in place and nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from sportsllm.artifacts import MANIFEST, read_manifest
from sportsllm.config import ModelConfig, load_config
from sportsllm.decoder import Logits, log_softmax
from sportsllm.errors import ArtifactError, UsageError

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
DATA_BYTES_KEY = "data_bytes"  # in the graph's metadata: how long the data file must be
KEEP_LOGITS = "num_logits_to_keep"  # optional input: 0 gives the logits of all positions, n of the last n
# Prompts are read in pieces of this many tokens, so that memory does not grow with the prompt.
PREFILL_CHUNK = 256
# Scoring needs every position's logits: vocab_size floats a token, so its pieces are smaller.
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

    def __init__(self, session: ort.InferenceSession, config: ModelConfig, batch: int, length: int) -> None:
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        names = [f"{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")]
        # Zeroed memory is mapped by the system when it is first written, so unused room costs nothing.
        self.buffers = {name: np.zeros(shape, dtype=np.float32) for name in names}
        self.length = length
        self.lengths = np.zeros(batch, dtype=np.int64)
        self._session = session

    def bind(self, first: int, count: int) -> ort.IOBinding:
        """A binding of `count` sequences' buffers, starting at sequence `first`."""
        binding = self._session.io_binding()
        for name, buffer in self.buffers.items():
            rows = buffer[first : first + count]
            for bind, side in ((binding.bind_input, "past_key_values"), (binding.bind_output, "present")):
                bind(f"{side}.{name}", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
        return binding


class OnnxDecoder:
    """An exported model as `sportsllm.decoder.Decoder`.

    Attributes:
        config: the model's shape.
        prefill_chunk: tokens of a prompt that are read at once.
    """

    def __init__(self, directory: Path, threads: int | None = None, graph: bytes | None = None) -> None:
        """Load the graph.

        Args:
            directory: see `open`.
            threads: see `open`.
            graph: a variant of the directory's graph to run on its weights instead of `model.onnx`.

        Raises:
            ArtifactError: see `open`.
        """
        self.config = load_config(directory)
        self.prefill_chunk = PREFILL_CHUNK
        self._directory = directory
        self._session = _open_session(directory, threads, graph)
        _check_interface(self._session, self.config, directory)
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
            binding = cache.bind(row, 1)
            for start in range(0, len(prompt), self.prefill_chunk):
                piece = prompt[None, start : start + self.prefill_chunk]
                mask = np.ones((1, start + piece.shape[1]), dtype=np.int64)
                self._run(binding, piece, mask, logits_BV[row : row + 1, None], keep=1)
            cache.lengths[row] = len(prompt)
        self._decode = cache.bind(0, len(prompts))
        return logits_BV

    def _emptied_cache(self, batch: int, room: int) -> Cache:
        """The old cache where it has the right size, since what lies beyond `lengths` is never read; else a new one."""
        if self._cache is None or (len(self._cache.lengths), self._cache.length) != (batch, room):
            self._cache = self._decode = None  # freed before the new one is made
            self._cache = Cache(self._session, self.config, batch, room)
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
        cache = Cache(self._session, self.config, 1, max(len(ids), 1))
        binding = cache.bind(0, 1)
        buffer = np.empty((1, min(len(ids), SCORE_CHUNK), self.config.vocab_size), dtype=np.float32)
        for start in range(0, len(ids), SCORE_CHUNK):
            piece = ids[None, start : start + SCORE_CHUNK]
            mask = np.ones((1, start + piece.shape[1]), dtype=np.int64)
            out = buffer[:, : piece.shape[1]]
            self._run(binding, piece, mask, out, keep=0)
            yield start, out[0]

    def _run(
        self,
        binding: ort.IOBinding,
        ids_BT: npt.NDArray[np.int64],
        mask_BS: npt.NDArray[np.int64],
        logits: Logits,
        keep: int,
    ) -> None:
        """Run the graph on bound buffers; `logits` (B, T or 1, V) is written in place."""
        kept = np.array([keep], dtype=np.int64)
        for name, array in (("input_ids", ids_BT), ("attention_mask", mask_BS), (KEEP_LOGITS, kept)):
            binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)

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


_LOAD_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def session_options(threads: int | None) -> ort.SessionOptions:
    """How sessions run."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


def _open_session(directory: Path, threads: int | None, graph: bytes | None) -> ort.InferenceSession:
    path, data = directory / GRAPH_FILE, directory / DATA_FILE
    _check_sizes(directory)
    options = session_options(threads)
    if graph is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    try:
        session = ort.InferenceSession(graph or str(path), options, providers=["CPUExecutionProvider"])
    except _LOAD_ERRORS as error:
        reason = str(error).splitlines()[0][:300]
        raise ArtifactError(f"{path}: ONNX Runtime cannot load it ({reason}); export it again") from None
    expected = session.get_modelmeta().custom_metadata_map.get(DATA_BYTES_KEY)
    if expected is not None:
        _check_size(data, int(expected))
    return session


def _check_sizes(directory: Path) -> None:
    """ONNX Runtime loads data that is too short or too long without a word, so look first."""
    if (directory / MANIFEST).exists():
        files = read_manifest(directory)["files"]
        for name in (GRAPH_FILE, DATA_FILE):
            if name in files:
                _check_size(directory / name, files[name]["bytes"])
    for name in (GRAPH_FILE, DATA_FILE):
        if not (directory / name).is_file():
            raise ArtifactError(f"{directory / name}: not found; export or copy the directory again")


def _check_size(path: Path, expected: int) -> None:
    found = path.stat().st_size if path.is_file() else -1
    if found != expected:
        state = "not found" if found < 0 else f"{found} bytes instead of {expected}"
        raise ArtifactError(f"{path}: {state}; the export is damaged, copy or make it again")


def _check_interface(session: ort.InferenceSession, config: ModelConfig, directory: Path) -> None:
    """The graph takes and gives what this module binds, in the shapes of config.json."""
    cache = [None, config.num_key_value_heads, None, config.head_dim]
    layers = [f"{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")]
    wanted = {"input_ids": [None, None], "attention_mask": [None, None], KEEP_LOGITS: [1]}
    wanted |= {f"past_key_values.{name}": cache for name in layers}
    wanted |= {f"present.{name}": cache for name in layers} | {"logits": [None, None, config.vocab_size]}
    arguments = (*session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs())
    found = {a.name: [size if isinstance(size, int) else None for size in a.shape] for a in arguments}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ArtifactError(
                f"{directory / GRAPH_FILE}: {name!r} has shape {found.get(name)}, config.json asks for "
                f"{wanted.get(name)}; use a directory that this program's export wrote"
            )
