"""The kernels in ONNX Runtime against float64, and what they refuse."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.kernels.library import VERSION

Array = npt.NDArray[Any]
Case = tuple[dict[str, Array], dict[str, "Packed"], dict[str, Any]]
# Of each cache the suffix of its operators, its type here and in a graph.
CACHES: dict[str, tuple[str, Any, int]] = {
    "fp32": ("", np.float32, TensorProto.FLOAT),
    "fp16": ("Half", np.float16, TensorProto.FLOAT16),
    "int8": ("Int8", np.int8, TensorProto.INT8),
}
HIDDEN, HEADS, KV_HEADS, SIZE, INNER, ROOM = 48, 4, 2, 12, 80, 40
POSITIONS = 2**20


class Packed:
    """A random matrix (N, K) as MatMulNBits stores it, and its numbers in float64."""

    def __init__(
        self, rng: np.random.Generator, rows: int, columns: int, bits: int, block: int, zeros: bool, size: float = 1.0
    ) -> None:
        groups = -(-columns // block)
        numbers = rng.integers(0, 2**bits, (rows, groups, block), dtype=np.uint8)
        points = rng.integers(0, 2**bits, (rows, groups), dtype=np.uint8) if zeros else None
        self.scale = (size * rng.uniform(0.01, 0.1, (rows, groups)) / 2 ** (bits - 4)).astype(np.float16)
        self.packed = numbers if bits == 8 else numbers[..., ::2] | numbers[..., 1::2] << 4
        self.points = points
        if points is not None and bits == 4:
            even = np.pad(points, ((0, 0), (0, groups % 2)))
            self.points = even[:, ::2] | even[:, 1::2] << 4
        middle = np.float64(2 ** (bits - 1)) if points is None else points[..., None].astype(np.float64)
        self.dense = ((numbers - middle) * self.scale[..., None].astype(np.float64)).reshape(rows, -1)[:, :columns]
        self.sizes = {"bits": bits, "block_size": block}

    def parts(self, name: str) -> dict[str, Array]:
        parts = {f"{name}.packed": self.packed, f"{name}.scale": self.scale}
        return parts if self.points is None else {**parts, f"{name}.zero_point": self.points}


def session(
    library: Path,
    op: str,
    names: list[str],
    outputs: dict[str, int],
    constants: dict[str, Array],
    fed: dict[str, Array],
    attributes: dict[str, Any],
    threads: int = 1,
) -> ort.InferenceSession:
    """A graph of one node."""
    known = {**constants, **fed}
    inputs = [name if name in known else "" for name in names]
    while inputs[-1] == "":
        inputs.pop()
    node = helper.make_node(op, inputs, list(outputs), domain="sportsllm", **attributes)
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in fed.items()}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, kind, [None] * fed[name].ndim) for name, kind in types.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("sportsllm", int(VERSION))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return opened(library, model.SerializeToString(), threads)


@lru_cache(maxsize=16)
def opened(library: Path, model: bytes, threads: int) -> ort.InferenceSession:
    """One session for many inputs, since opening one takes 50 times as long as a run."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def head_logits(library: Path, matrix: Packed, x: Array, norm: Array | None = None, wide: bool = False) -> Array:
    norm = np.ones(x.shape[-1], np.float32) if norm is None else norm
    constants = {"norm": norm, **matrix.parts("head")}
    names = ["x", "residual", "norm", "head.packed", "head.scale", "head.zero_point", "head.bias"]
    sizes = {f"head_{key}": value for key, value in matrix.sizes.items()}
    attributes = {"hidden_size": x.shape[-1], "epsilon": 1e-5, **sizes, **({"head_wide": 1} if wide else {})}
    op, names = ("GeneralHead", [*names, "norm.bias"]) if wide else ("DecoderHead", names)
    made = session(library, op, names, {"logits": TensorProto.FLOAT}, constants, {"x": x}, attributes)
    found: Array = made.run(None, {"x": x})[0]
    return found


def normed(x: Array) -> Array:
    wide = x.astype(np.float64)
    found: Array = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return found


