"""The precision that an exported graph stores its matrices in."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

_PACKED_TYPES = {ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8}


def graph_precision(nodes: Iterable[ir.Node], weights: Iterable[ir.Value]) -> str:
    """`nf4`, `int4`, `int8`, `fp16` or `fp32`: the narrowest numbers that a graph's matrices are stored in.

    Args:
        nodes: of the graph.
        weights: its initializers.
    """
    stored = {weight.dtype for weight in weights}
    bits = {dtype.bitwidth for dtype in stored if dtype in _PACKED_TYPES}
    for node in nodes:
        if node.op_type == "MatMulBnb4":
            return "nf4"
        if node.op_type == "BitShift":
            bits.add(4)  # an embedding's numbers, two of them in a byte
        if "bits" in node.attributes:
            bits.add(node.attributes["bits"].as_int())
    if bits:
        return f"int{min(bits)}"
    return "fp16" if ir.DataType.FLOAT16 in stored else "fp32"
