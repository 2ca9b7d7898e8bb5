"""Key and value buffers of the runtime, for both kinds of cache that exported graphs have.

Shape suffixes as in `export.runtime`, and: P columns of the past that a run is given.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export.session import GROWING_CACHE, cache_kind, cache_type
from sportsllm.config import ModelConfig

Array = npt.NDArray[Any]


class Cache:
    """Buffers of B sequences, one for the keys and one for the values of each layer, bound as past and as present.

    The graph writes new entries in place and nothing is ever copied. Sequences lie one after the other in memory, so
    that one sequence, or all of them, can be bound: prompts are read one by one, since the operator takes a batch
    only for single tokens, and then decoded together.

    Attributes:
        buffers: (B, K, L, E) by `<layer>.key` and `<layer>.value`.
        length: L, room for tokens.
        lengths: (B,), tokens so far of each sequence.
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
        self.buffers = dict(zip(names, _fresh(len(names), shape, dtype), strict=True))
        self.length = length
        self.lengths = np.zeros(batch, dtype=np.int64)
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}

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
        lengths = self.lengths[rows] + new
        return (np.arange(int(lengths.max())) < lengths[:, None]).astype(np.int64)

    def holding(self, other: Cache, tokens: int) -> Self:
        """This cache with the first tokens of another one's sequences."""
        for name, buffer in self.buffers.items():
            buffer[:, :, :tokens] = other.buffers[name][:, :, :tokens]
        return self

    def advance(self, rows: slice, new: int) -> None:
        """Count what the run has added."""
        self.lengths[rows] += new


class GrowingCache(Cache):
    """The same buffers for graphs whose present is a new tensor: past is copied out of them, what is new into them.

    Past has the width of the longest sequence; columns that a shorter one does not have are masked.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Room for past and present, kept: fresh memory for every step took longer than the step itself.
        self._room = {name: (np.empty_like(buffer), np.empty_like(buffer)) for name, buffer in self.buffers.items()}
        self._presents: dict[str, Array] = {}  # of the run that is bound

    def bind(self, session: ort.InferenceSession, rows: slice, new: int) -> ort.IOBinding:
        """See `Cache.bind`."""
        past = int(self.lengths[rows].max())
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
        lengths = self.lengths[rows]
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
    kind = GrowingCache if cache_kind(session, directory) == GROWING_CACHE else Cache
    return partial(kind, config, cache_type(session, directory))


def _fresh(count: int, shape: tuple[int, ...], dtype: type[np.float32] | type[np.int8]) -> Array:
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
