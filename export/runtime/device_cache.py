"""The key/value cache in the memory of a GPU or another processor that has its own.

Shape suffixes: B sequences, L room for tokens in the cache, V vocabulary. A cached tensor is (1, ..., L, E) for each
sequence, or (1, ...) where it is a state, since no part of a device's buffer can be bound alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export import metadata
from export.paths import find_files
from export.runtime.kv_cache import Cache, ConcatCache, bind_array
from export.runtime.providers import CPU, Provider
from export.runtime.session import CachedTensor, cached_tensors
from sportsllm.errors import ArtifactError, ResourceError

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
