"""Folds nodes of a graph into calls of model-local functions, which kernels of the same names may replace.

ONNX Runtime keeps such a call where a library registers an operator of the function's name, and runs that; elsewhere it
inlines the body, so that the graph computes what it did before, with the same operators in the same order
(https://onnx.ai/onnx/intro/concepts.html#functions). Layers whose bodies are equal but for names call one function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph.builder import Builder, opsets_of, with_branches


@dataclass(frozen=True)
class Call:
    """Nodes that become one call.

    Attributes:
        op: the kernel's name.
        name: of the call.
        base: what, with a dot behind it, the names of the layer's nodes begin with.
        prefixes: what the names of these nodes begin with, and of no others.
        inputs: the kernel's by name, in its order; None leaves an optional one out.
        outputs: in the same way, values of the nodes that only others read.
        attributes: the kernel's; the body holds its own.
        branch: of an `If`, that the nodes are in; None where they are the graph's.
    """

    op: str
    name: str
    base: str
    prefixes: tuple[str, ...]
    inputs: Mapping[str, ir.Value | None]
    outputs: Mapping[str, ir.Value]
    attributes: Mapping[str, int | float]
    branch: ir.Graph | None = None

    def local(self, name: str | None) -> str:
        """A name within the body."""
        return str(name).removeprefix(f"{self.base}.")


class Functions:
    """The functions of one graph, in one domain."""

    def __init__(self, graph: Builder, domain: str, most: int) -> None:
        """`most` is how many bodies of one operator the kernels have names for: `op`, `op1`, `op2`, ..."""
        self._graph, self._domain, self._most = graph, domain, most
        self._bodies: dict[str, dict[str, str]] = {}  # names of functions by operator and `_description`

    def fold(self, call: Call) -> bool:
        """Replace nodes by a call of a function that holds them; False, and no change, where no name is left."""
        around = self._graph.nodes if call.branch is None else call.branch
        nodes = [node for node in around if str(node.name).startswith(call.prefixes)]
        bodies = self._bodies.setdefault(call.op, {})
        places = {value: name for name, value in (*call.inputs.items(), *call.outputs.items()) if value is not None}
        text = "\n".join(_described(nodes, places, call))
        known = text in bodies
        if not known and len(bodies) == self._most:
            return False
        name = bodies.setdefault(text, f"{call.op}{len(bodies) or ''}")
        values = {old: ir.Value(name=old.name, type=old.type, shape=old.shape) for old in call.outputs.values()}
        inputs = list(call.inputs.values())
        while inputs[-1] is None:
            inputs.pop()
        made = ir.node(
            name, inputs, call.attributes, domain=self._domain, outputs=list(values.values()), name=call.name
        )
        if call.branch is None:
            self._graph.replace(nodes, made, values)
        else:
            _replace_in(call.branch, nodes, made, values)
        if known:
            for node in with_branches(nodes):
                for place in range(len(node.inputs)):
                    node.replace_input_with(place, None)
        else:
            self._graph.functions.append(_function(name, self._domain, call, nodes))
        return True


def _replace_in(branch: ir.Graph, nodes: list[ir.Node], by: ir.Node, values: Mapping[ir.Value, ir.Value]) -> None:
    """As `Builder.replace`, of a branch."""
    branch.insert_before(nodes[0], by)
    branch.outputs[:] = [values.get(value, value) for value in branch.outputs]
    branch.remove(nodes)
    ir.convenience.replace_all_uses_with(list(values), list(values.values()))


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


def _function(name: str, domain: str, call: Call, nodes: list[ir.Node]) -> ir.Function:
    """A function of these nodes, which are moved into it."""
    places = {value: ir.Value(name=place) for place, value in call.inputs.items() if value is not None}
    absent = {place: ir.Value(name=place) for place, value in call.inputs.items() if value is None}
    inputs = [absent[place] if value is None else places[value] for place, value in call.inputs.items()]
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
    attributes = [ir.Attr(key, _KINDS[type(value)], None) for key, value in call.attributes.items()]
    return ir.Function(domain, name, graph=graph, attributes=attributes)


_KINDS = {int: ir.AttributeType.INT, float: ir.AttributeType.FLOAT}
