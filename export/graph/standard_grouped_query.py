"""Grouped-query attention in standard operators: MatMul, Softmax, MatMul, and rotation by Mul, Sub and Add.

Present keys and values are the past followed by the new ones, a new tensor. A token's position is the number of ones
before it in `attention_mask`, so that sequences may be padded on the left, and in the cache anywhere.
Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, H query heads, K key/value heads,
E head_dim, X = E / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.half import HalfBuilder
from export.graph.layer import LayerBuilder
from export.graph.positions import places_by_mask, rotary_rows, rotated_pairs, seen_columns
from sportsllm.models.parts import HIDDEN


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
