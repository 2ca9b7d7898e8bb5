"""The runtime's key/value cache: in the host's memory, for both ways in which graphs join past and present, and in the
memory of a GPU or another processor that has its own.

Shape suffixes: B sequences, L room for tokens in the cache, V vocabulary. A cached tensor is (B, ..., L, E), where
(..., E) is the part of one token; or (B, ...), a state that every token changes, zeros before the first. On a device it
is one buffer a sequence, since no part of a device's buffer can be bound alone.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export import layout
from export.layout import find_files
from export.runtime.providers import CPU, Provider
from sportsllm.errors import ArtifactError, ResourceError
from sportsllm.inference.decoder import Logits
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import block_state, cached_shape
from sportsllm.models.sublayer import State

Array = npt.NDArray[Any]
CacheType = type[np.float32] | type[np.float16] | type[np.int8]
_TYPES: dict[str, CacheType] = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
_ALIGNMENT = 64  # bytes; of each buffer


@dataclass(frozen=True)
class CachedTensor:
    """A tensor that a graph caches."""

    name: str  # `<layer>.<state>`, after `past_key_values.` and `present.`
    state: State  # its shape, see `sportsllm.models.sublayer.State`
    dtype: CacheType

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Shape of a buffer for `batch` sequences, with room for `length` tokens of each if it caches tokens."""
        return (batch, *cached_shape(self.state, length))


def cached_tensors(session: ort.InferenceSession, directory: Path, config: ModelConfig) -> list[CachedTensor]:
    """What the graph of a model caches.

    Raises:
        ArtifactError: it is of a type that this program does not write, or past and present differ in it.
    """
    types = {item.name: item.type for item in (*session.get_inputs(), *session.get_outputs())}
    found = []
    for layer, state in product(range(config.num_hidden_layers), block_state(config)):
        name = f"{layer}.{state.name}"
        past, present = types[f"{layout.PAST}{name}"], types[f"{layout.PRESENT}{name}"]
        if past != present or past not in _TYPES:
            raise ArtifactError(
                f"{find_files(directory).graph}: caches {name!r} as {past} and {present}; "
                "use a directory that this program's export wrote"
            )
        found.append(CachedTensor(name, state, _TYPES[past]))
    return found


