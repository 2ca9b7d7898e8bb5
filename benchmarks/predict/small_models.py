"""Graphs of a few operators for ONNX Runtime, written byte by byte, for a device has no package that makes them.

ONNX is protocol buffers (https://protobuf.dev/programming-guides/encoding/): a field is its number and wire type, then
a varint (type 0), or a length and so many bytes (type 2). Numbers of fields are those of onnx.proto
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Weights lie in a file beside the graph, as an export's do, so
that the runtime reads, prepacks and keeps them in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MS = "com.microsoft"
IR_VERSION, OPSETS = 10, {"": 21, MS: 1}  # as `export.graph.builder` writes them
ALIGNMENT = 4096
_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}  # TensorProto.DataType
_INTEGER, _STRING, _EXTERNAL = 2, 3, 1  # AttributeProto.INT and .STRING; TensorProto.EXTERNAL


def _varint(number: int) -> bytes:
    """Seven bits a byte, lowest first; the highest bit says that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


@dataclass
class ProbeGraph:
    """Collects nodes, inputs, outputs and weights; shapes are fixed.

    Attributes:
        nodes, inputs, outputs, weights: encoded, in order.
        data: what the weights consist of, by name; a name used twice is stored once.
    """

    nodes: list[bytes] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    data: dict[str, Array] = field(default_factory=dict)

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> str:
        """A graph input, for example ("x", "float32", (1, 768)); returns its name."""
        self.inputs.append(_value(name, dtype, shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Make a value a graph output."""
        self.outputs.append(_value(name, dtype, shape))

    def weight(self, name: str, array: Array) -> str:
        """A tensor that lies in the data file; returns its name."""
        self.data[name] = np.ascontiguousarray(array)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str = "",
        attributes: Mapping[str, int | str] | None = None,
    ) -> str:
        """Add an operator; an empty input name leaves an optional input out. Returns the first output's name."""
        parts = [_field(1, name) for name in inputs] + [_field(2, name) for name in outputs]
        parts += [_field(3, outputs[0]), _field(4, op), _field(7, domain)]
        for name, value in (attributes or {}).items():
            content = _field(3, value) if isinstance(value, int) else _field(4, value)
            kind = _INTEGER if isinstance(value, int) else _STRING
            parts.append(_field(5, _field(1, name) + content + _field(20, kind)))
        self.nodes.append(b"".join(parts))
        return outputs[0]

    def write(self, path: Path) -> int:
        """Write the graph to `path` and its weights beside it, as `<path>.data`.

        Returns:
            Bytes of all weights.

        Raises:
            OSError: the files cannot be written.
        """
        data_path, tensors, total = path.with_name(f"{path.name}.data"), [], 0
        with data_path.open("wb") as stream:
            for name, array in self.data.items():
                stream.write(bytes(-stream.tell() % ALIGNMENT))
                offset = stream.tell()
                stream.write(array.data)
                tensors.append(_external(name, array, data_path.name, offset))
                total += array.nbytes
        graph = [_field(1, node) for node in self.nodes] + [_field(2, "probe")]
        graph += [_field(5, tensor) for tensor in tensors]
        graph += [_field(11, value) for value in self.inputs] + [_field(12, value) for value in self.outputs]
        opsets = [_field(8, _field(1, domain) + _field(2, version)) for domain, version in OPSETS.items()]
        path.write_bytes(_field(1, IR_VERSION) + _field(7, b"".join(graph)) + b"".join(opsets))
        return total


def _value(name: str, dtype: str, shape: Sequence[int]) -> bytes:
    """ValueInfoProto: a name, and a tensor type with its shape."""
    dimensions = b"".join(_field(1, _field(1, size)) for size in shape)
    tensor = _field(1, _TYPES[dtype]) + _field(2, dimensions)
    return _field(1, name) + _field(2, _field(1, tensor))


def _external(name: str, array: Array, location: str, offset: int) -> bytes:
    """TensorProto whose numbers lie in a file."""
    entries = {"location": location, "offset": str(offset), "length": str(array.nbytes)}
    parts = [_field(1, size) for size in array.shape] + [_field(2, _TYPES[array.dtype.name]), _field(8, name)]
    parts += [_field(13, _field(1, key) + _field(2, value)) for key, value in entries.items()]
    return b"".join([*parts, _field(14, _EXTERNAL)])
