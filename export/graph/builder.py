"""A thin layer over onnx_ir: add nodes and named weights, then write the graph and its data file.

Weights are read and written one by one, so that peak memory is near the size of the largest.
The same calls in the same order give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from export.kernels.library import VERSION
from export.layout import DATA_BYTES_KEY, KERNELS_DOMAIN, GraphFiles
from sportsllm import __version__

if TYPE_CHECKING:
    from export.cache_scales import CacheScales

Array = npt.NDArray[Any]

FLOAT, HALF, INT8, UINT8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.UINT8
INT32, INT64, BOOL = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL
CACHED_TYPES = {"fp32": FLOAT, "fp16": HALF, "int8": INT8}  # by `--kv-cache`
MS = "com.microsoft"  # the domain of ONNX Runtime's own operators, of which graphs have these:
_OF_MS = {
    "FusedMatMul",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "MatMulNBits",
    "QuickGelu",
    "RotaryEmbedding",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}
IR_VERSION = 10  # with opset 21: read by the browser build too
OPSETS = {"": 21, MS: 1, KERNELS_DOMAIN: int(VERSION)}  # a graph imports those that it uses
LEAST = float(np.finfo(np.float32).min)
"""Instead of minus infinity in masks: a padding token that attends to nothing stays a number."""
INLINE_BELOW_BYTES = 1024  # smaller tensors go into the graph file: loaders expect shape constants there
PAGE_BYTES = 4096  # large tensors start on a page; all are mapped from wherever they start
SMALL_BYTES = 2**20  # as ONNX's own writers have it
SMALL_ALIGNMENT = 64


@dataclass(frozen=True)
class GraphForm:
    """How a graph is written.

    Attributes:
        operators: `onnx`: ONNX Runtime's own, and calls of this program's kernels; `web`: those that a browser has;
            `standard`: ONNX's standard operators alone.
        dense: type that dense matrices are stored in.
        real: type of activations, vectors and scales. If it is float16, the other two are too; logits are float32 all
            the same.
        cached: type of keys and values; float32's alone with `standard`.
        scales: of an INT8 cache.
        inline: write no functions for kernels.
        wide_inputs: modules of packed matrices whose inputs are rounded to 16 bits instead of 8.
    """

    operators: str = "onnx"
    dense: ir.DataType = FLOAT
    real: ir.DataType = FLOAT
    cached: ir.DataType = FLOAT
    scales: CacheScales | None = None
    inline: bool = False
    wide_inputs: frozenset[str] = frozenset()

    @property
    def standard(self) -> bool:
        """Whether all operators are ONNX's own."""
        return self.operators == "standard"


