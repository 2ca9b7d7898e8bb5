"""Memory arithmetic: how many bytes a model needs on disk and in use, without building it.

Imports no torch. Letters: B sequences, T tokens, D hidden_size, L layers, V vocabulary.
"""

import math
from typing import NamedTuple

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.feed_forward_kinds import least_bits
from sportsllm.models.kinds import NORMS, OUTPUT_NORMS, block_matrices, block_state, sublayers
from sportsllm.models.parts import Matrix

PRECISIONS = ("fp32", "fp16", "int8", "int4")
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Numbers of a packed matrix that may share a scale, as MatMulNBits allows."""
CACHE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
LOSS_CHUNK_TOKENS = 1_024
"""The most tokens of a chunk of the loss, on any processor."""
_CPU_CHUNK_TOKENS = (128, 512)
_CPU_CHUNK_LOGITS = 8 * 2**20
_DENSE_BYTES = {"fp32": 4, "fp16": 2}
_MATRIX_BITS = {"int8": 8, "int4": 4}


def matrix_parameters(config: ModelConfig, block_size: int = 1) -> int:
    """Numbers in the matrices inside the blocks, each row filled up to whole blocks of `block_size`."""
    return sum(
        layers * m.rows * -(-m.columns // block_size) * block_size
        for part, layers in config.runs()
        for m in block_matrices(part)
    )


def block_parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in each part of one block, by the module's name; they add up to the whole block."""
    parts: dict[str, int] = {}
    norms: dict[str, int] = {}
    for sublayer, kind in sublayers(config).items():
        matrices = kind.matrices(config)
        parts |= {matrix.name: matrix.numel for matrix in matrices}
        parts |= {f"{matrix.name}.bias": matrix.rows for matrix in matrices if matrix.bias}
        norms |= {vector.name: vector.size for vector in kind.vectors(config)}
        norms[NORMS[sublayer]] = config.norm_parameters
        if config.output_norms:
            norms[OUTPUT_NORMS[sublayer]] = config.norm_parameters
    return parts | norms