def test_extreme_numbers(library: Path) -> None:
    rng = np.random.default_rng(3)
    for bits, number in ((4, 0), (4, 255), (8, 0), (8, 255)):
        matrix = Packed(rng, 8, 256, bits, 32, zeros=False)
        matrix.packed[:] = number
        level = (number & 15 if bits == 4 else number) - 2 ** (bits - 1)
        dense = np.repeat(matrix.scale.astype(np.float64), 32, axis=1) * level
        for x in (np.ones((1, 1, 256)), np.zeros((1, 9, 256)), np.full((1, 9, 256), 1e-39), np.full((1, 1, 256), 1e18)):
            x = x.astype(np.float32)
            wanted = normed(x) @ dense.T
            np.testing.assert_allclose(head_logits(library, matrix, x), wanted, rtol=1e-4, atol=1e-6)


def test_a_head_with_16_bit_inputs_agrees_with_float64(library: Path) -> None:
    """Inputs of 16 bits err by a 254th of what those of 8 bits do."""
    rng = np.random.default_rng(4)
    matrix = Packed(rng, 40, 96, 8, 32, zeros=False)
    for tokens in (1, 12):
        x = rng.standard_normal((1, tokens, 96), dtype=np.float32)
        wanted = normed(x) @ matrix.dense.T
        for wide, bound in ((False, 0.01), (True, 1e-4)):
            found = head_logits(library, matrix, x, wide=wide)
            assert np.linalg.norm(found - wanted) < bound * np.linalg.norm(wanted)


def layer_case(bits: int, block: int, zeros: bool, cache: str = "fp32") -> Case:
    rng = np.random.default_rng(bits + block)
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
        "output": (HIDDEN, HEADS * SIZE),
        "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    matrices = {name: Packed(rng, *shape, bits, block, zeros, size=0.3) for name, shape in shapes.items()}
    constants = {
        "frequencies": (100.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))).astype(np.float32),
        "unread": np.zeros(1, np.float32),
        "norm": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
        "second_norm": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
    }
    if cache == "int8":
        constants["key_scale"] = np.full((1, KV_HEADS, 1, SIZE), 0.05, np.float32)
        constants["value_scale"] = np.full((1, KV_HEADS, 1, SIZE), 0.05, np.float32)
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "head_size": SIZE}
    attributes |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "epsilon": 1e-5}
    attributes["rotary_factor"] = 1.25
    for name, matrix in matrices.items():
        constants |= matrix.parts(name)
        attributes |= {f"{name}_{key}": value for key, value in matrix.sizes.items()}
    return constants, matrices, attributes


def general_case(bits: int, wide: bool, cache: str = "fp32") -> Case:
    """A layer that LLaMA has not: Gemma's, with 16-bit inputs if `wide`."""
    constants, matrices, attributes = layer_case(bits, 32, bits == 4, cache)
    rng = np.random.default_rng(1)
    for name in ("norm_after_attention", "norm_after_feed_forward"):
        constants[name] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    attributes |= {"scale": 0.4, "window": 7, "gelu": 1, "gated": 1} | {f"{name}_wide": int(wide) for name in matrices}
    return constants, matrices, attributes


def names_of_layer() -> list[str]:
    first = "x residual last total keep past_key past_value frequencies key_scale value_scale norm query_norm key_norm"
    names = first.split()
    for name in ("qkv", "output", "second_norm", "gate_up", "down"):
        parts = ["packed", "scale", "zero_point", "bias"]
        names += [name] if name == "second_norm" else [f"{name}.{part}" for part in parts]
    return names


def op_and_names(attributes: dict[str, Any], suffix: str) -> tuple[str, list[str]]:
    """The operator of a layer, and its inputs."""
    if "scale" in attributes:
        more = ["norm_after_attention", "norm_after_feed_forward", "norm_bias", "second_norm_bias"]
        return f"GeneralLayer{suffix}", [*names_of_layer(), *more, "unread"]
    return f"DecoderLayer{suffix}", [*names_of_layer(), "unread"]


def layer_feeds(x: Array, last: int, cache: list[Array]) -> dict[str, Array]:
    ends = {"last": np.array([last], np.int32), "total": np.array(cache[0].shape[2], np.int32)}
    return {"x": x} | ends | {"past_key": cache[0], "past_value": cache[1]}


def layer_outputs(cached: int = TensorProto.FLOAT) -> dict[str, int]:
    return {"out": TensorProto.FLOAT, "residual_out": TensorProto.FLOAT, "key": cached, "value": cached}


