"""The ONNX graph of a checkpoint, built operator by operator instead of traced.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, D hidden_size, V vocabulary.

Inputs `input_ids` (B, T), `attention_mask` (B, S) and `past_key_values.N.<state>`; outputs `logits` (B, T, V) and
`present.N.<state>`: the names that optimum, onnxruntime-genai and transformers.js look for. What is cached is said by
the model's kinds, for grouped-query attention `key` and `value`, (B, heads, S, head_dim): tokens are always on the last
axis but one; an LSTM's `hidden` and `cell` have none, (B, cells). Sequences of unequal length are padded on the right;
with standard operators the left will do as well.
A further input, `num_logits_to_keep`, may be left out: 0 keeps all positions, n the last n only.
Operators are ONNX Runtime's own if it has them: GroupQueryAttention, MatMulNBits, GatherBlockQuantized, ...
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md); or standard ones alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from export import layout
from export.graph.builder import FLOAT, HALF, INT8, INT64, UINT8, Builder, GraphForm, with_branches
from export.graph.calls import KernelCalls, KernelUse
from export.graph.feed_forward import Gated, MixtureOfExperts, Plain
from export.graph.grouped_query import HEAD_MULTIPLE, OrtGroupedQuery, StandardGroupedQuery
from export.graph.kernel_layers import EmittedLayer, Stream, add_head, add_layer
from export.graph.latent import LatentAttention
from export.graph.layer import LayerBuilder, SublayerBuilder
from export.graph.lstm import LSTM
from export.graph.selected import SelectedAttention
from export.graph.weights import Matmul, Weights
from export.layout import plain_files, web_files, web_precision
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
    NORMS,
    OUTPUT_NORMS,
    block_matrices,
    block_state,
    cached_shape,
)
from sportsllm.models.memory import kernels_lack
from sportsllm.models.sublayer import HIDDEN, Matrix

_PACKED_TYPES = {ir.DataType.INT4, ir.DataType.UINT4, INT8, UINT8}


def _grouped_query(layers: LayerBuilder, part: str) -> SublayerBuilder:
    return (StandardGroupedQuery if layers.form.standard else OrtGroupedQuery)(layers, part)


BUILDERS: dict[str, Callable[[LayerBuilder, str], SublayerBuilder]] = {
    "grouped_query": _grouped_query,
    "latent": LatentAttention,
    "lstm": LSTM,
    "swiglu": Gated,
    "geglu": Gated,
    "gelu": Plain,
    "gelu_erf": Plain,
    "relu": Plain,
    "experts": MixtureOfExperts,
    "selected": SelectedAttention,
}
"""How each kind of attention and feed-forward is written to a graph."""
# Kinds of attention whose builder has such a cache in a graph that computes in float32.
CACHE_KINDS = {"fp16": ("grouped_query",), "int8": ("grouped_query", "latent")}


def check_kinds(config: ModelConfig, cache: str = "fp32", standard: bool = False) -> None:
    """Refuse what cannot be exported, in standard operators or in ONNX Runtime's own.

    Raises:
        UsageError: a kind has no builder here or none with such a cache, or heads of this size have no operator.
    """
    for part, _ in config.runs():
        for name, kind in (("attention", part.attention_kind), ("feed-forward", part.mlp_kind)):
            if kind not in BUILDERS:
                raise UsageError(f"{name} of kind {kind!r} has no ONNX graph; these do: {', '.join(BUILDERS)}")
    if config.attention_kind not in CACHE_KINDS.get(cache, (config.attention_kind,)):
        raise UsageError(f"--kv-cache {cache}: attention of kind {config.attention_kind!r} has none; leave it out")
    if config.head_dim % HEAD_MULTIPLE and config.attention_kind in ("grouped_query", "selected") and not standard:
        advice = "; use --format standard" if config.attention_kind == "grouped_query" else ""
        raise UsageError(
            f"heads of {config.head_dim} channels: ONNX Runtime's attention takes multiples of {HEAD_MULTIPLE}{advice}"
        )


def computes_in_half(config: ModelConfig) -> bool:
    """Whether all parts of a model are written in float16: LLaMA's, and sliding and unrotated attention."""
    parts = (config.attention_kind, config.mlp_kind, config.norm_kind, config.output_norms, config.embedding_scale)
    return parts == ("grouped_query", "swiglu", "rms", False, 1.0) and not kernels_lack(config)


@dataclass(frozen=True)
class WrittenGraph:
    """A graph on disk."""

    precision: str  # see `graph_precision`
    kernels: KernelUse  # which parts call them
    wide_inputs: frozenset[str] = frozenset()  # modules whose inputs have 16 bits: asked for, or the head, see below


