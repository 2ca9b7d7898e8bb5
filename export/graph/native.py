"""Which parts of a graph the kernels take, and how: each layer and the head become a call of a function.

The operators are those of `export/kernels/library.cpp`: `DecoderLayer`, `DecoderLayerInt8` over an INT8 cache, and
`DecoderHead`. A layer is folded if its four matrices are INT4 or INT8 in blocks; whatever is not stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from export import metadata
from export.graph.builder import KERNELS, Builder
from export.graph.functions import Call, Functions
from export.graph.positions import LAST, TOTAL
from export.kernels.library import VERSION
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import HEAD

MOST_BODIES = 8  # names that the library registers for each operator of a layer
_BLOCKS = (32, 64, 128, 256)
_MATRICES = {
    "qkv": "self_attn.qkv_proj",
    "output": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
_PARTS = ("packed", "scale", "zero_point", "bias")  # of a matrix, inputs in this order
Inputs = dict[str, ir.Value | None]


@dataclass
class Folded:
    """What became calls, and why the rest did not."""

    layers: int
    called: int = 0
    head: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def version(self) -> str | None:
        """Of the kernels that the graph calls; None where it calls none."""
        return VERSION if self.called or self.head else None

    def __str__(self) -> str:
        if self.version is None:
            return f"kernels: the graph calls none ({self._why()})"
        whole = self.called == self.layers and self.head
        head = " and the head" if self.head else ""
        called = f"all {self.layers} layers{head}" if whole else f"{self.called} of {self.layers} layers{head}"
        return f"kernels: called for {called}" + ("" if whole else f" ({self._why()})")

    def _why(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons))


def fold_model(graph: Builder, config: ModelConfig, residual: Sequence[Sequence[str]], int8_cache: bool) -> Folded:
    """Fold the layers and the head of a finished graph in ONNX Runtime's operators.

    Args:
        graph: changed; its metadata then name the kernels' version.
        config: the model's shape.
        residual: see `export.graph.decoder.WrittenGraph`; these values keep their names.
        int8_cache: whether keys and values are cached in INT8.
    """
    folded, functions = Folded(config.num_hidden_layers), Functions(graph, KERNELS, MOST_BODIES)
    for layer in range(config.num_hidden_layers):
        part = _Part(graph)
        call = _layer(part, config, layer, residual, int8_cache)
        if call is not None and not functions.fold(call):
            part.reasons.append(f"more than {MOST_BODIES} kinds of layers")
        folded.called += not part.reasons
        folded.reasons += part.reasons
    part = _Part(graph)
    call = _head(part, config, residual[-1])
    folded.head = call is not None and functions.fold(call)
    folded.reasons += part.reasons
    if graph.functions:
        graph.metadata[metadata.KERNELS_KEY] = VERSION
    return folded


class _Part:
    """A graph's values and products by name; collects reasons against a call."""

    def __init__(self, graph: Builder) -> None:
        self.nodes = {str(node.name): node for node in graph.nodes}
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

    def stream(self, names: Sequence[str]) -> Inputs:
        """The residual stream, as one or two values."""
        return {"x": self.values[names[0]], "residual": self.values[names[1]] if len(names) > 1 else None}


def _format(node: ir.Node | None) -> str:
    formats = {"FusedMatMul": "dense matrices", "DynamicQuantizeMatMul": "INT8 per row"}
    return "matrices in unlike formats" if node is None else formats.get(node.op_type, node.op_type)


def _layer(
    part: _Part, config: ModelConfig, layer: int, residual: Sequence[Sequence[str]], int8_cache: bool
) -> Call | None:
    """A layer's call; None where it cannot be one."""
    name, values = f"model.layers.{layer}", part.values
    if (config.attention_kind, config.mlp_kind) != ("grouped_query", "swiglu"):
        part.reasons.append(f"attention {config.attention_kind} with feed-forward {config.mlp_kind}")
        return None
    unlike = {
        "LayerNorm": config.norm_kind != "rms",
        "norms after attention and feed-forward": config.output_norms,
        "scores of another scale": config.attention_scale is not None,
        "sliding attention": config.window(layer) is not None,
        "attention without rotation": not config.rotates(layer),
    }
    if any(unlike.values()):
        part.reasons += [reason for reason, found in unlike.items() if found]
        return None
    found = {key: part.matrix(key, f"{name}.{module}") for key, module in _MATRICES.items()}
    if part.reasons:
        return None
    last = layer == config.num_hidden_layers - 1
    past = [metadata.past_name(layer, state) for state in ("key", "value")]
    inputs = part.stream(residual[layer])
    inputs |= {"last": values[LAST], "total": values[TOTAL], "keep": values[metadata.KEEP_LOGITS] if last else None}
    inputs |= {"past_key": values[past[0]], "past_value": values[past[1]]}
    inputs |= {"cosine": values["cos_cache"], "sine": values["sin_cache"]}
    inputs |= {f"{state}_scale": values.get(f"{name}.self_attn.{state[0]}_scale") for state in ("key", "value")}
    inputs["norm"] = values[f"{name}.input_layernorm.weight"]
    inputs |= {f"{side}_norm": values.get(f"{name}.self_attn.{side[0]}_norm.weight") for side in ("query", "key")}
    inputs |= found["qkv"][0] | found["output"][0]
    inputs |= {"second_norm": values[f"{name}.post_attention_layernorm.weight"]}
    inputs |= found["gate_up"][0] | found["down"][0]
    out, residual_out = residual[layer + 1]
    outputs = {"out": values[out], "residual_out": values[residual_out]}
    outputs |= {state: values[metadata.present_name(layer, state)] for state in ("key", "value")}
    attributes: dict[str, int | float] = {
        "num_heads": config.num_attention_heads,
        "kv_num_heads": config.num_key_value_heads,
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "epsilon": config.rms_norm_eps,
    }
    for _, sizes in found.values():
        attributes |= sizes
    op = "DecoderLayerInt8" if int8_cache else "DecoderLayer"
    return Call(op, name, (f"{name}.",), inputs, outputs, attributes)


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
    return Call("DecoderHead", HEAD, ("model.norm", HEAD), inputs, outputs, attributes)
