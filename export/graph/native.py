"""Which parts of a graph the kernels take, and how: each layer, its halves or the head become calls of functions.

The operators are those of `export/kernels/library.cpp`: `DecoderLayer`, or else `DecoderAttention` and
`DecoderFeedForward` (SwiGLU, or experts behind their router); `SelectedAttention`, over the written cache;
`LatentTokens`, which write it, and `LatentAttention`; `DecoderHead`. The cache's type is a part of the name:
`DecoderLayerHalf` over a float16 cache, `DecoderLayerInt8` over an INT8 one. A part is folded if its matrices, where it
has any, are INT4 or INT8 in blocks; whatever is not stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir

from export import metadata
from export.graph.builder import KERNELS, Builder, with_branches
from export.graph.functions import Call, Functions
from export.graph.native_attention import ATTENTION, SUFFIXES, AttentionCall, Inputs
from export.graph.positions import LAST, TOTAL
from export.kernels.library import VERSION
from sportsllm.models.config import ModelConfig
from sportsllm.models.feed_forward_kinds import SHARED, routed_names
from sportsllm.models.kinds import HEAD, NORMS

MOST_BODIES = 8  # names that the library registers for each operator of a layer
_BLOCKS = (32, 64, 128, 256)
_ATTENTION = {"qkv": "self_attn.qkv_proj", "output": "self_attn.o_proj"}
_FEED_FORWARD = {"gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
_PARTS = ("packed", "scale", "zero_point", "bias")  # of a matrix, inputs in this order


@dataclass
class Folded:
    """What became calls, and why the rest did not."""

    layers: int
    attention: int = 0
    feed_forward: int = 0
    head: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def version(self) -> str | None:
        """Of the kernels that the graph calls; None where it calls none."""
        return VERSION if self.attention or self.feed_forward or self.head else None

    def __str__(self) -> str:
        if self.version is None:
            return f"kernels: the graph calls none ({self._why()})"
        parts = {"": self.attention} if self.attention == self.feed_forward else {}
        parts = parts or {"attention of ": self.attention, "the feed-forward of ": self.feed_forward}
        called = [f"{name}{self._of_layers(count)}" for name, count in parts.items() if count]
        called += ["the head"] if self.head else []
        whole = self.attention == self.feed_forward == self.layers and self.head
        joined = " and ".join(filter(None, [", ".join(called[:-1]), called[-1]]))
        return f"kernels: called for {joined}" + ("" if whole else f" ({self._why()})")

    def _of_layers(self, count: int) -> str:
        return f"all {count} layers" if count == self.layers else f"{count} of {self.layers} layers"

    def _why(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons))


def fold_model(graph: Builder, config: ModelConfig, residual: Sequence[Sequence[str]], cached: ir.DataType) -> Folded:
    """Fold the layers and the head of a finished graph in ONNX Runtime's operators.

    Args:
        graph: changed; its metadata then name the kernels' version.
        config: the model's shape.
        residual: see `export.graph.decoder.WrittenGraph`; these values keep their names.
        cached: what keys and values are cached in.
    """
    folded, functions = Folded(config.num_hidden_layers), Functions(graph, KERNELS, MOST_BODIES)

    def fold(made: Callable[[_Part], Call | None], reasons: list[str]) -> bool:
        part = _Part(graph)
        call = made(part)
        if call is not None and not functions.fold(call):
            part.reasons.append(f"more than {MOST_BODIES} kinds of layers")
        reasons += part.reasons
        return not part.reasons

    for layer in range(config.num_hidden_layers):
        model = config.of_layer(layer)
        if (own := ATTENTION.get(model.attention_kind)) is not None:
            done = [fold(partial(_alone, config=model, layer=layer, kind=each), folded.reasons) for each in own]
            folded.attention += all(done)
            folded.feed_forward += fold(partial(_feed_forward, config=model, layer=layer), folded.reasons)
            continue
        attention = partial(_layer, config=model, layer=layer, residual=residual, cached=cached)
        if fold(partial(attention, whole=True), []):
            folded.attention, folded.feed_forward = folded.attention + 1, folded.feed_forward + 1
            continue
        folded.attention += fold(partial(attention, whole=False), folded.reasons)
        folded.feed_forward += fold(partial(_feed_forward, config=model, layer=layer), folded.reasons)
    folded.head = fold(lambda part: _head(part, config, residual[-1]), folded.reasons)
    if graph.functions:
        graph.metadata[metadata.KERNELS_KEY] = VERSION
    return folded


class _Part:
    """A graph's values and products by name; collects reasons against a call."""

    def __init__(self, graph: Builder) -> None:
        self.nodes = {str(node.name): node for node in with_branches(graph.nodes)}
        found = (*graph.inputs, *graph.weights, *(value for node in graph.nodes for value in node.outputs))
        self.values = {str(value.name): value for value in found}
        self.reasons: list[str] = []

    def matrix(self, key: str, name: str) -> tuple[Inputs, dict[str, int]]:
        """A product's inputs and attributes of the kernel; a reason instead where there is no such product."""
        node = self.nodes.get(f"{name}/product")
        if node is None or node.op_type != "MatMulNBits":
            self.reasons.append(_format(node))
            return {}, {}
        sizes = {size: node.attributes[size].as_int() for size in ("bits", "block_size")}
        if sizes["bits"] not in (4, 8) or sizes["block_size"] not in _BLOCKS:
            self.reasons.append(f"{sizes['bits']} bits in blocks of {sizes['block_size']}")
        given = [*node.inputs[1:], None][:3]
        inputs = dict(zip((f"{key}_{part}" for part in _PARTS), [*given, self.values.get(f"{name}.bias")], strict=True))
        return inputs, {f"{key}_{size}": value for size, value in sizes.items()}

    def alike(self, kind: str, size: int, modules: Sequence[str], up: str) -> tuple[Inputs, dict[str, int]]:
        """Inputs and attributes of parts of a feed-forward that are stored alike; a reason where they are not."""
        inputs: Inputs = {}
        found: list[dict[str, int]] = []
        for number, module in enumerate(modules):
            attributes = {f"{kind}_size": size}
            for key, name in (("up", up), ("down", "down_proj")):
                given, sizes = self.matrix(key, f"{module}.{name}")
                inputs |= {f"{kind}{number}_{part}": value for part, value in given.items() if value is not None}
                attributes |= {f"{kind}_{part}": value for part, value in sizes.items()}
                attributes |= {
                    f"{kind}_{key}_{plural}": int(given.get(f"{key}_{part}") is not None)
                    for part, plural in (("zero_point", "zero_points"), ("bias", "biases"))
                }
            found.append(attributes)
        if any(attributes != found[0] for attributes in found):
            self.reasons.append("experts in unlike formats")
        return inputs, found[0]

    def output(self, name: str) -> ir.Value:
        """What a node, or a product with its bias, gives."""
        names = (f"{name}/biased", f"{name}/product", name)
        return next(self.nodes[each] for each in names if each in self.nodes).outputs[0]

    def second_normed(self, layer: str) -> ir.Value:
        """What a layer's feed-forward reads."""
        return self.values[f"{layer}.{NORMS['mlp']}"]

    def stream(self, names: Sequence[str]) -> Inputs:
        """The residual stream, as one or two values."""
        return {"x": self.values[names[0]], "residual": self.values[names[1]] if len(names) > 1 else None}


