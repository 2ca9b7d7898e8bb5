"""Key and value buffers of the runtime, for both kinds of cache that exported graphs have.

Shape suffixes as in `export.runtime.decoder`, and: P columns of the past that a run is given.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export.metadata import CONCAT_CACHE, KEEP_LOGITS
from export.runtime.session import cache_kind, cache_type
from sportsllm.models.config import ModelConfig

Array = npt.NDArray[Any]


class Cache:
    """Buffers of B sequences, one for the keys and one for the values of each layer, bound as past and as present.

    The graph writes new entries in place and nothing is ever copied. Sequences lie one after the other in memory, so
    that one sequence, or all of them, can be bound: prompts are read one by one, since the operator takes a batch
    only for single tokens, and then decoded together.

    Attributes:
        buffers: (B, K, L, E) by `<layer>.key` and `<layer>.value`.
        length: L, room for tokens.
        lengths: tokens so far of each of the B sequences. A list: between steps numpy's code is cold.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: type[np.float32] | type[np.int8],
        batch: int,
        length: int,
    ) -> None:
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        names = [f"{layer}.{part}" for layer in range(config.num_hidden_layers) for part in ("key", "value")]
        self.buffers = dict(zip(names, _zero_pages(len(names), shape, dtype), strict=True))
        self.length = length
        self.lengths = [0] * batch
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}
        self._steps: dict[int, DecodeStep] = {}

    def steps(self, session: ort.InferenceSession, vocab_size: int) -> DecodeStep | None:
        """The run of a session that adds a token to every sequence; None where what is bound differs by step."""
        if id(session) not in self._steps:
            self._steps[id(session)] = DecodeStep(self, session, vocab_size)
        return self._steps[id(session)]

    def bind(self, session: ort.InferenceSession, rows: slice, new: int) -> ort.IOBinding:
        """A session's binding of some sequences' keys and values, for a run that adds `new` tokens to each."""
        key = (id(session), rows.start, rows.stop)
        if key not in self._bindings:
            binding = session.io_binding()
            for name, buffer in self.buffers.items():
                _bind(binding.bind_input, f"past_key_values.{name}", buffer[rows])
                _bind(binding.bind_output, f"present.{name}", buffer[rows])
            self._bindings[key] = binding
        return self._bindings[key]

    def mask(self, rows: slice, new: int) -> npt.NDArray[np.int64]:
        """attention_mask of that run: padding on the right, the operator reads each sequence's length from its sum."""
        lengths = np.array(self.lengths[rows]) + new
        return (np.arange(int(lengths.max())) < lengths[:, None]).astype(np.int64)

    def copy_prefix_from(self, other: Cache, tokens: int) -> Self:
        """This cache with the first tokens of another one's sequences."""
        for name, buffer in self.buffers.items():
            buffer[:, :, :tokens] = other.buffers[name][:, :, :tokens]
        return self

    def advance(self, rows: slice, new: int) -> None:
        """Count what the run has added."""
        self.lengths[rows] = [length + new for length in self.lengths[rows]]


