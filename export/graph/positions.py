"""Where tokens stand, in both operator sets: lengths, places and rotary tables, which all layers share.

Shape suffixes: B sequences, T new tokens, S tokens so far with the new ones, E head_dim,
X = E / 2.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from export.graph.builder import Builder
from export.metadata import ROPE_CACHES
from sportsllm.models.config import ModelConfig
from sportsllm.models.rope import rope_tables

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64
LAST, TOTAL = "positions/seqlens_k", "positions/total"  # what all layers read: lengths less 1, and S
_PLACES = "places/new"
_SCALAR = np.array([], np.int64)  # the shape of one


def rotary_caches(
    graph: Builder, config: ModelConfig, layer: int, real: ir.DataType = ir.DataType.FLOAT
) -> tuple[ir.Value, ir.Value]:
    """A layer's cosine and sine tables, (context, E / 2) of type `real`."""
    local = config.rope_local_theta is not None and config.window(layer) is not None
    tables = rope_tables(config, config.max_position_embeddings, local)
    names = ROPE_CACHES[2 * local :]
    cos, sin = (graph.constant(name, table.astype(real.numpy())) for name, table in zip(names, tables, strict=False))
    return cos, sin


def sequence_lengths(graph: Builder, mask_BS: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Each sequence's tokens so far less 1, (B,), and S, both int32; the same values each time it is asked."""
    last, total = graph.made(LAST), graph.made(TOTAL)
    if last is not None and total is not None:
        return last, total
    one, scalar = graph.constant("one", np.array(1, np.int64)), graph.constant("scalar_shape", _SCALAR)
    lengths_B = graph.node("positions/lengths", "ReduceSum", [mask_BS, graph.axis(1)], keepdims=0)
    last_B = graph.node("positions/last", "Sub", [lengths_B, one])
    width_S = graph.node("positions/mask_width", "Shape", [mask_BS], start=1, end=2)
    total = graph.node("positions/mask_scalar", "Reshape", [width_S, scalar])
    return (
        graph.node(LAST, "Cast", [last_B], to=INT32.value),
        graph.node(TOTAL, "Cast", [total], to=INT32.value),
    )


def position_ids(graph: Builder, name: str, seqlens_k: ir.Value, x: ir.Value) -> ir.Value:
    """Where each new token of x, (B, T, ...), stands, (B, T), as GroupQueryAttention counts.

    Token t stands at max(length - T, 0) + t.
    """
    scalar, one = graph.constant("scalar_shape", _SCALAR), graph.constant("one", np.array(1, np.int64))
    zero = graph.constant("zero", np.array(0, np.int64))
    last_B = graph.node(f"{name}/positions/last", "Cast", [seqlens_k], to=INT64.value)
    lengths_B = graph.node(f"{name}/positions/lengths", "Add", [last_B, one])
    width_T = graph.node(f"{name}/positions/new_width", "Shape", [x], start=1, end=2)
    before_B = graph.node(f"{name}/positions/before", "Sub", [lengths_B, width_T])
    first_B = graph.node(f"{name}/positions/first", "Max", [before_B, zero])
    first_B1 = graph.node(f"{name}/positions/first_column", "Unsqueeze", [first_B, graph.axis(1)])
    new = graph.node(f"{name}/positions/new_scalar", "Reshape", [width_T, scalar])
    steps_T = graph.node(f"{name}/positions/steps", "Range", [zero, new, one])
    return graph.node(f"{name}/positions/ids", "Add", [first_B1, steps_T])


def rows_and_places(graph: Builder, name: str, places_BT: ir.Value, places_BT1: ir.Value) -> ir.Value:
    """Where new tokens go in a cache of (B, L, ...), (B, T, 2): sequence and place, which is given in two shapes."""
    scalar, column = graph.constant("scalar_shape", _SCALAR), np.array([-1, 1, 1], np.int64)
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    batch = graph.node(f"{name}/batch", "Shape", [places_BT], start=0, end=1)
    count = graph.node(f"{name}/count", "Reshape", [batch, scalar])
    rows_B = graph.node(f"{name}/rows", "Range", [zero, count, one])
    rows_B11 = graph.node(f"{name}/row_column", "Reshape", [rows_B, graph.constant(f"{name}/as_column", column)])
    none_BT1 = graph.node(f"{name}/nothing", "Sub", [places_BT1, places_BT1])
    rows_BT1 = graph.node(f"{name}/row_of_each", "Add", [none_BT1, rows_B11])
    return graph.node(f"{name}/where", "Concat", [rows_BT1, places_BT1], axis=2)


def places_by_mask(graph: Builder, tokens_BT: ir.Value, mask_BS: ir.Value) -> ir.Value:
    """Where each new token stands, (B, T): the number of ones before it in the mask, wherever the padding is."""
    if (known := graph.made(_PLACES)) is not None:
        return known
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    start, end = new_columns(graph, tokens_BT)
    counted_BS = graph.node("places/counted", "CumSum", [mask_BS, one])
    before_BS = graph.node("places/before", "Sub", [counted_BS, one])
    # Padding before the first token has no position; 0 will do.
    all_BS = graph.node("places/all", "Max", [before_BS, zero])
    return graph.node(_PLACES, "Slice", [all_BS, start, end, graph.axis(1)])


def new_columns(graph: Builder, tokens_BT: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Start and end, (1,), of the new tokens among all columns: they are the last T."""
    end = graph.constant("end", np.array([np.iinfo(np.int64).max], np.int64))
    if (known := graph.made("places/start")) is not None:
        return known, end
    width_T = graph.node("places/new_width", "Shape", [tokens_BT], start=1, end=2)
    return graph.node("places/start", "Neg", [width_T]), end


def rotary_rows(graph: Builder, config: ModelConfig, layer: int, places_BT: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The new tokens' rows of a layer's cosine and sine tables, (B, T, 1, X); those of layers alike are the same."""
    found = []
    for table in rotary_caches(graph, config, layer):
        part = str(table.name).removesuffix("_cache")
        rows = graph.made(f"places/{part}")
        if rows is None:
            rows_BTX = graph.node(f"places/{part}_rows", "Gather", [table, places_BT])
            rows = graph.node(f"places/{part}", "Unsqueeze", [rows_BTX, graph.axis(2)])
        found.append(rows)
    return found[0], found[1]


def seen_columns(graph: Builder, tokens_BT: ir.Value, mask_BS: ir.Value, window: int | None) -> ir.Value:
    """Whether new token t attends to column s, (B, 1, T, S); the same value for layers alike."""
    name = "places/seen" if window is None else f"places/seen_{window}"
    if (known := graph.made(name)) is not None:
        return known
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    scalar = graph.constant("scalar_shape", np.array([], np.int64))
    start, end = new_columns(graph, tokens_BT)
    width_S = graph.node(f"{name}/mask_width", "Shape", [mask_BS], start=1, end=2)
    total = graph.node(f"{name}/total", "Reshape", [width_S, scalar])
    columns_S = graph.node(f"{name}/columns", "Range", [zero, total, one])
    own_T = graph.node(f"{name}/own_columns", "Slice", [columns_S, start, end, graph.axis(0)])
    own_T1 = graph.node(f"{name}/own_column", "Unsqueeze", [own_T, graph.axis(1)])
    near_TS = graph.node(f"{name}/earlier", "LessOrEqual", [columns_S, own_T1])
    real_BS = graph.node(f"{name}/real", "Cast", [mask_BS], to=ir.DataType.BOOL.value)
    middle_axes = graph.constant("axes_1_2", np.array([1, 2], np.int64))
    real_B11S = graph.node(f"{name}/real_row", "Unsqueeze", [real_BS, middle_axes])
    if window is None:
        return graph.node(name, "And", [near_TS, real_B11S])
    # Columns of padding do not count: the window goes by places, the number of ones before a column.
    counted_BS = graph.node(f"{name}/counted", "CumSum", [mask_BS, one])
    counted_B1S = graph.node(f"{name}/counted_row", "Unsqueeze", [counted_BS, graph.axis(1)])
    own_BT = graph.node(f"{name}/own_counted", "Slice", [counted_BS, start, end, graph.axis(1)])
    own_BT1 = graph.node(f"{name}/own_counted_column", "Unsqueeze", [own_BT, graph.axis(2)])
    size = graph.constant(f"window_{window}", np.array(window, np.int64))
    first_BT1 = graph.node(f"{name}/first", "Sub", [own_BT1, size])
    inside_BTS = graph.node(f"{name}/inside", "Greater", [counted_B1S, first_BT1])
    inside_B1TS = graph.node(f"{name}/inside_heads", "Unsqueeze", [inside_BTS, graph.axis(1)])
    causal = graph.node(f"{name}/causal", "And", [near_TS, real_B11S])
    return graph.node(name, "And", [causal, inside_B1TS])


def rotated_pairs(graph: Builder, name: str, x_BTHE: ir.Value, tables: tuple[ir.Value, ir.Value] | None) -> ir.Value:
    """Each pair of channels, half a head apart, turned by the angle of the token's place; as it is without tables."""
    if tables is None:
        return x_BTHE
    cos, sin = tables
    outputs = [f"{name}/first", f"{name}/second"]
    first, second = graph.node_with_outputs(f"{name}/halves", "Split", [x_BTHE], outputs, axis=-1, num_outputs=2)

    def turned(half: str, op: str, own: ir.Value, other: ir.Value) -> ir.Value:
        by_cos = graph.node(f"{own.name}_cos", "Mul", [own, cos])
        by_sin = graph.node(f"{other.name}_sin", "Mul", [other, sin])
        return graph.node(f"{name}/turned_{half}", op, [by_cos, by_sin])

    both = [turned("first", "Sub", first, second), turned("second", "Add", second, first)]
    return graph.node(f"{name}/turned", "Concat", both, axis=-1)