def _format(node: ir.Node | None) -> str:
    formats = {"FusedMatMul": "dense matrices", "DynamicQuantizeMatMul": "INT8 per row"}
    return "matrices in unlike formats" if node is None else formats.get(node.op_type, node.op_type)


def _alone(part: _Part, config: ModelConfig, layer: int, kind: AttentionCall) -> Call:
    return kind(part.nodes, part.values, config, layer)


def _layer(
    part: _Part,
    config: ModelConfig,
    layer: int,
    residual: Sequence[Sequence[str]],
    cached: ir.DataType,
    whole: bool,
) -> Call | None:
    """The call of a layer, or of its attention and the norm behind it; None where it cannot be one."""
    name, values = f"model.layers.{layer}", part.values
    if config.attention_kind != "grouped_query":
        part.reasons.append(f"attention {config.attention_kind}")
        return None
    unlike = {
        f"feed-forward {config.mlp_kind}": whole and config.mlp_kind != "swiglu",
        "LayerNorm": config.norm_kind != "rms",
        "norms after attention and feed-forward": config.output_norms,
        "scores of another scale": config.attention_scale is not None,
        "sliding attention": config.window(layer) is not None,
        "attention without rotation": not config.rotates(layer),
    }
    if any(unlike.values()):
        part.reasons += [reason for reason, found in unlike.items() if found]
        return None
    found = {key: part.matrix(key, f"{name}.{module}") for key, module in _ATTENTION.items()}
    second = {key: part.matrix(key, f"{name}.{module}") for key, module in _FEED_FORWARD.items()} if whole else {}
    if part.reasons:
        return None
    last = layer == config.num_hidden_layers - 1
    past = [metadata.past_name(layer, state) for state in ("key", "value")]
    inputs = part.stream(residual[layer])
    inputs |= {"last": values[LAST], "total": values[TOTAL], "keep": values[metadata.KEEP_LOGITS] if last else None}
    inputs |= {"past_key": values[past[0]], "past_value": values[past[1]]}
    inputs |= {"cosine": values["cos_cache"], "sine": values["sin_cache"]}
    inputs |= {f"{state}_scale": values.get(f"{name}.self_attn.{state[0]}_scale") for state in ("key", "value")}
    inputs["norm"] = values[f"{name}.{NORMS['self_attn']}.weight"]
    inputs |= {f"{side}_norm": values.get(f"{name}.self_attn.{side[0]}_norm.weight") for side in ("query", "key")}
    inputs |= found["qkv"][0] | found["output"][0]
    inputs |= {"second_norm": values[f"{name}.{NORMS['mlp']}.weight"]}
    out, residual_out = residual[layer + 1]
    outputs = {"out": values[out] if whole else part.second_normed(name), "residual_out": values[residual_out]}
    outputs |= {state: values[metadata.present_name(layer, state)] for state in ("key", "value")}
    attributes: dict[str, int | float] = {
        "num_heads": config.num_attention_heads,
        "kv_num_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        **({"intermediate_size": config.intermediate_size} if whole else {}),
        "epsilon": config.rms_norm_eps,
    }
    if whole:
        inputs |= second["gate_up"][0] | second["down"][0]
    for _, sizes in (found | second).values():
        attributes |= sizes
    op = ("DecoderLayer" if whole else "DecoderAttention") + SUFFIXES[cached]
    if whole:
        return Call(op, name, name, (f"{name}.",), inputs, outputs, attributes)
    prefixes = tuple(f"{name}.{start}" for start in (*NORMS.values(), "self_attn.", "self_attn/", "kept/"))
    return Call(op, f"{name}.self_attn", name, prefixes, inputs, outputs, attributes)