def write_graph(checkpoint: Path, directory: Path, form: GraphForm | None = None) -> WrittenGraph:
    """Write the graph of a checkpoint, packed or not, and its data into `directory`, which exists.

    Packed matrices are copied byte for byte; for standard operators they are transposed. Dense ones become float32, or
    float16 that is widened to float32 before use. Vectors (norms, biases) stay float32, except in a graph that computes
    in float16. Writing twice gives identical files.

    Raises:
        ArtifactError: the checkpoint is damaged, or does not fit float16.
        UsageError: a kind of the model has no graph.
    """
    form = form or GraphForm()
    config, weights = load_config(checkpoint), Weights(checkpoint)
    cache = layout.CONCAT_CACHE if form.standard else layout.IN_PLACE_CACHE
    facts = {layout.CACHE_KEY: cache}
    if form.operators == "onnx":
        facts[layout.RUNTIME_KEY] = layout.OLDEST_RUNTIME
    graph = Builder("sportsllm", facts)
    tokens_BT = graph.input(layout.INPUT_IDS, INT64, ["batch_size", "sequence_length"])
    mask_BS = graph.input(layout.ATTENTION_MASK, INT64, ["batch_size", "total_sequence_length"])
    shapes, numbers = _cache_shapes(config, "past_sequence_length"), range(config.num_hidden_layers)
    pasts = [
        [graph.input(layout.past_name(i, name), form.cached, shape) for name, shape in shapes.items()] for i in numbers
    ]
    keep = graph.input_with_default(layout.KEEP_LOGITS, np.array([0], np.int64))
    reasons = {
        "standard operators": form.standard,
        "a browser has none": form.operators == "web",
        "float16": form.real == HALF,
        "--set inline=true": form.inline,
    }
    refused = next((reason for reason, given in reasons.items() if given), None)
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    table = Matrix(head, config.vocab_size, config.hidden_size, "token", HIDDEN, HIDDEN)
    if not form.standard and form.real == FLOAT and _all_in_8_bits(weights, config, table):
        form = replace(form, wide_inputs=form.wide_inputs | {head})
    calls, matmul = KernelCalls(graph, config.num_hidden_layers, refused), Matmul(graph, weights, form)
    layers = LayerBuilder(graph, config, matmul, tokens_BT, mask_BS, form, calls)
    stream, presents = add_layers(layers, pasts, keep)
    with graph.recording() as nodes:
        x_BTD, _ = layers.norm(LAST_NORM, *stream)
        logits = matmul.product(HEAD, x_BTD, [table])
    logits = add_head(layers, stream, table, nodes, logits)
    logits = layers.softcapped("logits", logits, config.logit_softcap)
    if form.real == HALF:
        logits = graph.node("logits/float", "Cast", logits, to=FLOAT.value)
    graph.output(logits, layout.LOGITS, FLOAT, ["batch_size", "sequence_length", config.vocab_size])
    shapes = _cache_shapes(config, "total_sequence_length")
    for layer, present in enumerate(presents):
        for (name, shape), value in zip(shapes.items(), present, strict=True):
            graph.output(value, layout.present_name(layer, name), form.cached, shape)
    bodies = (node for function in graph.functions for node in function)
    precision = graph_precision(with_branches([*graph.nodes, *bodies]), graph.initializers.values())
    files = plain_files(directory)
    if form.operators == "web":
        files = web_files(directory, web_precision(precision, form.real == HALF))
    files.graph.parent.mkdir(exist_ok=True)
    graph.write(files)
    return WrittenGraph(precision, calls.use, form.wide_inputs)


def _all_in_8_bits(weights: Weights, config: ModelConfig, table: Matrix) -> bool:
    """Whether every matrix has 8 bits in blocks. Then rounding what the head reads makes half of the export's KL."""
    numbers = range(config.num_hidden_layers)
    matrices = [(f"model.layers.{i}.{m.name}", m) for i in numbers for m in block_matrices(config.of_layer(i))]
    packings = [weights.packing(name, (m.rows, m.columns)) for name, m in [*matrices, (table.name, table)]]
    return all(packing is not None and packing.bits == 8 for packing in packings)


