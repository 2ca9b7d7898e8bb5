"""Calls of this program's kernels: model-local functions, which operators of the same names may replace.

ONNX Runtime keeps such a call if a library registers an operator of the function's name, and runs that. Otherwise it
inlines the body, so that the graph computes what it did without the call, with the same operators in the same order
(https://onnx.ai/onnx/intro/concepts.html#functions). Layers whose bodies are equal but for names call one function.

The operators are those of `export/kernels/library.cpp`: `DecoderLayer`, or else `DecoderAttention` and
`DecoderFeedForward` (SwiGLU, or experts behind their router); `GeneralLayer` and `GeneralAttention`, which have more
forms of layers, see `export.graph.kernel_layers`; `SelectedAttention`, over the written cache;
`LatentTokens`, which write it, and `LatentAttention`; `DecoderHead`. The cache's type is a part of the name:
`DecoderLayerHalf` over a float16 cache, `DecoderLayerInt8` over an INT8 one. Matrices must be INT4 or INT8 in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from export import layout
from export.graph.builder import FLOAT, HALF, INT8, Builder, opsets_of, with_branches
from export.kernels.library import VERSION
from export.runtime.session import parts_in_words

MOST_BODIES = 8  # names that the library registers for each operator of a layer
SUFFIXES = {FLOAT: "", HALF: "Half", INT8: "Int8"}
"""Suffix of an operator's name, by the type of the cache."""
Inputs = dict[str, ir.Value | None]
Attributes = dict[str, int | float]


@dataclass(frozen=True)
class Operand:
    """A packed matrix as the kernels read it: `KEY_packed`, `_scale`, `_zero_point` and `_bias`, and sizes.

    `wide` if its inputs are rounded to 16 bits.
    """

    inputs: Inputs
    attributes: Attributes
    wide: bool = False


@dataclass(frozen=True)
class Call:
    """A call of a kernel.

    Attributes:
        op: the kernel's name.
        name: of the call.
        base: what, with a dot behind it, the names of the layer's nodes begin with.
        inputs: the kernel's by name, in its order, then what only the body reads; None leaves an optional one out.
        outputs: likewise, values of the nodes that become the body; those of the call once it is added.
        attributes: the kernel's; the body holds its own.
        shares: whether the body, and not the kernel, reads more, of which the graph has one for all layers.
    """

    op: str
    name: str
    base: str
    inputs: Inputs
    outputs: dict[str, ir.Value]
    attributes: Mapping[str, int | float]
    shares: bool = False

    def local(self, name: str | None) -> str:
        """A name within the body."""
        return str(name).removeprefix(f"{self.base}.")


@dataclass
class KernelUse:
    """What became calls, and why the rest did not."""

    layers: int
    attention: int = 0
    feed_forward: int = 0
    head: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def version(self) -> str | None:
        """Version of the kernels that the graph calls; None if it calls none."""
        return VERSION if self.attention or self.feed_forward or self.head else None

    def __str__(self) -> str:
        why = "; ".join(dict.fromkeys(self.reasons))
        if self.version is None:
            return f"kernels: the graph calls none ({why})"
        whole = self.attention == self.feed_forward == self.layers and self.head
        parts = parts_in_words(self.layers, self.attention, self.feed_forward, self.head)
        return f"kernels: called for {parts}" + ("" if whole else f" ({why})")