def _feed_forward(part: _Part, config: ModelConfig, layer: int) -> Call | None:
    """The call of a layer's feed-forward behind its norm, of experts behind their router; None where it is not one."""
    base = f"model.layers.{layer}"
    name, experts = f"{base}.mlp", config.experts
    if config.mlp_kind not in ("swiglu", "experts"):
        part.reasons.append(f"feed-forward {config.mlp_kind}")
        return None
    gated = experts is None or experts.gated
    up = "gate_up_proj" if gated else "up_proj"
    attributes: dict[str, int | float] = {
        "hidden_size": config.hidden_size,
        "gated": int(gated),
        "experts": 0 if experts is None else experts.count,
        "active_experts": 0 if experts is None else experts.active,
        "shared": 1 if experts is None else min(1, experts.shared),
    }
    inputs: Inputs = {"x": part.second_normed(base), "chosen": None, "weights": None}
    size = config.intermediate_size
    if experts is None:
        matrices, own = part.alike("shared", size, [name], up)
        inputs |= matrices
        prefixes: tuple[str, ...] = (f"{name}.", f"{name}/")
        out = f"{name}.down_proj"
    else:
        matrices, own = part.alike("expert", size, [f"{name}.{expert}" for expert in routed_names(experts)], up)
        inputs |= matrices
        if experts.shared:
            matrices, sizes = part.alike("shared", experts.shared * size, [f"{name}.{SHARED}"], up)
            inputs |= matrices
            own |= sizes
        inputs |= {place: part.nodes[f"{name}/{place}"].inputs[0] for place in ("chosen", "weights")}
        prefixes = (f"{name}/", f"{name}.experts.", f"{name}.{SHARED}")
        out = f"{name}/output"
    if part.reasons:
        return None
    outputs = {"out": part.output(out)}
    return Call("DecoderFeedForward", name, base, prefixes, inputs, outputs, attributes | own)


def _head(part: _Part, config: ModelConfig, stream: Sequence[str]) -> Call | None:
    """The head's call; None where it cannot be one."""
    matrix, sizes = part.matrix("head", HEAD)
    if config.norm_kind != "rms":
        part.reasons.append("LayerNorm")
    if part.reasons:
        return None
    inputs = {**part.stream(stream), "norm": part.values["model.norm.weight"], **matrix}
    attributes: Mapping[str, int | float] = {"hidden_size": config.hidden_size, "epsilon": config.rms_norm_eps, **sizes}
    outputs = {"logits": part.values[metadata.LOGITS]}
    return Call("DecoderHead", HEAD, HEAD, ("model.norm", HEAD), inputs, outputs, attributes)