class Builder:
    """Collects the inputs, nodes, weights, outputs and metadata of one graph."""

    def __init__(self, name: str, metadata: Mapping[str, str]) -> None:
        self._name, self.metadata = name, dict(metadata)
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []  # without those inside branches
        self.initializers: dict[str, ir.Value] = {}  # weights and constants
        self._aliases: dict[str, str] = {}  # from the alias's name to the weight's
        self.functions: list[ir.Function] = []

    @contextmanager
    def recording(self) -> Iterator[list[ir.Node]]:
        """Nodes that are made inside go to a list instead of the graph."""
        around, self.nodes = self.nodes, list[ir.Node]()
        try:
            yield self.nodes
        finally:
            self.nodes = around

    def made(self, name: str) -> ir.Value | None:
        """The value of a node with one output, by the node's name, if it was added before."""
        return next((node.outputs[0] for node in self.nodes if node.name == name), None)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[object]) -> ir.Value:
        """A graph input, for example (B, 8) as ["batch_size", 8]; dimensions given by name are free."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def input_with_default(self, name: str, default: Array) -> ir.Value:
        """An input that callers may leave out (an overridable initializer)."""
        value = self.constant(name, default)
        self._inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[object]) -> None:
        """Make `value` a graph output called `name`."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self._outputs.append(value)

    def node(self, name: str, op: str, *inputs: ir.Value | int | None, **attributes: Any) -> ir.Value:
        """Add an operator with one output, which is named like the node; an int as an input is a list of an axis."""
        return self.nodes_of(name, op, inputs, [name], **attributes)[0]

    def at(self, prefix: str) -> Callable[..., ir.Value]:
        """`node`, with something in front of the names."""
        return lambda name, op, *inputs, **attributes: self.node(prefix + name, op, *inputs, **attributes)

    def nodes_of(
        self, name: str, op: str, inputs: Sequence[ir.Value | int | None], outputs: Sequence[str], **attributes: Any
    ) -> list[ir.Value]:
        """Add an operator with several outputs, by name; an empty one leaves an optional output out."""
        read = [self.ints(f"axis_{each}", [each]) if isinstance(each, int) else each for each in inputs]
        values = [ir.Value(name=output) for output in outputs]
        domain = MS if op in _OF_MS else ""
        self.nodes.append(ir.node(op, read, attributes, domain=domain, outputs=values, name=name))
        return values

    def if_else(
        self,
        name: str,
        condition: ir.Value,
        then: Callable[[], Sequence[ir.Value]],
        otherwise: Callable[[], Sequence[ir.Value]],
        outputs: Mapping[str, ir.DataType],
    ) -> list[ir.Value]:
        """An `If`: of two branches with the same outputs, given by name and type, one runs.

        Branches add their nodes and return values in the order of `outputs`. They may use any value of the graph but no
        node name of it. Weights and constants stay the graph's.
        """
        graphs = {}
        for branch, make in (("then_branch", then), ("else_branch", otherwise)):
            with self.recording() as nodes:
                values = make()
            for value, dtype in zip(values, outputs.values(), strict=True):
                value.type = ir.TensorType(dtype)
            graphs[branch] = ir.Graph([], values, nodes=nodes, name=f"{name}/{branch}")
        return self.nodes_of(name, "If", [condition], list(outputs), **graphs)

    def scan(
        self,
        name: str,
        states: Sequence[ir.Value],
        sequences: Sequence[ir.Value],
        step: Callable[[Sequence[ir.Value], Sequence[ir.Value]], tuple[Sequence[ir.Value], ir.Value]],
        outputs: Sequence[str],
    ) -> list[ir.Value]:
        """A `Scan` over axis 1 of float32 sequences, (B, T, ...), with states that go from step to step.

        `step` is given the states and one step of every sequence, (B, ...), and returns the new states and what is
        collected, all with their shapes, which the runtime asks for. The names of its nodes and their values get the
        scan's in front; weights and constants stay the graph's.

        Returns:
            The last states, and what was collected, (B, T, ...), called `outputs`.
        """
        given = [ir.Value(name=f"{name}/{value.name}", type=ir.TensorType(FLOAT)) for value in (*states, *sequences)]
        with self.recording() as nodes:
            kept, collected = step(given[: len(states)], given[len(states) :])
        results = [*kept, collected]
        for node in nodes:
            node.name = f"{name}/{node.name}"
            for value in node.outputs:
                value.name = f"{name}/{value.name}"
        for value in results:
            value.type = ir.TensorType(FLOAT)
        body = ir.Graph(given, results, nodes=nodes, name=f"{name}/step")
        axes: dict[str, Any] = {"scan_input_axes": [1] * len(sequences), "scan_output_axes": [1]}
        inputs = [*states, *sequences]
        return self.nodes_of(name, "Scan", inputs, outputs, body=body, num_scan_inputs=len(sequences), **axes)

    def split(self, name: str, x: ir.Value, sizes: Sequence[int], outputs: Sequence[str]) -> list[ir.Value]:
        """x cut along its last axis."""
        lengths = self.ints("split_" + "_".join(map(str, sizes)), sizes)
        return self.nodes_of(name, "Split", [x, lengths], outputs, axis=-1)

    def constant(self, name: str, array: Array) -> ir.Value:
        """A small tensor; the same name gives the same tensor."""
        return self.weight(name, ir.DataType.from_numpy(array.dtype), array.shape, lambda: array)

    def ints(self, name: str, numbers: int | Sequence[int]) -> ir.Value:
        """A constant of int64, a list or a single number."""
        return self.constant(name, np.array(numbers, np.int64))

    @property
    def zero(self) -> ir.Value:
        """0, int64."""
        return self.ints("zero", 0)

    @property
    def one(self) -> ir.Value:
        """1, int64."""
        return self.ints("one", 1)

    def size(self, name: str, x: ir.Value, axis: int) -> ir.Value:
        """The length of an axis, (1,)."""
        return self.node(name, "Shape", x, start=axis, end=axis + 1)

    def real(self, name: str, number: float) -> ir.Value:
        """A constant of float32."""
        return self.constant(name, np.array(number, np.float32))

    def weight(self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], Array]) -> ir.Value:
        """A named tensor that `read` fetches when the graph is written; a name used twice is stored once."""
        if name not in self.initializers:
            tensor = ir.LazyTensor(lambda: ir.tensor(read(), dtype, name=name), dtype, ir.Shape(shape), name=name)
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
            self.initializers[name] = value
        return self.initializers[name]

    def alias(self, name: str, weight: ir.Value, shape: Sequence[int]) -> ir.Value:
        """A weight under another name and in another shape; its bytes are stored once.

        A Reshape would compute the same, but ONNX Runtime folds it into a copy in memory.
        """
        assert weight.name is not None and weight.dtype is not None, "a weight has both"
        self._aliases[name] = weight.name
        self.initializers[name] = ir.Value(name=name, type=ir.TensorType(weight.dtype), shape=ir.Shape(shape))
        return self.initializers[name]

    def write(self, files: GraphFiles) -> None:
        """Write the graph and its data."""
        with files.data.open("wb") as stream:
            for name, value in self.initializers.items():
                if name in self._aliases:
                    value.const_value = _aliased(self.initializers[self._aliases[name]].const_value, value)
                else:
                    value.const_value = _store(value.const_value, stream, files.data.name)
            length = stream.tell()
        used = [value for value in self.initializers.values() if value.uses()]
        opsets = opsets_of([*self.nodes, *(node for function in self.functions for node in function)])
        graph = ir.Graph(
            self._inputs, self._outputs, nodes=self.nodes, initializers=used, opset_imports=opsets, name=self._name
        )
        model = ir.Model(
            graph,
            ir_version=IR_VERSION,
            producer_name="sportsllm-compress",
            producer_version=__version__,
            functions=self.functions,
            metadata_props={DATA_BYTES_KEY: str(length), **self.metadata},
        )
        ir.save(model, files.graph)