class DecodeStep:
    """One token for every sequence of a `Cache`, in buffers that are bound once.

    The mask is as wide as the cache, with zeros behind what there is: the operator reads each length from its sum. So
    no shape differs from step to step, and ONNX Runtime plans its memory once.
    """

    def __init__(self, cache: Cache, session: ort.InferenceSession, vocab_size: int) -> None:
        batch = len(cache.lengths)
        self._session = session
        self._masked = [0] * batch  # how much of each row of the mask is set
        self._ids = np.zeros((batch, 1), dtype=np.int64)
        self._mask = np.zeros((batch, cache.length), dtype=np.int64)
        self._keep = np.ones(1, dtype=np.int64)
        self._logits = np.empty((batch, 1, vocab_size), dtype=np.float32)
        self._binding = session.io_binding()
        for name, buffer in cache.buffers.items():
            _bind(self._binding.bind_input, f"past_key_values.{name}", buffer)
            _bind(self._binding.bind_output, f"present.{name}", buffer)
        inputs = {"input_ids": self._ids, "attention_mask": self._mask, KEEP_LOGITS: self._keep}
        for name, array in inputs.items():
            _bind(self._binding.bind_input, name, array)
        _bind(self._binding.bind_output, "logits", self._logits)

    def run(self, tokens: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """(B, V) logits after one token each, which the next run overwrites.

        Args:
            tokens: B ids.
            lengths: B numbers of tokens before these.
        """
        for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
            self._ids[row, 0] = token
            if self._masked[row] == length:
                self._mask[row, length] = 1
            else:
                self._mask[row] = np.arange(self._mask.shape[1]) <= length
            self._masked[row] = length + 1
        self._session.run_with_iobinding(self._binding)
        logits: npt.NDArray[np.float32] = self._logits[:, 0]
        return logits


class ConcatCache(Cache):
    """The same buffers for graphs whose present is a new tensor: past is copied out of them, what is new into them.

    Past has the width of the longest sequence; columns that a shorter one does not have are masked.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Room for past and present, kept: fresh memory for every step took longer than the step itself.
        self._room = {name: (np.empty_like(buffer), np.empty_like(buffer)) for name, buffer in self.buffers.items()}
        self._presents: dict[str, Array] = {}  # of the run that is bound

    def steps(self, session: ort.InferenceSession, vocab_size: int) -> None:
        """See `Cache.steps`."""

    def bind(self, session: ort.InferenceSession, rows: slice, new: int) -> ort.IOBinding:
        """See `Cache.bind`."""
        past = max(self.lengths[rows])
        binding = session.io_binding()
        for name, buffer in self.buffers.items():
            old = buffer[rows, :, :past]
            batch, heads, _, size = old.shape
            given, present = self._room[name]
            given = _first(given, old.shape)
            np.copyto(given, old)
            present = _first(present, (batch, heads, past + new, size))
            _bind(binding.bind_input, f"past_key_values.{name}", given)
            _bind(binding.bind_output, f"present.{name}", present)
            self._presents[name] = present
        return binding

    def mask(self, rows: slice, new: int) -> npt.NDArray[np.int64]:
        """See `Cache.mask`: the past on the left, the gap where it is short, then the new tokens."""
        lengths = np.array(self.lengths[rows])
        past = np.arange(int(lengths.max())) < lengths[:, None]
        return np.concatenate([past, np.ones((len(lengths), new), dtype=bool)], axis=1).astype(np.int64)

    def advance(self, rows: slice, new: int) -> None:
        """See `Cache.advance`."""
        for name, present in self._presents.items():
            for row, length in enumerate(self.lengths[rows]):
                self.buffers[name][rows][row, :, length : length + new] = present[row, :, -new:]
        super().advance(rows, new)


def cache_maker(session: ort.InferenceSession, config: ModelConfig, directory: Path) -> Callable[[int, int], Cache]:
    """What makes empty caches for a graph from a number of sequences and the room for each in tokens.

    Args:
        session: the graph.
        config: its shape.
        directory: its place, for messages.

    Raises:
        ArtifactError: the graph has a cache that this program does not know.
    """
    kind = ConcatCache if cache_kind(session, directory) == CONCAT_CACHE else Cache
    return partial(kind, config, cache_type(session, directory))


def _zero_pages(count: int, shape: tuple[int, ...], dtype: type[np.float32] | type[np.int8]) -> Array:
    """(count, *shape) zeros, mapped anew: the system gives pages when they are first written; unused room costs little.

    `numpy.zeros` may get memory that was used and freed before, which it must clear, and so take, at once: 100 MB more
    for a 97M model's float32 cache of 2,048 tokens with 40 in it, where a smaller one had been before.
    """
    size = count * math.prod(shape)
    length = max(1, size * np.dtype(dtype).itemsize)
    if sys.platform == "win32":
        memory = mmap.mmap(-1, length)
    else:  # the default is memory that forked processes share
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, size).reshape(count, *shape)


def _first(array: Array, shape: tuple[int, ...]) -> Array:
    """The beginning of an array's memory as an array of another shape."""
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)


def _bind(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
