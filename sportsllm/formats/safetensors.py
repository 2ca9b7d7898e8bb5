"""The tensors of a checkpoint directory, read one by one on demand, and how config.json says they are stored.

Those that bitsandbytes quantized read as dense ones, see `sportsllm.formats.bitsandbytes`. Only safetensors are read:
pickle runs code. The weights of a large GGUF file stay there, see `sportsllm.formats.gguf.convert`. Every tensor is
checked for finiteness.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, adapter_hint, clip, read_json, require_directory, validate
from sportsllm.formats.bitsandbytes import companions, read_dense
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.layouts import BUFFERS, LAYOUTS, Part, UnlikeTensor, parts_of
from sportsllm.formats.manifest import GGUF_RECORD, MANIFEST, check_whole, link_problem, linked_gguf
from sportsllm.formats.packed import bitsandbytes_kind, quantization_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
REOPEN_BYTES = 64_000_000
_LONGEST_NAME = 200

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a stored tensor."""
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}
"""Types of streamed tensors, in their order in a file."""
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)  # float8 has no operators, float64 may exceed float32


class StreamedTensors(MutableMapping[str, Tensor]):
    """A safetensors file that is written tensor by tensor, byte for byte what `save_file` writes at once.

    Its space is allocated first, so that a full disk ends the work before it begins. Tensors that are written can be
    read again and replaced.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Kind]) -> None:
        """Create the file for tensors of known types and shapes; in a directory, one that goes with its last reader."""
        self._path, self._written = path, dict[str, Kind]()
        header: JsonObject = {"__metadata__": {"format": "pt"}}
        order, start = list(_TYPES), 0
        self._kinds, self._starts = dict(kinds), dict[str, int]()
        for name in sorted(kinds, key=lambda name: (order.index(kinds[name][0]), name)):
            (dtype, shape), self._starts[name] = kinds[name], start
            start += torch.Size(shape).numel() * dtype.itemsize
            place = {"shape": list(shape), "data_offsets": [self._starts[name], start]}
            header[name] = {"dtype": _TYPES[dtype]} | place
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._file = TemporaryFile(dir=path) if path.is_dir() else path.open("w+b")  # noqa: SIM115
        try:
            with suppress(AttributeError):  # not on macOS and Windows
                os.posix_fallocate(self._file.fileno(), 0, self._data + start)
            self._file.write(len(text).to_bytes(8, "little") + text)
            self._file.truncate(self._data + start)
        except OSError as error:
            raise self._named(error) from None

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        assert self._kinds[name] == (tensor.dtype, tuple(tensor.shape)), name
        try:
            self._file.seek(self._data + self._starts[name])
            self._file.write(tensor.detach().cpu().contiguous().numpy().data)
            self._file.flush()
        except OSError as error:
            raise self._named(error) from None
        self._written[name] = self._kinds[name]

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self._written[name]
        tensor = torch.empty(shape, dtype=dtype)
        self._file.seek(self._data + self._starts[name])
        self._file.readinto(tensor.numpy().data)
        return tensor

    def __delitem__(self, name: str) -> None:
        del self._written[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._written)

    def __len__(self) -> int:
        return len(self._written)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


class _File(Protocol):
    """The part of `safe_open` that is used; the library has no types."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by the model's names, each read from disk on demand.

    A family's files may hold them in another layout, see `sportsllm.formats.layouts`; what this program quantized is
    never in one. Pages read from an open file count as memory, so files are reopened after every `REOPEN_BYTES`.
    """

    def __init__(self, directory: Path) -> None:
        """Open the files.

        Raises:
            ArtifactError: a file is missing or damaged, or another method quantized the checkpoint.
        """
        self.directory, self.quantization = directory, quantization_config(directory)
        self._in_gguf = (directory / GGUF_RECORD).exists()
        self._files = {path: _open(path, self._in_gguf) for path in _weight_files(directory)}
        self._where = {name: path for path, file in self._files.items() for name in list(file.keys())}
        self._bytes = 0  # read since the files were opened
        self._packed = bitsandbytes_kind(directory) is not None
        self._beside = companions(self._where) if self._packed else frozenset()
        stored = [name for name in self._where if name not in self._beside]
        self._names, self._layout = dict.fromkeys(stored), dict[str, Part]()
        data = read_json(directory / "config.json")
        layout, in_halves = str(data.get("model_type")), data.get("rope_interleave") is False  # DeepSeek's, as ours are
        if layout in LAYOUTS and not in_halves and not self._in_gguf and self.quantization is None:
            self._layout = parts_of(layout, load_config(directory), stored, data)
            used = {part.stored for part in self._layout.values()}
            named = [name for name, part in self._layout.items() if part.stored in self._where]
            others = [name for name in stored if name not in used and not name.endswith(BUFFERS.get(layout, ()))]
            self._names = dict.fromkeys([*named, *others])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        stored = self.stored_name(name)
        path, tensor = self._where[stored], self._stored(stored)
        if self._packed:
            tensor = read_dense(stored, self._beside, self._stored, str(path))
        if tensor.is_floating_point() and tensor.dtype not in _COMPUTED:
            tensor = tensor.float()
        if tensor.is_floating_point() and not all_finite(tensor):
            raise ArtifactError(f"{path}: tensor {stored!r} holds NaN or infinity; use an undamaged checkpoint")
        if name not in self._layout:
            return tensor
        try:
            return self._layout[name].read(tensor)
        except UnlikeTensor as error:
            raise ArtifactError(f"{self.directory}: tensor {stored!r} {error}") from None

    def stored_name(self, name: str) -> str:
        """What one of the model's tensors is called in the files."""
        return self._layout[name].stored if name in self._layout else name

    def _stored(self, name: str) -> Tensor:
        tensor = self._files[self._where[name]].get_tensor(name)
        self._bytes += tensor.nbytes
        if self._bytes > REOPEN_BYTES and not self._in_gguf:
            self._files = {path: _open(path) for path in self._files}
            self._bytes = 0
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; `isfinite` would make copies of the tensor."""
    ends = torch.stack(torch.aminmax(tensor)) if tensor.numel() else tensor
    return bool(ends.isfinite().all())


def _open(path: Path, gguf: bool = False) -> _File:
    if gguf:
        from sportsllm.formats.gguf.config import open_gguf, read_config
        from sportsllm.formats.gguf.weights import GGUFTensors

        file = open_gguf(path)
        return GGUFTensors(file, read_config(file))
    try:
        path.open("rb").close()  # safetensors calls a file that may not be read missing
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path}: not a whole safetensors file ({clip(error, 200)}); copy or make it again"
        ) from None


@dataclass(frozen=True)
class _Index:
    """The index of shards: each tensor's file."""

    weight_map: dict[str, str]


