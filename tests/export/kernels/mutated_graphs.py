"""Runs damaged graphs of kernels, each refused or run, never a crash: `mutated_graphs.py LIBRARY SEED COUNT`."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto
from test_kernels import (
    CACHES,
    FEED_FORWARDS,
    HIDDEN,
    KV_HEADS,
    LATENT_NAMES,
    POSITIONS,
    ROOM,
    SELECTED_NAMES,
    SIZE,
    Array,
    Packed,
    feed_forward_case,
    general_case,
    latent_case,
    layer_case,
    layer_feeds,
    layer_outputs,
    op_and_names,
    selected_case,
    sent_tokens,
    session,
)

NUMBERS = (-(2**62), -1, 0, 1, 2, 3, 7, 16, 31, 32, 48, 64, 255, 256, 2**31, 2**62)


def damaged(array: Array, chance: random.Random) -> Array:
    """The same numbers in another shape or type, or others."""
    kind = chance.randrange(6)
    if kind == 0 and array.ndim:
        return array[: chance.randrange(array.shape[0] + 1)]
    if kind == 1:
        return array[..., : chance.randrange(array.shape[-1] + 1)] if array.ndim else array[None]
    if kind == 2:
        return array.reshape(-1)
    if kind == 3:
        return array[None]
    if kind == 4:
        with np.errstate(invalid="ignore"):
            return array.astype(chance.choice([np.float32, np.float16, np.int32, np.int64, np.uint8, np.int8]))
    if array.dtype.kind == "f":
        return np.full_like(array, chance.choice([np.nan, np.inf, -np.inf, 1e38, 0]))
    limits = np.iinfo(array.dtype)
    return np.full_like(array, chance.choice([limits.min, limits.max, 0, 1]))


Node = tuple[str, list[str], dict[str, int], dict[str, Array], dict[str, Array], dict[str, Any]]
"""Arguments of `session` but the library."""


def layer(chance: random.Random) -> Node:
    suffix, kind, cached = CACHES[kept := chance.choice(sorted(CACHES))]
    if chance.random() < 0.5:
        constants, _, attributes = general_case(chance.choice([4, 8]), chance.random() < 0.5, kept)
    else:
        constants, _, attributes = layer_case(
            chance.choice([4, 8]), chance.choice([32, 128]), chance.random() < 0.5, kept
        )
    tokens = chance.choice([1, 3, 12])
    last = chance.choice([tokens - 1, ROOM - 1, ROOM, POSITIONS, -1])
    cache: list[Array] = [np.zeros((1, KV_HEADS, ROOM, SIZE), kind) for _ in range(2)]
    fed = layer_feeds(np.ones((1, tokens, HIDDEN), np.float32), last, cache)
    return *op_and_names(attributes, suffix), layer_outputs(cached), constants, fed, attributes


def head(chance: random.Random) -> Node:
    rng = np.random.default_rng(chance.randrange(100))
    matrix = Packed(rng, 37, 80, chance.choice([4, 8]), 32, chance.random() < 0.5)
    constants = {"norm": np.ones(80, np.float32), **matrix.parts("head")}
    names = ["x", "residual", "norm", "head.packed", "head.scale", "head.zero_point", "head.bias"]
    attributes = {"hidden_size": 80, "epsilon": 1e-5, "head_bits": matrix.sizes["bits"], "head_block_size": 32}
    fed = {"x": np.ones((1, chance.choice([1, 2, 9]), 80), np.float32)}
    return "DecoderHead", names, {"logits": TensorProto.FLOAT}, constants, fed, attributes


def feed_forward(chance: random.Random) -> Node:
    settings = chance.choice(FEED_FORWARDS)
    constants, _, attributes = feed_forward_case(*settings)
    names = ["x", "chosen", "weights", *constants]
    fed = sent_tokens(chance.choice([1, 3, 12]), settings[3])
    return "DecoderFeedForward", names, {"out": TensorProto.FLOAT}, constants, fed, attributes


def selected(chance: random.Random) -> Node:
    fed, attributes = selected_case(chance.choice([1, 3, 12]))
    out = {"out": TensorProto.FLOAT}
    return "SelectedAttention", SELECTED_NAMES, out, {"unread": np.zeros(1, np.float32)}, fed, attributes


def latent(chance: random.Random) -> Node:
    plain, int8 = chance.choice(sorted(LATENT_NAMES)), chance.random() < 0.5
    op, fed, attributes = latent_case(plain, chance.choice([1, 3, 12]), int8)
    outputs = {"out": TensorProto.FLOAT}
    if plain == "LatentTokens":
        outputs = {"plain": TensorProto.FLOAT, "turned": TensorProto.FLOAT}
        outputs["present"] = TensorProto.INT8 if int8 else TensorProto.FLOAT
    return op, LATENT_NAMES[plain], outputs, {"unread": np.zeros(1, np.float32)}, fed, attributes


def run_one(library: Path, seed: int) -> bool:
    """Whether a graph with one to three damages ran."""
    chance = random.Random(seed)
    case = chance.choice([layer, head, feed_forward, selected, latent])
    op, names, outputs, constants, fed, attributes = case(chance)
    for _ in range(chance.randrange(1, 4)):
        what = chance.randrange(5)
        if what == 0:
            name = chance.choice(sorted(attributes))
            value = chance.choice([*NUMBERS, attributes[name] + 2**62])  # products of the last wrap to the true ones
            attributes[name] = float(value) if isinstance(attributes[name], float) else int(value)
        elif what == 1:
            name = chance.choice(sorted(constants))
            constants[name] = damaged(constants[name], chance)
        elif what == 2:
            constants.pop(chance.choice(sorted(constants)))
        else:
            name = chance.choice(sorted(fed))
            fed[name] = damaged(fed[name], chance)
        if not constants:
            return False
    try:
        made = session(library, op, names, outputs, constants, fed, attributes, threads=2)
        made.run(None, fed)
    except Exception as error:  # the runtime's errors have no common class
        if not str(error).strip():
            raise
        return False
    return True


if __name__ == "__main__":
    ort.set_default_logger_severity(4)
    library, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ran = sum(run_one(library, seed) for seed in range(first, first + count))
    print(count, ran)
