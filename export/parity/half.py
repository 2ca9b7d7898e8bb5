"""Graphs that compute in float16: the same graph in float32, and the PyTorch model with the numbers that it stores."""

from __future__ import annotations

import onnx_ir as ir
import torch

from export.parity.inputs import round_to_half
from sportsllm.formats.packed import QuantizedWeight
from sportsllm.formats.quantized_layers import QuantizedMatrix
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.rope import rope_tables

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_TABLES = ("cos_cache", "sin_cache")


def widen(graph: ir.Model, config: ModelConfig) -> None:
    """Make a graph that computes in float16 compute in float32 with the weights that it stores, in place.

    The rotary tables become float32's: the gate compares the stored ones for equality.
    """
    main = graph.graph
    tables = dict(zip(_TABLES, rope_tables(config, config.max_position_embeddings), strict=True))
    for value in (*main.inputs, *main.outputs):
        if value.dtype == HALF:
            value.dtype = FLOAT
    for node in main:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == HALF.value:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT.value)
    first = main[0]
    for name, value in list(main.initializers.items()):
        if value.dtype != HALF:
            continue
        if name in tables:
            value.const_value = ir.tensor(tables[name], name=name)
            value.dtype = FLOAT
            continue
        cast = ir.node("Cast", [value], {"to": FLOAT.value}, name=f"{name}/widened")
        for node, place in list(value.uses()):
            if node is not cast:
                node.replace_input_with(place, cast.outputs[0])
        main.insert_before(first, cast)


@torch.no_grad()
def round_model_to_half(model: SportsLLM) -> None:
    """Round everything that such a graph stores to float16, in place: matrices, scales of packed ones, vectors."""
    round_to_half(model.parameters())
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            zero_points = getattr(module, "weight_zero_point", None)
            rounded = QuantizedWeight(
                packed=module.get_buffer("weight_packed").numpy(),
                scales=module.get_buffer("weight_scale").half().float().numpy(),
                zero_points=None if zero_points is None else zero_points.numpy(),
                bits=module.bits,
                block_size=module.block_size,
                in_features=module.in_features,
            )
            module.weight.copy_(torch.from_numpy(rounded.dequantize()))
