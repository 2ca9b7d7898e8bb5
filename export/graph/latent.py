"""Multi-head latent attention in the graph; see `sportsllm.models.latent`.

The cache holds a token's latent vector and its rotated key, side by side. Short chunks are read in the absorbed form,
for which kv_b_proj is a float32 constant by head; long ones expand the cache to keys and values, which is less work.
Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, L room in the cache, H heads,
R kv_lora_rank, E head_dim, N qk_nope_head_dim, V v_head_dim, C = R + E.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export import layout
from export.graph.builder import FLOAT, LEAST, Array
from export.graph.calls import Attributes, Call
from export.graph.layer import LayerBuilder, SublayerBuilder
from sportsllm.models.sublayer import HIDDEN

LONG_PIECE = 16
"""From this many new tokens on keys and values are made."""


class LatentAttention(SublayerBuilder):
    """Attention over a cache that ONNX Runtime's graphs write in place and standard ones join anew.

    Of an INT8 cache, which those graphs may have, every token is read as it is stored, new ones too.
    """

    def __init__(self, layers: LayerBuilder, part: str) -> None:
        super().__init__(layers, part)
        self._standard, self._last_B = layers.form.standard, None if layers.form.standard else layers.lengths()[0]
        self._places_BT = layers.places("latent")
        if self._standard:
            self._seen_B1TS = layers.seen_columns(None)
        else:
            graph, at = self.graph, self.graph.at("latent/")
            # S of the longest sequence: the attention mask may be as wide as the cache.
            total = at("total", "Add", at("last", "ReduceMax", self._places_BT, keepdims=0), graph.one)
            self._width_S = at("width", "Unsqueeze", total, 0)
            columns_S = at("columns", "Range", graph.zero, total, graph.one)
            places_BT1 = at("place_column", "Unsqueeze", self._places_BT, 2)
            self._seen_B1TS = at("seen", "Unsqueeze", at("earlier", "LessOrEqual", columns_S, places_BT1), 1)
            self._where_BT2 = layers.rows_and_places("latent", self._places_BT, places_BT1)
        self._tables = layers.rotary_rows(0, self._places_BT)

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name = self.graph, self.config, self.name(layer)
        at, calls = graph.at(f"{name}/"), self.layers.calls
        *queries, latent = self.products(layer, HIDDEN, x_BTD)
        (query,) = queries
        if config.q_lora_rank is not None:
            query = self._normed(layer, "q_a_layernorm", query, config.q_lora_rank)
            (query,) = self.products(layer, "query_latent", query)
        with graph.recording() as nodes:
            made = self._tokens(layer, query, latent, past[0])
        tokens = self._tokens_call(layer, query, latent, past[0], made)
        all_called = calls.add(tokens, nodes)
        plain_BHTN, turned_BHTE, present = tokens.outputs.values()

        def short() -> Sequence[ir.Value]:
            part = f"{name}/short"
            with graph.recording() as nodes:
                mixed = self._absorbed(layer, part, plain_BHTN, turned_BHTE, present)
            call = self._short_call(layer, part, plain_BHTN, turned_BHTE, present, mixed)
            calls.use.attention += calls.add(call, nodes) and all_called
            return [call.outputs["out"]]

        least = graph.ints("latent/long_piece", [LONG_PIECE])
        (mixed_BHTV,) = graph.if_else(
            f"{name}/attention_either",
            at("is_long", "GreaterOrEqual", graph.size(f"{name}/piece", x_BTD, 1), least),
            lambda: [self._made(layer, f"{name}/long", plain_BHTN, turned_BHTE, present)],
            short,
            {f"{name}/mixed": FLOAT},
        )
        flat = graph.ints("latent/flat", [0, 0, config.num_attention_heads * config.value_dim])
        return at("attended", "Reshape", at("by_token", "Transpose", mixed_BHTV, perm=[0, 2, 1, 3]), flat), [present]

    def _tokens_call(
        self, layer: int, query: ir.Value, latent: ir.Value, past: ir.Value, made: Sequence[ir.Value]
    ) -> Call:
        """The call of `_tokens`, whose results are `made`."""
        config, name, (cosine, sine) = self.config, self.name(layer), self._tables
        norm = self.layers.matmul.vector(f"{name}.kv_a_layernorm.weight", config.kv_rank)
        inputs = {"query": query, "latent": latent, "cosine": cosine, "sine": sine, "last": self._last_B, "past": past}
        inputs |= {"norm": norm, "scale": self._stored_scale(layer)}
        epsilon = float(np.float32(self._eps("kv_a_layernorm")))
        attributes = self._sizes() | {"epsilon": epsilon, "scale": config.score_scale}
        outputs = dict(zip(("unrotated", "rotated", "present"), made, strict=True))
        op = self._operator("LatentTokens")
        return Call(op, f"{name}/tokens", f"model.layers.{layer}", inputs, outputs, attributes, shares=True)

    def _short_call(
        self, layer: int, name: str, plain: ir.Value, turned: ir.Value, present: ir.Value, mixed: ir.Value
    ) -> Call:
        """The call of attention of few new tokens, in a branch."""
        inputs = {"unrotated": plain, "rotated": turned, "last": self._last_B, "state": present}
        inputs |= {"keys": self._keys(layer), "values": self._values(layer), "scale": self._stored_scale(layer)}
        op = self._operator("LatentAttention")
        return Call(op, name, f"model.layers.{layer}", inputs, {"out": mixed}, self._sizes(), shares=True)

    def _operator(self, name: str) -> str:
        return name if self.layers.form.scales is None else f"{name}Int8"

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

    def _tokens(
        self, layer: int, query: ir.Value, latent: ir.Value, past: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The new tokens' queries, unrotated and rotated, by head; and the cache with the new tokens written."""
        graph, config, name = self.graph, self.config, self.name(layer)
        at, rank, rotated = graph.at(f"{name}."), config.kv_rank, config.head_dim
        by_head = graph.ints("latent/by_head", [0, 0, config.num_attention_heads, -1])
        query_BTHE = at("q/heads", "Reshape", query, by_head)
        parts = [f"{name}.q/plain", f"{name}.q/to_turn"]
        plain, turn = graph.split(f"{name}.q/split", query_BTHE, [config.unrotated_dim, rotated], parts)
        turned_BTHE = self.layers.rotated(f"{name}.q", turn, self._tables)
        low, key = graph.split(f"{name}.kv/split", latent, [rank, rotated], [f"{name}.kv/low", f"{name}.kv/key"])
        low = self._normed(layer, "kv_a_layernorm", low, rank)
        key_BT1E = self.layers.rotated(f"{name}.k", at("k/head", "Unsqueeze", key, 2), self._tables)
        key_BTE = at("k/turned_row", "Squeeze", key_BT1E, 2)
        new_BTC = graph.node(f"{name}/cached", "Concat", low, key_BTE, axis=-1)
        present = self._joined(layer, past, new_BTC)
        factor = graph.real("latent/scale", config.score_scale)
        plain_BTHN = at("q/plain_scaled", "Mul", plain, factor)
        turned_BTHE = at("q/turned_scaled", "Mul", turned_BTHE, factor)
        plain_BHTN = at("q/plain_by_head", "Transpose", plain_BTHN, perm=[0, 2, 1, 3])
        return plain_BHTN, at("q/turned_by_head", "Transpose", turned_BTHE, perm=[0, 2, 1, 3]), present

    def _normed(self, layer: int, vector: str, x: ir.Value, size: int) -> ir.Value:
        name = f"{self.name(layer)}.{vector}"
        weight = self.layers.matmul.vector(f"{name}.weight", size)
        return self.layers.rms_norm(name, x, weight, self._eps(vector))

    def _eps(self, vector: str) -> float | None:
        (eps,) = (found.eps for found in self._vectors if found.name == vector)
        return eps

    def _joined(self, layer: int, past: ir.Value, new_BTC: ir.Value) -> ir.Value:
        """The cache with the new tokens, as the graph gives it back."""
        at = self.graph.at(f"{self.name(layer)}/")
        if self._standard:
            return at("present", "Concat", past, new_BTC, axis=1)
        if stored := self._stored(layer):
            new_BTC = at("rounded", "QuantizeLinear", new_BTC, *stored, axis=2)
        return at("present", "ScatterND", past, self._where_BT2, new_BTC)

    def _stored_scale(self, layer: int) -> ir.Value | None:
        """Scales of an INT8 cache, (C,)."""
        if (scales := self.layers.form.scales) is None:
            return None
        (scale_LC,) = scales.states
        return self.graph.constant(layout.cache_scale_name(layer, self.states[0].name), scale_LC[layer].numpy())

    def _stored(self, layer: int) -> list[ir.Value]:
        """Scales and zeros of an INT8 cache, (C,) each; none of another."""
        scale_C, width = self._stored_scale(layer), self.config.kv_rank + self.config.head_dim
        return [] if scale_C is None else [scale_C, self.graph.constant("latent/zeros", np.zeros(width, np.int8))]

    def _filled(self, layer: int, name: str, present: ir.Value) -> ir.Value:
        """The filled part of the cache, (B, S, C) float32."""
        if self._standard:
            return present
        at, begin = self.graph.at(f"{name}/"), self.graph.ints("cache/begin", [0])
        filled_BSC = at("filled", "Slice", present, begin, self._width_S, 1)
        if stored := self._stored(layer):
            filled_BSC = at("filled_float", "DequantizeLinear", filled_BSC, *stored, axis=2)
        return filled_BSC

    def _absorbed(
        self, layer: int, name: str, plain_BHTN: ir.Value, turned_BHTE: ir.Value, present: ir.Value
    ) -> ir.Value:
        """Attention to the cached vectors themselves, (B, H, T, V); heads count as rows of one matrix."""
        graph, at, config = self.graph, self.graph.at(f"{name}/"), self.config
        state_BSC = self._filled(layer, name, present)
        heads, rank, rotated = config.num_attention_heads, config.kv_rank, config.head_dim
        keys_HNR, values_HVR = self._keys(layer), self._values(layer)
        query_BHTC = at("query", "Concat", at("low_query", "MatMul", plain_BHTN, keys_HNR), turned_BHTE, axis=-1)
        query_BXC = at("query_rows", "Reshape", query_BHTC, graph.ints("latent/rows_of_heads", [0, -1, rank + rotated]))
        scores_BXS = at("scores", "MatMul", query_BXC, at("columns", "Transpose", state_BSC, perm=[0, 2, 1]))
        size = graph.size(f"{name}/width", state_BSC, 1)
        shape = at("scores_shape", "Concat", graph.ints("latent/heads_apart", [0, heads, -1]), size, axis=0)
        weights_BHTS = self._weights(name, at("scores_by_head", "Reshape", scores_BXS, shape))
        flat = at("weights_shape", "Concat", graph.ints("latent/heads_together", [0, -1]), size, axis=0)
        mixed_BXC = at("mixed_rows", "MatMul", at("weight_rows", "Reshape", weights_BHTS, flat), state_BSC)
        parts = [f"{name}/mixed_low", f"{name}/mixed_key"]
        mixed_BXR, _ = graph.split(f"{name}/mixed_split", mixed_BXC, [rank, rotated], parts)
        by_head = graph.ints("latent/low_by_head", [0, heads, -1, rank])
        mixed_BHTR = at("mixed_by_head", "Reshape", mixed_BXR, by_head)
        return at("mixed", "MatMul", mixed_BHTR, at("values_turned", "Transpose", values_HVR, perm=[0, 2, 1]))

    def _made(self, layer: int, name: str, plain_BHTN: ir.Value, turned_BHTE: ir.Value, present: ir.Value) -> ir.Value:
        """Attention to keys and values made of the cache, (B, H, T, V)."""
        graph, at, config = self.graph, self.graph.at(f"{name}/"), self.config
        state_BSC, sizes = self._filled(layer, name, present), [config.kv_rank, config.head_dim]
        low, key = graph.split(f"{name}/split", state_BSC, sizes, [f"{name}/low", f"{name}/key"])
        low_B1SR = at("low_heads", "Unsqueeze", low, 1)
        key_B1ES = at("key_columns", "Transpose", at("key_heads", "Unsqueeze", key, 1), perm=[0, 1, 3, 2])
        low_B1RS = at("low_columns", "Transpose", low_B1SR, perm=[0, 1, 3, 2])
        keys_HNR, values_HVR = self._keys(layer), self._values(layer)
        keys_BHNS, values_BHVS = at("keys", "MatMul", keys_HNR, low_B1RS), at("values", "MatMul", values_HVR, low_B1RS)
        plain_BHTS = at("plain_scores", "MatMul", plain_BHTN, keys_BHNS)
        turned_BHTS = at("turned_scores", "MatMul", turned_BHTE, key_B1ES)
        weights_BHTS = self._weights(name, at("scores", "Add", plain_BHTS, turned_BHTS))
        return at("mixed", "MatMul", weights_BHTS, at("value_rows", "Transpose", values_BHVS, perm=[0, 1, 3, 2]))

    def _weights(self, name: str, scores_BHTS: ir.Value) -> ir.Value:
        least = self.graph.real("latent/least", LEAST)
        masked = self.graph.node(f"{name}/masked", "Where", self._seen_B1TS, scores_BHTS, least)
        return self.graph.node(f"{name}/weights", "Softmax", masked, axis=-1)

    def _keys(self, layer: int) -> ir.Value:
        return self._by_head(layer, "keys", 0, self.config.unrotated_dim)

    def _values(self, layer: int) -> ir.Value:
        return self._by_head(layer, "values", self.config.unrotated_dim, self.config.value_dim)

    def _by_head(self, layer: int, part: str, start: int, count: int) -> ir.Value:
        """(H, count, R): rows of every head of kv_b_proj, dequantized if it is packed."""
        (matrix,) = (found for found in self._matrices if found.name == "kv_b_proj")
        heads, module = self.config.num_attention_heads, f"{self.name(layer)}.kv_b_proj"

        def read() -> Array:
            dense = self.layers.matmul.dequantized(module, (matrix.rows, matrix.columns))
            return np.ascontiguousarray(dense.reshape(heads, -1, matrix.columns)[:, start : start + count])

        return self.graph.weight(f"{module}.{part}", FLOAT, (heads, count, matrix.columns), read)
