"""Multi-head latent attention in the graph; see `sportsllm.models.latent`.

The cache holds a token's latent vector and its rotated key, side by side. Short pieces are read in the absorbed form,
for which kv_b_proj is a float32 constant by head; long ones make keys and values of the cache, which is less work.
Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, L room in the cache, H heads,
R kv_lora_rank, E head_dim, N qk_nope_head_dim, V v_head_dim, C = R + E.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export import metadata
from export.graph.builder import Array
from export.graph.calls import Attributes, Call, Inputs, shared_inputs
from export.graph.layer import HalfBuilder, LayerBuilder
from export.graph.positions import (
    places_by_mask,
    position_ids,
    rotary_rows,
    rotated_pairs,
    rows_and_places,
    seen_columns,
    sequence_lengths,
)
from sportsllm.models.parts import HIDDEN

FLOAT = ir.DataType.FLOAT
LONG_PIECE = 16
"""From this many new tokens on keys and values are made."""


class LatentAttention(HalfBuilder):
    """Attention over a cache that ONNX Runtime's graphs write in place and standard ones join anew.

    Of an INT8 cache, which those graphs may have, every token is read as it is stored, new ones too.
    """

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        graph, config, sequences = self.graph, self.config, layers.sequences
        tokens_BT, mask_BS = sequences.tokens_BT, sequences.mask_BS
        if layers.standard:
            self._places_BT = places_by_mask(graph, tokens_BT, mask_BS)
            self._seen_B1TS = seen_columns(graph, tokens_BT, mask_BS, None)
        else:
            self._last_B, _ = sequence_lengths(graph, mask_BS)
            self._places_BT = position_ids(graph, "latent", self._last_B, tokens_BT)
            self._share_places()
        self._tables = rotary_rows(graph, config, 0, self._places_BT)

    def _share_places(self) -> None:
        """What all layers read to write into the cache: (B, T, 2) of sequence and place, and S, (1,); and the mask.

        S is that of the longest sequence: the attention mask may be as wide as the cache.
        """
        graph = self.graph
        zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
        last = graph.node("latent/last", "ReduceMax", [self._places_BT], keepdims=0)
        total = graph.node("latent/total", "Add", [last, one])
        self._width_S = graph.node("latent/width", "Unsqueeze", [total, graph.axis(0)])
        columns_S = graph.node("latent/columns", "Range", [zero, total, one])
        places_BT1 = graph.node("latent/place_column", "Unsqueeze", [self._places_BT, graph.axis(2)])
        seen_BTS = graph.node("latent/earlier", "LessOrEqual", [columns_S, places_BT1])
        self._seen_B1TS = graph.node("latent/seen", "Unsqueeze", [seen_BTS, graph.axis(1)])
        self._where_BT2 = rows_and_places(graph, "latent", self._places_BT, places_BT1)

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name = self.graph, self.config, self.name(layer)
        heads = config.num_attention_heads
        *queries, latent = self.products(layer, HIDDEN, x_BTD)
        (query,) = queries
        if config.q_lora_rank is not None:
            query = self._normed(layer, "q_a_layernorm", query, config.q_lora_rank)
            (query,) = self.products(layer, "query_latent", query)
        plain_BHTN, turned_BHTE, present = self._tokens(layer, query, latent, past[0])
        width_T = graph.node(f"{name}/piece", "Shape", [x_BTD], start=1, end=2)
        least = graph.constant("latent/long_piece", np.array([LONG_PIECE], np.int64))
        is_long = graph.node(f"{name}/is_long", "GreaterOrEqual", [width_T, least])
        (mixed_BHTV,) = graph.if_else(
            f"{name}/attention_either",
            is_long,
            {
                "then_branch": lambda: [self._made(layer, f"{name}/long", plain_BHTN, turned_BHTE, present)],
                "else_branch": lambda: [self._short(layer, plain_BHTN, turned_BHTE, present)],
            },
            {f"{name}/mixed": FLOAT},
        )
        mixed_BTHV = graph.node(f"{name}/by_token", "Transpose", [mixed_BHTV], perm=[0, 2, 1, 3])
        flat = graph.constant("latent/flat", np.array([0, 0, heads * config.value_dim], np.int64))
        return graph.node(f"{name}/attended", "Reshape", [mixed_BTHV, flat]), [present]

    def _tokens(
        self, layer: int, query: ir.Value, latent: ir.Value, past: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The new tokens' queries, unrotated and rotated, by head; and the cache with the new tokens written."""
        with self.graph.recording() as nodes:
            values = self._emit_tokens(layer, query, latent, past)
        if not self.layers.calls.allowed:
            self.graph.extend(nodes)
            return values
        config, name, stored = self.config, self.name(layer), self._stored(layer)
        cosine, sine = self._tables
        norm = self.layers.matmul.vector(f"{name}.kv_a_layernorm.weight", config.kv_rank)
        inputs: Inputs = {"query": query, "latent": latent, "cosine": cosine, "sine": sine, "last": self._last_B}
        inputs |= {"past": past, "norm": norm, "scale": stored[0] if stored else None}
        inputs |= shared_inputs(nodes, inputs)
        attributes = self._sizes() | {
            "epsilon": float(np.float32(self._eps("kv_a_layernorm"))),
            "scale": config.score_scale,
        }
        outputs = dict(zip(("unrotated", "rotated", "present"), values, strict=True))
        op = "LatentTokens" + ("Int8" if stored else "")
        call = Call(op, f"{name}/tokens", f"model.layers.{layer}", inputs, outputs, attributes)
        made = self.layers.calls.add(call, nodes)
        if made is None:
            self.graph.extend(nodes)
            self._all_called = False
            return values
        self._all_called = True
        return made["unrotated"], made["rotated"], made["present"]

    def _short(self, layer: int, plain_BHTN: ir.Value, turned_BHTE: ir.Value, present: ir.Value) -> ir.Value:
        """Attention of few new tokens, in a branch."""
        name, stored = f"{self.name(layer)}/short", self._stored(layer)
        with self.graph.recording() as nodes:
            mixed = self._absorbed(layer, name, plain_BHTN, turned_BHTE, present)
        if not self.layers.calls.allowed:
            self.graph.extend(nodes)
            return mixed
        inputs: Inputs = {"unrotated": plain_BHTN, "rotated": turned_BHTE, "last": self._last_B, "state": present}
        inputs["keys"] = self._by_head(layer, "keys", 0, self.config.unrotated_dim)
        inputs["values"] = self._by_head(layer, "values", self.config.unrotated_dim, self.config.value_dim)
        inputs["scale"] = stored[0] if stored else None
        inputs |= shared_inputs(nodes, inputs)
        op = "LatentAttention" + ("Int8" if stored else "")
        call = Call(op, name, f"model.layers.{layer}", inputs, {"out": mixed}, self._sizes())
        made = self.layers.calls.add(call, nodes)
        if made is None:
            self.graph.extend(nodes)
            return mixed
        self.layers.calls.use.attention += self._all_called
        return made["out"]

    def _sizes(self) -> Attributes:
        """What both kernels are told of the shape."""
        config = self.config
        return {
            "num_heads": config.num_attention_heads,
            "rank": config.kv_rank,
            "rotated_size": config.head_dim,
            "unrotated_size": config.unrotated_dim,
            "value_size": config.value_dim,
        }

    def _emit_tokens(
        self, layer: int, query: ir.Value, latent: ir.Value, past: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """See `_tokens`."""
        graph, config, name = self.graph, self.config, self.name(layer)
        heads, rank, rotated = config.num_attention_heads, config.kv_rank, config.head_dim
        by_head = graph.constant("latent/by_head", np.array([0, 0, heads, -1], np.int64))
        query_BTHE = graph.node(f"{name}.q/heads", "Reshape", [query, by_head])
        parts = [f"{name}.q/plain", f"{name}.q/to_turn"]
        plain, turn = graph.split(f"{name}.q/split", query_BTHE, [config.unrotated_dim, rotated], parts)
        turned_BTHE = rotated_pairs(graph, f"{name}.q", turn, self._tables)
        low, key = graph.split(f"{name}.kv/split", latent, [rank, rotated], [f"{name}.kv/low", f"{name}.kv/key"])
        low = self._normed(layer, "kv_a_layernorm", low, rank)
        key_BT1E = graph.node(f"{name}.k/head", "Unsqueeze", [key, graph.axis(2)])
        key_BT1E = rotated_pairs(graph, f"{name}.k", key_BT1E, self._tables)
        key_BTE = graph.node(f"{name}.k/turned_row", "Squeeze", [key_BT1E, graph.axis(2)])
        new_BTC = graph.node(f"{name}/cached", "Concat", [low, key_BTE], axis=-1)
        present = self._joined(layer, past, new_BTC)
        factor = graph.constant("latent/scale", np.array(config.score_scale, np.float32))
        plain_BTHN = graph.node(f"{name}.q/plain_scaled", "Mul", [plain, factor])
        turned_BTHE = graph.node(f"{name}.q/turned_scaled", "Mul", [turned_BTHE, factor])
        plain_BHTN, turned_BHTE = (
            graph.node(f"{name}.q/{part}_by_head", "Transpose", [value], perm=[0, 2, 1, 3])
            for part, value in (("plain", plain_BTHN), ("turned", turned_BTHE))
        )
        return plain_BHTN, turned_BHTE, present

    def _normed(self, layer: int, vector: str, x: ir.Value, size: int) -> ir.Value:
        name = f"{self.name(layer)}.{vector}"
        weight = self.layers.matmul.vector(f"{name}.weight", size)
        return self.layers.rms_norm(name, x, weight, self._eps(vector))

    def _eps(self, vector: str) -> float | None:
        (eps,) = (found.eps for found in self._vectors if found.name == vector)
        return eps

    def _joined(self, layer: int, past: ir.Value, new_BTC: ir.Value) -> ir.Value:
        """The cache with the new tokens, as the graph gives it back."""
        graph, name = self.graph, self.name(layer)
        if self.layers.standard:
            return graph.node(f"{name}/present", "Concat", [past, new_BTC], axis=1)
        if stored := self._stored(layer):
            new_BTC = graph.node(f"{name}/rounded", "QuantizeLinear", [new_BTC, *stored], axis=2)
        return graph.node(f"{name}/present", "ScatterND", [past, self._where_BT2, new_BTC])

    def _stored(self, layer: int) -> list[ir.Value]:
        """Scales and zeros of an INT8 cache, (C,) each; none of another."""
        scales = self.layers.sequences.form.scales
        if scales is None:
            return []
        (scale_LC,) = scales.states
        scale_C = self.graph.constant(metadata.cache_scale_name(layer, self.states[0].name), scale_LC[layer].numpy())
        return [scale_C, self.graph.constant("latent/zeros", np.zeros(scale_LC.shape[1], np.int8))]

    def _filled(self, layer: int, name: str, present: ir.Value) -> ir.Value:
        """What of the cache is filled, (B, S, C) float32."""
        graph = self.graph
        if self.layers.standard:
            return present
        begin = graph.constant("cache/begin", np.array([0], np.int64))
        filled_BSC = graph.node(f"{name}/filled", "Slice", [present, begin, self._width_S, graph.axis(1)])
        if stored := self._stored(layer):
            filled_BSC = graph.node(f"{name}/filled_float", "DequantizeLinear", [filled_BSC, *stored], axis=2)
        return filled_BSC

    def _absorbed(
        self, layer: int, name: str, plain_BHTN: ir.Value, turned_BHTE: ir.Value, present: ir.Value
    ) -> ir.Value:
        """Attention to the cached vectors themselves, (B, H, T, V); heads count as rows of one matrix."""
        graph, config, state_BSC = self.graph, self.config, self._filled(layer, name, present)
        heads, rank = config.num_attention_heads, config.kv_rank
        keys_HNR = self._by_head(layer, "keys", 0, config.unrotated_dim)
        values_HVR = self._by_head(layer, "values", config.unrotated_dim, config.value_dim)
        low_BHTR = graph.node(f"{name}/low_query", "MatMul", [plain_BHTN, keys_HNR])
        query_BHTC = graph.node(f"{name}/query", "Concat", [low_BHTR, turned_BHTE], axis=-1)
        width = rank + config.head_dim
        rows = graph.constant("latent/rows_of_heads", np.array([0, -1, width], np.int64))
        query_BXC = graph.node(f"{name}/query_rows", "Reshape", [query_BHTC, rows])
        state_BCS = graph.node(f"{name}/columns", "Transpose", [state_BSC], perm=[0, 2, 1])
        scores_BXS = graph.node(f"{name}/scores", "MatMul", [query_BXC, state_BCS])
        apart = graph.constant("latent/heads_apart", np.array([0, heads, -1], np.int64))
        size = graph.node(f"{name}/width", "Shape", [state_BSC], start=1, end=2)
        shape = graph.node(f"{name}/scores_shape", "Concat", [apart, size], axis=0)
        weights_BHTS = self._weights(name, graph.node(f"{name}/scores_by_head", "Reshape", [scores_BXS, shape]))
        together = graph.constant("latent/heads_together", np.array([0, -1], np.int64))
        flat = graph.node(f"{name}/weights_shape", "Concat", [together, size], axis=0)
        weights_BXS = graph.node(f"{name}/weight_rows", "Reshape", [weights_BHTS, flat])
        mixed_BXC = graph.node(f"{name}/mixed_rows", "MatMul", [weights_BXS, state_BSC])
        mixed_BXR, _ = graph.split(
            f"{name}/mixed_split", mixed_BXC, [rank, config.head_dim], [f"{name}/mixed_low", f"{name}/mixed_key"]
        )
        by_head = graph.constant("latent/low_by_head", np.array([0, heads, -1, rank], np.int64))
        mixed_BHTR = graph.node(f"{name}/mixed_by_head", "Reshape", [mixed_BXR, by_head])
        values_HRV = graph.node(f"{name}/values_turned", "Transpose", [values_HVR], perm=[0, 2, 1])
        return graph.node(f"{name}/mixed", "MatMul", [mixed_BHTR, values_HRV])

    def _made(self, layer: int, name: str, plain_BHTN: ir.Value, turned_BHTE: ir.Value, present: ir.Value) -> ir.Value:
        """Attention to keys and values made of the cache, (B, H, T, V)."""
        graph, config, state_BSC = self.graph, self.config, self._filled(layer, name, present)
        rank, rotated = config.kv_rank, config.head_dim
        low, key = graph.split(f"{name}/split", state_BSC, [rank, rotated], [f"{name}/low", f"{name}/key"])
        low_B1SR = graph.node(f"{name}/low_heads", "Unsqueeze", [low, graph.axis(1)])
        key_B1ES = graph.node(
            f"{name}/key_columns",
            "Transpose",
            [graph.node(f"{name}/key_heads", "Unsqueeze", [key, graph.axis(1)])],
            perm=[0, 1, 3, 2],
        )
        low_B1RS = graph.node(f"{name}/low_columns", "Transpose", [low_B1SR], perm=[0, 1, 3, 2])
        keys_HNR = self._by_head(layer, "keys", 0, config.unrotated_dim)
        values_HVR = self._by_head(layer, "values", config.unrotated_dim, config.value_dim)
        keys_BHNS = graph.node(f"{name}/keys", "MatMul", [keys_HNR, low_B1RS])
        values_BHVS = graph.node(f"{name}/values", "MatMul", [values_HVR, low_B1RS])
        plain_BHTS = graph.node(f"{name}/plain_scores", "MatMul", [plain_BHTN, keys_BHNS])
        turned_BHTS = graph.node(f"{name}/turned_scores", "MatMul", [turned_BHTE, key_B1ES])
        weights_BHTS = self._weights(name, graph.node(f"{name}/scores", "Add", [plain_BHTS, turned_BHTS]))
        values_BHSV = graph.node(f"{name}/value_rows", "Transpose", [values_BHVS], perm=[0, 1, 3, 2])
        return graph.node(f"{name}/mixed", "MatMul", [weights_BHTS, values_BHSV])

    def _weights(self, name: str, scores_BHTS: ir.Value) -> ir.Value:
        # The least number instead of minus infinity: a padding token that attends to nothing stays a number.
        least = self.graph.constant("latent/least", np.array(np.finfo(np.float32).min, np.float32))
        masked = self.graph.node(f"{name}/masked", "Where", [self._seen_B1TS, scores_BHTS, least])
        return self.graph.node(f"{name}/weights", "Softmax", [masked], axis=-1)

    def _by_head(self, layer: int, part: str, start: int, count: int) -> ir.Value:
        """(H, count, R): rows of every head of kv_b_proj, dequantized if it is packed."""
        (matrix,) = (found for found in self._matrices if found.name == "kv_b_proj")
        heads, module = self.config.num_attention_heads, f"{self.name(layer)}.kv_b_proj"

        def read() -> Array:
            dense = self.layers.matmul.dequantized(module, (matrix.rows, matrix.columns))
            return np.ascontiguousarray(dense.reshape(heads, -1, matrix.columns)[:, start : start + count])

        return self.graph.weight(f"{module}.{part}", FLOAT, (heads, count, matrix.columns), read)
