"""Which nodes of attention with kernels of its own become which calls; see `export.graph.native`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import onnx_ir as ir

from export import metadata
from export.graph.functions import Call
from export.graph.latent import SHORT
from export.graph.positions import LAST
from export.graph.selected import SELECTED
from sportsllm.models.attention_kinds import index_size
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import block_state

Inputs = dict[str, ir.Value | None]
Nodes = Mapping[str, ir.Node]
Values = Mapping[str, ir.Value]
AttentionCall = Callable[[Nodes, Values, ModelConfig, int], Call]
"""Of a graph's nodes and values by name, the model's config and a layer."""
SUFFIXES = {ir.DataType.FLOAT: "", ir.DataType.FLOAT16: "Half", ir.DataType.INT8: "Int8"}
"""Of an operator's name, by what the cache is of."""


def _selected(nodes: Nodes, values: Values, config: ModelConfig, layer: int) -> Call:
    """The call of a layer's attention to selected tokens, from the written cache on.

    Behind the kernel's inputs come what all layers share and the body alone reads.
    """
    base = f"model.layers.{layer}"
    name, selection = f"{base}.self_attn/{SELECTED}", config.chosen_selection
    states = zip(("key", "value", "index"), block_state(config), strict=True)
    inputs: Inputs = {"query": nodes[f"{name}/one/query"].inputs[0]}
    inputs |= {"index_query": nodes[f"{name}/one/chosen/query_rows"].inputs[0], "last": values[LAST]}
    inputs |= {key: values[metadata.present_name(layer, state.name)] for key, state in states}
    outputs = {"out": nodes[f"{name}/either"].outputs[0]}
    inputs |= _shared(nodes, (f"{name}/",), inputs)
    attributes: dict[str, int | float] = {
        "num_heads": config.num_attention_heads,
        "kv_num_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "index_heads": selection.heads,
        "index_size": index_size(config),
        "block_size": selection.block,
        "blocks": selection.blocks,
        "newest_blocks": selection.newest,
        "scale": config.score_scale,
    }
    return Call("SelectedAttention", name, base, (f"{name}/",), inputs, outputs, attributes)


def _latent_tokens(nodes: Nodes, values: Values, config: ModelConfig, layer: int) -> Call:
    """The call of what latent attention makes of new tokens between the products and the written cache."""
    base, (state,) = f"model.layers.{layer}", block_state(config)
    name = f"{base}.self_attn"
    prefixes = tuple(
        f"{name}{start}" for start in (".q/", ".kv/", ".kv_a_layernorm", ".k/", "/cached", "/rounded", "/present")
    )
    norm, shifted = (nodes[f"{prefixes[2]}{end}"] for end in ("", "/shifted"))
    epsilon = cast(ir.Value, shifted.inputs[1]).const_value
    assert epsilon is not None, "a constant"
    stored = nodes.get(f"{name}/rounded")
    inputs: Inputs = {"query": nodes[f"{name}.q/heads"].inputs[0], "latent": nodes[f"{name}.kv/split"].inputs[0]}
    inputs |= {"cosine": nodes[f"{name}.q/first_cos"].inputs[1], "sine": nodes[f"{name}.q/first_sin"].inputs[1]}
    inputs |= {"last": values[LAST], "past": values[metadata.past_name(layer, state.name)]}
    inputs |= {"norm": norm.inputs[1], "scale": None if stored is None else stored.inputs[1]}
    inputs |= _shared(nodes, prefixes, inputs)
    outputs = {"unrotated": nodes[f"{name}.q/plain_by_head"].outputs[0]}
    outputs |= {"rotated": nodes[f"{name}.q/turned_by_head"].outputs[0]}
    outputs |= {"present": values[metadata.present_name(layer, state.name)]}
    attributes = _latent_sizes(config) | {
        "epsilon": float(epsilon.numpy()),
        "scale": config.score_scale,
    }
    op = "LatentTokens" + ("" if stored is None else SUFFIXES[ir.DataType.INT8])
    return Call(op, f"{name}/tokens", base, prefixes, inputs, outputs, attributes)


def _latent_sizes(config: ModelConfig) -> dict[str, int | float]:
    return {
        "num_heads": config.num_attention_heads,
        "rank": config.kv_rank,
        "rotated_size": config.head_dim,
        "unrotated_size": config.unrotated_dim,
        "value_size": config.value_dim,
    }


def _latent(nodes: Nodes, values: Values, config: ModelConfig, layer: int) -> Call:
    """The call of a layer's attention of few new tokens to cached latent vectors, in a branch of the graph.

    Behind the kernel's inputs come what all layers share and the body alone reads.
    """
    base, (state,) = f"model.layers.{layer}", block_state(config)
    name = f"{base}.self_attn/{SHORT}"
    (branch,) = (graph for graph in _branches(nodes[f"{base}.self_attn/attention_either"]) if _holds(graph, name))
    plain, keys = nodes[f"{name}/low_query"].inputs
    stored = nodes.get(f"{name}/filled_float")
    inputs: Inputs = {"unrotated": plain, "rotated": nodes[f"{name}/query"].inputs[1], "last": values[LAST]}
    inputs |= {"state": values[metadata.present_name(layer, state.name)], "keys": keys}
    inputs |= {"values": nodes[f"{name}/values_turned"].inputs[0]}
    inputs["scale"] = None if stored is None else stored.inputs[1]
    inputs |= _shared(nodes, (f"{name}/",), inputs)
    op = "LatentAttention" + ("" if stored is None else SUFFIXES[ir.DataType.INT8])
    return Call(op, name, base, (f"{name}/",), inputs, {"out": branch.outputs[0]}, _latent_sizes(config), branch)


def _branches(node: ir.Node) -> list[ir.Graph]:
    return [one.as_graph() for one in node.attributes.values() if one.type == ir.AttributeType.GRAPH]


def _holds(graph: ir.Graph, name: str) -> bool:
    return any(str(node.name).startswith(f"{name}/") for node in graph)


def _shared(nodes: Mapping[str, ir.Node], prefixes: tuple[str, ...], inputs: Inputs) -> Inputs:
    """What nodes of some names read besides `inputs`, of which the graph has one for all layers."""
    own = [node for node in nodes.values() if str(node.name).startswith(prefixes)]
    known = {*inputs.values(), *(value for node in own for value in node.outputs)}
    read = dict.fromkeys(value for node in own for value in node.inputs if value is not None and value not in known)
    return {f"shared{n}": value for n, value in enumerate(v for v in read if v.const_value is None)}


ATTENTION: dict[str, tuple[AttentionCall, ...]] = {"selected": (_selected,), "latent": (_latent_tokens, _latent)}
"""Attention that has kernels apart from products, by its kind."""
