"""Grouped-query attention by ONNX Runtime's GroupQueryAttention, which keeps past and present in one buffer.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, H query heads, K key/value heads,
E head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS
from export.graph.half import HalfBuilder
from export.graph.int8_cache_prefill import LongPrefill, group_query_attention
from export.graph.layer import LayerBuilder
from sportsllm.models.parts import HIDDEN
from sportsllm.models.rope import rope_tables

FLOAT, INT8, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64
LAST, TOTAL = "positions/seqlens_k", "positions/total"  # what all layers read: lengths less 1, and S
# GroupQueryAttention rotates only heads of a multiple of 16; for others ONNX Runtime refuses the graph.
ROTARY_MULTIPLE = 16
_SCALAR = np.array([], np.int64)  # the shape of one
_K_SCALE_INPUT = 12  # place of k_scale among GroupQueryAttention's inputs; v_scale follows


class OrtGroupedQuery(HalfBuilder):
    """GroupQueryAttention over a cache of the type that is computed in, or an INT8 one.

    All layers share what it reads of the sequences' lengths, each less 1, (B,), and S, int32; and the rotary tables,
    (context, E / 2). What else a layer needs it computes of those and of its own input, so that it can become a
    function, see `export.graph.functions`.
    """

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        graph, mask_BS = self.graph, layers.sequences.mask_BS
        self._one, scalar = graph.constant("one", np.array(1, np.int64)), graph.constant("scalar_shape", _SCALAR)
        lengths_B = graph.node("positions/lengths", "ReduceSum", [mask_BS, graph.axis(1)], keepdims=0)
        last_B = graph.node("positions/last", "Sub", [lengths_B, self._one])
        width_S = graph.node("positions/mask_width", "Shape", [mask_BS], start=1, end=2)
        total = graph.node("positions/mask_scalar", "Reshape", [width_S, scalar])
        self._seqlens_k = graph.node(LAST, "Cast", [last_B], to=INT32.value)
        self._total = graph.node(TOTAL, "Cast", [total], to=INT32.value)
        real = layers.matmul.real.numpy()
        cos, sin = (x.astype(real) for x in rope_tables(self.config, self.config.max_position_embeddings))
        self._tables = graph.constant("cos_cache", cos), graph.constant("sin_cache", sin)
        self._rotates_outside = self.config.head_dim % ROTARY_MULTIPLE != 0
        # Otherwise the operator takes query, key and value as one.
        self._split = self.config.qk_norm or self._rotates_outside

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        parts: Sequence[ir.Value] = self.products(layer, HIDDEN, x_BTD, self._split)
        name, config, sequences = self.name(layer), self.config, self.layers.sequences
        if self._split:
            query, key, value = parts
            ids_BT = self._position_ids(name, x_BTD) if self._rotates_outside else None
            query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads, ids_BT)
            key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads, ids_BT)
            parts = [query, key, value]
        scales = self._cache_scales(layer)
        if sequences.scales is None or not sequences.separate_prefill_branch:
            attended, *present = self._group_query(name, parts, past, scales)
            return attended, present
        tables = None if self._rotates_outside else self._tables
        prefill = LongPrefill(self.graph, config, x_BTD, (self._seqlens_k, self._total), tables)
        types = {"attended": FLOAT, "key": INT8, "value": INT8}

        def either() -> Sequence[ir.Value]:
            return self.graph.if_else(
                f"{name}/attention_if_alone",
                prefill.has_room(f"{name}/room", past[0]),
                {
                    "then_branch": lambda: prefill.attend(f"{name}/long", parts, past, scales),
                    "else_branch": lambda: self._group_query(f"{name}/many", parts, past, scales),
                },
                {f"{name}/alone/{output}": dtype for output, dtype in types.items()},
            )

        attended, *present = self.graph.if_else(
            f"{name}/attention_either",
            prefill.is_long(f"{name}/piece"),
            {
                "then_branch": either,
                "else_branch": lambda: self._group_query(f"{name}/short", parts, past, scales),
            },
            {f"{name}/{output}": dtype for output, dtype in types.items()},
        )
        return attended, present

    def _position_ids(self, name: str, x_BTD: ir.Value) -> ir.Value:
        """Where each new token stands, (B, T), as GroupQueryAttention counts: token t at max(length - T, 0) + t."""
        graph, scalar = self.graph, self.graph.constant("scalar_shape", _SCALAR)
        zero = graph.constant("zero", np.array(0, np.int64))
        last_B = graph.node(f"{name}/positions/last", "Cast", [self._seqlens_k], to=INT64.value)
        lengths_B = graph.node(f"{name}/positions/lengths", "Add", [last_B, self._one])
        width_T = graph.node(f"{name}/positions/new_width", "Shape", [x_BTD], start=1, end=2)
        before_B = graph.node(f"{name}/positions/before", "Sub", [lengths_B, width_T])
        first_B = graph.node(f"{name}/positions/first", "Max", [before_B, zero])
        first_B1 = graph.node(f"{name}/positions/first_column", "Unsqueeze", [first_B, graph.axis(1)])
        new = graph.node(f"{name}/positions/new_scalar", "Reshape", [width_T, scalar])
        steps_T = graph.node(f"{name}/positions/steps", "Range", [zero, new, self._one])
        return graph.node(f"{name}/positions/ids", "Add", [first_B1, steps_T])

    def _group_query(
        self, name: str, parts: Sequence[ir.Value], past: Sequence[ir.Value], scales: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """GroupQueryAttention as it is: attended values, present keys and values."""
        query, *rest = parts
        key, value = rest or (None, None)  # all in one: the operator takes the query's rows first
        tables = () if self._rotates_outside else self._tables
        inputs = [query, key, value, *past, self._seqlens_k, self._total, *tables]
        attributes: dict[str, int | str] = {}
        if scales:
            inputs += [None] * (_K_SCALE_INPUT - len(inputs)) + list(scales)
            attributes = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        outputs = ("attended", "key", "value")
        return group_query_attention(self.graph, self.config, name, inputs, outputs, bool(tables), **attributes)

    def _cache_scales(self, layer: int) -> list[ir.Value]:
        """A layer's scales of keys and of values, (1, K, 1, E); none for a float32 cache."""
        scales = self.layers.sequences.scales
        if scales is None:
            return []
        found = {"k": scales.keys[layer], "v": scales.values[layer]}  # (K, E) each
        name = self.name(layer)
        return [self.graph.constant(f"{name}.{part}_scale", x[None, :, None].numpy()) for part, x in found.items()]

    def _prepare_heads(self, name: str, x: ir.Value, heads: int, ids_BT: ir.Value | None) -> ir.Value:
        """What GroupQueryAttention does not do: norm of each head (Qwen3), rotation of odd sizes; (B, T, heads * E)."""
        graph, size = self.graph, self.config.head_dim
        if self.config.qk_norm:
            apart = graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
            together = graph.constant(f"heads_{heads}_flat", np.array([0, 0, heads * size], np.int64))
            x_BTHE = graph.node(f"{name}_norm/heads", "Reshape", [x, apart])
            gamma = self.layers.matmul.vector(f"{name}_norm.weight", size)
            normed = self.layers.rms_norm(f"{name}_norm", x_BTHE, gamma)
            x = graph.node(f"{name}_norm/flat", "Reshape", [normed, together])
        if ids_BT is None:
            return x
        inputs = [x, ids_BT, *self._tables]
        return graph.node(f"{name}_rotary", "RotaryEmbedding", inputs, MS, num_heads=heads, rotary_embedding_dim=size)
