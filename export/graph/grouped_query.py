"""Grouped-query attention in two operator sets.

ONNX Runtime's GroupQueryAttention keeps past and present in one buffer. In standard operators it is MatMul, Softmax and
MatMul, and rotation by Mul, Sub and Add: present keys and values are the past followed by the new ones, a new tensor,
and a token's position is the number of ones before it in `attention_mask`, so that sequences may be padded on the left,
and in the cache anywhere.
Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, H query heads, K key/value heads,
E head_dim, X = E / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from export import metadata
from export.graph.builder import MS, Builder
from export.graph.calls import Inputs
from export.graph.layer import HalfBuilder, LayerBuilder
from export.graph.positions import (
    places_by_mask,
    position_ids,
    rotary_caches,
    rotary_rows,
    rotated_pairs,
    seen_columns,
    sequence_lengths,
)
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS
from sportsllm.models.parts import HIDDEN

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
# GroupQueryAttention rotates only heads of a multiple of 16; for others ONNX Runtime refuses the graph.
ROTARY_MULTIPLE = 16
_K_SCALE_INPUT = 12  # place of k_scale among GroupQueryAttention's inputs; v_scale follows


def group_query_attention(
    graph: Builder,
    config: ModelConfig,
    name: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[str],
    do_rotary: bool = False,
    window: int | None = None,
    **attributes: int | str,
) -> list[ir.Value]:
    """Add the operator; names of its outputs follow `name`. `window` is how many tokens count, the newest included."""
    heads = {"num_heads": config.num_attention_heads, "kv_num_heads": config.num_key_value_heads}
    given: dict[str, Any] = {**heads, "do_rotary": int(do_rotary), **attributes}
    if window is not None:
        given["local_window_size"] = window
    if config.attention_scale is not None:
        given["scale"] = float(config.attention_scale)
    names = [f"{name}/{output}" for output in outputs]
    return graph.node_with_outputs(f"{name}/attention", "GroupQueryAttention", inputs, names, MS, **given)


class _Call(NamedTuple):
    """What GroupQueryAttention of one layer reads beside query, key, value and lengths."""

    past: Sequence[ir.Value]
    scales: Sequence[ir.Value]
    tables: Sequence[ir.Value]  # none where it does not rotate
    window: int | None


class OrtGroupedQuery(HalfBuilder):
    """GroupQueryAttention over a cache of the type that is computed in, an INT8 one, or a float16 one.

    The operator computes in the type of its cache. So that over a float16 cache only keys, values and their products
    are of that type, it gets them rotated.

    All layers share what it reads of the sequences' lengths, each less 1, (B,), and S, int32; and the rotary tables,
    (context, E / 2). What else a layer needs it computes of those and of its own input, so that it can become a
    function, see `export.graph.calls`.
    """

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        self._seqlens_k, self._total = sequence_lengths(self.graph, layers.sequences.mask_BS)
        config, real = self.config, layers.matmul.real
        self._tables: list[Sequence[ir.Value]] = [
            rotary_caches(self.graph, config, layer, real) if config.rotates(layer) else ()
            for layer in range(config.num_hidden_layers)
        ]
        self._half_cache = real == FLOAT and layers.sequences.form.half_cache
        self._rotates_outside = self._half_cache or self.config.head_dim % ROTARY_MULTIPLE != 0

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        name, config = self.name(layer), self.config
        tables = self._tables[layer]
        # Otherwise the operator takes query, key and value as one.
        split = config.qk_norm or self._rotates_outside or not tables
        parts: Sequence[ir.Value] = self.products(layer, HIDDEN, x_BTD, split)
        if split:
            query, key, value = parts
            outside = tables if self._rotates_outside else ()
            ids_BT = position_ids(self.graph, name, self._seqlens_k, x_BTD) if outside else None
            query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads, ids_BT, outside)
            key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads, ids_BT, outside)
            parts = [query, key, value]
            tables = () if outside else tables
        call = _Call(past, self._cache_scales(layer), tables, config.window(layer))
        attended, *present = self._group_query(name, parts, call)
        return attended, present

    def kernel_inputs(self, layer: int, past: Sequence[ir.Value], keep: ir.Value | None) -> Inputs:
        """What kernels of a layer read beside the residual stream and matrices; not of layers that do not rotate."""
        config, name, matmul, tables = self.config, self.name(layer), self.layers.matmul, self._tables[layer]
        inputs: Inputs = {"last": self._seqlens_k, "total": self._total, "keep": keep}
        inputs |= {"past_key": past[0], "past_value": past[1], "cosine": tables[0], "sine": tables[1]}
        inputs |= dict(zip(("key_scale", "value_scale"), self._cache_scales(layer) or (None, None), strict=True))
        inputs["norm"] = matmul.vector(f"model.layers.{layer}.{NORMS['self_attn']}.weight", config.hidden_size)
        for side in ("query", "key"):
            weight = f"{name}.{side[0]}_norm.weight"
            inputs[f"{side}_norm"] = matmul.vector(weight, config.head_dim) if config.qk_norm else None
        return inputs

    def _group_query(self, name: str, parts: Sequence[ir.Value], call: _Call) -> Sequence[ir.Value]:
        """GroupQueryAttention as it is: attended values, present keys and values."""
        if self._half_cache:
            parts = [self.graph.node(f"{part.name}/half", "Cast", [part], to=HALF.value) for part in parts]
        query, *rest = parts
        key, value = rest or (None, None)  # all in one: the operator takes the query's rows first
        inputs = [query, key, value, *call.past, self._seqlens_k, self._total, *call.tables]
        attributes: dict[str, int | str] = {}
        if call.scales:
            inputs += [None] * (_K_SCALE_INPUT - len(inputs)) + list(call.scales)
            attributes = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        outputs, rotary = ("attended", "key", "value"), bool(call.tables)
        found = group_query_attention(self.graph, self.config, name, inputs, outputs, rotary, call.window, **attributes)
        if not self._half_cache:
            return found
        attended, *present = found
        return [self.graph.node(f"{name}/attended_float", "Cast", [attended], to=FLOAT.value), *present]

    def _cache_scales(self, layer: int) -> list[ir.Value]:
        """A layer's scales of keys and of values, (1, K, 1, E); none for a float32 cache."""
        scales = self.layers.sequences.form.scales
        if scales is None:
            return []
        found = zip(self.states, scales.states, strict=True)  # (L, K, E) each
        return [
            self.graph.constant(metadata.cache_scale_name(layer, state.name), scale[layer][None, :, None].numpy())
            for state, scale in found
        ]

    def _prepare_heads(
        self, name: str, x: ir.Value, heads: int, ids_BT: ir.Value | None, tables: Sequence[ir.Value]
    ) -> ir.Value:
        """What GroupQueryAttention does not do: norm of each head (Qwen3), rotation of odd sizes; (B, T, heads * E)."""
        graph, size = self.graph, self.config.head_dim
        if self.config.qk_norm:
            apart = graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
            together = graph.constant(f"heads_{heads}_flat", np.array([0, 0, heads * size], np.int64))
            x_BTHE = graph.node(f"{name}_norm/heads", "Reshape", [x, apart])
            gamma = self.layers.matmul.vector(f"{name}_norm.weight", size)
            normed = self.layers.rms_norm(f"{name}_norm", x_BTHE, gamma)
            x = graph.node(f"{name}_norm/flat", "Reshape", [normed, together])
        return x if ids_BT is None else self._rotated(name, x, heads, ids_BT, tables)

    def _rotated(self, name: str, x: ir.Value, heads: int, ids_BT: ir.Value, tables: Sequence[ir.Value]) -> ir.Value:
        sizes = {"num_heads": heads, "rotary_embedding_dim": self.config.head_dim}
        return self.graph.node(f"{name}_rotary", "RotaryEmbedding", [x, ids_BT, *tables], MS, **sizes)