def run_layer(library: Path, case: Case, pieces: list[int], kept: str = "fp32") -> tuple[Array, Array]:
    """Sum of the layer's two outputs for tokens read in pieces, (T, D), and the keys, (K, T, E)."""
    constants, _, attributes = case
    suffix, kind, cached = CACHES[kept]
    cache = [np.zeros((1, KV_HEADS, ROOM, SIZE), kind) for _ in range(2)]
    x = np.random.default_rng(7).normal(size=(1, sum(pieces), HIDDEN)).astype(np.float32)
    op_names, outputs = op_and_names(attributes, suffix), layer_outputs(cached)
    made, found, start = None, [], 0
    for count in pieces:
        fed = layer_feeds(x[:, start : start + count], start + count - 1, cache)
        made = made or session(library, *op_names, outputs, constants, fed, attributes, threads=2)
        out, residual, *cache = made.run(None, fed)
        found.append((out + residual)[0])
        start += count
    return np.concatenate(found), cache[0][0, :, :start]


def layer_oracle(case: Case, tokens: int) -> tuple[Array, Array]:
    """The same in float64, inputs not rounded."""
    constants, matrices, attributes = case
    x = np.random.default_rng(7).normal(size=(1, tokens, HIDDEN)).astype(np.float32)[0].astype(np.float64)
    parts = np.split(
        normed(x) * constants["norm"] @ matrices["qkv"].dense.T, np.cumsum([HEADS * SIZE, KV_HEADS * SIZE]), axis=1
    )
    query, key, value = (part.reshape(tokens, -1, SIZE).transpose(1, 0, 2) for part in parts)
    angles = np.arange(tokens)[:, None] * constants["frequencies"].astype(np.float64)
    cosine, sine = (attributes["rotary_factor"] * turned(angles) for turned in (np.cos, np.sin))

    def rotated(h: Array) -> Array:
        if "frequencies" not in constants:
            return h
        a, b = h[..., : SIZE // 2], h[..., SIZE // 2 :]
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)

    query, key = rotated(query), rotated(key)
    group = HEADS // KV_HEADS
    scores = query @ key.repeat(group, 0).transpose(0, 2, 1) * attributes.get("scale", SIZE**-0.5)
    seen = np.tril(np.ones((tokens, tokens), bool))
    seen = np.triu(seen, 1 - attributes.get("window", tokens))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = (weights @ value.repeat(group, 0)).transpose(1, 0, 2).reshape(tokens, -1)

    def after(name: str, made: Array) -> Array:
        return normed(made) * constants[name] if name in constants else made

    total = x + after("norm_after_attention", attended @ matrices["output"].dense.T)
    gate, up = np.split(normed(total) * constants["second_norm"] @ matrices["gate_up"].dense.T, 2, axis=1)
    bent = gate / (1 + np.exp(-gate))
    if "gelu" in attributes:
        bent = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return total + after("norm_after_feed_forward", bent * up @ matrices["down"].dense.T), key


@pytest.mark.parametrize(("bits", "block", "zeros"), [(4, 32, True), (4, 64, False), (8, 32, False), (8, 128, True)])
def test_a_layer_agrees_with_float64(library: Path, bits: int, block: int, zeros: bool) -> None:
    """Rounding inputs to 8 bits four times in a row changes about half a percent."""
    case = layer_case(bits, block, zeros)
    for pieces in ([1] * 5, [20, 1, 3], [8, 12]):
        found, keys = run_layer(library, case, pieces)
        wanted, wanted_keys = layer_oracle(case, sum(pieces))
        assert np.linalg.norm(found - wanted) < 0.015 * np.linalg.norm(wanted)
        assert np.linalg.norm(keys - wanted_keys) < 0.01 * np.linalg.norm(wanted_keys)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_general_layer_agrees_with_float64(bits: int, library: Path) -> None:
    """Inputs of 16 bits err by a 254th of what those of 8 bits do."""
    for wide, bound in ((False, 0.02), (True, 2e-4)):
        case = general_case(bits, wide)
        for pieces in ([1] * 9, [20, 1, 3], [8, 12]):
            found, _ = run_layer(library, case, pieces)
            wanted, _ = layer_oracle(case, sum(pieces))
            assert np.linalg.norm(found - wanted) < bound * np.linalg.norm(wanted)


def test_a_general_layer_gives_the_bits_of_a_plain_one(library: Path) -> None:
    constants, matrices, attributes = layer_case(4, 32, True)
    more = {"scale": float(np.float32(1) / np.sqrt(np.float32(SIZE))), "window": 0, "gelu": 0, "gated": 1}
    more |= {f"{name}_wide": 0 for name in matrices}
    cases: list[Case] = [(constants, matrices, attributes | extra) for extra in ({}, more)]
    for found, wanted in zip(*(run_layer(library, case, [12, 1, 3]) for case in cases), strict=True):
        assert np.array_equal(found, wanted)