class Cache:
    """Buffers of B sequences, one for every tensor that the graph caches, bound as past and as present.

    The graph writes new entries in place and nothing is copied. Sequences lie one after the other in memory, so that
    one or all of them can be bound: prompts are read one by one, since the operator takes a batch only for single
    tokens, and then decoded together.

    Attributes:
        buffers: (B, ..., L, E) by `<layer>.<state>`, for example `0.key`; states (B, ...).
        states: names of those without tokens.
        length: L.
        lengths: tokens so far of each sequence. A list: between steps numpy's code has left the processor's caches.
    """

    def __init__(
        self, session: ort.InferenceSession, vocab_size: int, tensors: Sequence[CachedTensor], batch: int, length: int
    ) -> None:
        self.buffers = self._allocate(tensors, batch, length)
        self.states = [tensor.name for tensor in tensors if not tensor.state.per_token]
        self.length = length
        self.lengths = [0] * batch
        self._session, self._logits = session, np.empty((batch, 1, vocab_size), dtype=np.float32)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._steps: dict[tuple[int, int], _Step] = {}

    def _allocate(self, tensors: Sequence[CachedTensor], batch: int, length: int) -> dict[str, Array]:
        """A buffer of zeros for each tensor, see `CachedTensor.shape`, all in one piece of memory."""
        shapes = [tensor.shape(batch, length) for tensor in tensors]
        starts = [0]
        for tensor, shape in zip(tensors, shapes, strict=True):
            size_bytes = math.prod(shape) * np.dtype(tensor.dtype).itemsize
            starts.append(starts[-1] + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT)
        memory, buffers = _zero_pages(starts.pop()), {}
        for tensor, shape, start in zip(tensors, shapes, starts, strict=True):
            buffers[tensor.name] = np.frombuffer(memory, tensor.dtype, math.prod(shape), start).reshape(shape)
        return buffers

    def step(self, tokens: Sequence[int], first: int = 0) -> Logits | None:
        """(B, V) logits after one token more of the B sequences from `first`, overwritten by their next step; None,
        and nothing is run, if a step cannot be bound once for all."""
        rows = slice(first, first + len(tokens))
        if (step := self._steps.get((rows.start, rows.stop))) is None:
            step = _Step(self._session, self._binding(rows), self._logits[rows], self.length)
            self._steps[rows.start, rows.stop] = step
        return step.run(tokens, self.lengths[rows])

    def bind(self, rows: slice, new: int) -> ort.IOBinding:
        """The binding of some sequences' buffers, for a run that adds `new` tokens to each."""
        key = (rows.start, rows.stop)
        if key not in self._bindings:
            self._bindings[key] = self._binding(rows)
        return self._bindings[key]

    def _binding(self, rows: slice) -> ort.IOBinding:
        """A new binding of some sequences' buffers as past and as present."""
        binding = self._session.io_binding()
        for name, buffer in self.buffers.items():
            _bind(binding.bind_input, f"{layout.PAST}{name}", buffer[rows])
            _bind(binding.bind_output, f"{layout.PRESENT}{name}", buffer[rows])
        return binding

    def mask(self, rows: slice, new: int) -> npt.NDArray[np.int64]:
        """attention_mask of that run, padded on the right: the operator reads each sequence's length from its sum."""
        lengths = np.array(self.lengths[rows]) + new
        return (np.arange(int(lengths.max())) < lengths[:, None]).astype(np.int64)

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each sequence, `lengths` of them, or all if there are states.

        Nothing beyond a sequence's tokens is read of a cached tensor. A state cannot go back: it stays only if a
        sequence keeps every token, and starts again from zeros else.
        """
        if self.states:
            lengths = [length if length == old else 0 for old, length in zip(self.lengths, lengths, strict=True)]
        self.lengths[:] = lengths
        self._clear_states()

    def _clear_states(self) -> None:
        """Zeros in the states of sequences without tokens."""
        for name in self.states:
            self.buffers[name][[not length for length in self.lengths]] = 0

    def advance(self, rows: slice, new: int) -> None:
        """Count the tokens that the run has added."""
        self.lengths[rows] = [length + new for length in self.lengths[rows]]


class _Step:
    """One token for every sequence of a `Cache`, in buffers that are bound once.

    The mask is as wide as the cache, with zeros behind the last token: the operator reads each length from its sum. So
    no shape changes from step to step, and ONNX Runtime plans its memory once.
    """

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, logits: Logits, length: int) -> None:
        self._session, self._binding, self._logits = session, binding, logits
        batch = len(logits)
        self._masked = [0] * batch  # ones in each row of the mask
        self._ids = np.zeros((batch, 1), dtype=np.int64)
        self._mask = np.zeros((batch, length), dtype=np.int64)
        self._keep = np.ones(1, dtype=np.int64)
        bind_run(binding, self._ids, self._mask, self._keep, self._logits)

    def run(self, tokens: Sequence[int], lengths: Sequence[int]) -> Logits:
        """(B, V) logits after one token each, `lengths` tokens before them."""
        for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
            self._ids[row, 0] = token
            if self._masked[row] == length:
                self._mask[row, length] = 1
            else:
                self._mask[row] = np.arange(self._mask.shape[1]) <= length
            self._masked[row] = length + 1
        self._session.run_with_iobinding(self._binding)
        logits: Logits = self._logits[:, 0]
        return logits


class ConcatCache(Cache):
    """The same buffers for graphs whose present is a new tensor: past is copied out, new tokens are copied in.

    Past is as long as the longest sequence; columns beyond the end of a shorter one are masked.
    """

    def _allocate(self, tensors: Sequence[CachedTensor], batch: int, length: int) -> dict[str, Array]:
        buffers = super()._allocate(tensors, batch, length)
        # Memory for past and present, kept: fresh memory for every step took longer than the step itself.
        self._room = {name: (np.empty_like(buffer), np.empty_like(buffer)) for name, buffer in buffers.items()}
        self._presents: dict[str, Array] = {}  # of the run that is bound
        return buffers

    def step(self, tokens: Sequence[int], first: int = 0) -> None:
        """None: every step has a past of another shape."""

    def bind(self, rows: slice, new: int) -> ort.IOBinding:
        length = max(self.lengths[rows])
        binding = self._session.io_binding()
        for name, buffer in self.buffers.items():
            past, present = self._room[name]
            if name in self.states:
                past, present = buffer[rows], present[rows]
            else:
                old = buffer[rows, ..., :length, :]
                past = _first(past, old.shape)
                np.copyto(past, old)
                present = _first(present, (*old.shape[:-2], length + new, old.shape[-1]))
            _bind(binding.bind_input, f"{layout.PAST}{name}", past)
            _bind(binding.bind_output, f"{layout.PRESENT}{name}", present)
            self._presents[name] = present
        return binding

    def mask(self, rows: slice, new: int) -> npt.NDArray[np.int64]:
        """See `Cache.mask`: the past on the left, a gap where it is short, then the new tokens."""
        lengths = np.array(self.lengths[rows])
        past = np.arange(int(lengths.max())) < lengths[:, None]
        return np.concatenate([past, np.ones((len(lengths), new), dtype=bool)], axis=1).astype(np.int64)

    def advance(self, rows: slice, new: int) -> None:
        for name, present in self._presents.items():
            if name in self.states:
                self.buffers[name][rows] = present
                continue
            for row, length in enumerate(self.lengths[rows]):
                self.buffers[name][rows][row, ..., length : length + new, :] = present[row, ..., -new:, :]
        super().advance(rows, new)


class DeviceCache(Cache):
    """A `Cache` whose buffers stay where the provider computes; between steps only ids and logits are copied.

    The sequences are decoded one after the other. Masks end with the token: not every provider's attention counts a
    sequence's length as the CPU's does, which takes a wider one.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        vocab_size: int,
        tensors: Sequence[CachedTensor],
        batch: int,
        length: int,
        places: Mapping[str, Any],
        provider: Provider,
    ) -> None:
        """Allocate zeros; `places` has the memory of each tensor that is not in the host's, see `device_memory`."""
        self._places, self._provider = places, provider
        super().__init__(session, vocab_size, tensors, batch, length)
        self._keep = np.ones(1, dtype=np.int64)

    def _allocate(self, tensors: Sequence[CachedTensor], batch: int, length: int) -> dict[str, Array]:
        """None in the host's memory: `_values` has a buffer for each tensor of each sequence."""
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        try:
            self._values = [
                {each.name: _zeros(each, length, self._places.get(each.name), self._provider) for each in tensors}
                for _ in range(batch)
            ]
        except Exception as error:  # the runtime's errors have no common class
            raise ResourceError(
                f"--provider {self._provider.name}: no memory there for a cache of {batch} x {length} tokens "
                f"({' '.join(str(error).split())[:200]}); use a shorter text or a smaller model"
            ) from None
        return {}

    def step(self, tokens: Sequence[int], first: int = 0) -> Logits:
        assert first == 0
        for row, (token, length) in enumerate(zip(tokens, self.lengths, strict=True)):
            binding = self.bind(slice(row, row + 1), 1)
            ids, mask = np.array([[token]], dtype=np.int64), np.ones((1, length + 1), dtype=np.int64)
            bind_run(binding, ids, mask, self._keep, self._logits[row : row + 1])
            self._session.run_with_iobinding(binding)
        logits: Logits = self._logits[:, 0]
        return logits

    def _binding(self, rows: slice) -> ort.IOBinding:
        binding = self._session.io_binding()
        for name, value in self._values[rows.start].items():
            binding.bind_ortvalue_input(f"{layout.PAST}{name}", value)
            binding.bind_ortvalue_output(f"{layout.PRESENT}{name}", value)
        return binding

    def _clear_states(self) -> None:
        for values, length in zip(self._values, self.lengths, strict=True):
            for name in self.states if not length else ():
                values[name].update_inplace(np.zeros(values[name].shape(), self._dtypes[name]))


