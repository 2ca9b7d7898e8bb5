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
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export import metadata
from export.paths import find_files
from export.runtime.providers import CPU, Provider
from export.runtime.session import CachedTensor, cached_tensors
from sportsllm.errors import ArtifactError, ResourceError

Array = npt.NDArray[Any]
_ALIGNMENT = 64  # bytes; of each buffer


class Cache:
    """Buffers of B sequences, one for every tensor that the graph caches, bound as past and as present.

    The graph writes new entries in place and nothing is copied. Sequences lie one after the other in memory, so that
    one or all of them can be bound: prompts are read one by one, since the operator takes a batch only for single
    tokens, and then decoded together.

    Attributes:
        buffers: (B, ..., L, E) by `<layer>.<state>`, for example `0.key`; states (B, ...).
        length: L.
        lengths: tokens so far of each sequence. A list: between steps numpy's code has left the processor's caches.
    """

    def __init__(self, tensors: Sequence[CachedTensor], batch: int, length: int) -> None:
        self.buffers = _empty_buffers(tensors, batch, length)
        self.states = [tensor.name for tensor in tensors if not tensor.state.per_token]
        self.length = length
        self.lengths = [0] * batch
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}
        self._steps: dict[int, DecodeStep] = {}

    def decode_step(self, session: ort.InferenceSession, vocab_size: int) -> Step | None:
        """A session's run for one token more of every sequence; None if it cannot be bound once for all steps."""
        if id(session) not in self._steps:
            self._steps[id(session)] = DecodeStep(self, session, vocab_size)
        return self._steps[id(session)]

    def bind(self, session: ort.InferenceSession, rows: slice, new: int) -> ort.IOBinding:
        """A session's binding of some sequences' buffers, for a run that adds `new` tokens to each."""
        key = (id(session), rows.start, rows.stop)
        if key not in self._bindings:
            self._bindings[key] = self.binding(session, rows)
        return self._bindings[key]

    def binding(self, session: ort.InferenceSession, rows: slice) -> ort.IOBinding:
        """A new binding of some sequences' buffers as past and as present."""
        binding = session.io_binding()
        for name, buffer in self.buffers.items():
            bind_array(binding.bind_input, f"{metadata.PAST}{name}", buffer[rows])
            bind_array(binding.bind_output, f"{metadata.PRESENT}{name}", buffer[rows])
        return binding

    def mask(self, rows: slice, new: int) -> npt.NDArray[np.int64]:
        """attention_mask of that run, padded on the right: the operator reads each sequence's length from its sum."""
        lengths = np.array(self.lengths[rows]) + new
        return (np.arange(int(lengths.max())) < lengths[:, None]).astype(np.int64)

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each sequence, `lengths` of them, or all where there are states.

        Nothing beyond a sequence's tokens is read of a cached tensor. A state cannot go back: it stays only where a
        sequence keeps every token, and starts again from zeros else.
        """
        self.lengths[:] = self._kept(self.lengths, lengths)
        self._clear_states()

    def _kept(self, have: Sequence[int], wanted: Sequence[int]) -> list[int]:
        if not self.states:
            return list(wanted)
        return [length if length == old else 0 for old, length in zip(have, wanted, strict=True)]

    def _clear_states(self) -> None:
        """Zeros in the states of sequences without tokens."""
        for name in self.states:
            self.buffers[name][[not length for length in self.lengths]] = 0

    def copy_prefix_from(self, other: Cache, lengths: Sequence[int]) -> None:
        """Take over the first tokens of another cache's sequences, `lengths` of each; of states see `keep`."""
        longest = max(lengths)
        for name, buffer in self.buffers.items():
            if name in self.states:
                buffer[:] = other.buffers[name]
            else:
                buffer[..., :longest, :] = other.buffers[name][..., :longest, :]
        self.lengths[:] = self._kept(other.lengths, lengths)
        self._clear_states()

    def advance(self, rows: slice, new: int) -> None:
        """Count the tokens that the run has added."""
        self.lengths[rows] = [length + new for length in self.lengths[rows]]


