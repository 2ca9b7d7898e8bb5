"""A GGUF file's metadata and tensors, checked for wholeness; numbers are read from disk when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf

from sportsllm.errors import ArtifactError

_T = TypeVar("_T")
_D = TypeVar("_D")


@dataclass(frozen=True)
class GGUFFile:
    """Metadata by key, such as `llama.block_count`, and tensors by name, such as `blk.0.attn_q.weight`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    def value(self, key: str, kind: type[_T]) -> _T:
        """The value of a key.

        Raises:
            ArtifactError: it is missing, or of another type.
        """
        found = self.metadata.get(key)
        if not isinstance(found, kind) or isinstance(found, bool) is not (kind is bool):
            what = "is missing" if found is None else f"is a {type(found).__name__}, not a {kind.__name__}"
            raise self.error(f"{key} {what}; convert the model again")
        return found

    def value_or(self, default: _D, key: str, kind: type[_T]) -> _T | _D:
        """As `value`, but `default` where the file lacks the key."""
        return self.value(key, kind) if key in self.metadata else default

    def error(self, text: str) -> ArtifactError:
        """An error about this file."""
        return ArtifactError(f"{self.path}: {text}")


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file.

    Raises:
        ArtifactError: not there, no GGUF, cut short, damaged, or one part of several.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: not found; give a .gguf file")
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ArtifactError(f"{path}: not a GGUF file; it begins with {magic!r}, not with b'GGUF'")
    try:  # the reader has no errors of its own: past the file's end it fails in whatever it does next
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ArithmeticError, LookupError, OSError, TypeError, UnicodeError, ValueError) as error:
        raise ArtifactError(f"{path}: cut short or damaged ({error}); copy or download it again") from None
    file = GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    parts = file.value_or(1, "split.count", int)
    if parts != 1:
        raise file.error(f"is one of {parts} parts; join them with llama-gguf-split --merge")
    return file
