"""Attention to chosen blocks of tokens in the graph; see `sportsllm.models.selection`. Experimental.

New keys, values and index keys are written into the cache first, outside of any branch: an `If` copies what it gives
back. Then one new token scores the index keys, takes the best blocks and reads the keys and values of their tokens
alone. A chunk of a prompt goes through GroupQueryAttention, with a bias that hides what is not chosen. As long as no
more tokens are there than are chosen, all of them are.
Shape suffixes: B sequences, T new tokens, S tokens of the longest sequence with the new ones, L room in the cache,
H query heads, K key/value heads, G = H / K, E head_dim, J index heads, I their size, N blocks, C chosen blocks, X
tokens in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import FLOAT, INT32, INT64, LEAST
from export.graph.calls import Attributes, Call, Inputs
from export.graph.grouped_query import OrtGroupedQuery
from export.graph.layer import LayerBuilder
from sportsllm.models.kinds import index_pairs, index_size
from sportsllm.models.sublayer import HIDDEN


class SelectedAttention(OrtGroupedQuery):
    """Attention over a float32 cache of keys, values and index keys, which is written in place."""

    def __init__(self, layers: LayerBuilder, part: str) -> None:
        super().__init__(layers, part)
        graph, at, selection = self.graph, self.graph.at("selected/"), self.config.chosen_selection
        self._selection, self._ids_BT = selection, layers.places("selected")
        caches = layers.rotary_caches(0)
        self._turns = (self._ids_BT, *caches)
        self._length = at("length", "Add", at("last", "ReduceMax", self._ids_BT, keepdims=0), graph.one)
        self._length_S = at("length_list", "Unsqueeze", self._length, 0)
        places_BT1 = at("place_column", "Unsqueeze", self._ids_BT, 2)
        self._where_BT2 = layers.rows_and_places("selected", self._ids_BT, places_BT1)
        self._is_long = at("is_long", "Greater", self._length, graph.ints("selected/tokens", selection.tokens))
        width_T = graph.size("selected/piece", layers.tokens_BT, 1)
        self._alone = at("alone", "Equal", width_T, graph.ints("selected/one", [1]))
        self._past_P = at("past", "Sub", self._length_S, width_T)
        self._length_int32 = at("length_int32", "Cast", self._length, to=INT32.value)
        # Blocks that are there, those that are kept in any case, and those that come later, (B, T, N).
        size, rest = (graph.ints(f"selected/block{n}", selection.block - bool(n)) for n in ("", "_less_1"))
        own_BT1 = at("own_block", "Div", places_BT1, size)
        count = at("blocks", "Div", at("up", "Add", self._length, rest), size)
        blocks_N = at("numbers", "Range", graph.zero, count, graph.one)
        before_BT1 = at("before_newest", "Sub", own_BT1, graph.ints("selected/newest", selection.newest))
        is_new, is_first = at("is_new", "Greater", blocks_N, before_BT1), at("is_first", "Equal", blocks_N, graph.zero)
        self._kept_BTN = at("kept", "Or", is_new, is_first)
        self._later_BTN = at("later", "Greater", blocks_N, own_BT1)
        tokens_S = at("token_numbers", "Range", graph.zero, self._length, graph.one)
        self._unseen_BT1S = at("unseen_heads", "Unsqueeze", at("unseen", "Greater", tokens_S, places_BT1), 2)
        missing = at("missing", "Sub", at("whole", "Mul", count, size), self._length)
        self._missing = at("missing_list", "Unsqueeze", missing, 0)
        pairs = self.config.head_dim // 2
        begin = graph.ints("selected/first_pair", [pairs - index_pairs(self.config)])
        end = graph.ints("selected/last_pair", [pairs])
        self._slower = [at(f"slower_{table.name}", "Slice", table, begin, end, 1) for table in caches]
        self._cached_rows: tuple[ir.Value, ir.Value] | None = None

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name, selection = self.graph, self.config, self.name(layer), self._selection
        at = graph.at(f"{name}.")
        query, key, value, index_q, index_k = self.products(layer, HIDDEN, x_BTD)
        query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads, self._turns)
        key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads, self._turns)
        index_q = self._slowly_rotated(f"{name}.index_q", index_q, selection.heads * selection.parts)
        index_k = self._slowly_rotated(f"{name}.index_k", index_k, selection.parts)
        first_BK1, where_BKT3 = self._rows_of_heads(past[0])
        index = graph.node(f"{name}/index_present", "ScatterND", past[2], self._where_BT2, index_k)
        by_head = graph.ints("selected/by_head", [0, 0, -1, config.head_dim])
        presents = []
        for part, new, old in zip("kv", (key, value), past, strict=False):
            new_BTKE = at(f"{part}/heads", "Reshape", new, by_head)
            new_BKTE = at(f"{part}/by_head", "Transpose", new_BTKE, perm=[0, 2, 1, 3])
            presents.append(at(f"{part}/present", "ScatterND", old, where_BKT3, new_BKTE))
        parts, scored = (query, key, value), (index_q, index)
        name = f"{name}/selected"
        with graph.recording() as nodes:
            (attended,) = graph.if_else(
                f"{name}/either",
                self._alone,
                lambda: [self._single(f"{name}/one", query, scored, presents, first_BK1)],
                lambda: [self._piece(f"{name}/piece", parts, scored, presents)],
                {f"{name}/attended": FLOAT},
            )
        call = self._call(layer, name, (query, index_q, *presents, index), attended)
        self.layers.calls.use.attention += self.layers.calls.add(call, nodes)
        return call.outputs["out"], [*presents, index]

    def _call(self, layer: int, name: str, read: Sequence[ir.Value], attended: ir.Value) -> Call:
        """The call of attention from the written cache on; `read` are queries and what is cached."""
        config, selection = self.config, self._selection
        query, index_query, key, value, index = read
        inputs: Inputs = {"query": query, "index_query": index_query, "last": self._seqlens_k}
        inputs |= {"key": key, "value": value, "index": index}
        attributes: Attributes = {
            "num_heads": config.num_attention_heads,
            "kv_num_heads": config.num_key_value_heads,
            "head_size": config.head_dim,
            "index_heads": selection.heads,
            "index_size": index_size(config),
            "block_size": selection.block,
            "blocks": selection.blocks,
            "newest_blocks": selection.newest,
            "scale": config.score_scale,
        }
        base, outputs = f"model.layers.{layer}", {"out": attended}
        return Call("SelectedAttention", name, base, inputs, outputs, attributes, shares=True)

    def _slowly_rotated(self, name: str, x: ir.Value, parts: int) -> ir.Value:
        sizes = {"num_heads": parts, "rotary_embedding_dim": 2 * index_pairs(self.config)}
        return self.graph.node(f"{name}_rotary", "RotaryEmbedding", x, self._ids_BT, *self._slower, **sizes)

    def _piece(
        self, name: str, parts: Sequence[ir.Value], scored: Sequence[ir.Value], presents: Sequence[ir.Value]
    ) -> ir.Value:
        """Attention of several new tokens to those before and to themselves, (B, T, H E)."""
        graph, at, begin = self.graph, self.graph.at(f"{name}/"), self.graph.ints("cache/begin", [0])
        before = [
            at(f"{part}_before", "Slice", present, begin, self._past_P, 2)
            for part, present in zip("kv", presents, strict=True)
        ]

        def attend(part: str, *bias: ir.Value | None) -> Sequence[ir.Value]:
            inputs = [*parts, *before, self._seqlens_k, self._length_int32, *bias]
            return self.attention(f"{name}/{part}", inputs, ("attended", "all_keys", "all_values"))[:1]

        (attended,) = graph.if_else(
            f"{name}/either",
            self._is_long,
            lambda: attend("masked", None, None, None, self._bias(f"{name}/masked", scored)),
            lambda: attend("all"),
            {f"{name}/mixed": FLOAT},
        )
        return attended

    def _bias(self, name: str, scored: Sequence[ir.Value]) -> ir.Value:
        """Bias of attention's scores, (B, 1, T, S): the least number for tokens not chosen, else 0."""
        graph, at = self.graph, self.graph.at(f"{name}/")
        chosen_BTC, scores_BTN = self._choice(name, scored)
        zero = ir.tensor(np.zeros(1, np.float32))
        hidden_BTN = at("hidden", "Expand", graph.real("selected/least", LEAST), at("shape", "Shape", scores_BTN))
        none_BTC = at("nothing", "ConstantOfShape", at("chosen_shape", "Shape", chosen_BTC), value=zero)
        open_BTN = at("open", "ScatterElements", hidden_BTN, chosen_BTC, none_BTC, axis=2)
        wide = graph.ints("selected/tokens_of_block", [1, 1, 1, self._selection.block])
        by_token = at("open_tokens", "Expand", at("open_column", "Unsqueeze", open_BTN, 3), wide)
        # (B, T, N, X) as (B, 1, T, N * X)
        batch, width = (graph.size(f"{name}/size_{axis}", by_token, axis) for axis in (0, 1))
        one, rest = graph.ints("selected/one", [1]), graph.ints("selected/rest", [-1])
        joined = at("joined", "Reshape", by_token, at("joined_shape", "Concat", batch, one, width, rest, axis=0))
        return at("bias", "Slice", joined, graph.ints("cache/begin", [0]), self._length_S, 3)

    def _choice(self, name: str, scored: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Numbers of the chosen blocks, (B, T, C), and the shares that they were chosen by, (B, T, N)."""
        graph, at, selection = self.graph, self.graph.at(f"{name}/"), self._selection
        index_q, index_BLI = scored
        least, scale = graph.real("selected/least", LEAST), self.config.score_scale
        filled_BSI = at("filled", "Slice", index_BLI, graph.ints("cache/begin", [0]), self._length_S, 1)
        rows = graph.ints("selected/query_rows", [0, -1, index_size(self.config)])
        query_BYI = at("query_rows", "Reshape", index_q, rows)  # Y = T J
        scores_BYS = at("by_head", "FusedMatMul", query_BYI, filled_BSI, transB=1, alpha=scale)
        width = graph.size(f"{name}/width", filled_BSI, 1)
        lead = [graph.size(f"{name}/lead_{axis}", index_q, axis) for axis in (0, 1)]
        apart = at("apart", "Concat", *lead, graph.ints("selected/heads", [selection.heads]), width, axis=0)
        scores_BTJS = at("heads", "Reshape", scores_BYS, apart)
        seen_BTJS = at("seen", "Where", self._unseen_BT1S, least, scores_BTJS)
        shares_BTS = at("shares", "ReduceSum", at("head_shares", "Softmax", seen_BTJS, axis=-1), 2, keepdims=0)
        # To whole blocks
        pads = at("pads", "Concat", graph.ints("selected/no_pads", [0] * 5), self._missing, axis=0)
        padded = at("padded", "Pad", shares_BTS, pads)
        block, rest = graph.ints("selected/block_list", [selection.block]), graph.ints("selected/rest_list", [-1])
        by_block = at("by_block", "Reshape", padded, at("blocks_shape", "Concat", *lead, rest, block, axis=0))
        shares_BTN = at("block_shares", "ReduceSum", by_block, 3, keepdims=0)
        kept = at("with_kept", "Where", self._kept_BTN, graph.real("selected/most", -LEAST), shares_BTN)
        ranked = at("ranked", "Where", self._later_BTN, least, kept)
        number, outputs = graph.ints("selected/chosen_blocks", [selection.blocks]), ("best_scores", "best")
        names = [f"{name}/{output}" for output in outputs]
        _, chosen = graph.nodes_of(f"{name}/top", "TopK", [ranked, number], names, axis=2, sorted=0)
        return chosen, ranked

    def _single(
        self,
        name: str,
        query: ir.Value,
        scored: Sequence[ir.Value],
        presents: Sequence[ir.Value],
        first_BK1: ir.Value,
    ) -> ir.Value:
        """Attention of one token a sequence, (B, 1, H E), to chosen tokens, whose rows of the cache alone are read."""
        graph, at, config = self.graph, self.graph.at(f"{name}/"), self.config
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        own_B11 = at("own", "Unsqueeze", self._ids_BT, 2)
        (places_B1X,) = graph.if_else(
            f"{name}/places_either",
            self._is_long,
            lambda: [self._chosen_places(f"{name}/chosen", scored)],
            lambda: [self._all_places(f"{name}/all", own_B11)],
            {f"{name}/places": INT64},
        )
        # Places behind the newest token are of its block, or of a shorter sequence's missing ones.
        real_B1X, inside_B1X = at("real", "LessOrEqual", places_B1X, own_B11), at("inside", "Min", places_B1X, own_B11)
        rows_BKX, flat = at("rows", "Add", inside_B1X, first_BK1), graph.ints("selected/flat", [-1, size])
        keys, values = (
            at(f"{part}_read", "Gather", at(f"{part}_rows", "Reshape", present, flat), rows_BKX)
            for part, present in zip("kv", presents, strict=True)
        )
        query_BKGE = at("query", "Reshape", query, graph.ints("selected/grouped", [0, shared, -1, size]))
        scores = at("attention_scores", "FusedMatMul", query_BKGE, keys, transB=1, alpha=config.score_scale)
        real_B11X = at("real_heads", "Unsqueeze", real_B1X, 1)
        masked = at("real_scores", "Where", real_B11X, scores, graph.real("selected/least", LEAST))
        mixed_BKGE = at("mixed", "MatMul", at("attention_weights", "Softmax", masked, axis=-1), values)
        return at("row", "Reshape", mixed_BKGE, graph.ints("selected/row", [0, 1, heads * size]))

    def _chosen_places(self, name: str, scored: Sequence[ir.Value]) -> ir.Value:
        """The tokens of the chosen blocks, (B, 1, X)."""
        graph, at, block = self.graph, self.graph.at(f"{name}/"), self._selection.block
        chosen_B1C, _ = self._choice(name, scored)
        start = at("starts", "Mul", chosen_B1C, graph.ints("selected/block", block))
        inside = graph.ints("selected/inside", range(block))
        places = at("by_block_places", "Add", at("start_column", "Unsqueeze", start, 3), inside)
        return at("places", "Reshape", places, graph.ints("selected/joined", [0, 1, -1]))

    def _all_places(self, name: str, own_B11: ir.Value) -> ir.Value:
        """Every token up to the newest of the longest sequence, (B, 1, S)."""
        graph, at = self.graph, self.graph.at(f"{name}/")
        places_S = at("range", "Range", graph.zero, self._length, graph.one)
        return at("places", "Add", at("nothing", "Sub", own_B11, own_B11), places_S)

    def _rows_of_heads(self, past_BKLE: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The row of each head's first token among those of the cache, (B, K, 1), and where the new tokens go,
        (B, K, T, 3) of sequence, head and place. All layers share them, since their caches have the same room."""
        if self._cached_rows is not None:
            return self._cached_rows
        graph, at, heads = self.graph, self.graph.at("selected/"), self.config.num_key_value_heads
        room, batch = graph.size("selected/room", past_BKLE, 2), graph.size("selected/cached_batch", past_BKLE, 0)
        count = at("cached_count", "Squeeze", batch)
        numbers_B = at("cached_sequences", "Range", graph.zero, count, graph.one)
        numbers_B11 = at("cached_column", "Reshape", numbers_B, graph.ints("selected/as_column", [-1, 1, 1]))
        head_1K1 = graph.constant("selected/head", np.arange(heads, dtype=np.int64)[None, :, None])
        before = at("heads_before", "Mul", numbers_B11, graph.ints("selected/shared_heads", heads))
        first_BK1 = at("first_row", "Mul", at("head_number", "Add", before, head_1K1), room)
        # (b, k, place) as (b, 0, place) + (0, k, 0)
        pair_B1T2, outputs = at("where_heads", "Unsqueeze", self._where_BT2, 1), ("where_row", "where_place")
        names = [f"selected/{output}" for output in outputs]
        sequence, place = graph.nodes_of("selected/where_split", "Split", [pair_B1T2], names, axis=-1, num_outputs=2)
        nothing = at("no_head", "Sub", sequence, sequence)
        triple_B1T3 = at("where_three", "Concat", sequence, nothing, place, axis=-1)
        at_head = np.zeros((1, heads, 1, 3), np.int64)
        at_head[0, :, 0, 1] = np.arange(heads)
        where_BKT3 = at("where_all", "Add", triple_B1T3, graph.constant("cache/at_head", at_head))
        self._cached_rows = first_BK1, where_BKT3
        return self._cached_rows