class StandardGroupedQuery(HalfBuilder):
    """Attention over a float32 cache that grows by concatenation."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        assert layers.sequences.form.scales is None, "no standard operator reads an INT8 cache"
        tokens_BT, mask_BS = layers.sequences.tokens_BT, layers.sequences.mask_BS
        graph, config, places_BT = self.graph, self.config, places_by_mask(self.graph, tokens_BT, mask_BS)
        layers_of_model = range(config.num_hidden_layers)
        self._tables = [
            rotary_rows(graph, config, i, places_BT) if config.rotates(i) else None for i in layers_of_model
        ]
        self._seen = [seen_columns(graph, tokens_BT, mask_BS, config.window(i)) for i in layers_of_model]

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name = self.graph, self.config, self.name(layer)
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, key, value = self.products(layer, HIDDEN, x_BTD)
        query_BTHE = rotated_pairs(graph, f"{name}.q", self._heads(f"{name}.q", query, heads), self._tables[layer])
        key_BTKE = rotated_pairs(graph, f"{name}.k", self._heads(f"{name}.k", key, shared), self._tables[layer])
        scale = graph.constant("attention_scale", np.array(config.score_scale, np.float32))
        query_BTHE = graph.node(f"{name}.q/scaled", "Mul", [query_BTHE, scale])
        query_BHTE = graph.node(f"{name}.q/by_head", "Transpose", [query_BTHE], perm=[0, 2, 1, 3])
        new = (key_BTKE, self._heads(f"{name}.v", value, shared, normed=False))
        present = []
        for part, old_BKSE, new_BTKE in zip("kv", past, new, strict=True):
            new_BKTE = graph.node(f"{name}.{part}/by_head", "Transpose", [new_BTKE], perm=[0, 2, 1, 3])
            present.append(graph.node(f"{name}.{part}/present", "Concat", [old_BKSE, new_BKTE], axis=2))
        keys, values = present

        # Query heads that share a key head lie one after the other: their tokens count as rows of one matrix.
        def shaped(part: str, x: ir.Value, count: int, last: int) -> ir.Value:
            """(B, count, rows, last), last 0 for as it is."""
            shape = graph.constant(f"shape_{count}_{last}", np.array([0, count, -1, last], np.int64))
            return graph.node(f"{name}/{part}", "Reshape", [x, shape])

        keys_BKES = graph.node(f"{name}.k/columns", "Transpose", [keys], perm=[0, 1, 3, 2])
        scores = graph.node(f"{name}/scores", "MatMul", [shaped("query", query_BHTE, shared, size), keys_BKES])
        # The least number instead of minus infinity: a padding token that attends to nothing stays a number.
        least = graph.constant("attention_least", np.array(np.finfo(np.float32).min, np.float32))
        scores_BHTS = shaped("scores_by_head", scores, heads, 0)
        masked = graph.node(f"{name}/masked", "Where", [self._seen[layer], scores_BHTS, least])
        weights = graph.node(f"{name}/weights", "Softmax", [masked], axis=-1)
        mixed = graph.node(f"{name}/mixed", "MatMul", [shaped("weights_shared", weights, shared, 0), values])
        mixed_BHTE = shaped("mixed_by_head", mixed, heads, size)
        mixed_BTHE = graph.node(f"{name}/by_token", "Transpose", [mixed_BHTE], perm=[0, 2, 1, 3])
        flat = graph.constant("attention_flat", np.array([0, 0, heads * size], np.int64))
        return graph.node(f"{name}/attended", "Reshape", [mixed_BTHE, flat]), present

    def _heads(self, name: str, x: ir.Value, heads: int, normed: bool = True) -> ir.Value:
        """(B, T, heads * E) as (B, T, heads, E), each head normed where the model does that (Qwen3)."""
        size = self.config.head_dim
        shape = self.graph.constant(f"heads_{heads}", np.array([0, 0, heads, size], np.int64))
        x = self.graph.node(f"{name}/heads", "Reshape", [x, shape])
        if not (self.config.qk_norm and normed):
            return x
        return self.layers.rms_norm(f"{name}_norm", x, self.layers.matmul.vector(f"{name}_norm.weight", size))