def test_a_general_layer_without_rotation_has_no_frequencies(library: Path) -> None:
    constants, matrices, attributes = general_case(8, wide=True)
    still = constants | {"frequencies": np.zeros_like(constants["frequencies"])}
    none = {name: array for name, array in constants.items() if name != "frequencies"}
    attributes["rotary_factor"] = 1.0
    for found, wanted in zip(
        *(run_layer(library, (c, matrices, attributes), [12, 1, 3]) for c in (none, still)), strict=True
    ):
        assert np.array_equal(found, wanted)


def test_keys_far_into_a_context_are_rotated(library: Path) -> None:
    """Angles are rounded to float32, as in training; cosine and sine of them are within half a float32 step."""
    constants, _, attributes = layer_case(8, 32, False)
    cache: list[Array] = [np.zeros((1, KV_HEADS, 2_000, SIZE), np.float32) for _ in range(2)]
    x = np.random.default_rng(7).normal(size=(1, 1, HIDDEN)).astype(np.float32)

    def key_at(place: int) -> Array:
        fed = layer_feeds(x, place, cache)
        made = session(library, *op_and_names(attributes, ""), layer_outputs(), constants, fed, attributes)
        return np.asarray(made.run(["key"], fed)[0][0, :, place], np.float64)

    start = key_at(0) / 1.25
    for place in (127, 128, 1_999):
        angles = (np.float32(place) * constants["frequencies"]).astype(np.float64)
        a, b = start[:, : SIZE // 2], start[:, SIZE // 2 :]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        np.testing.assert_allclose(key_at(place), 1.25 * np.concatenate(turned, axis=1), rtol=0, atol=2e-6)


def test_an_int8_cache_holds_keys_rounded_by_its_scales(library: Path) -> None:
    case = layer_case(8, 32, False, "int8")
    _, keys = run_layer(library, case, [20, 1], "int8")
    _, wanted = layer_oracle(case, 21)
    assert np.abs(keys - np.clip(wanted / 0.05, -128, 127)).max() < 1.5


def test_a_float16_cache_holds_keys_rounded_once(library: Path) -> None:
    """The layer's numbers differ by what rounding keys and values to 11 bits changes."""
    case = layer_case(8, 32, False)
    found, keys = run_layer(library, case, [20, 1, 3], "fp16")
    wide, wide_keys = run_layer(library, case, [20, 1, 3])
    assert keys.dtype == np.float16
    assert np.array_equal(keys[:, :20], wide_keys[:, :20].astype(np.float16))
    assert 0 < np.linalg.norm(found - wide) < 1e-3 * np.linalg.norm(wide)


@pytest.mark.parametrize("bits", [4, 8])
def test_nan_in_a_weight_reaches_every_output(library: Path, bits: int) -> None:
    """One number of a norm, and one scale of a query head: finite logits would hide that weights are damaged."""
    for name in ("norm", "qkv.scale"):
        constants, matrices, attributes = layer_case(bits, 32, False)
        (spoilt := constants[name].copy()).flat[5] = np.nan
        found, _ = run_layer(library, (constants | {name: spoilt}, matrices, attributes), [1, 20, 3])
        assert np.isnan(found).all()


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize(("bits", "cache"), [(4, "fp32"), (8, "int8"), (4, "fp16")])
def test_several_rows_equal_single_ones_bit_for_bit(library: Path, bits: int, cache: str, general: bool) -> None:
    case = general_case(bits, True, cache) if general else layer_case(bits, 32, True, cache)
    together, alone = run_layer(library, case, [3, 8, 16], cache), run_layer(library, case, [1] * 27, cache)
    assert np.array_equal(together[0], alone[0])
    assert np.array_equal(together[1], alone[1])


@pytest.mark.parametrize("kept", ["fp32", "int8"])
@pytest.mark.parametrize("tokens", [0, 2])
def test_the_new_cache_is_the_old_one_the_new_tokens_and_zeros(library: Path, tokens: int, kept: str) -> None:
    """ONNX Runtime hands out memory of the call before, so whatever is not written shows."""
    constants, _, attributes = layer_case(8, 32, False, kept)
    suffix, kind, cached = CACHES[kept]
    rng, known = np.random.default_rng(0), 5
    past = [rng.integers(1, 9, (1, KV_HEADS, ROOM, SIZE)).astype(kind) for _ in range(2)]
    fed = layer_feeds(rng.normal(size=(1, tokens, HIDDEN)).astype(np.float32), known + tokens - 1, past)
    made = session(library, *op_and_names(attributes, suffix), layer_outputs(cached), constants, fed, attributes)
    other = fed | {name: np.full_like(fed[name], 77) for name in ("past_key", "past_value")}
    for _ in range(3):
        made.run(None, other)
        for found, before in zip(made.run(None, fed)[2:], past, strict=True):
            assert np.array_equal(found[0, :, :known], before[0, :, :known])
            assert not found[0, :, known + tokens :].any()
            assert found[0, :, known : known + tokens].any() == bool(tokens)


def test_attention_alone_ends_behind_the_second_norm(library: Path) -> None:
    """Bits of the whole layer, whose outputs are the same sum and what the other half makes of the norm."""
    constants, _, attributes = layer_case(4, 32, True)
    _, names = op_and_names(attributes, "")
    x = np.random.default_rng(7).normal(size=(1, 9, HIDDEN)).astype(np.float32)
    fed = layer_feeds(x, 8, [np.zeros((1, KV_HEADS, ROOM, SIZE), np.float32) for _ in range(2)])
    whole = session(library, "DecoderLayer", names, layer_outputs(), constants, fed, attributes).run(None, fed)
    first = [*names[: names.index("second_norm") + 1], "unread"]
    own = {name: array for name, array in constants.items() if name in first}
    sizes = {name: value for name, value in attributes.items() if not name.startswith(("gate_up", "down", "inter"))}
    half = session(library, "DecoderAttention", first, layer_outputs(), own, fed, sizes).run(None, fed)
    assert np.array_equal(half[1], whole[1])
    for found, wanted in zip(half[2:], whole[2:], strict=True):
        assert np.array_equal(found[:, :, :9], wanted[:, :, :9])
    np.testing.assert_allclose(half[0], normed(half[1]) * constants["second_norm"], rtol=1e-5, atol=1e-6)


def feed_forward_case(
    bits: int, block: int, zeros: bool, experts: int, shared: bool, gated: bool, biases: bool
) -> tuple[dict[str, Array], list[tuple[Array, ...]], dict[str, Any]]:
    """Constants in the kernel's order, float64 matrices and biases of each part, attributes; shared parts are wider."""
    rng = np.random.default_rng(experts + bits)
    constants: dict[str, Array] = {}
    parts: list[tuple[Array, ...]] = []
    attributes: dict[str, Any] = {"hidden_size": HIDDEN, "gated": int(gated), "experts": experts, "shared": int(shared)}
    attributes["active_experts"] = min(2, experts)
    for kind, count, inner in (("expert", experts, INNER), ("shared", int(shared), 100)):
        for number in range(count):
            part: list[Array] = []
            for key, shape in (("up", (inner * (1 + gated), HIDDEN)), ("down", (HIDDEN, inner))):
                matrix = Packed(rng, *shape, bits, block, zeros, size=0.3)
                name, bias = f"{kind}{number}_{key}", rng.normal(size=shape[0]).astype(np.float32)
                constants |= matrix.parts(name) | ({f"{name}.bias": bias} if biases else {})
                part += [matrix.dense, bias * biases]
                attributes |= {f"{kind}_{key}_{size}": value for size, value in matrix.sizes.items()}
                attributes |= {f"{kind}_{key}_zero_points": int(zeros), f"{kind}_{key}_biases": int(biases)}
            parts.append(tuple(part))
            attributes[f"{kind}_size"] = inner
    return constants, parts, attributes


def run_feed_forward(
    library: Path, constants: dict[str, Array], attributes: dict[str, Any], fed: dict[str, Array], threads: int = 2
) -> Array:
    names, out = ["x", "chosen", "weights", *constants], {"out": TensorProto.FLOAT}
    made = session(library, "DecoderFeedForward", names, out, constants, fed, attributes, threads)
    found: Array = made.run(None, fed)[0]
    return found


def sent_tokens(tokens: int, experts: int) -> dict[str, Array]:
    """Inputs for two experts a token, the first of which gets most tokens and the last none."""
    rng = np.random.default_rng(tokens)
    fed: dict[str, Array] = {"x": rng.normal(size=(1, tokens, HIDDEN)).astype(np.float32)}
    if experts:
        second = rng.integers(1, experts - 1, tokens)
        fed["chosen"] = np.stack([np.zeros(tokens, np.int64), second], axis=-1)[None]
        fed["weights"] = rng.uniform(0.1, 1, (1, tokens, 2)).astype(np.float32)
    return fed


FEED_FORWARDS = [
    (4, 32, True, 5, False, True, False),
    (8, 64, False, 6, True, True, False),
    (4, 128, False, 4, False, False, True),
    (8, 32, True, 0, True, True, False),
    (4, 32, False, 0, True, False, True),
]


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("settings", FEED_FORWARDS, ids=str)
def test_a_feed_forward_agrees_with_float64(library: Path, settings: Any, tokens: int) -> None:
    """Inputs are rounded to 8 bits twice in a row, half a percent each by 32 numbers; gate and up both err."""
    _, _, _, experts, shared, gated, _ = settings
    constants, parts, attributes = feed_forward_case(*settings)
    fed = sent_tokens(tokens, experts)
    wide = fed["x"][0].astype(np.float64)
    made = []
    for up, up_bias, down, down_bias in parts:
        inner = wide @ up.T + up_bias
        gate, rest = np.split(inner, 2, axis=1) if gated else (inner, 1.0)
        made.append((gate / (1 + np.exp(-gate)) * rest) @ down.T + down_bias)
    wanted = made[-1].copy() if shared else np.zeros_like(wide)
    if experts:
        for token in range(tokens):
            for expert, weight in zip(fed["chosen"][0, token], fed["weights"][0, token], strict=True):
                wanted[token] += weight * made[expert][token]
    found = run_feed_forward(library, constants, attributes, fed)[0]
    assert np.linalg.norm(found - wanted) < 0.015 * np.linalg.norm(wanted)
    for threads in (1, 3):
        assert np.array_equal(run_feed_forward(library, constants, attributes, fed, threads)[0], found)


def test_experts_that_are_not_there_are_refused(library: Path) -> None:
    constants, _, attributes = feed_forward_case(4, 32, True, 5, False, True, False)
    fed = sent_tokens(3, 5)
    for number in (-1, 5):
        bad = fed | {"chosen": np.full_like(fed["chosen"], number)}
        with pytest.raises(Exception, match=f"expert {number} of 5"):
            run_feed_forward(library, constants, attributes, bad)
    with pytest.raises(Exception, match="6 experts a token of 5"):
        run_feed_forward(library, constants, attributes | {"active_experts": 6}, fed)
    with pytest.raises(Exception, match="experts have shapes"):
        run_feed_forward(library, constants, attributes, fed | {"weights": fed["weights"][:, :2]})
    with pytest.raises(Exception, match="is missing"):
        run_feed_forward(library, constants, attributes | {"experts": 6}, fed)


SELECTED_NAMES = ["query", "index_query", "last", "key", "value", "index_key", "shared"]


def selected_case(tokens: int) -> tuple[dict[str, Array], dict[str, Any]]:
    """Inputs and attributes of two sequences, one of which sees more blocks than are chosen."""
    rng, room, size = np.random.default_rng(tokens), 90, 10
    shapes = {"query": (tokens, HEADS * SIZE), "index_query": (tokens, HEADS * size)}
    shapes |= dict.fromkeys(("key", "value"), (KV_HEADS, room, SIZE)) | {"index_key": (room, size)}
    fed: dict[str, Array] = {name: rng.normal(size=(2, *shape)).astype(np.float32) for name, shape in shapes.items()}
    fed |= {"last": np.array([room - 1, tokens + 2], np.int32), "shared": np.ones(1, np.int64)}
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "head_size": SIZE}
    attributes |= {"index_heads": HEADS, "index_size": size, "block_size": 4, "blocks": 8, "newest_blocks": 2}
    return fed, attributes | {"scale": 0.4}


