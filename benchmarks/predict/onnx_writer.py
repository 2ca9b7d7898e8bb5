"""Write an ONNX graph byte by byte, for a device has no package that does.

ONNX is protocol buffers (https://protobuf.dev/programming-guides/encoding/) with the field numbers of onnx.proto
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). A field is its number and wire type, then a varint (type 0),
four bytes (type 5), or a length and that many bytes (type 2).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from export.metadata import KERNELS_DOMAIN, KERNELS_KEY

Array = npt.NDArray[Any]
MS = "com.microsoft"
IR_VERSION, OPSETS = 10, {"": 21, MS: 1}  # as `export.graph.builder` writes them
PAGE_BYTES = 4096
_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}  # TensorProto.DataType
_EXTERNAL = 1  # TensorProto.DataLocation


class OnnxGraph:
    """Collects a graph for the file `path`. Weights go straight to the data file `<path>.data`."""

    def __init__(self, path: Path) -> None:
        self._path, self._data = path, path.with_name(f"{path.name}.data").open("wb")
        self._fields = [_field(2, "graph")]
        self._placed: dict[str, tuple[str, bytes]] = {}
        self._version: str | None = None

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """A graph input; dimensions given by name are free. Returns its name."""
        self._fields.append(_field(11, _value(name, dtype, shape)))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Make a value a graph output; returns its name."""
        self._fields.append(_field(12, _value(name, dtype, shape)))
        return name

    def constant(self, name: str, array: Array) -> str:
        """A small tensor inside the graph file; returns its name."""
        return self._tensor(name, array.dtype.name, array.shape, _field(9, array.tobytes()))

    def weight(self, name: str, array: Array) -> str:
        """A tensor in the data file, beginning on a page so that it can be mapped; returns its name."""
        self._data.write(bytes(-self._data.tell() % PAGE_BYTES))
        entries = {"location": Path(self._data.name).name, "offset": self._data.tell(), "length": array.nbytes}
        parts = [_field(13, _field(1, key) + _field(2, str(value))) for key, value in entries.items()]
        self._placed[name] = array.dtype.name, b"".join([*parts, _field(14, _EXTERNAL)])
        self._data.write(np.ascontiguousarray(array).data)
        return self.view(name, name, array.shape)

    def view(self, name: str, weight: str, shape: Sequence[int]) -> str:
        """The bytes of a weight under another name, in another shape; returns its name."""
        dtype, place = self._placed[weight]
        return self._tensor(name, dtype, shape, place)

    def _tensor(self, name: str, dtype: str, shape: Sequence[int], content: bytes) -> str:
        dimensions = b"".join(_field(1, size) for size in shape)
        self._fields.append(_field(5, dimensions + _field(2, _TYPES[dtype]) + _field(8, name) + content))
        return name

    def node(
        self, op: str, inputs: Sequence[str], outputs: str | Sequence[str], domain: str = "", **attributes: float | str
    ) -> str:
        """Add an operator; an empty name leaves an optional input or output out. Returns the first output's name."""
        names = [outputs] if isinstance(outputs, str) else outputs
        parts = [_field(1, name) for name in inputs] + [_field(2, name) for name in names]
        parts += [_field(3, names[0]), _field(4, op), _field(7, domain)]
        parts += [_field(5, _attribute(name, value)) for name, value in attributes.items()]
        self._fields.append(_field(1, b"".join(parts)))
        return names[0]

    def calls_kernels(self, version: str) -> None:
        """Say which version of this program's kernels the graph calls; it has no bodies for runtimes without them."""
        self._version = version

    def write(self) -> None:
        """Write the graph and close the data file."""
        self._data.close()
        domains = OPSETS if self._version is None else OPSETS | {KERNELS_DOMAIN: 1}
        parts = [_field(8, _field(1, domain) + _field(2, version)) for domain, version in domains.items()]
        if self._version is not None:
            parts.append(_field(14, _field(1, KERNELS_KEY) + _field(2, self._version)))
        self._path.write_bytes(_field(1, IR_VERSION) + _field(7, b"".join(self._fields)) + b"".join(parts))


def _varint(number: int) -> bytes:
    """Seven bits a byte, lowest first; the highest bit says that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, value: float | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _attribute(name: str, value: float | str) -> bytes:
    """AttributeProto. Its type is 1, 2 or 3 for f, i and s; a negative integer is two's complement of 64 bits."""
    number, kind = {float: (2, 1), int: (3, 2), str: (4, 3)}[type(value)]
    return _field(1, name) + _field(number, value % 2**64 if isinstance(value, int) else value) + _field(20, kind)


def _value(name: str, dtype: str, shape: Sequence[int | str]) -> bytes:
    """ValueInfoProto: a name, and a tensor type with its shape."""
    sizes = [_field(1, size) if isinstance(size, int) else _field(2, size) for size in shape]
    tensor = _field(1, _TYPES[dtype]) + _field(2, b"".join(_field(1, size) for size in sizes))
    return _field(1, name) + _field(2, _field(1, tensor))
