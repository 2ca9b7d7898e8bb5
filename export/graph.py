"""The ONNX graph of a checkpoint, built operator by operator instead of traced.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, D hidden_size, H query heads,
K key/value heads, E head_dim, V vocabulary.

Inputs `input_ids` (B, T), `attention_mask` (B, S), `past_key_values.N.key` and `.value` (B, K, S - T, E);
outputs `logits` (B, T, V), `present.N.key` and `.value` (B, K, S, E): the names that optimum,
onnxruntime-genai and transformers.js look for. Sequences of unequal length are padded on the right.
A further input, `num_logits_to_keep`, may be left out: 0 keeps all positions, n the last n only.
Operators are ONNX Runtime's own where it has them: GroupQueryAttention, MatMulNBits, GatherBlockQuantized, …
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from export.builder import MS, Builder
from export.kv_cache import CacheScales
from export.matrices import Matrices
from export.session import KEEP_LOGITS
from export.weights import Weights
from sportsllm.config import ModelConfig, load_config
from sportsllm.rope import rope_tables

FLOAT, INT8, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64
# GroupQueryAttention rotates only heads of a multiple of 16; for others ONNX Runtime refuses the graph.
ROTARY_MULTIPLE = 16
_K_SCALE_INPUT = 12  # place of k_scale among GroupQueryAttention's inputs; v_scale follows


def write_graph(
    checkpoint: Path, directory: Path, half: bool = False, scales: CacheScales | None = None
) -> dict[str, ir.TensorProtocol]:
    """Write `model.onnx` and `model.onnx.data` of a checkpoint into `directory`.

    Packed matrices are copied byte for byte; dense ones become float32, or float16 that is widened to float32
    before use. Vectors (norms, biases) stay float32. Writing twice gives identical files.

    Args:
        checkpoint: a checkpoint directory, packed or not.
        directory: exists; files of these names are replaced.
        half: store dense matrices in float16.
        scales: of an INT8 cache; a float32 one if not given.

    Returns:
        The stored tensors by name, see `Builder.write`.

    Raises:
        ArtifactError: the checkpoint is damaged, or does not fit float16.
    """
    return build_graph(load_config(checkpoint), Weights(checkpoint), half, scales).write(directory)


def build_graph(
    config: ModelConfig, weights: Weights, half: bool = False, scales: CacheScales | None = None
) -> Builder:
    """The graph of a model; weights are read when it is written."""
    graph = Builder("sportsllm")
    tokens_BT, mask_BS, pasts = add_inputs(graph, config, scales)
    keep = graph.input_with_default(KEEP_LOGITS, np.array([0], np.int64))

    matrices, positions = Matrices(graph, weights, half), make_positions(graph, config, tokens_BT, mask_BS)
    blocks = Blocks(graph, config, matrices, positions, scales)
    x_BTD = blocks.matrices.embedding("model.embed_tokens", tokens_BT, config.vocab_size, config.hidden_size)
    residual_BTD, presents = None, []
    for layer, past in enumerate(pasts):
        name = f"model.layers.{layer}"
        x_BTD, residual_BTD = blocks.norm(f"{name}.input_layernorm", x_BTD, residual_BTD)
        x_BTD, present = blocks.attend(layer, x_BTD, past)
        presents.append(present)
        if layer == len(pasts) - 1:  # nothing reads what the last layer does with positions that are not kept
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
    x_BTD, _ = blocks.norm("model.norm", x_BTD, residual_BTD)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits = blocks.matrices.product("lm_head", x_BTD, [head], [config.vocab_size], config.hidden_size)
    graph.output(logits, "logits", FLOAT, ["batch_size", "sequence_length", config.vocab_size])
    add_presents(graph, config, scales, presents)
    return graph


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


@dataclass(frozen=True)
class Positions:
    """What attention needs to know of lengths and places.

    Attributes:
        seqlens_k: (B,) int32, tokens of each sequence, less 1.
        total: int32, S.
        cos, sin: rotary tables, (context, E / 2) float32.
        ids_BT: place of each new token; None where attention rotates by itself.
    """

    seqlens_k: ir.Value
    total: ir.Value
    cos: ir.Value
    sin: ir.Value
    ids_BT: ir.Value | None


def make_positions(graph: Builder, config: ModelConfig, tokens_BT: ir.Value, mask_BS: ir.Value) -> Positions:
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    scalar = graph.constant("scalar_shape", np.array([], np.int64))
    lengths_B = graph.node("positions/lengths", "ReduceSum", [mask_BS, graph.axis(1)], keepdims=0)
    last_B = graph.node("positions/last", "Sub", [lengths_B, one])
    width_S = graph.node("positions/mask_width", "Shape", [mask_BS], start=1, end=2)
    total = graph.node("positions/mask_scalar", "Reshape", [width_S, scalar])
    cos, sin = rope_tables(config, config.max_position_embeddings)
    ids_BT = None
    if config.head_dim % ROTARY_MULTIPLE:
        # As GroupQueryAttention counts: token t stands at max(length - T, 0) + t.
        width_T = graph.node("positions/new_width", "Shape", [tokens_BT], start=1, end=2)
        before_B = graph.node("positions/before", "Sub", [lengths_B, width_T])
        first_B = graph.node("positions/first", "Max", [before_B, zero])
        first_B1 = graph.node("positions/first_column", "Unsqueeze", [first_B, graph.axis(1)])
        new = graph.node("positions/new_scalar", "Reshape", [width_T, scalar])
        steps_T = graph.node("positions/steps", "Range", [zero, new, one])
        ids_BT = graph.node("positions/ids", "Add", [first_B1, steps_T])
    return Positions(
        seqlens_k=graph.node("positions/seqlens_k", "Cast", [last_B], to=INT32.value),
        total=graph.node("positions/total", "Cast", [total], to=INT32.value),
        cos=graph.constant("cos_cache", cos),
        sin=graph.constant("sin_cache", sin),
        ids_BT=ids_BT,
    )


class Blocks:
    """The parts that a layer is made of."""

    def __init__(
        self,
        graph: Builder,
        config: ModelConfig,
        matrices: Matrices,
        positions: Positions,
        scales: CacheScales | None,
    ) -> None:
        self._graph, self._config, self._positions, self._scales = graph, config, positions, scales
        self.matrices = matrices
        self._epsilon = float(np.float32(config.rms_norm_eps))

    def norm(self, name: str, x: ir.Value, residual: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """RMSNorm of x + residual; returns the normed values and the sum."""
        gamma = self.matrices.vector(f"{name}.weight", self._config.hidden_size)
        if residual is None:
            return self._rms_norm(name, x, gamma), x
        normed, _, _, total = self._graph.node_with_outputs(
            name,
            "SkipSimplifiedLayerNormalization",
            [x, residual, gamma],
            (name, "", "", f"{name}/sum"),
            MS,
            epsilon=self._epsilon,
        )
        return normed, total

    def _rms_norm(self, name: str, x: ir.Value, gamma: ir.Value) -> ir.Value:
        """x / sqrt(mean(x ** 2) + eps) * gamma in standard operators, which ONNX Runtime fuses into one.

        Its fused operator claims the standard domain, where `onnx.checker` does not know it.
        """
        graph = self._graph
        two = graph.constant("norm/two", np.array(2.0, np.float32))
        epsilon = graph.constant("norm/epsilon", np.array(self._epsilon, np.float32))
        squared = graph.node(f"{name}/squared", "Pow", [x, two])
        mean = graph.node(f"{name}/mean", "ReduceMean", [squared, graph.axis(-1)], keepdims=1)
        root = graph.node(f"{name}/root", "Sqrt", [graph.node(f"{name}/shifted", "Add", [mean, epsilon])])
        return graph.node(name, "Mul", [graph.node(f"{name}/scaled", "Div", [x, root]), gamma])

    def attend(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        """Attention up to its output matrix; returns what that reads and the present keys and values."""
        config, positions, name = self._config, self._positions, f"model.layers.{layer}.self_attn"
        modules = [f"{name}.{part}_proj" for part in "qkv"]
        sizes = [config.query_size, config.key_value_size, config.key_value_size]
        apart = config.qk_norm or positions.ids_BT is not None
        query, *rest = self.matrices.projections(
            f"{name}.qkv_proj", x_BTD, modules, sizes, config.hidden_size, config.attention_bias, apart
        )
        key, value = rest or (None, None)  # all in one: the operator takes the query's rows first
        if apart:
            query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads)
            key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads)
        tables = [positions.cos, positions.sin] if positions.ids_BT is None else []
        inputs = [query, key, value, *past, positions.seqlens_k, positions.total, *tables]
        scales, attributes = self._cache_scales(layer, name)
        if scales:
            inputs += [None] * (_K_SCALE_INPUT - len(inputs)) + scales
        attended, *present = self._graph.node_with_outputs(
            f"{name}/attention",
            "GroupQueryAttention",
            inputs,
            [f"{name}/{output}" for output in ("attended", "key", "value")],
            MS,
            num_heads=config.num_attention_heads,
            kv_num_heads=config.num_key_value_heads,
            do_rotary=int(bool(tables)),
            **attributes,
        )
        return attended, present

    def attention_output(self, layer: int, attended_BTA: ir.Value) -> ir.Value:
        """The output matrix of attention."""
        config, output = self._config, f"model.layers.{layer}.self_attn.o_proj"
        bias = config.attention_output_bias
        return self.matrices.product(output, attended_BTA, [output], [config.hidden_size], config.query_size, bias)

    def _cache_scales(self, layer: int, name: str) -> tuple[list[ir.Value | None], dict[str, int | str]]:
        """Inputs and attributes that make a layer's cache INT8; none for a float32 one."""
        if self._scales is None:
            return [], {}
        shape = (1, self._config.num_key_value_heads, 1, self._config.head_dim)
        found = {"k": self._scales.keys[layer], "v": self._scales.values[layer]}
        values = [
            self._graph.constant(f"{name}.{part}_scale", scale.reshape(shape).numpy()) for part, scale in found.items()
        ]
        return values, {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}

    def _prepare_heads(self, name: str, x: ir.Value, heads: int) -> ir.Value:
        """What GroupQueryAttention does not do: norm of each head (Qwen3), rotation of odd sizes; (B, T, heads * E)."""
        graph, size = self._graph, self._config.head_dim
        if self._config.qk_norm:
            apart = graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
            together = graph.constant(f"heads_{heads}_flat", np.array([0, 0, heads * size], np.int64))
            x_BTHE = graph.node(f"{name}_norm/heads", "Reshape", [x, apart])
            normed = self._rms_norm(f"{name}_norm", x_BTHE, self.matrices.vector(f"{name}_norm.weight", size))
            x = graph.node(f"{name}_norm/flat", "Reshape", [normed, together])
        positions = self._positions
        if positions.ids_BT is None:
            return x
        inputs = [x, positions.ids_BT, positions.cos, positions.sin]
        return graph.node(f"{name}_rotary", "RotaryEmbedding", inputs, MS, num_heads=heads, rotary_embedding_dim=size)

    def feed_forward(self, name: str, x_BTD: ir.Value) -> ir.Value:
        """SwiGLU: down(silu(gate(x)) * up(x))."""
        graph, config = self._graph, self._config
        modules, sizes = [f"{name}.gate_proj", f"{name}.up_proj"], [config.intermediate_size] * 2
        gate, up = self.matrices.projections(
            f"{name}.gate_up_proj", x_BTD, modules, sizes, config.hidden_size, config.mlp_bias, apart=True
        )
        active = graph.node(f"{name}/silu", "QuickGelu", [gate], MS, alpha=1.0)  # x * sigmoid(1.0 * x)
        inner = graph.node(f"{name}/inner", "Mul", [active, up])
        down = f"{name}.down_proj"
        return self.matrices.product(
            down, inner, [down], [config.hidden_size], config.intermediate_size, config.mlp_bias
        )
