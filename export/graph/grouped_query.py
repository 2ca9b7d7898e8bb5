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
from typing import Any

import onnx_ir as ir

from export import layout
from export.graph.builder import FLOAT, HALF, LEAST
from export.graph.calls import Inputs
from export.graph.layer import LayerBuilder, SublayerBuilder
from sportsllm.models.description import NORMS
from sportsllm.models.sublayer import HIDDEN

# GroupQueryAttention takes only heads of a multiple of 8, and rotates those of a multiple of 16.
HEAD_MULTIPLE, ROTARY_MULTIPLE = 8, 16
_K_SCALE_INPUT = 12  # place of k_scale among GroupQueryAttention's inputs; v_scale follows


class OrtGroupedQuery(SublayerBuilder):
    """GroupQueryAttention over a cache of the compute dtype, an INT8 one, or a float16 one.

    The operator computes in the type of its cache. So that over a float16 cache only keys, values and their products
    are of that type, it gets them rotated.

    All layers share what it reads of the sequences' lengths, each less 1, (B,), and S, int32; and, if the operator
    rotates, tables, (context, E / 2). What else a layer needs it computes of those and of its own input, so that it can
    become a function, see `export.graph.calls`.
    """

    def __init__(self, layers: LayerBuilder, part: str) -> None:
        super().__init__(layers, part)
        self._seqlens_k, self._total = layers.lengths()
        config = self.config
        self._half_cache = layers.form.real == FLOAT and layers.form.cached == HALF
        odd = bool(config.head_dim % ROTARY_MULTIPLE or config.rotary_size % ROTARY_MULTIPLE)
        self._rotates_outside = self._half_cache or odd
        self._tables: list[Sequence[ir.Value]] = [
            layers.rotary_caches(layer) if config.rotates(layer) and not self._rotates_outside else ()
            for layer in range(config.num_hidden_layers)
        ]

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        name, config, tables = self.name(layer), self.config, self._tables[layer]
        # Otherwise the operator takes query, key and value as one, the query's rows first.
        split = config.qk_norm or not tables
        parts = self.products(layer, HIDDEN, x_BTD, split)
        if split:
            query, key, value = parts
            outside = config.rotates(layer) and self._rotates_outside
            turns = self.layers.new_rotary_caches(name, layer, self._seqlens_k) if outside else ()
            query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads, turns)
            key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads, turns)
            parts = [query, key, value]
        if self._half_cache:
            parts = [self.graph.node(f"{part.name}/half", "Cast", part, to=HALF.value) for part in parts]
        inputs = [*parts, *[None] * (3 - len(parts)), *past, self._seqlens_k, self._total, *tables]
        attributes: dict[str, Any] = {"do_rotary": int(bool(tables))}
        if scales := self._cache_scales(layer):
            inputs += [None] * (_K_SCALE_INPUT - len(inputs)) + scales
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        if (window := config.window(layer)) is not None:
            attributes["local_window_size"] = window
        attended, *present = self.attention(name, inputs, ("attended", "key", "value"), **attributes)
        if self._half_cache:
            attended = self.graph.node(f"{name}/attended_float", "Cast", attended, to=FLOAT.value)
        return attended, present

    def attention(
        self,
        name: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[str],
        do_rotary: int = 0,
        **attributes: Any,
    ) -> list[ir.Value]:
        """Add the operator; names of its outputs follow `name`."""
        config = self.config
        heads = {"num_heads": config.num_attention_heads, "kv_num_heads": config.num_key_value_heads}
        given: dict[str, Any] = {**heads, "do_rotary": do_rotary, **attributes}
        if config.attention_scale is not None:
            given["scale"] = float(config.attention_scale)
        if config.attention_softcap is not None:
            given["softcap"] = float(config.attention_softcap)
        names = [f"{name}/{output}" for output in outputs]
        return self.graph.nodes_of(f"{name}/attention", "GroupQueryAttention", inputs, names, **given)

    def kernel_inputs(self, layer: int, past: Sequence[ir.Value], keep: ir.Value | None) -> Inputs:
        """What kernels of a layer read beside the residual stream and matrices."""
        config, name, matmul = self.config, self.name(layer), self.layers.matmul
        inputs: Inputs = {"last": self._seqlens_k, "total": self._total, "keep": keep}
        inputs |= {"past_key": past[0], "past_value": past[1]}
        inputs["frequencies"] = self.layers.rotary_frequencies(layer)[0] if config.rotates(layer) else None
        inputs |= dict(zip(("key_scale", "value_scale"), self._cache_scales(layer) or (None, None), strict=True))
        inputs["norm"] = matmul.vector(f"model.layers.{layer}.{NORMS['self_attn']}.weight", config.hidden_size)
        for side in ("query", "key"):
            weight = f"{name}.{side[0]}_norm.weight"
            inputs[f"{side}_norm"] = matmul.vector(weight, config.head_dim) if config.qk_norm else None
        return inputs

    def body_inputs(self, layer: int) -> Inputs:
        """What a layer in ONNX Runtime's operators reads beside that."""
        return {"tokens": self.layers.tokens_BT, **dict(zip(("cosine", "sine"), self._tables[layer], strict=False))}

    def _cache_scales(self, layer: int) -> list[ir.Value]:
        """A layer's scales of keys and of values, (1, K, 1, E); none for a float32 cache."""
        if (scales := self.layers.form.scales) is None:
            return []
        return [
            self.graph.constant(layout.cache_scale_name(layer, state.name), scale_LKE[layer][None, :, None].numpy())
            for state, scale_LKE in zip(self.states, scales.states, strict=True)
        ]

    def _prepare_heads(self, name: str, x: ir.Value, heads: int, turns: Sequence[ir.Value]) -> ir.Value:
        """What GroupQueryAttention does not do: norm of each head (Qwen3), rotation of odd sizes, by each token's row
        in two tables if they are given; (B, T, heads * E)."""
        graph, size = self.graph, self.config.head_dim
        if self.config.joint_qk_norm:
            x = self.layers.rms_norm(f"{name}_norm", x, self.layers.matmul.vector(f"{name}_norm.weight", heads * size))
        elif self.config.qk_norm:
            x_BTHE = graph.node(f"{name}_norm/heads", "Reshape", x, graph.ints(f"heads_{heads}", [0, 0, heads, size]))
            gamma = self.layers.matmul.vector(f"{name}_norm.weight", size)
            normed = self.layers.rms_norm(f"{name}_norm", x_BTHE, gamma)
            flat = graph.ints(f"heads_{heads}_flat", [0, 0, heads * size])
            x = graph.node(f"{name}_norm/flat", "Reshape", normed, flat)
        if not turns:
            return x
        sizes = {"num_heads": heads, "rotary_embedding_dim": self.config.rotary_size}
        return graph.node(f"{name}_rotary", "RotaryEmbedding", x, *turns, **sizes)


