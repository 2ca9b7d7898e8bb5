"""Grouped-query attention by ONNX Runtime's GroupQueryAttention, which keeps past and present in one buffer.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, H query heads, K key/value heads,
E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS, Builder
from export.graph.half import HalfBuilder
from export.graph.int8_cache_prefill import LongPrefill, attend_long_prefill, long_prefill_values
from export.graph.layer import LayerBuilder
from sportsllm.models.config import ModelConfig
from sportsllm.models.parts import HIDDEN
from sportsllm.models.rope import rope_tables

FLOAT, INT8, INT32 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT32
# GroupQueryAttention rotates only heads of a multiple of 16; for others ONNX Runtime refuses the graph.
ROTARY_MULTIPLE = 16
_K_SCALE_INPUT = 12  # place of k_scale among GroupQueryAttention's inputs; v_scale follows


@dataclass(frozen=True)
class _Positions:
    """Lengths and positions, which all layers share.

    Attributes:
        lengths_B: (B,) int64, tokens of each sequence.
        width_S: (1,) int64, S.
        seqlens_k: (B,) int32, tokens of each sequence, less 1.
        total: int32, S.
        cos, sin: rotary tables, (context, E / 2) float32.
        ids_BT: position of each new token; None where GroupQueryAttention rotates by itself.
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


class OrtGroupedQuery(HalfBuilder):
    """GroupQueryAttention over a float32 or an INT8 cache."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        sequences = layers.sequences
        self._positions = _positions(self.graph, self.config, sequences.tokens_BT, sequences.mask_BS)
        self._prefill: LongPrefill | None = None  # made with the first layer, from its past
        self._rotates_outside = self._positions.ids_BT is not None
        # Otherwise the operator takes query, key and value as one.
        self._split = self.config.qk_norm or self._rotates_outside

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        """See `HalfBuilder.emit`."""
        parts: Sequence[ir.Value] = self.products(layer, HIDDEN, x_BTD, self._split)
        name, config, sequences = self.name(layer), self.config, self.layers.sequences
        if self._split:
            query, key, value = parts
            query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads)
            key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads)
            parts = [query, key, value]
        scales = self._cache_scales(layer)
        if sequences.scales is None or not sequences.separate_prefill_branch:
            attended, *present = self._group_query(name, parts, past, scales)
            return attended, present
        prefill = self._long_prefill(past)
        attended, *present = self.graph.if_else(
            f"{name}/attention_either",
            prefill.is_long,
            {
                "then_branch": lambda: attend_long_prefill(
                    self.graph, config, f"{name}/long", prefill, parts, past, scales, self._rotates_outside
                ),
                "else_branch": lambda: self._group_query(f"{name}/short", parts, past, scales),
            },
            {f"{name}/attended": FLOAT, f"{name}/key": INT8, f"{name}/value": INT8},
        )
        return attended, present

    def _long_prefill(self, past: Sequence[ir.Value]) -> LongPrefill:
        if self._prefill is None:
            positions, tokens_BT = self._positions, self.layers.sequences.tokens_BT
            tables = positions.cos, positions.sin
            self._prefill = long_prefill_values(
                self.graph, tokens_BT, past[0], positions.lengths_B, positions.width_S, tables
            )
        return self._prefill

    def _group_query(
        self, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value], scales: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """GroupQueryAttention as it is: attended values, present keys and values."""
        config, positions = self.config, self._positions
        query, *rest = parts
        key, value = rest or (None, None)  # all in one: the operator takes the query's rows first
        tables = [] if self._rotates_outside else [positions.cos, positions.sin]
        inputs = [query, key, value, *past, positions.seqlens_k, positions.total, *tables]
        attributes: dict[str, int | str] = {}
        if scales:
            inputs += [None] * (_K_SCALE_INPUT - len(inputs)) + list(scales)
            attributes = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        return self.graph.node_with_outputs(
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

    def _cache_scales(self, layer: int) -> list[ir.Value]:
        """A layer's scales of keys and of values, (1, K, 1, E); none for a float32 cache."""
        scales = self.layers.sequences.scales
        if scales is None:
            return []
        shape = (1, self.config.num_key_value_heads, 1, self.config.head_dim)
        found = {"k": scales.keys[layer], "v": scales.values[layer]}
        return [
            self.graph.constant(f"{self.name(layer)}.{part}_scale", scale.reshape(shape).numpy())
            for part, scale in found.items()
        ]

    def _prepare_heads(self, name: str, x: ir.Value, heads: int) -> ir.Value:
        """What GroupQueryAttention does not do: norm of each head (Qwen3), rotation of odd sizes; (B, T, heads * E)."""
        graph, size = self.graph, self.config.head_dim
        if self.config.qk_norm:
            apart = graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
            together = graph.constant(f"heads_{heads}_flat", np.array([0, 0, heads * size], np.int64))
            x_BTHE = graph.node(f"{name}_norm/heads", "Reshape", [x, apart])
            gamma = self.layers.matmul.vector(f"{name}_norm.weight", size)
            normed = self.layers.rms_norm(f"{name}_norm", x_BTHE, gamma)
            x = graph.node(f"{name}_norm/flat", "Reshape", [normed, together])
        positions = self._positions
        if positions.ids_BT is None:
            return x
        inputs = [x, positions.ids_BT, positions.cos, positions.sin]
        return graph.node(f"{name}_rotary", "RotaryEmbedding", inputs, MS, num_heads=heads, rotary_embedding_dim=size)
