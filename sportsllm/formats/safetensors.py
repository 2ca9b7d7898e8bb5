"""The tensors of a checkpoint directory, read one by one on demand, and how config.json says they are stored.

Those that bitsandbytes quantized read as dense ones, see `sportsllm.formats.bitsandbytes`. Only safetensors are read:
pickle runs code. Every tensor is checked for finiteness.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.files import require_directory
from sportsllm.formats.bitsandbytes import companions, read_dense
from sportsllm.formats.huggingface import load_config, packed_by_bitsandbytes
from sportsllm.formats.json_files import clip, read_json, validate
from sportsllm.formats.layouts import LAYOUTS, Part, UnlikeTensor, is_buffer, layout_name, parts_of
from sportsllm.formats.manifest import MANIFEST, read_manifest

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANT_METHOD = "sportsllm-nbits"
REOPEN_BYTES = 64_000_000
_LONGEST_NAME = 200


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by the model's names, each read from disk on demand; see `StoredTensors`.

    A family's files may hold them in another layout, see `sportsllm.formats.layouts`; what this program quantized is
    never in one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stored = StoredTensors(directory)
        self._parts: dict[str, Part] = {}
        model_type = layout_name(read_json(directory / "config.json"))
        if model_type in LAYOUTS and quantization_config(directory) is None:
            self._parts = parts_of(model_type, load_config(directory), self._stored)
        used = {part.stored for part in self._parts.values()}
        known = [name for name, part in self._parts.items() if part.stored in self._stored]
        others = (name for name in self._stored if name not in used and not is_buffer(model_type, name))
        self._names = dict.fromkeys([*known, *others])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        part = self._parts.get(name)
        if part is None:
            return self._stored[name]
        try:
            return part.read(self._stored[part.stored])
        except UnlikeTensor as error:
            raise ArtifactError(f"{self.directory}: tensor {part.stored!r} {error}") from None

    def stored_name(self, name: str) -> str:
        """What one of the model's tensors is called in the files."""
        return self._parts[name].stored if name in self._parts else name

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class _Index:
    """The index of shards: each tensor's file."""

    weight_map: dict[str, str]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint as they are named in its files; bitsandbytes' matrices as dense ones.

    Pages read from an open file count as memory, so a file is reopened after every `REOPEN_BYTES`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        self._bytes = 0  # read since the files were opened
        for path in _weight_files(directory):
            self._files[path] = _open(path)
            for name in list(self._files[path].keys()):
                if name in self._where:
                    raise ArtifactError(f"{path}: tensor {name!r} is also in {self._where[name].name}")
                self._where[name] = path
        self._dense = bitsandbytes_kind(directory) is None
        self._beside = frozenset() if self._dense else companions(self._where)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._beside:
            raise KeyError(name)
        path = self._where[name]
        tensor = self._stored(name) if self._dense else read_dense(name, self._beside, self._stored, str(path))
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{path}: tensor {name!r} holds NaN or infinity; use an undamaged checkpoint")
        return tensor

    def _stored(self, name: str) -> Tensor:
        tensor = cast(Tensor, self._files[self._where[name]].get_tensor(name))
        self._bytes += tensor.nbytes
        if self._bytes > REOPEN_BYTES:
            self._files = {path: _open(path) for path in self._files}
            self._bytes = 0
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._where and name not in self._beside  # without reading it

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._where if name not in self._beside)

    def __len__(self) -> int:
        return len(self._where) - len(self._beside)


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path}: not a whole safetensors file ({clip(error, 200)}); copy or make it again"
        ) from None


def _weight_files(directory: Path) -> list[Path]:
    require_directory(directory, "a checkpoint directory")
    if (directory / MANIFEST).exists():
        for name, entry in read_manifest(directory).files.items():
            path = directory / name
            size = path.stat().st_size if path.exists() else -1
            if size != entry.bytes:
                found = "missing" if size < 0 else f"{size} bytes instead of {entry.bytes}"
                raise ArtifactError(f"{path}: {found}; the directory is damaged, copy or make it again")
    if (directory / INDEX).exists():
        names = sorted(set(validate(_Index, read_json(directory / INDEX), directory / INDEX).weight_map.values()))
        outside = next((name for name in names if Path(name).name != name or len(name) > _LONGEST_NAME), None)
        if outside is not None:
            raise ArtifactError(f"{directory / INDEX}: {clip(outside)} is no file of the directory; copy it again")
        missing = [name for name in names if not (directory / name).is_file()] if names else ["no shard"]
        if missing:
            raise ArtifactError(f"{directory / INDEX}: {clip(missing[0])} is missing; copy the directory again")
        return [directory / name for name in names]
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        raise ArtifactError(
            f"{directory}: only {pickles[0]} found; pickle files can run code and are not read, "
            "convert them to safetensors"
        )
    raise ArtifactError(f"{directory}: no {WEIGHTS}; is it a finished checkpoint?")


def quantization_config(directory: Path) -> dict[str, Any] | None:
    """How this program quantized a checkpoint; None for dense ones and for bitsandbytes', which read as dense.

    Raises:
        ArtifactError: another method quantized it.
    """
    data = read_json(directory / "config.json").get("quantization_config")
    if data is None or packed_by_bitsandbytes(data) is not None:
        return None
    if not isinstance(data, dict):
        raise ArtifactError(f"{directory / 'config.json'}: quantization_config is {data!r}, not an object; correct it")
    if data.get("quant_method") != QUANT_METHOD:
        raise ArtifactError(
            f"{directory / 'config.json'}: quant_method {data.get('quant_method')!r} is not supported; "
            "use the unquantized checkpoint"
        )
    return cast(dict[str, Any], data)


def bitsandbytes_kind(directory: Path) -> str | None:
    """`NF4`, `FP4` or `INT8` where bitsandbytes packed a checkpoint's matrices, else None."""
    return packed_by_bitsandbytes(read_json(directory / "config.json").get("quantization_config"))


def check_shape(tensor: Tensor, expected: tuple[int, ...], name: str, directory: Path) -> None:
    """Refuse a tensor of another shape than config.json asks for."""
    if tuple(tensor.shape) != expected:
        raise ArtifactError(
            f"{directory}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {expected}"
        )
