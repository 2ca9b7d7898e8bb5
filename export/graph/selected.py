"""Attention to chosen blocks of tokens in the graph; see `sportsllm.models.selection`.

New keys, values and index keys are written into the cache first, outside of any branch: an `If` copies what it gives
back. Then one new token scores the index keys, takes the best blocks and reads the keys and values of their tokens
alone. A piece of a prompt goes through GroupQueryAttention, with a bias that hides what is not chosen. As long as no
more tokens are there than are chosen, all of them are.
Shape suffixes: B sequences, T new tokens, S tokens of the longest sequence with the new ones, L room in the cache,
H query heads, K key/value heads, G = H / K, E head_dim, J index heads, I their size, N blocks, C chosen blocks, X
tokens in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph.builder import MS
from export.graph.calls import Attributes, Call, Inputs, shared_inputs
from export.graph.grouped_query import OrtGroupedQuery, group_query_attention
from export.graph.layer import LayerBuilder
from export.graph.positions import position_ids, rows_and_places
from sportsllm.models.parts import HIDDEN, index_pairs, index_size

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_LEAST = np.array(np.finfo(np.float32).min, np.float32)


class SelectedAttention(OrtGroupedQuery):
    """Attention over a float32 cache of keys, values and index keys, which is written in place."""

    def __init__(self, layers: LayerBuilder, half: str) -> None:
        super().__init__(layers, half)
        graph, selection = self.graph, self.config.chosen_selection
        self._selection = selection
        zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
        self._ids_BT = position_ids(graph, "selected", self._seqlens_k, layers.sequences.tokens_BT)
        last = graph.node("selected/last", "ReduceMax", [self._ids_BT], keepdims=0)
        self._length = length = graph.node("selected/length", "Add", [last, one])
        self._length_S = graph.node("selected/length_list", "Unsqueeze", [length, graph.axis(0)])
        places_BT1 = graph.node("selected/place_column", "Unsqueeze", [self._ids_BT, graph.axis(2)])
        self._where_BT2 = rows_and_places(graph, "selected", self._ids_BT, places_BT1)
        most = graph.constant("selected/tokens", np.array(selection.tokens, np.int64))
        self._is_long = graph.node("selected/is_long", "Greater", [length, most])
        width_T = graph.node("selected/piece", "Shape", [layers.sequences.tokens_BT], start=1, end=2)
        only = graph.constant("selected/one", np.array([1], np.int64))
        self._alone = graph.node("selected/alone", "Equal", [width_T, only])
        self._past_P = graph.node("selected/past", "Sub", [self._length_S, width_T])
        self._length_int32 = graph.node("selected/length_int32", "Cast", [length], to=ir.DataType.INT32.value)
        # Blocks that are there, those that are kept in any case, and those that come later, (B, T, N).
        size = graph.constant("selected/block", np.array(selection.block, np.int64))
        own_BT1 = graph.node("selected/own_block", "Div", [places_BT1, size])
        rest = graph.constant("selected/block_less_1", np.array(selection.block - 1, np.int64))
        count = graph.node("selected/blocks", "Div", [graph.node("selected/up", "Add", [length, rest]), size])
        blocks_N = graph.node("selected/numbers", "Range", [zero, count, one])
        newest = graph.constant("selected/newest", np.array(selection.newest, np.int64))
        before_BT1 = graph.node("selected/before_newest", "Sub", [own_BT1, newest])
        new_BTN = graph.node("selected/is_new", "Greater", [blocks_N, before_BT1])
        self._kept_BTN = graph.node(
            "selected/kept", "Or", [new_BTN, graph.node("selected/is_first", "Equal", [blocks_N, zero])]
        )
        self._later_BTN = graph.node("selected/later", "Greater", [blocks_N, own_BT1])
        tokens_S = graph.node("selected/token_numbers", "Range", [zero, length, one])
        unseen_BTS = graph.node("selected/unseen", "Greater", [tokens_S, places_BT1])
        self._unseen_BT1S = graph.node("selected/unseen_heads", "Unsqueeze", [unseen_BTS, graph.axis(2)])
        whole = graph.node("selected/whole", "Mul", [count, size])
        missing = graph.node("selected/missing", "Sub", [whole, length])
        self._missing = graph.node("selected/missing_list", "Unsqueeze", [missing, graph.axis(0)])
        pairs = self.config.head_dim // 2
        begin, end = (
            graph.constant(f"selected/{word}_pair", np.array([n], np.int64))
            for word, n in (("first", pairs - index_pairs(self.config)), ("last", pairs))
        )
        self._slower = [
            graph.node(f"selected/slower_{table.name}", "Slice", [table, begin, end, graph.axis(1)])
            for table in self._tables[0]
        ]
        self._cached_rows: tuple[ir.Value, ir.Value] | None = None

    def emit(self, layer: int, x_BTD: ir.Value, past: Sequence[ir.Value]) -> tuple[ir.Value, Sequence[ir.Value]]:
        graph, config, name, selection = self.graph, self.config, self.name(layer), self._selection
        query, key, value, index_q, index_k = self.products(layer, HIDDEN, x_BTD)
        tables = self._tables[layer]
        query = self._prepare_heads(f"{name}.q", query, config.num_attention_heads, self._ids_BT, tables)
        key = self._prepare_heads(f"{name}.k", key, config.num_key_value_heads, self._ids_BT, tables)
        index_q = self._slowly_rotated(f"{name}.index_q", index_q, selection.heads * selection.parts)
        index_k = self._slowly_rotated(f"{name}.index_k", index_k, selection.parts)
        first_BK1, where_BKT3 = self._rows_of_heads(past[0])
        index = graph.node(f"{name}/index_present", "ScatterND", [past[2], self._where_BT2, index_k])
        by_head = graph.constant("selected/by_head", np.array([0, 0, -1, config.head_dim], np.int64))
        presents = []
        for part, new, old in zip("kv", (key, value), past, strict=False):
            new_BTKE = graph.node(f"{name}.{part}/heads", "Reshape", [new, by_head])
            new_BKTE = graph.node(f"{name}.{part}/by_head", "Transpose", [new_BTKE], perm=[0, 2, 1, 3])
            presents.append(graph.node(f"{name}.{part}/present", "ScatterND", [old, where_BKT3, new_BKTE]))
        parts, scored = (query, key, value), (index_q, index)
        name = f"{name}/selected"
        with graph.recording() as nodes:
            (attended,) = graph.if_else(
                f"{name}/either",
                self._alone,
                {
                    "then_branch": lambda: [self._single(f"{name}/one", query, scored, presents, first_BK1)],
                    "else_branch": lambda: [self._piece(f"{name}/piece", parts, scored, presents)],
                },
                {f"{name}/attended": FLOAT},
            )
        if self.layers.calls.allowed:
            made = self.layers.calls.add(
                self._call(layer, name, nodes, (query, index_q, *presents, index), attended), nodes
            )
            if made is not None:
                self.layers.calls.use.attention += 1
                return made["out"], [*presents, index]
        graph.extend(nodes)
        return attended, [*presents, index]

    def _call(
        self, layer: int, name: str, nodes: Sequence[ir.Node], read: Sequence[ir.Value], attended: ir.Value
    ) -> Call:
        """The call of attention from the written cache on; `read` are queries and what is cached."""
        config, selection = self.config, self._selection
        query, index_query, key, value, index = read
        inputs: Inputs = {"query": query, "index_query": index_query, "last": self._seqlens_k}
        inputs |= {"key": key, "value": value, "index": index}
        inputs |= shared_inputs(nodes, inputs)
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
        return Call("SelectedAttention", name, f"model.layers.{layer}", inputs, {"out": attended}, attributes)

    def _slowly_rotated(self, name: str, x: ir.Value, parts: int) -> ir.Value:
        sizes = {"num_heads": parts, "rotary_embedding_dim": 2 * index_pairs(self.config)}
        return self.graph.node(f"{name}_rotary", "RotaryEmbedding", [x, self._ids_BT, *self._slower], MS, **sizes)

    def _piece(
        self, name: str, parts: Sequence[ir.Value], scored: Sequence[ir.Value], presents: Sequence[ir.Value]
    ) -> ir.Value:
        """Attention of several new tokens to those before and to themselves, (B, T, H E)."""
        graph, begin = self.graph, self.graph.constant("cache/begin", np.array([0], np.int64))
        before = [
            graph.node(f"{name}/{part}_before", "Slice", [present, begin, self._past_P, graph.axis(2)])
            for part, present in zip("kv", presents, strict=True)
        ]

        def attend(part: str, bias: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
            inputs = [*parts, *before, self._seqlens_k, self._length_int32, *bias]
            outputs = ("attended", "all_keys", "all_values")
            return group_query_attention(graph, self.config, f"{name}/{part}", inputs, outputs)[:1]

        (attended,) = graph.if_else(
            f"{name}/either",
            self._is_long,
            {
                "then_branch": lambda: attend("masked", [None, None, None, self._bias(f"{name}/masked", scored)]),
                "else_branch": lambda: attend("all", []),
            },
            {f"{name}/mixed": FLOAT},
        )
        return attended

    def _bias(self, name: str, scored: Sequence[ir.Value]) -> ir.Value:
        """What is added to attention's scores, (B, 1, T, S): the least number for tokens not chosen, else 0."""
        graph = self.graph
        chosen_BTC, scores_BTN = self._choice(name, scored)
        least = graph.constant("selected/least", _LEAST)
        shape, zero = graph.node(f"{name}/shape", "Shape", [scores_BTN]), ir.tensor(np.zeros(1, np.float32))
        hidden_BTN = graph.node(f"{name}/hidden", "Expand", [least, shape])
        count = graph.node(f"{name}/chosen_shape", "Shape", [chosen_BTC])
        none_BTC = graph.node(f"{name}/nothing", "ConstantOfShape", [count], value=zero)
        open_BTN = graph.node(f"{name}/open", "ScatterElements", [hidden_BTN, chosen_BTC, none_BTC], axis=2)
        column = graph.node(f"{name}/open_column", "Unsqueeze", [open_BTN, graph.axis(3)])
        wide = graph.constant("selected/tokens_of_block", np.array([1, 1, 1, self._selection.block], np.int64))
        by_token = graph.node(f"{name}/open_tokens", "Expand", [column, wide])
        joined = graph.node(f"{name}/joined", "Reshape", [by_token, self._joined_shape(name, by_token)])
        begin = graph.constant("cache/begin", np.array([0], np.int64))
        return graph.node(f"{name}/bias", "Slice", [joined, begin, self._length_S, graph.axis(3)])

    def _joined_shape(self, name: str, x_BTNX: ir.Value) -> ir.Value:
        """(B, 1, T, N * X) of (B, T, N, X)."""
        graph = self.graph
        size = [graph.node(f"{name}/size_{axis}", "Shape", [x_BTNX], start=axis, end=axis + 1) for axis in (0, 1)]
        one, rest = (
            graph.constant(f"selected/{word}", np.array([n], np.int64)) for word, n in (("one", 1), ("rest", -1))
        )
        return graph.node(f"{name}/joined_shape", "Concat", [size[0], one, size[1], rest], axis=0)

    def _choice(self, name: str, scored: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Numbers of the chosen blocks, (B, T, C), and the shares that they were chosen by, (B, T, N)."""
        graph, selection = self.graph, self._selection
        index_q, index_BLI = scored
        begin = graph.constant("cache/begin", np.array([0], np.int64))
        filled_BSI = graph.node(f"{name}/filled", "Slice", [index_BLI, begin, self._length_S, graph.axis(1)])
        rows = graph.constant("selected/query_rows", np.array([0, -1, index_size(self.config)], np.int64))
        query_BYI = graph.node(f"{name}/query_rows", "Reshape", [index_q, rows])  # Y = T J
        scores_BYS = graph.node(
            f"{name}/by_head", "FusedMatMul", [query_BYI, filled_BSI], MS, transB=1, alpha=self.config.score_scale
        )
        width = graph.node(f"{name}/width", "Shape", [filled_BSI], start=1, end=2)
        lead = [graph.node(f"{name}/lead_{axis}", "Shape", [index_q], start=axis, end=axis + 1) for axis in (0, 1)]
        count = graph.constant("selected/heads", np.array([selection.heads], np.int64))
        apart = graph.node(f"{name}/apart", "Concat", [*lead, count, width], axis=0)
        scores_BTJS = graph.node(f"{name}/heads", "Reshape", [scores_BYS, apart])
        least = graph.constant("selected/least", _LEAST)
        seen_BTJS = graph.node(f"{name}/seen", "Where", [self._unseen_BT1S, least, scores_BTJS])
        shares_BTJS = graph.node(f"{name}/head_shares", "Softmax", [seen_BTJS], axis=-1)
        shares_BTS = graph.node(f"{name}/shares", "ReduceSum", [shares_BTJS, graph.axis(2)], keepdims=0)
        # To whole blocks
        none = graph.constant("selected/no_pads", np.array([0] * 5, np.int64))
        pads = graph.node(f"{name}/pads", "Concat", [none, self._missing], axis=0)
        padded = graph.node(f"{name}/padded", "Pad", [shares_BTS, pads])
        block, rest = (
            graph.constant(f"selected/{word}_list", np.array([n], np.int64))
            for word, n in (("block", selection.block), ("rest", -1))
        )
        blocks = graph.node(f"{name}/blocks_shape", "Concat", [*lead, rest, block], axis=0)
        by_block = graph.node(f"{name}/by_block", "Reshape", [padded, blocks])
        shares_BTN = graph.node(f"{name}/block_shares", "ReduceSum", [by_block, graph.axis(3)], keepdims=0)
        most = graph.constant("selected/most", -_LEAST)
        kept = graph.node(f"{name}/with_kept", "Where", [self._kept_BTN, most, shares_BTN])
        ranked = graph.node(f"{name}/ranked", "Where", [self._later_BTN, least, kept])
        number = graph.constant("selected/chosen_blocks", np.array([selection.blocks], np.int64))
        outputs = [f"{name}/best_scores", f"{name}/best"]
        _, chosen = graph.node_with_outputs(f"{name}/top", "TopK", [ranked, number], outputs, axis=2, sorted=0)
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
        graph, config = self.graph, self.config
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        own_B11 = graph.node(f"{name}/own", "Unsqueeze", [self._ids_BT, graph.axis(2)])
        (places_B1X,) = graph.if_else(
            f"{name}/places_either",
            self._is_long,
            {
                "then_branch": lambda: [self._chosen_places(f"{name}/chosen", scored)],
                "else_branch": lambda: [self._all_places(f"{name}/all", own_B11)],
            },
            {f"{name}/places": INT64},
        )
        # Places behind the newest token are of its block, or of a shorter sequence's missing ones.
        real_B1X = graph.node(f"{name}/real", "LessOrEqual", [places_B1X, own_B11])
        inside_B1X = graph.node(f"{name}/inside", "Min", [places_B1X, own_B11])
        rows_BKX = graph.node(f"{name}/rows", "Add", [inside_B1X, first_BK1])
        flat = graph.constant("selected/flat", np.array([-1, size], np.int64))
        keys, values = (
            graph.node(
                f"{name}/{part}_read",
                "Gather",
                [graph.node(f"{name}/{part}_rows", "Reshape", [present, flat]), rows_BKX],
            )
            for part, present in zip("kv", presents, strict=True)
        )
        grouped = graph.constant("selected/grouped", np.array([0, shared, -1, size], np.int64))
        query_BKGE = graph.node(f"{name}/query", "Reshape", [query, grouped])
        scores = graph.node(
            f"{name}/attention_scores", "FusedMatMul", [query_BKGE, keys], MS, transB=1, alpha=self.config.score_scale
        )
        real_B11X = graph.node(f"{name}/real_heads", "Unsqueeze", [real_B1X, graph.axis(1)])
        least = graph.constant("selected/least", _LEAST)
        masked = graph.node(f"{name}/real_scores", "Where", [real_B11X, scores, least])
        weights = graph.node(f"{name}/attention_weights", "Softmax", [masked], axis=-1)
        mixed_BKGE = graph.node(f"{name}/mixed", "MatMul", [weights, values])
        row = graph.constant("selected/row", np.array([0, 1, heads * size], np.int64))
        return graph.node(f"{name}/row", "Reshape", [mixed_BKGE, row])

    def _chosen_places(self, name: str, scored: Sequence[ir.Value]) -> ir.Value:
        """The tokens of the chosen blocks, (B, 1, X)."""
        graph, selection = self.graph, self._selection
        chosen_B1C, _ = self._choice(name, scored)
        block = graph.constant("selected/block", np.array(selection.block, np.int64))
        start = graph.node(f"{name}/starts", "Mul", [chosen_B1C, block])
        column = graph.node(f"{name}/start_column", "Unsqueeze", [start, graph.axis(3)])
        inside = graph.constant("selected/inside", np.arange(selection.block, dtype=np.int64))
        places = graph.node(f"{name}/by_block_places", "Add", [column, inside])
        joined = graph.constant("selected/joined", np.array([0, 1, -1], np.int64))
        return graph.node(f"{name}/places", "Reshape", [places, joined])

    def _all_places(self, name: str, own_B11: ir.Value) -> ir.Value:
        """Every token up to the newest of the longest sequence, (B, 1, S)."""
        graph = self.graph
        zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
        places_S = graph.node(f"{name}/range", "Range", [zero, self._length, one])
        nothing = graph.node(f"{name}/nothing", "Sub", [own_B11, own_B11])
        return graph.node(f"{name}/places", "Add", [nothing, places_S])

    def _rows_of_heads(self, past_BKLE: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The row of each head's first token among those of the cache, (B, K, 1), and where the new tokens go,
        (B, K, T, 3) of sequence, head and place. All layers share them, since their caches have the same room."""
        if self._cached_rows is not None:
            return self._cached_rows
        graph, heads = self.graph, self.config.num_key_value_heads
        zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
        scalar = graph.constant("scalar_shape", np.array([], np.int64))
        room = graph.node("selected/room", "Shape", [past_BKLE], start=2, end=3)
        batch = graph.node("selected/cached_batch", "Shape", [past_BKLE], start=0, end=1)
        count = graph.node("selected/cached_count", "Reshape", [batch, scalar])
        numbers_B = graph.node("selected/cached_sequences", "Range", [zero, count, one])
        column = graph.constant("selected/as_column", np.array([-1, 1, 1], np.int64))
        numbers_B11 = graph.node("selected/cached_column", "Reshape", [numbers_B, column])
        each = graph.constant("selected/shared_heads", np.array(heads, np.int64))
        head_1K1 = graph.constant("selected/head", np.arange(heads, dtype=np.int64)[None, :, None])
        before = graph.node("selected/heads_before", "Mul", [numbers_B11, each])
        number_BK1 = graph.node("selected/head_number", "Add", [before, head_1K1])
        first_BK1 = graph.node("selected/first_row", "Mul", [number_BK1, room])
        # (b, k, place) as (b, 0, place) + (0, k, 0)
        pair_B1T2 = graph.node("selected/where_heads", "Unsqueeze", [self._where_BT2, graph.axis(1)])
        sequence, place = graph.node_with_outputs(
            "selected/where_split", "Split", [pair_B1T2], ["selected/where_row", "selected/where_place"],
            axis=-1, num_outputs=2,
        )  # fmt: skip
        nothing = graph.node("selected/no_head", "Sub", [sequence, sequence])
        triple_B1T3 = graph.node("selected/where_three", "Concat", [sequence, nothing, place], axis=-1)
        at_head = np.zeros((1, heads, 1, 3), np.int64)
        at_head[0, :, 0, 1] = np.arange(heads)
        where = graph.node("selected/where_all", "Add", [triple_B1T3, graph.constant("cache/at_head", at_head)])
        self._cached_rows = first_BK1, where
        return self._cached_rows