def quantized_bytes(rows: int, columns: int, bits: int, block_size: int, zero_points: bool = False) -> int:
    """Exact size of a packed matrix: numbers, one float32 scale per block and, optionally, zero points.

    Rows are padded to whole blocks, and the zero points of a row to whole bytes, as
    `sportsllm.formats.packed.QuantizedWeight` lays them out.
    """
    blocks = -(-columns // block_size)
    packed = rows * blocks * (block_size * bits // 8)
    scales = rows * blocks * 4
    zeros = rows * (-(-blocks * bits // 8)) if zero_points else 0
    return packed + scales + zeros


def weight_bytes(
    config: ModelConfig, precision: str, block_size: int = 32, head_bits: int = 8, zero_points: bool = False
) -> int:
    """Bytes of all weights on disk; a tied embedding counts once. Arguments and errors: see `component_bytes`."""
    return sum(component_bytes(config, precision, block_size, head_bits, zero_points).values())


def component_bytes(
    config: ModelConfig, precision: str, block_size: int = 32, head_bits: int = 8, zero_points: bool = False
) -> dict[str, int]:
    """Bytes of the parts that `ModelConfig.parameters_by_component` counts.

    Args:
        precision: fp32 or fp16 (everything), int8 or int4 (the blocks' matrices; norms and biases stay fp32).
        block_size: numbers of a packed matrix that share a scale.
        head_bits: bits of embedding and head when the rest is quantized: 4, 8, or 32 for float32.
        zero_points: whether 4-bit blocks have one each; 8-bit blocks have none.

    Raises:
        UsageError: an unknown precision, block size or number of bits.
    """
    check_format(precision, block_size, head_bits)
    norm_number = _DENSE_BYTES.get(precision, 4)
    parts = dict.fromkeys(config.parameters_by_component(), 0)
    for part, layers in config.runs():
        a_block = block_bytes(part, precision, block_size, head_bits, zero_points)
        for component, (sublayer, kind) in zip(("attention", "feed_forward"), sublayers(part).items(), strict=True):
            norms = {NORMS[sublayer], OUTPUT_NORMS[sublayer], *(vector.name for vector in kind.vectors(part))}
            in_half = {matrix.name for matrix in kind.matrices(part)}
            for name, size in a_block.items():
                if name in norms:
                    parts["norms"] += layers * size
                elif name.removesuffix(".bias") in in_half:
                    parts[component] += layers * size
    parts["norms"] += norm_number * config.norm_parameters
    table = norm_number * config.vocab_size * config.hidden_size
    if precision in _MATRIX_BITS and head_bits != 32:
        zeros = zero_points and head_bits == 4
        table = quantized_bytes(config.vocab_size, config.hidden_size, head_bits, block_size, zeros)
    parts["embedding"] = table + norm_number * config.positions * config.hidden_size
    parts["head"] = 0 if config.tie_word_embeddings else table
    return parts


def block_bytes(
    config: ModelConfig, precision: str, block_size: int = 32, head_bits: int = 8, zero_points: bool = False
) -> dict[str, int]:
    """Bytes of each part of one block, by the names of `block_parameters`; see `component_bytes`."""
    check_format(precision, block_size, head_bits)
    sizes = {name: _DENSE_BYTES.get(precision, 4) * count for name, count in block_parameters(config).items()}
    if precision in _MATRIX_BITS:
        bits = _MATRIX_BITS[precision]
        for kind in sublayers(config).values():
            for m in kind.matrices(config):
                own = max(bits, least_bits(m.name))
                sizes[m.name] = quantized_bytes(m.rows, m.columns, own, block_size, zero_points and own == 4)
    return sizes


def count_bytes(parameters: int, precision: str, block_size: int | None = None) -> int:
    """Bytes of weights of which only the number is known: all in one format, without scales or with those of blocks,
    which at 4 bits have zero points as well.

    Raises:
        UsageError: an unknown precision or block size.
    """
    check_format(precision, block_size or BLOCK_SIZES[0])
    if precision in _DENSE_BYTES:
        return _DENSE_BYTES[precision] * parameters
    packed = -(-parameters * _MATRIX_BITS[precision] // 8)
    if block_size is None:
        return packed
    blocks = -(-parameters // block_size)
    return packed + 4 * blocks + (-(-blocks // 2) if precision == "int4" else 0)


def check_format(precision: str, block_size: int, head_bits: int = 8) -> None:
    """Refuse a format that no checkpoint has.

    Raises:
        UsageError: an unknown precision, block size or number of bits.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    if precision in _DENSE_BYTES:
        return
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(str(size) for size in BLOCK_SIZES)
        raise UsageError(f"block size {block_size} is not supported; use one of {sizes}")
    if head_bits not in (4, 8, 32):
        raise UsageError(f"head bits {head_bits} are not supported; use 4, 8 or 32")


def kv_cache_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers cache for a token of one sequence, by precision of the cache."""
    return _cached_bytes(config, per_token=True)


def state_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers keep of one sequence however long it is, by precision; 0 for attention."""
    return _cached_bytes(config, per_token=False)


def _cached_bytes(config: ModelConfig, per_token: bool) -> dict[str, int]:
    kept = [state for state in block_state(config) if state.per_token == per_token]
    numbers = config.num_hidden_layers * sum(math.prod(state.shape) for state in kept)
    return {name: numbers * size for name, size in CACHE_BYTES.items()}


def loss_chunk_tokens(vocab_size: int, device: str = "cpu") -> int:
    """Tokens whose logits `sportsllm.training.loss` makes at once.

    On a CPU 256 to 512 were fastest at vocabularies of 2,048 and of 32,000: with fewer the products and the sum of the
    head's gradient slow down, with more the passes over the logits leave the cache. Larger vocabularies get fewer, so
    that a buffer stays near 32 MiB. A GPU needs long products.
    """
    if device != "cpu":
        return LOSS_CHUNK_TOKENS
    least, most = _CPU_CHUNK_TOKENS
    return max(least, min(most, _CPU_CHUNK_LOGITS // vocab_size))


class TensorShape(NamedTuple):
    """A tensor on the way from tokens to logits; `held` is False for one that is never made whole."""

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    layers: int = 1
    held: bool = True


def tensor_shapes(config: ModelConfig, batch: int, length: int, element_bytes: int = 4) -> list[TensorShape]:
    """Every tensor along the way for B = `batch` and T = `length`, in order of use.

    `bytes` is one tensor's size and `layers` how many of it there are. A number of a weight or activation has
    `element_bytes`, a token id 8.
    """
    hidden, vocab, steps = config.hidden_size, config.vocab_size, (batch, length)
    shapes = [TensorShape("token ids", "input", steps, 8 * batch * length)]

    def add(name: str, kind: str, shape: tuple[int, ...], layers: int = 1, held: bool = True) -> None:
        shapes.append(TensorShape(name, kind, shape, math.prod(shape) * element_bytes, layers, held))

    add("embed_tokens.weight", "weight", (vocab, hidden))
    add("hidden", "activation", (*steps, hidden))
    if config.positions:
        add("embed_positions.weight", "weight", (config.positions, hidden))
    elif config.position_kind == "rotary":
        add("rope cos, sin", "table", (2, length, config.head_dim // 2))
    for part, layers in config.runs():
        for (sublayer, described), result in zip(sublayers(part).items(), ("attention", "feed-forward"), strict=True):
            add(NORMS[sublayer], "activation", (*steps, hidden), layers)
            for item in described.tensors(part):
                if isinstance(item, Matrix):
                    add(f"{item.name}.weight", "weight", (item.rows, item.columns), layers)
                elif item.kind == "cache":
                    add(item.name, "cache", (batch, *item.shape[:-1], length, item.shape[-1]), layers, item.held)
                elif item.kind == "state":
                    add(item.name, "state", (batch, *item.shape), layers, item.held)
                elif item.kind == "scores":
                    add(item.name, "activation", (batch, *item.shape, length, length), layers, item.held)
                else:
                    add(item.name, "activation", (*steps, *item.shape), layers, item.held)
            if config.output_norms:
                add(OUTPUT_NORMS[sublayer], "activation", (*steps, hidden), layers)
            add(f"hidden + {result}", "activation", (*steps, hidden), layers)
    add("norm", "activation", (*steps, hidden))
    if not config.tie_word_embeddings:
        add("lm_head.weight", "weight", (vocab, hidden))
    add("logits, in chunks", "activation", (min(batch * length, LOSS_CHUNK_TOKENS), vocab))
    add("logits, whole", "activation", (*steps, vocab), held=False)
    return shapes