def graph_precision(nodes: Iterable[ir.Node], weights: Iterable[ir.Value]) -> str:
    """`int4`, `int8`, `fp16` or `fp32`: the narrowest numbers that a graph's matrices are stored in."""
    stored = {weight.dtype for weight in weights if weight.shape is not None and len(weight.shape) > 1}
    bits = {dtype.bitwidth for dtype in stored if dtype in _PACKED_TYPES}
    for node in nodes:
        if node.op_type == "BitShift":
            bits.add(4)  # an embedding's numbers, two of them in a byte
        if "bits" in node.attributes:
            bits.add(node.attributes["bits"].as_int())
    if bits:
        return f"int{min(bits)}"
    return "fp16" if HALF in stored else "fp32"


def add_layers(
    layers: LayerBuilder, pasts: Sequence[Sequence[ir.Value]], keep: ir.Value
) -> tuple[Stream, list[Sequence[ir.Value]]]:
    """Embedding and layers, which read what each has cached; `keep` positions are wanted behind the last layer, 0 for
    all.

    Returns:
        The stream behind the layers, and what each layer caches.
    """
    config, builders = layers.config, _sublayer_builders(layers)
    stream, presents = Stream(layers.embedding(), None), list[Sequence[ir.Value]]()
    for layer, past in enumerate(pasts):
        own = config.of_layer(layer)
        attention, mlp = builders["self_attn", own.attention_kind], builders["mlp", own.mlp_kind]
        emitted = _emit(layers, attention, mlp, layer, stream, past, keep if layer == len(pasts) - 1 else None)
        add_layer(layers, attention, mlp, emitted)
        stream = Stream(emitted.out, emitted.residual)
        presents.append(emitted.presents)
    return stream, presents


def _sublayer_builders(layers: LayerBuilder) -> dict[tuple[str, str], SublayerBuilder]:
    """A builder for each kind of attention and feed-forward that the model has, by module and kind."""
    check_kinds(layers.config, standard=layers.form.standard)
    made: dict[tuple[str, str], SublayerBuilder] = {}
    for config, _ in layers.config.runs():
        for part, kind in (("self_attn", config.attention_kind), ("mlp", config.mlp_kind)):
            if (part, kind) not in made:
                made[part, kind] = BUILDERS[kind](replace(layers, config=config), part)
    return made


def _emit(
    layers: LayerBuilder,
    attention: SublayerBuilder,
    mlp: SublayerBuilder,
    layer: int,
    stream: Stream,
    past: Sequence[ir.Value],
    keep: ir.Value | None,
) -> EmittedLayer:
    """The nodes of a layer in ONNX Runtime's operators; `keep` in the last one."""
    graph, base, normed_first = layers.graph, f"model.layers.{layer}", layers.config.input_norms
    with graph.recording() as first:
        x_BTD, residual_BTD = layers.norm(f"{base}.{NORMS['self_attn']}", *stream, normed_first)
        x_BTD, presents = attention.emit(layer, x_BTD, past)
        if keep is not None:  # nothing reads what the rest of the last layer does with positions that are not kept
            at, end = graph.at(f"{base}.kept/"), graph.ints("kept/end", [np.iinfo(np.int64).max])
            start = at("start", "Neg", keep)  # -0 is the first position
            x_BTD, residual_BTD = (at(str(n), "Slice", x, start, end, 1) for n, x in enumerate((x_BTD, residual_BTD)))
        x_BTD = attention.output(layer, x_BTD)
        if layers.config.output_norms:
            x_BTD, _ = layers.norm(f"{base}.{OUTPUT_NORMS['self_attn']}", x_BTD, None)
        if layers.config.parallel_residual:
            normed, _ = layers.norm(f"{base}.{NORMS['mlp']}", residual_BTD, None, normed_first)
            residual = graph.node(f"{base}.after_attention", "Add", x_BTD, residual_BTD)
        else:
            normed, residual = layers.norm(f"{base}.{NORMS['mlp']}", x_BTD, residual_BTD, normed_first)
    with graph.recording() as router:
        routed = mlp.route(layer, normed)
    with graph.recording() as second:
        made, _ = mlp.emit(layer, normed, routed)
        out = made = mlp.output(layer, made)
    with graph.recording() as last:
        if layers.config.output_norms:
            out, _ = layers.norm(f"{base}.{OUTPUT_NORMS['mlp']}", made, None)
    nodes = (first, router, second, last)
    return EmittedLayer(layer, *nodes, stream, past, keep, presents, normed, residual, routed, made, out)


def _cache_shapes(config: ModelConfig, length: str) -> dict[str, list[object]]:
    """Names and shapes of what one layer caches, tokens, if there are any, on the last axis but one."""
    return {s.name: ["batch_size", *cached_shape(s, length)] for s in block_state(config)}