def _zero_pages(size_bytes: int) -> mmap.mmap:
    """Zeros in freshly mapped memory: the system gives a page when it is first written, so unused room costs little.

    `numpy.zeros` may get memory that was used and freed before and must clear, and so take, all of it: 100 MB more for
    a 97M model's float32 cache of 2,048 tokens with 40 in it, where a smaller one had been before.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, max(1, size_bytes))
    # The default is memory that forked processes share.
    return mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _first(array: Array, shape: tuple[int, ...]) -> Array:
    """The beginning of an array's memory as an array of another shape."""
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)


def bind_run(
    binding: ort.IOBinding,
    ids_BT: npt.NDArray[np.int64],
    mask_BS: npt.NDArray[np.int64],
    keep: npt.NDArray[np.int64],
    logits: Logits,
) -> None:
    """Bind what a run reads and writes beside the cache; the arrays must live until it has ended."""
    for name, array in ((layout.INPUT_IDS, ids_BT), (layout.ATTENTION_MASK, mask_BS), (layout.KEEP_LOGITS, keep)):
        _bind(binding.bind_input, name, array)
    _bind(binding.bind_output, layout.LOGITS, logits)


def _bind(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


_HOST = "Cpu"  # ONNX Runtime's name for memory that the processor's own programs read


def device_memory(session: ort.InferenceSession) -> dict[str, Any]:
    """The memory where a session keeps each cached tensor, past and present alike, by name; those of the host not."""
    pasts = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    presents = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
    there = {item.name.removeprefix(layout.PRESENT) for item, memory in presents if memory.name != _HOST}
    names = ((item.name.removeprefix(layout.PAST), memory) for item, memory in pasts)
    return {name: memory for name, memory in names if memory.name != _HOST and name in there}


def _zeros(tensor: CachedTensor, length: int, memory: Any | None, provider: Provider) -> ort.OrtValue:
    """A buffer of zeros for one sequence, see `CachedTensor.shape`."""
    zeros = np.zeros(tensor.shape(1, length), tensor.dtype)
    if memory is None:
        return ort.OrtValue.ortvalue_from_numpy(zeros)
    kind = "npu" if provider.processor == "npu" else "gpu"
    value = ort.OrtValue.ortvalue_from_shape_and_type(
        list(zeros.shape), tensor.dtype, kind, memory.device_id, memory.device_vendor_id
    )
    value.update_inplace(zeros)
    return value


def cache_maker(
    session: ort.InferenceSession, directory: Path, config: ModelConfig, provider: Provider = CPU
) -> Callable[[int, int], Cache]:
    """A function that makes empty caches for a graph, from the number of sequences and the room for tokens in each.

    Raises:
        ArtifactError: the graph has a cache that this program does not know.
    """
    kind = str(session.get_modelmeta().custom_metadata_map.get(layout.CACHE_KEY, layout.IN_PLACE_CACHE))
    kinds: dict[str, type[Cache]] = {layout.IN_PLACE_CACHE: Cache, layout.CONCAT_CACHE: ConcatCache}
    if kind not in kinds:
        raise ArtifactError(f"{find_files(directory).graph}: has a cache of kind {kind!r}; upgrade this program")
    tensors, places = cached_tensors(session, directory, config), {} if provider.is_cpu else device_memory(session)
    if places and kind == layout.IN_PLACE_CACHE:
        return partial(DeviceCache, session, config.vocab_size, tensors, places=places, provider=provider)
    return partial(kinds[kind], session, config.vocab_size, tensors)
