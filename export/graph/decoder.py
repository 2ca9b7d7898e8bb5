"""The ONNX graph of a checkpoint, built operator by operator instead of traced.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, D hidden_size, H query heads,
K key/value heads, E head_dim, V vocabulary.

Inputs `input_ids` (B, T), `attention_mask` (B, S), `past_key_values.N.key` and `.value` (B, K, S - T, E);
outputs `logits` (B, T, V), `present.N.key` and `.value` (B, K, S, E): the names that optimum,
onnxruntime-genai and transformers.js look for. Sequences of unequal length are padded on the right;
with standard operators the left will do as well.
A further input, `num_logits_to_keep`, may be left out: 0 keeps all positions, n the last n only.
Operators are ONNX Runtime's own where it has them: GroupQueryAttention, MatMulNBits, GatherBlockQuantized, …
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md); or standard ones alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from export.cache_scales import CacheScales
from export.graph.builder import Builder
from export.graph.layer import LayerBuilder
from export.graph.matmul import Matrices
from export.graph.ort_layer import OrtLayerBuilder
from export.graph.standard_layer import StandardLayerBuilder, StandardMatrices
from export.graph.standard_matmul import StandardEmbedding
from export.graph.weights import Weights
from export.metadata import CACHE_KEY, CONCAT_CACHE, IN_PLACE_CACHE, KEEP_LOGITS
from export.paths import plain_files, web_files
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config

FLOAT, INT8, INT64 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT64


def write_graph(
    checkpoint: Path,
    directory: Path,
    half: bool = False,
    scales: CacheScales | None = None,
    standard: bool = False,
    web: str | None = None,
) -> dict[str, ir.TensorProtocol]:
    """Write the graph of a checkpoint and its data into `directory`.

    Packed matrices are copied byte for byte, but for INT8 rows, which become columns, and for standard operators, which
    want all of them so; dense ones become float32, or float16 that is widened to float32
    before use. Vectors (norms, biases) stay float32. Writing twice gives identical files.

    Args:
        checkpoint: a checkpoint directory, packed or not.
        directory: exists; files of these names are replaced.
        half: store dense matrices in float16.
        scales: of an INT8 cache; a float32 one if not given.
        standard: use standard ONNX operators alone; they know no INT8 cache.
        web: lay them out for a browser, under the names of this precision; else `model.onnx`, `model.onnx.data`.

    Returns:
        The stored tensors by name, see `Builder.write`.

    Raises:
        ArtifactError: the checkpoint is damaged, or does not fit float16.
    """
    files = plain_files(directory) if web is None else web_files(directory, web)
    files.graph.parent.mkdir(exist_ok=True)
    graph = build_graph(load_config(checkpoint), Weights(checkpoint), half, scales, standard, web is not None)
    return graph.write(files)


def build_graph(
    config: ModelConfig,
    weights: Weights,
    half: bool = False,
    scales: CacheScales | None = None,
    standard: bool = False,
    web: bool = False,
) -> Builder:
    """The graph of a model; weights are read when it is written."""
    graph = Builder("sportsllm", {CACHE_KEY: CONCAT_CACHE if standard else IN_PLACE_CACHE})
    tokens_BT, mask_BS, pasts = add_inputs(graph, config, scales)
    keep = graph.input_with_default(KEEP_LOGITS, np.array([0], np.int64))

    blocks: LayerBuilder
    if standard:
        assert scales is None, "refused before"
        blocks = StandardLayerBuilder(graph, config, StandardMatrices(graph, weights, half), tokens_BT, mask_BS)
    else:
        multiply = StandardEmbedding if web else Matrices
        # A browser's cache grows with every run, which leaves no room to write in.
        matrices = multiply(graph, weights, half)
        blocks = OrtLayerBuilder(graph, config, matrices, tokens_BT, mask_BS, scales, separate_prefill_branch=not web)
    x_BTD, residual_BTD, presents = add_layers(graph, config, blocks, tokens_BT, pasts, keep)
    x_BTD, _ = blocks.norm("model.norm", x_BTD, residual_BTD)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits = blocks.matrices.product("lm_head", x_BTD, [head], [config.vocab_size], config.hidden_size)
    graph.output(logits, "logits", FLOAT, ["batch_size", "sequence_length", config.vocab_size])
    add_presents(graph, config, scales, presents)
    return graph


def add_layers(
    graph: Builder,
    config: ModelConfig,
    blocks: LayerBuilder,
    tokens_BT: ir.Value,
    pasts: Sequence[Sequence[ir.Value]],
    keep: ir.Value | None,
) -> tuple[ir.Value, ir.Value | None, list[Sequence[ir.Value]]]:
    """Embedding and layers.

    Args:
        graph: gets them.
        config: the model's shape.
        blocks: what the layers are made of.
        tokens_BT: token ids.
        pasts: each layer's keys and values.
        keep: how many last positions are wanted behind the last layer, 0 for all; None where only the cache is, and the
            last layer ends with its attention.

    Returns:
        What the last layer adds, the residual stream before it, and each layer's keys and values.
    """
    x_BTD = blocks.matrices.embedding("model.embed_tokens", tokens_BT, config.vocab_size, config.hidden_size)
    residual_BTD, presents = None, []
    for layer, past in enumerate(pasts):
        name = f"model.layers.{layer}"
        x_BTD, residual_BTD = blocks.norm(f"{name}.input_layernorm", x_BTD, residual_BTD)
        x_BTD, present = blocks.attention(layer, x_BTD, past)
        presents.append(present)
        if layer == len(pasts) - 1:  # nothing reads what the last layer does with positions that are not kept
            if keep is None:
                break
            # From the n-th last position on; a start of -0 is the first.
            start = graph.node("kept/start", "Neg", [keep])
            end = graph.constant("kept/end", np.array([np.iinfo(np.int64).max], np.int64))
            x_BTD, residual_BTD = (
                graph.node(f"{value.name}/kept", "Slice", [value, start, end, graph.axis(1)])
                for value in (x_BTD, residual_BTD)
            )
        x_BTD = blocks.attention_output(layer, x_BTD)
        x_BTD, residual_BTD = blocks.norm(f"{name}.post_attention_layernorm", x_BTD, residual_BTD)
        x_BTD = blocks.feed_forward(f"{name}.mlp", x_BTD)
    return x_BTD, residual_BTD, presents


def add_inputs(
    graph: Builder, config: ModelConfig, scales: CacheScales | None
) -> tuple[ir.Value, ir.Value, list[list[ir.Value]]]:
    """Token ids, attention mask, and each layer's past keys and values."""
    tokens_BT = graph.input("input_ids", INT64, ["batch_size", "sequence_length"])
    mask_BS = graph.input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
    shape = ["batch_size", config.num_key_value_heads, "past_sequence_length", config.head_dim]
    pasts = [
        [graph.input(f"past_key_values.{layer}.{part}", _cache_type(scales), shape) for part in ("key", "value")]
        for layer in range(config.num_hidden_layers)
    ]
    return tokens_BT, mask_BS, pasts


def add_presents(
    graph: Builder, config: ModelConfig, scales: CacheScales | None, presents: Sequence[Sequence[ir.Value]]
) -> None:
    """Each layer's keys and values as outputs."""
    shape = ["batch_size", config.num_key_value_heads, "total_sequence_length", config.head_dim]
    for layer, present in enumerate(presents):
        for part, value in zip(("key", "value"), present, strict=True):
            graph.output(value, f"present.{layer}.{part}", _cache_type(scales), shape)


def _cache_type(scales: CacheScales | None) -> ir.DataType:
    return FLOAT if scales is None else INT8