def with_branches(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """The nodes, and those inside their branches."""
    for node in nodes:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from with_branches(attribute.as_graph())


def opsets_of(nodes: Iterable[ir.Node]) -> dict[str, int]:
    """The operator sets that nodes are of."""
    domains = {node.domain for node in with_branches(nodes)}
    return {domain: version for domain, version in OPSETS.items() if domain in domains}


def _store(tensor: ir.LazyTensor, stream: IO[bytes], location: str) -> ir.TensorProtocol:
    """Append a tensor to the data file and return the reference to it; small ones stay in the graph."""
    array = np.asarray(tensor.numpy(), order="C")
    if array.nbytes < INLINE_BELOW_BYTES:
        return ir.tensor(array, tensor.dtype, name=tensor.name)
    alignment = SMALL_ALIGNMENT if array.nbytes < SMALL_BYTES else PAGE_BYTES
    stream.write(b"\0" * (-stream.tell() % alignment))
    offset = stream.tell()
    # Two 4-bit numbers share a byte there, not in the array.
    length = stream.write(array.data if tensor.dtype.bitwidth >= 8 else tensor.tobytes())
    return ir.ExternalTensor(location, offset, length, tensor.dtype, shape=tensor.shape, name=tensor.name)


def _aliased(stored: ir.TensorProtocol | None, view: ir.Value) -> ir.TensorProtocol:
    """A stored tensor under another name, in another shape."""
    assert isinstance(stored, ir.ExternalTensor | ir.Tensor) and view.shape is not None, "weights come before views"
    if isinstance(stored, ir.ExternalTensor):
        return ir.ExternalTensor(
            stored.location, stored.offset, stored.length, stored.dtype, shape=view.shape, name=str(view.name)
        )
    return ir.tensor(stored.numpy().reshape(view.shape.numpy()), stored.dtype, name=view.name)