def _weight_files(directory: Path) -> list[Path]:
    require_directory(directory, "a checkpoint directory")
    if (directory / MANIFEST).exists():
        check_whole(directory, "copy or make it again")
    if (gguf := linked_gguf(directory)) is not None:
        if problem := link_problem(directory, gguf):
            raise ArtifactError(
                f"{gguf.path}: {problem}, it holds the weights of {directory}; give the GGUF file instead"
            )
        return [Path(gguf.path)]
    if (index := directory / INDEX).exists():
        names = sorted(set(validate(_Index, read_json(index), index).weight_map.values()))
        for name in names or ["no shard"]:
            if Path(name).name != name or len(name) > _LONGEST_NAME:
                raise ArtifactError(f"{index}: {clip(name)} is not a file in the directory; copy it again")
            if not (directory / name).is_file():
                raise ArtifactError(f"{index}: {clip(name)} is missing; copy the directory again")
        return [directory / name for name in names]
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if any("-of-" in name for name in others):
        advice = f"copy {INDEX} too, the index of the shards"
    elif others:
        advice = f"rename {others[0]}"
    elif pickles:
        advice = f"pickle files can run code and are not read: convert {pickles[0]} to safetensors"
    else:
        advice = "give a finished checkpoint, not an export"
    raise ArtifactError(f"{directory}: no {WEIGHTS}; {adapter_hint(directory) or advice}")


def check_shape(tensor: Tensor, expected: tuple[int, ...], name: str, directory: Path) -> None:
    """Refuse a tensor of another shape than config.json asks for."""
    if tuple(tensor.shape) != expected:
        raise ArtifactError(
            f"{directory}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {expected}"
        )
