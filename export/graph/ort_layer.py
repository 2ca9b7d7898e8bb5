"""The parts of a layer in ONNX Runtime's own operators, which are the fastest.

Shape suffixes as in `export.graph.decoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.cache_scales import CacheScales
from export.graph.builder import MS, Builder
from export.graph.int8_cache_prefill import LongPrefill, PromptAttention, long_prefill_values
from export.graph.layer import LayerBuilder
from export.graph.matmul import Matrices
from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import rope_tables

FLOAT, INT8, INT32 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT32
# GroupQueryAttention rotates only heads of a multiple of 16; for others ONNX Runtime refuses the graph.
ROTARY_MULTIPLE = 16
_K_SCALE_INPUT = 12  # place of k_scale among GroupQueryAttention's inputs; v_scale follows


@dataclass(frozen=True)
class _Positions:
    """What attention needs to know of lengths and places.

    Attributes:
        lengths_B: (B,) int64, tokens of each sequence.
        width_S: (1,) int64, S.
        seqlens_k: (B,) int32, tokens of each sequence, less 1.
        total: int32, S.
        cos, sin: rotary tables, (context, E / 2) float32.
        ids_BT: place of each new token; None where attention rotates by itself.
    """

    lengths_B: ir.Value
    width_S: ir.Value
    seqlens_k: ir.Value
    total: ir.Value
    cos: ir.Value
    sin: ir.Value
    ids_BT: ir.Value | None


def _positions(graph: Builder, config: ModelConfig, tokens_BT: ir.Value, mask_BS: ir.Value) -> _Positions:
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
    return _Positions(
        lengths_B=lengths_B,
        width_S=width_S,
        seqlens_k=graph.node("positions/seqlens_k", "Cast", [last_B], to=INT32.value),
        total=graph.node("positions/total", "Cast", [total], to=INT32.value),
        cos=graph.constant("cos_cache", cos),
        sin=graph.constant("sin_cache", sin),
        ids_BT=ids_BT,
    )


class OrtLayerBuilder(LayerBuilder):
    """GroupQueryAttention, which keeps past and present in one buffer, with fused norms and activations."""

    def __init__(
        self,
        graph: Builder,
        config: ModelConfig,
        matrices: Matrices,
        tokens_BT: ir.Value,
        mask_BS: ir.Value,
        scales: CacheScales | None,
        separate_prefill_branch: bool = True,
    ) -> None:
        """Start a graph's layers.

        Args:
            graph: gets them.
            config: the model's shape.
            matrices: what multiplies.
            tokens_BT: token ids.
            mask_BS: attention mask.
            scales: of an INT8 cache; a float32 one if not given.
            separate_prefill_branch: read prompts into an INT8 cache as `export.graph.int8_cache_prefill` does.
        """
        super().__init__(graph, config, matrices)
        self._positions, self._scales = _positions(graph, config, tokens_BT, mask_BS), scales
        self._tokens_BT, self._prompts_apart = tokens_BT, separate_prefill_branch and scales is not None
        self._prompt: LongPrefill | None = None  # known with the first layer's past
        self._apart = config.qk_norm or self._positions.ids_BT is not None

    def _add_and_norm(self, name: str, x: ir.Value, residual: ir.Value, gamma: ir.Value) -> tuple[ir.Value, ir.Value]:
        normed, _, _, total = self._graph.node_with_outputs(
            name,
            "SkipSimplifiedLayerNormalization",
            [x, residual, gamma],
            (name, "", "", f"{name}/sum"),
            MS,
            epsilon=self._epsilon,
        )
        return normed, total

    def _attend(
        self, layer: int, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value]
    ) -> tuple[ir.Value, Sequence[ir.Value]]:
        if self._apart:
            query, key, value = parts
            query = self._prepare_heads(f"{name}.q", query, self._config.num_attention_heads)
            key = self._prepare_heads(f"{name}.k", key, self._config.num_key_value_heads)
            parts = [query, key, value]
        scales = self._cache_scales(layer, name)
        if not self._prompts_apart:
            attended, *present = self._group_query(name, parts, past, scales)
            return attended, present
        prompt = self._prompt_facts(past)
        rotated = self._positions.ids_BT is not None
        attended, *present = self._graph.if_else(
            f"{name}/attention_either",
            prompt.is_long,
            {
                "then_branch": lambda: PromptAttention(self._graph, self._config, name, prompt).attend(
                    parts, past, scales, rotated
                ),
                "else_branch": lambda: self._group_query(f"{name}/short", parts, past, scales),
            },
            {f"{name}/attended": FLOAT, f"{name}/key": INT8, f"{name}/value": INT8},
        )
        return attended, present

    def _prompt_facts(self, past: Sequence[ir.Value]) -> LongPrefill:
        """Added with the first layer."""
        if self._prompt is None:
            positions = self._positions
            tables = positions.cos, positions.sin
            self._prompt = long_prefill_values(
                self._graph, self._tokens_BT, past[0], positions.lengths_B, positions.width_S, tables
            )
        return self._prompt

    def _group_query(
        self, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value], scales: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """GroupQueryAttention as it is: what `o_proj` reads, present keys and values."""
        config, positions = self._config, self._positions
        query, *rest = parts
        key, value = rest or (None, None)  # all in one: the operator takes the query's rows first
        tables = [positions.cos, positions.sin] if positions.ids_BT is None else []
        inputs = [query, key, value, *past, positions.seqlens_k, positions.total, *tables]
        attributes: dict[str, int | str] = {}
        if scales:
            inputs += [None] * (_K_SCALE_INPUT - len(inputs)) + list(scales)
            attributes = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        return self._graph.node_with_outputs(
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

    def _cache_scales(self, layer: int, name: str) -> list[ir.Value]:
        """A layer's scales of keys and of values, (1, K, 1, E); none for a float32 cache."""
        if self._scales is None:
            return []
        shape = (1, self._config.num_key_value_heads, 1, self._config.head_dim)
        found = {"k": self._scales.keys[layer], "v": self._scales.values[layer]}
        return [
            self._graph.constant(f"{name}.{part}_scale", scale.reshape(shape).numpy()) for part, scale in found.items()
        ]

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

    def _silu(self, name: str, x: ir.Value) -> ir.Value:
        return self._graph.node(name, "QuickGelu", [x], MS, alpha=1.0)  # x * sigmoid(1.0 * x)