class StandardGroupedQuery(SublayerBuilder):
    """Attention over a float32 cache that grows by concatenation."""

    def __init__(self, layers: LayerBuilder, part: str) -> None:
        super().__init__(layers, part)
        assert layers.form.scales is None, "no standard operator reads an INT8 cache"
        config, places_BT, numbers = self.config, layers.places("standard"), range(self.config.num_hidden_layers)
        self._tables = [layers.rotary_rows(i, places_BT) if config.rotates(i) else None for i in numbers]
        self._seen = [layers.seen_columns(config.window(i)) for i in numbers]

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name = self.graph, self.config, self.name(layer)
        at, rotated = graph.at(f"{name}/"), self.layers.rotated
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, key, value = self.products(layer, HIDDEN, x_BTD)
        query_BTHE = rotated(f"{name}.q", self._heads(f"{name}.q", query, heads), self._tables[layer])
        key_BTKE = rotated(f"{name}.k", self._heads(f"{name}.k", key, shared), self._tables[layer])
        scale = graph.real("attention_scale", config.score_scale)
        query_BTHE = graph.node(f"{name}.q/scaled", "Mul", query_BTHE, scale)
        query_BHTE = graph.node(f"{name}.q/by_head", "Transpose", query_BTHE, perm=[0, 2, 1, 3])
        new = (key_BTKE, self._heads(f"{name}.v", value, shared, normed=False))
        present = []
        for part, old_BKSE, new_BTKE in zip("kv", past, new, strict=True):
            new_BKTE = graph.node(f"{name}.{part}/by_head", "Transpose", new_BTKE, perm=[0, 2, 1, 3])
            present.append(graph.node(f"{name}.{part}/present", "Concat", old_BKSE, new_BKTE, axis=2))
        keys, values = present

        # Query heads that share a key head lie one after the other: their tokens count as rows of one matrix.
        def shaped(part: str, x: ir.Value, count: int, last: int) -> ir.Value:
            """(B, count, rows, last), last 0 for as it is."""
            return at(part, "Reshape", x, graph.ints(f"shape_{count}_{last}", [0, count, -1, last]))

        keys_BKES = graph.node(f"{name}.k/columns", "Transpose", keys, perm=[0, 1, 3, 2])
        scores = at("scores", "MatMul", shaped("query", query_BHTE, shared, size), keys_BKES)
        scores = self.layers.softcapped(f"{name}/scores", scores, config.attention_softcap)
        scores_BHTS = shaped("scores_by_head", scores, heads, 0)
        masked = at("masked", "Where", self._seen[layer], scores_BHTS, graph.real("attention_least", LEAST))
        weights = at("weights", "Softmax", masked, axis=-1)
        mixed = at("mixed", "MatMul", shaped("weights_shared", weights, shared, 0), values)
        mixed_BTHE = at("by_token", "Transpose", shaped("mixed_by_head", mixed, heads, size), perm=[0, 2, 1, 3])
        return at("attended", "Reshape", mixed_BTHE, graph.ints("attention_flat", [0, 0, heads * size])), present

    def _heads(self, name: str, x: ir.Value, heads: int, normed: bool = True) -> ir.Value:
        """(B, T, heads * E) as (B, T, heads, E), each head or all together normed if the model does that."""
        size, together = self.config.head_dim, self.config.joint_qk_norm
        if together and normed:
            x = self.layers.rms_norm(f"{name}_norm", x, self.layers.matmul.vector(f"{name}_norm.weight", heads * size))
        x = self.graph.node(f"{name}/heads", "Reshape", x, self.graph.ints(f"heads_{heads}", [0, 0, heads, size]))
        if together or not (self.config.qk_norm and normed):
            return x
        return self.layers.rms_norm(f"{name}_norm", x, self.layers.matmul.vector(f"{name}_norm.weight", size))
