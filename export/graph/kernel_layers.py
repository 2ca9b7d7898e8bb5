"""Which parts of a layer in ONNX Runtime's operators become calls of kernels: all of it, its sublayers, or none.

LLaMA's layers call `DecoderLayer` or `DecoderAttention`. Those with norms behind sublayers, another scale of scores, a
window, no rotation, LayerNorm, GELU with or without a gate, or 16-bit inputs call `GeneralLayer` or `GeneralAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from export.graph.calls import SUFFIXES, Attributes, Call, Inputs, Operand
from export.graph.grouped_query import OrtGroupedQuery
from export.graph.layer import LayerBuilder, SublayerBuilder
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import HEAD, LAST_NORM, NORMS, OUTPUT_NORMS
from sportsllm.models.kinds import SHARED, routed_names
from sportsllm.models.memory import kernels_lack
from sportsllm.models.sublayer import HIDDEN, Matrix

_WHOLE_KINDS = ("swiglu", "geglu", "gelu")
"""Kinds of feed-forward that are computed together with attention."""


class Stream(NamedTuple):
    """The residual stream between layers, (B, T, D), not yet added up."""

    x: ir.Value  # what the last sublayer adds
    residual: ir.Value | None  # the stream before it


@dataclass
class EmittedLayer:
    """The nodes of a layer, not yet in the graph, and the values between them; those of calls once they are added."""

    layer: int
    first: list[ir.Node]  # norm, attention and the norm behind it
    router: list[ir.Node]  # of experts
    second: list[ir.Node]  # the feed-forward
    last: list[ir.Node]  # the norm behind it, in a model with `output_norms`
    stream: Stream  # what the layer reads
    past: Sequence[ir.Value]
    keep: ir.Value | None  # positions that are kept behind the last layer
    presents: Sequence[ir.Value]
    normed: ir.Value  # what the feed-forward reads
    residual: ir.Value  # the stream behind attention
    routed: Sequence[ir.Value]  # the router's choice
    made: ir.Value  # the feed-forward's output
    out: ir.Value  # the same behind its norm: what is added to the residual stream


def add_layer(layers: LayerBuilder, attention: SublayerBuilder, mlp: SublayerBuilder, emitted: EmittedLayer) -> None:
    """Add a layer to the graph, with calls if kernels compute it."""
    calls, graph, config = layers.calls, layers.graph, attention.config
    if not calls.allowed:
        graph.nodes.extend([*emitted.first, *emitted.router, *emitted.second, *emitted.last])
        return
    reasons = kernels_lack(config)
    if not reasons and mlp.config.mlp_kind in _WHOLE_KINDS:
        call = _attention_call(layers, attention, emitted, mlp)
        if isinstance(call, Call) and calls.fold(call, [*emitted.first, *emitted.second, *emitted.last]):
            calls.use.attention, calls.use.feed_forward = calls.use.attention + 1, calls.use.feed_forward + 1
            emitted.out, emitted.residual, *emitted.presents = call.outputs.values()
            return
    if config.attention_kind in ("latent", "selected"):  # those have calls within
        graph.nodes.extend(emitted.first)
    else:
        call = reasons or _attention_call(layers, attention, emitted)
        if calls.add(call, emitted.first) and isinstance(call, Call):
            calls.use.attention += 1
            emitted.normed, emitted.residual, *emitted.presents = call.outputs.values()
    graph.nodes.extend(emitted.router)
    call = _feed_forward_call(mlp, emitted)
    if calls.add(call, emitted.second) and isinstance(call, Call):
        calls.use.feed_forward += 1
        emitted.made = call.outputs["out"]
        emitted.out = emitted.out if emitted.last else emitted.made
    graph.nodes.extend(emitted.last)


def _attention_call(
    layers: LayerBuilder, attention: SublayerBuilder, emitted: EmittedLayer, mlp: SublayerBuilder | None = None
) -> Call | list[str]:
    """The call of attention and the norm behind it, with `mlp` of the whole layer; or why there is none."""
    layer, config = emitted.layer, attention.config
    assert isinstance(attention, OrtGroupedQuery), "asked for before"
    name = f"model.layers.{layer}"
    operands = [attention.operand("qkv", layer, HIDDEN), attention.output_operand("output", layer)]
    if mlp is not None:
        operands += [mlp.operand("gate_up", layer, HIDDEN), mlp.output_operand("down", layer)]
    if reasons := [each for each in operands if isinstance(each, str)]:
        return reasons
    found = [each for each in operands if isinstance(each, Operand)]
    second_norm = layers.matmul.vector(f"{name}.{NORMS['mlp']}.weight", config.hidden_size)
    inputs = emitted.stream._asdict() | attention.kernel_inputs(layer, emitted.past, emitted.keep)
    inputs |= found[0].inputs | found[1].inputs | {"second_norm": second_norm}
    attributes: Attributes = {
        "num_heads": config.num_attention_heads,
        "kv_num_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        **({} if mlp is None else {"intermediate_size": mlp.config.intermediate_size}),
        "epsilon": config.rms_norm_eps,
        "rotary_factor": layers.rotary_frequencies(layer)[1] if config.rotates(layer) else 1.0,
    }
    for operand in found:
        attributes |= operand.attributes
    for operand in found[2:]:
        inputs |= operand.inputs
    key, value = emitted.presents
    out = emitted.normed if mlp is None else emitted.out
    outputs = {"out": out, "residual_out": emitted.residual, "key": key, "value": value}
    kind = "Decoder"
    if _is_general(config, layer, mlp) or any(operand.wide for operand in found):
        kind = "General"
        attributes |= _general_attributes(config, layer, mlp, found)
        inputs |= dict.fromkeys(_FEED_FORWARD_INPUTS) if mlp is None else {}
        inputs |= _norms(layers, layer, mlp)
    inputs |= attention.body_inputs(layer)
    op = kind + ("Attention" if mlp is None else "Layer") + SUFFIXES[layers.form.cached]
    return Call(op, attention.name(layer) if mlp is None else name, name, inputs, outputs, attributes)


def _is_general(config: ModelConfig, layer: int, mlp: SublayerBuilder | None) -> bool:
    """Whether LLaMA has no such layers."""
    unlike = [config.output_norms, config.attention_scale is not None, config.window(layer) is not None]
    unlike += [not config.rotates(layer), config.norm_kind == "layer"]
    return any(unlike) or (mlp is not None and mlp.config.mlp_kind != "swiglu")


def _general_attributes(
    config: ModelConfig, layer: int, mlp: SublayerBuilder | None, operands: Sequence[Operand]
) -> Attributes:
    window = config.window(layer) or 0
    attributes: Attributes = {"scale": config.score_scale, "window": min(window, config.max_position_embeddings)}
    if mlp is not None:
        kind = mlp.config.mlp_kind
        attributes |= {"gelu": int(kind != "swiglu"), "gated": int(kind != "gelu")}
    keys = ("qkv", "output", "gate_up", "down")
    return attributes | {f"{key}_wide": int(operand.wide) for key, operand in zip(keys, operands, strict=False)}


_FEED_FORWARD_INPUTS = [
    f"{key}_{part}" for key in ("gate_up", "down") for part in ("packed", "scale", "zero_point", "bias")
]


def _norms(layers: LayerBuilder, layer: int, mlp: SublayerBuilder | None) -> Inputs:
    """Norms behind attention and feed-forward, and biases of those before."""
    config, base = layers.config, f"model.layers.{layer}"

    def vector(name: str, given: bool) -> ir.Value | None:
        return layers.matmul.vector(f"{base}.{name}", config.hidden_size) if given else None

    normed, biased = config.output_norms, config.norm_kind == "layer"
    return {
        "norm_after_attention": vector(f"{OUTPUT_NORMS['self_attn']}.weight", normed),
        "norm_after_feed_forward": vector(f"{OUTPUT_NORMS['mlp']}.weight", normed and mlp is not None),
        "norm_bias": vector(f"{NORMS['self_attn']}.bias", biased),
        "second_norm_bias": vector(f"{NORMS['mlp']}.bias", biased),
    }


def _feed_forward_call(mlp: SublayerBuilder, emitted: EmittedLayer) -> Call | list[str]:
    """The call of a feed-forward behind its norm, of experts behind their router; or why there is none."""
    config, name, size = mlp.config, mlp.name(emitted.layer), mlp.config.intermediate_size
    if config.mlp_kind not in ("swiglu", "experts"):
        return [f"feed-forward {config.mlp_kind}"]
    experts = config.experts
    attributes: Attributes = {
        "hidden_size": config.hidden_size,
        "gated": int(experts is None or experts.gated),
        "experts": 0 if experts is None else experts.count,
        "active_experts": 0 if experts is None else experts.active,
        "shared": 1 if experts is None else min(1, experts.shared),
    }
    chosen, weights = emitted.routed or (None, None)
    inputs: Inputs = {"x": emitted.normed, "chosen": chosen, "weights": weights}
    reasons: list[str] = []
    if experts is None:
        attributes |= _alike(mlp, emitted.layer, "shared", size, [""], inputs, reasons)
    else:
        attributes |= _alike(mlp, emitted.layer, "expert", size, routed_names(experts), inputs, reasons)
        if experts.shared:
            attributes |= _alike(mlp, emitted.layer, "shared", experts.shared * size, [SHARED], inputs, reasons)
    base = f"model.layers.{emitted.layer}"
    return reasons or Call("DecoderFeedForward", name, base, inputs, {"out": emitted.made}, attributes)


def _alike(
    mlp: SublayerBuilder, layer: int, kind: str, size: int, modules: Sequence[str], inputs: Inputs, reasons: list[str]
) -> Attributes:
    """Attributes of parts of a feed-forward that are stored alike; adds their matrices, or reasons if they are not."""
    found: list[Attributes] = []
    for number, module in enumerate(modules):
        attributes: Attributes = {f"{kind}_size": size}
        for key, operand in zip(("up", "down"), mlp.operands(layer, module), strict=True):
            if isinstance(operand, str):
                reasons.append(operand)
                continue
            reasons += ["16-bit inputs"] * operand.wide
            inputs |= {f"{kind}{number}_{part}": value for part, value in operand.inputs.items() if value is not None}
            attributes |= {f"{kind}_{part}": value for part, value in operand.attributes.items()}
            attributes |= {
                f"{kind}_{key}_{plural}": int(operand.inputs[f"{key}_{part}"] is not None)
                for part, plural in (("zero_point", "zero_points"), ("bias", "biases"))
            }
        found.append(attributes)
    if any(attributes != found[0] for attributes in found):
        reasons.append("experts in unlike formats")
    return found[0]


def add_head(layers: LayerBuilder, stream: Stream, table: Matrix, nodes: list[ir.Node], logits: ir.Value) -> ir.Value:
    """Add the head's nodes to the graph, as a call if kernels compute it; returns its logits."""
    if not layers.calls.allowed:
        layers.graph.nodes.extend(nodes)
        return logits
    config, operand = layers.config, layers.matmul.operand("head", HEAD, [table])
    call: Call | list[str] = [operand] if isinstance(operand, str) else []
    if isinstance(operand, Operand):
        norm = layers.matmul.vector(f"{LAST_NORM}.weight", config.hidden_size)
        inputs = {**stream._asdict(), "norm": norm, **operand.inputs}
        sizes: Attributes = {"hidden_size": config.hidden_size, "epsilon": config.rms_norm_eps}
        op, biased = "DecoderHead", config.norm_kind == "layer"
        if biased or operand.wide:
            op, sizes["head_wide"] = "GeneralHead", int(operand.wide)
            inputs["norm_bias"] = layers.matmul.vector(f"{LAST_NORM}.bias", config.hidden_size) if biased else None
        call = Call(op, HEAD, HEAD, inputs, {"logits": logits}, sizes | operand.attributes)
    layers.calls.use.head = layers.calls.add(call, nodes)
    return call.outputs["logits"] if isinstance(call, Call) else logits