class KernelCalls:
    """The calls of one graph.

    Attributes:
        use: what became calls.
        allowed: whether the graph may have any.
    """

    def __init__(self, graph: Builder, layers: int, refused: str | None) -> None:
        """`refused` is why a graph has none."""
        self._graph, self.allowed = graph, refused is None
        self.use = KernelUse(layers, reasons=[] if refused is None else [refused])
        self._bodies: dict[str, dict[str, str]] = {}  # names of functions by operator and `_described`

    def add(self, call: Call | list[str], nodes: list[ir.Node]) -> bool:
        """Add nodes to the graph, as a call if there can be one; a list says why not. `Call.outputs` are read then."""
        if isinstance(call, Call) and self.allowed and self.fold(call, nodes):
            return True
        if self.allowed:
            self.use.reasons += [f"more than {MOST_BODIES} kinds of layers"] if isinstance(call, Call) else call
        self._graph.nodes.extend(nodes)
        return False

    def fold(self, call: Call, nodes: list[ir.Node]) -> bool:
        """Add a call of a function that holds some nodes, which are not in the graph; False, and nothing is added, if
        no name is left."""
        inputs = call.inputs | (_shared_inputs(nodes, call.inputs) if call.shares else {})
        bodies = self._bodies.setdefault(call.op, {})
        places = {value: name for name, value in (*inputs.items(), *call.outputs.items()) if value is not None}
        text = "\n".join(_described(nodes, places, call))
        known = text in bodies
        if not known and len(bodies) == MOST_BODIES:
            return False
        function = bodies.setdefault(text, f"{call.op}{len(bodies) or ''}")
        old = list(call.outputs.values())
        new = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in old]
        given = list(inputs.values())
        while given[-1] is None:
            given.pop()
        domain = layout.KERNELS_DOMAIN
        self._graph.nodes.append(ir.node(function, given, call.attributes, domain=domain, outputs=new, name=call.name))
        ir.convenience.replace_all_uses_with(old, new)
        if known:
            for node in with_branches(nodes):
                for place in range(len(node.inputs)):
                    node.replace_input_with(place, None)
        else:
            self._graph.functions.append(_function(function, call, inputs, nodes))
        call.outputs.update(zip(call.outputs, new, strict=True))
        self._graph.metadata[layout.KERNELS_KEY] = VERSION
        return True


def _shared_inputs(nodes: Iterable[ir.Node], inputs: Inputs) -> Inputs:
    """What nodes read besides `inputs`, weights and constants aside."""
    own = list(with_branches(nodes))
    known = {*inputs.values(), *(value for node in own for value in node.outputs)}
    read = dict.fromkeys(value for node in own for value in node.inputs if value is not None and value not in known)
    return {f"shared{n}": value for n, value in enumerate(v for v in read if v.const_value is None)}


def _described(nodes: Iterable[ir.Node], places: Mapping[ir.Value, str], call: Call) -> Iterator[str]:
    """Lines that are equal for equal bodies."""
    for node in nodes:
        inputs = [_described_value(value, places, call) for value in node.inputs]
        outputs = [places.get(value, call.local(value.name)) for value in node.outputs]
        plain = {name: a.value for name, a in node.attributes.items() if a.type != ir.AttributeType.GRAPH}
        yield repr((node.domain, node.op_type, inputs, outputs, sorted(plain.items())))
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                branch = attribute.as_graph()
                yield f"{name}: {[call.local(value.name) for value in branch.outputs]}"
                yield from _described(branch, places, call)


def _described_value(value: ir.Value | None, places: Mapping[ir.Value, str], call: Call) -> str:
    if value is None:
        return ""
    if value.const_value is None or value in places:
        return places.get(value, call.local(value.name))
    array = np.asarray(value.const_value.numpy())
    return f"{array.dtype}{array.shape}{array.tobytes().hex()}"


def _function(name: str, call: Call, given: Inputs, nodes: list[ir.Node]) -> ir.Function:
    """A function of these nodes, which are moved into it."""
    inputs = [ir.Value(name=place) for place in given]
    places = {value: made for value, made in zip(given.values(), inputs, strict=True) if value is not None}
    constants: dict[ir.Value, ir.Node] = {}
    for node in with_branches(nodes):
        for place, value in enumerate(node.inputs):
            if value in places:
                node.replace_input_with(place, places[value])
            elif value is not None and value.const_value is not None:
                if value not in constants:
                    tensor = ir.tensor(np.asarray(value.const_value.numpy()), value.dtype, name=value.name)
                    constants[value] = ir.node("Constant", [], {"value": tensor}, name=value.name)
                    constants[value].outputs[0].name = value.name
                node.replace_input_with(place, constants[value].outputs[0])
        node.name = call.local(node.name)
        for value in node.outputs:
            value.name = call.local(value.name)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                attribute.as_graph().name = call.local(attribute.as_graph().name)
    for name_in_body, output in call.outputs.items():
        output.name = name_in_body
    body = [*constants.values(), *nodes]
    graph = ir.Graph(inputs, list(call.outputs.values()), nodes=body, opset_imports=opsets_of(body), name=name)
    kinds = {int: ir.AttributeType.INT, float: ir.AttributeType.FLOAT}
    attributes = [ir.Attr(key, kinds[type(value)], None) for key, value in call.attributes.items()]
    return ir.Function(layout.KERNELS_DOMAIN, name, graph=graph, attributes=attributes)