def run_selected(library: Path, fed: dict[str, Array], attributes: dict[str, Any]) -> Array:
    out = {"out": TensorProto.FLOAT}
    made = session(library, "SelectedAttention", SELECTED_NAMES, out, {}, fed, attributes, threads=2)
    found: Array = made.run(None, fed)[0]
    return found


def test_attention_to_selected_tokens_sees_no_others(library: Path) -> None:
    """A block of the values at a time is made no numbers: as many as are chosen spoil the outcome, of all heads."""
    fed, attributes = selected_case(1)
    whole = run_selected(library, fed, attributes)
    assert np.isfinite(whole).all()
    seen = 0
    for start in range(0, 90, 4):
        spoilt = fed["value"].copy()
        spoilt[0, :, start : start + 4] = np.nan
        found = run_selected(library, fed | {"value": spoilt}, attributes)
        assert np.isnan(found[0]).all() or np.array_equal(found[0], whole[0])
        seen += bool(np.isnan(found[0]).any())
    assert seen == 8


def test_what_selects_badly_is_refused(library: Path) -> None:
    fed, attributes = selected_case(3)
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"blocks": 3}, "nothing to choose"),
        ({}, {"block_size": 0}, "it must be from 1"),
        ({}, {"kv_num_heads": 3}, "heads disagree"),
        ({"last": np.array([90, 5], np.int32)}, {}, "room for 90"),
        ({"index_key": fed["index_key"][:, :-1]}, {}, "has shape"),
    ]
    for inputs, sizes, message in bad:
        with pytest.raises(Exception, match=message):
            run_selected(library, fed | inputs, attributes | sizes)