class Step(Protocol):
    """A run for one token more of every sequence."""

    def run(self, tokens: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """(B, V) logits after one token each, `lengths` tokens before them; the next run overwrites these logits."""


class DecodeStep:
    """One token for every sequence of a `Cache`, in buffers that are bound once.

    The mask is as wide as the cache, with zeros behind the last token: the operator reads each length from its sum. So
    no shape changes from step to step, and ONNX Runtime plans its memory once.
    """

    def __init__(self, cache: Cache, session: ort.InferenceSession, vocab_size: int) -> None:
        batch = len(cache.lengths)
        self._session = session
        self._masked = [0] * batch  # ones in each row of the mask
        self._ids = np.zeros((batch, 1), dtype=np.int64)
        self._mask = np.zeros((batch, cache.length), dtype=np.int64)
        self._keep = np.ones(1, dtype=np.int64)
        self._logits = np.empty((batch, 1, vocab_size), dtype=np.float32)
        self._binding = cache.binding(session, slice(None))
        inputs = {metadata.INPUT_IDS: self._ids, metadata.ATTENTION_MASK: self._mask, metadata.KEEP_LOGITS: self._keep}
        for name, array in inputs.items():
            bind_array(self._binding.bind_input, name, array)
        bind_array(self._binding.bind_output, metadata.LOGITS, self._logits)

    def run(self, tokens: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """See `Step.run`."""
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
    """The same buffers for graphs whose present is a new tensor: past is copied out, new tokens are copied in.

    Past is as long as the longest sequence; columns beyond the end of a shorter one are masked.
    """

    def __init__(self, tensors: Sequence[CachedTensor], batch: int, length: int) -> None:
        super().__init__(tensors, batch, length)
        # Memory for past and present, kept: fresh memory for every step took longer than the step itself.
        self._room = {name: (np.empty_like(buffer), np.empty_like(buffer)) for name, buffer in self.buffers.items()}
        self._presents: dict[str, Array] = {}  # of the run that is bound

    def decode_step(self, session: ort.InferenceSession, vocab_size: int) -> None:
        """None: every step has a past of another shape."""

    def bind(self, session: ort.InferenceSession, rows: slice, new: int) -> ort.IOBinding:
        length = max(self.lengths[rows])
        binding = session.io_binding()
        for name, buffer in self.buffers.items():
            past, present = self._room[name]
            if name in self.states:
                bind_array(binding.bind_input, f"{metadata.PAST}{name}", buffer[rows])
                bind_array(binding.bind_output, f"{metadata.PRESENT}{name}", present[rows])
                self._presents[name] = present[rows]
                continue
            old = buffer[rows, ..., :length, :]
            past = _first(past, old.shape)
            np.copyto(past, old)
            present = _first(present, (*old.shape[:-2], length + new, old.shape[-1]))
            bind_array(binding.bind_input, f"{metadata.PAST}{name}", past)
            bind_array(binding.bind_output, f"{metadata.PRESENT}{name}", present)
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


def _empty_buffers(tensors: Sequence[CachedTensor], batch: int, length: int) -> dict[str, Array]:
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


def bind_array(bind: Any, name: str, array: Array) -> None:
    """Bind an array of the host's memory with one of an IOBinding's methods."""
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


_HOST = "Cpu"  # ONNX Runtime's name for memory that the processor's own programs read


class DeviceCache(Cache):
    """A `Cache` whose buffers stay where the provider computes; between steps only ids and logits are copied.

    The sequences are decoded one after the other.
    """

    def __init__(
        self, places: Mapping[str, Any], provider: Provider, tensors: Sequence[CachedTensor], batch: int, length: int
    ) -> None:
        """Allocate zeros; `places` has the memory of each tensor that is not in the host's, see `device_memory`."""
        super().__init__([], batch, length)
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        self.states = [tensor.name for tensor in tensors if not tensor.state.per_token]
        try:
            self._values = [
                {tensor.name: _zeros(tensor, length, places.get(tensor.name), provider) for tensor in tensors}
                for _ in range(batch)
            ]
        except Exception as error:  # the runtime's errors have no common class
            raise ResourceError(
                f"--provider {provider.name}: no memory there for a cache of {batch} x {length} tokens "
                f"({' '.join(str(error).split())[:200]}); use a shorter text or a smaller model"
            ) from None

    def decode_step(self, session: ort.InferenceSession, vocab_size: int) -> DeviceStep:
        return DeviceStep(self, session, vocab_size)

    def binding(self, session: ort.InferenceSession, rows: slice) -> ort.IOBinding:
        """A new binding of one sequence's buffers as past and as present."""
        binding = session.io_binding()
        for name, value in self._values[rows.start].items():
            binding.bind_ortvalue_input(f"{metadata.PAST}{name}", value)
            binding.bind_ortvalue_output(f"{metadata.PRESENT}{name}", value)
        return binding

    def copy_prefix_from(self, other: Cache, lengths: Sequence[int]) -> None:
        """See `Cache.copy_prefix_from`; through the host's memory."""
        assert isinstance(other, DeviceCache), "both are of one session"
        for own, theirs, count in zip(self._values, other._values, lengths, strict=True):
            for name, value in own.items():
                old = theirs[name].numpy()
                new = np.zeros(value.shape(), self._dtypes[name])
                if name in self.states:
                    new[:] = old
                else:
                    new[..., :count, :] = old[..., :count, :]
                value.update_inplace(new)
        self.lengths[:] = self._kept(other.lengths, lengths)
        self._clear_states()

    def _clear_states(self) -> None:
        for values, length in zip(self._values, self.lengths, strict=True):
            for name in self.states if not length else ():
                values[name].update_inplace(np.zeros(values[name].shape(), self._dtypes[name]))


class DeviceStep:
    """One token for every sequence of a `DeviceCache`. The mask ends with the token: not every provider's attention
    counts a sequence's length as the CPU's does, which takes a wider one."""

    def __init__(self, cache: DeviceCache, session: ort.InferenceSession, vocab_size: int) -> None:
        self._cache, self._session = cache, session
        self._logits = np.empty((len(cache.lengths), 1, vocab_size), dtype=np.float32)
        self._keep = np.ones(1, dtype=np.int64)

    def run(self, tokens: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """See `export.runtime.kv_cache.DecodeStep.run`."""
        for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
            binding = self._cache.bind(self._session, slice(row, row + 1), 1)
            ids, mask = np.array([[token]], dtype=np.int64), np.ones((1, length + 1), dtype=np.int64)
            inputs = {metadata.INPUT_IDS: ids, metadata.ATTENTION_MASK: mask, metadata.KEEP_LOGITS: self._keep}
            for name, array in inputs.items():
                bind_array(binding.bind_input, name, array)
            bind_array(binding.bind_output, metadata.LOGITS, self._logits[row : row + 1])
            self._session.run_with_iobinding(binding)
        logits: npt.NDArray[np.float32] = self._logits[:, 0]
        return logits


def device_memory(session: ort.InferenceSession) -> dict[str, Any]:
    """The memory where a session keeps each cached tensor, past and present alike, by name; those of the host not."""
    try:
        pasts = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        presents = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
    except AttributeError:  # ONNX Runtime before 1.24: everything goes through the host's memory
        return {}
    there = {item.name.removeprefix(metadata.PRESENT) for item, memory in presents if memory.name != _HOST}
    names = ((item.name.removeprefix(metadata.PAST), memory) for item, memory in pasts)
    return {name: memory for name, memory in names if memory.name != _HOST and name in there}


def cache_maker(
    session: ort.InferenceSession, directory: Path, provider: Provider = CPU
) -> Callable[[int, int], Cache]:
    """A function that makes empty caches for a graph, from the number of sequences and the room for tokens in each.

    Raises:
        ArtifactError: the graph has a cache that this program does not know.
    """
    kind = str(session.get_modelmeta().custom_metadata_map.get(metadata.CACHE_KEY, metadata.IN_PLACE_CACHE))
    kinds: dict[str, type[Cache]] = {metadata.IN_PLACE_CACHE: Cache, metadata.CONCAT_CACHE: ConcatCache}
    if kind not in kinds:
        raise ArtifactError(f"{find_files(directory).graph}: has a cache of kind {kind!r}; upgrade this program")
    tensors, places = cached_tensors(session, directory), {} if provider.is_cpu else device_memory(session)
    if places and kind == metadata.IN_PLACE_CACHE:
        return partial(DeviceCache, places, provider, tensors)
    return partial(kinds[kind], tensors)


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