LATENT_NAMES = {
    "LatentTokens": ["query", "latent", "cosine", "sine", "last", "past", "norm", "scale", "shared"],
    "LatentAttention": ["unrotated", "rotated", "last", "past", "keys", "values", "scale", "shared"],
}
RANK, ROTATED, UNROTATED, VALUE = 37, 6, 11, 13


def latent_case(op: str, tokens: int, int8: bool) -> tuple[str, dict[str, Array], dict[str, Any]]:
    """Name, inputs and attributes for two sequences, one of which fills the cache."""
    rng, room, width = np.random.default_rng(tokens), 300, RANK + ROTATED
    shapes = {"query": (2, tokens, HEADS * (UNROTATED + ROTATED)), "latent": (2, tokens, width), "norm": (RANK,)}
    shapes |= {"unrotated": (2, HEADS, tokens, UNROTATED), "rotated": (2, HEADS, tokens, ROTATED)}
    shapes |= {"keys": (HEADS, UNROTATED, RANK), "values": (HEADS, VALUE, RANK), "past": (2, room, width)}
    fed: dict[str, Array] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    angles = rng.uniform(0, 6, (2, tokens, 1, ROTATED // 2))
    fed |= {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
    fed |= {"last": np.array([room - 1, tokens + 2], np.int32), "shared": np.ones(1, np.int64)}
    if int8:
        fed["scale"] = rng.uniform(0.01, 0.03, width).astype(np.float32)
        fed["past"] = np.clip(np.round(fed["past"] / fed["scale"]), -128, 127).astype(np.int8)
    sizes = {
        "num_heads": HEADS, "rank": RANK, "rotated_size": ROTATED, "unrotated_size": UNROTATED, "value_size": VALUE,
    }  # fmt: skip
    more = {"epsilon": 1e-5, "scale": 0.3} if op == "LatentTokens" else {}
    given = {name: fed[name] for name in LATENT_NAMES[op] if name in fed}
    return op + "Int8" * int8, given, {**sizes, **more}


def run_latent(
    library: Path, op: str, fed: dict[str, Array], attributes: dict[str, Any], threads: int = 2
) -> list[Array]:
    plain = op.removesuffix("Int8")
    outputs = {"out": TensorProto.FLOAT}
    if plain == "LatentTokens":
        cached = TensorProto.INT8 if plain != op else TensorProto.FLOAT
        outputs = {"plain": TensorProto.FLOAT, "turned": TensorProto.FLOAT, "present": cached}
    made = session(library, op, LATENT_NAMES[plain], outputs, {}, fed, attributes, threads)
    found: list[Array] = made.run(None, fed)
    return found


def turned(x: Array, cosine: Array, sine: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("int8", [False, True])
def test_latent_tokens_agree_with_float64(library: Path, tokens: int, int8: bool) -> None:
    op, fed, attributes = latent_case("LatentTokens", tokens, int8)
    plain, rotated, present = run_latent(library, op, fed, attributes)
    wide = {name: array.astype(np.float64) for name, array in fed.items()}
    query = wide["query"].reshape(2, tokens, HEADS, -1)
    ours = query[..., :UNROTATED] * 0.3, turned(query[..., UNROTATED:], wide["cosine"], wide["sine"]) * 0.3
    for found, wanted in zip((plain, rotated), ours, strict=True):
        np.testing.assert_allclose(found, wanted.transpose(0, 2, 1, 3), atol=1e-6)
    low, key = np.split(wide["latent"], [RANK], axis=-1)
    low = low / np.sqrt(np.mean(low**2, axis=-1, keepdims=True) + 1e-5) * wide["norm"]
    key = turned(key[:, :, None], wide["cosine"], wide["sine"])[:, :, 0]
    vectors, expected = np.concatenate([low, key], axis=-1), fed["past"].copy()
    for row, last in enumerate(fed["last"]):
        stored = np.clip(np.round(vectors[row] / fed["scale"]), -128, 127) if int8 else vectors[row]
        expected[row, last + 1 - tokens : last + 1] = stored
    # A number half-way between two steps may go either way.
    np.testing.assert_allclose(present.astype(np.float64), expected, atol=1 if int8 else 1e-5)
    assert np.mean(present != expected) < 0.001 or not int8
    for threads in (1, 3):
        again = run_latent(library, op, fed, attributes, threads)
        assert all(np.array_equal(*pair) for pair in zip(again, (plain, rotated, present), strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 15])
@pytest.mark.parametrize("int8", [False, True])
def test_latent_attention_agrees_with_float64(library: Path, tokens: int, int8: bool) -> None:
    """In the form that is not absorbed: keys and values are made of the cache."""
    op, fed, attributes = latent_case("LatentAttention", tokens, int8)
    (found,) = run_latent(library, op, fed, attributes)
    wide = {name: array.astype(np.float64) for name, array in fed.items()}
    state = wide["past"] * (wide["scale"] if int8 else 1.0)
    for row, last in enumerate(fed["last"]):
        for token in range(tokens):
            seen = state[row, : last + 2 - tokens + token]
            keys = np.einsum("hnr,sr->hsn", wide["keys"], seen[:, :RANK])
            values = np.einsum("hvr,sr->hsv", wide["values"], seen[:, :RANK])
            scores = np.einsum("hn,hsn->hs", wide["unrotated"][row, :, token], keys)
            scores += wide["rotated"][row, :, token] @ seen[:, RANK:].T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            wanted = np.einsum("hs,hsv->hv", weights, values)
            # Scores reach some hundreds, whose float32 sums err by some hundred-thousandths.
            np.testing.assert_allclose(found[row, :, token], wanted, atol=2e-3)
    for threads in (1, 3):
        assert np.array_equal(run_latent(library, op, fed, attributes, threads)[0], found)


def test_latent_vectors_that_do_not_fit_are_refused(library: Path) -> None:
    for op in LATENT_NAMES:
        name, fed, attributes = latent_case(op, 3, False)
        bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({}, {"rank": 0}, "it must be from 1"),
            ({}, {"rotated_size": 5}, "come in pairs"),
            ({"last": np.array([300, 5], np.int32)}, {}, "room for 300"),
            ({"past": fed["past"][:, :, :-1]}, {}, "the cache has shape"),
        ]
        for inputs, sizes, message in bad:
            with pytest.raises(Exception, match=message):
                run_latent(library, name, fed | inputs, attributes | sizes)


def test_bad_shapes_are_refused_when_the_graph_is_opened(library: Path) -> None:
    x, matrix = np.zeros((1, 1, 64), np.float32), Packed(np.random.default_rng(0), 8, 64, 4, 32, zeros=False)
    with pytest.raises(Exception, match="norm"):
        head_logits(library, matrix, x, norm=np.ones(3, np.float32))
    packed, sizes = matrix.packed, matrix.sizes
    for part, changes, message in (
        (packed[:, :1], {}, "has shape"), (packed, {"block_size": 48}, "blocks of 48"), (packed, {"bits": 5}, "5 bits"),
    ):  # fmt: skip
        matrix.packed, matrix.sizes = part, sizes | changes
        with pytest.raises(Exception, match=message):
            head_logits(library, matrix, x)


def test_a_layer_of_impossible_sizes_is_refused(library: Path) -> None:
    """2^62 more heads: products of sizes wrap round to the right shapes. And a cache that is full."""
    constants, matrices, attributes = layer_case(4, 32, False)
    case = constants, matrices, attributes | {"num_heads": attributes["num_heads"] + 2**62}
    with pytest.raises(Exception, match="num_heads is 4611686018427387908; it must be from 1 to"):
        run_layer(library, case, [3])
    with pytest.raises(Exception, match=f"room for {ROOM}"):
        run_layer(library, (constants, matrices, attributes), [30, 20])
