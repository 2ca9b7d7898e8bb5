"""Memory arithmetic: bytes of a model on disk and in use, from its shape alone. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import (
    NORMS,
    OUTPUT_NORMS,
    Parameter,
    block_matrices,
    block_state,
    block_tensors,
    end_tensors,
    sublayers,
)
from sportsllm.models.kinds import least_bits
from sportsllm.models.sublayer import Activation, Matrix
from sportsllm.processors import LOSS_CHUNK_TOKENS

PRECISIONS = ("fp32", "fp16", "int8", "int4")
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Values of a packed matrix that may share a scale, as MatMulNBits allows."""
SCALE_BYTES = 2
"""Size of a block's scale, float16."""
MIXED_GROWTH = 0.05
"""Bytes that `quantize` may add to 4-bit matrices for those that need 8 bits, as a share of all matrices."""
_CACHE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
_DENSE_BYTES = {"fp32": 4, "fp16": 2}
_MATRIX_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored.

    Attributes:
        precision: fp32 or fp16 (everything), int8 or int4 (the blocks' matrices; norms and biases stay fp32).
        block_size: values of a packed matrix that share a scale.
        head_bits: bits of embedding and head if the rest is packed: 4, 8, or 32 for float32.
        zero_points: whether 4-bit blocks have one each; 8-bit blocks have none.

    Raises:
        UsageError: a format that no checkpoint has.
    """

    precision: str
    block_size: int = 32
    head_bits: int = 8
    zero_points: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision!r} is not known; use one of {', '.join(PRECISIONS)}")
        if self.quantized and self.block_size not in BLOCK_SIZES:
            raise UsageError(f"group_size is {self.block_size}; use one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.quantized and self.head_bits not in (4, 8, 32):
            raise UsageError(f"head_bits is {self.head_bits}; use 4, 8 or 32")

    @property
    def quantized(self) -> bool:
        """Whether the blocks' matrices are packed."""
        return self.precision in _MATRIX_BITS


def matrix_parameters(config: ModelConfig, block_size: int = 1) -> int:
    """Values of the matrices inside the blocks, each row filled up to whole blocks of `block_size`."""
    return sum(
        layers * m.rows * -(-m.columns // block_size) * block_size
        for part, layers in config.runs()
        for m in block_matrices(part)
    )


def active_matrix_parameters(config: ModelConfig) -> int:
    """Values of the matrices inside the blocks that one token is multiplied by: of experts the chosen ones'."""
    return sum(layers * each.active_parameters for part, layers in config.runs() for each in sublayers(part).values())


def block_parameters(config: ModelConfig) -> dict[str, int]:
    """Values of each tensor of one block, by its module's name in the sublayer; they add up to the whole block."""
    return _by_module(config, {item.name: item.numel for item in block_tensors(config)})


def block_bytes(config: ModelConfig, stored: WeightFormat) -> dict[str, int]:
    """Bytes of each tensor of one block, by the names of `block_parameters`."""
    return _by_module(config, {item.name: _stored_bytes(item, stored) for item in block_tensors(config)})


def _by_module(config: ModelConfig, found: dict[str, int]) -> dict[str, int]:
    """Sums over the tensors of a module, matrices and biases before norms."""
    sums: dict[str, int] = {}
    for item in sorted(block_tensors(config), key=lambda item: item.component == "norms"):
        name = item.name.removeprefix("self_attn.").removeprefix("mlp.")
        name = name.rpartition(".")[0] if item.component == "norms" else name.removesuffix(".weight")
        sums[name] = sums.get(name, 0) + found[item.name]
    return sums


def _stored_bytes(item: Parameter, stored: WeightFormat) -> int:
    """Bytes of a tensor."""
    bits = {"matrix": _MATRIX_BITS.get(stored.precision), "embedding": stored.head_bits, "head": stored.head_bits}
    packed = bits.get(item.role) if stored.quantized else None
    if packed in (None, 32):
        return _DENSE_BYTES.get(stored.precision, 4) * item.numel
    packed = max(packed, least_bits(item.name.removeprefix("mlp.").removesuffix(".weight")))
    rows, columns = item.shape
    return quantized_bytes(rows, columns, packed, stored.block_size, stored.zero_points and packed == 4)


def quantized_bytes(rows: int, columns: int, bits: int, block_size: int, zero_points: bool = False) -> int:
    """Exact size of a packed matrix: values, one float16 scale per block and, optionally, zero points.

    Rows are padded to whole blocks, and the zero points of a row to whole bytes, as
    `sportsllm.formats.packed.QuantizedWeight` lays them out.
    """
    blocks = -(-columns // block_size)
    zeros = -(-blocks * bits // 8) if zero_points else 0
    return rows * (blocks * (block_size * bits // 8) + SCALE_BYTES * blocks + zeros)


def weight_bytes(config: ModelConfig, stored: WeightFormat) -> int:
    """Bytes of all weights on disk; a tied embedding counts once."""
    return sum(component_bytes(config, stored).values())


def component_bytes(config: ModelConfig, stored: WeightFormat) -> dict[str, int]:
    """Bytes of the parts that `ModelConfig.parameters_by_component` counts."""
    parts: dict[str, int] = dict.fromkeys(config.parameters_by_component(), 0)
    for part, layers in config.runs():
        for item in block_tensors(part):
            parts[item.component] += layers * _stored_bytes(item, stored)
    for item in end_tensors(config):
        parts[item.component] += _stored_bytes(item, stored)
    return parts


def count_bytes(parameters: int, precision: str, block_size: int | None = None) -> int:
    """Bytes of weights of which only the number is known: all in one format, without scales or with those of blocks,
    which at 4 bits have zero points as well.

    Raises:
        UsageError: an unknown precision or block size.
    """
    stored = WeightFormat(precision, block_size or BLOCK_SIZES[0])
    if not stored.quantized:
        return _DENSE_BYTES[precision] * parameters
    packed = -(-parameters * _MATRIX_BITS[precision] // 8)
    if block_size is None:
        return packed
    blocks = -(-parameters // block_size)
    return packed + SCALE_BYTES * blocks + (-(-blocks // 2) if precision == "int4" else 0)


def usual_cache(config: ModelConfig, quantized: bool) -> str:
    """Precision of the cache of an ONNX export by default: float16 if its matrices are quantized.

    A step then reads about as many bytes of the cache as of the matrices, and float16 costs less than the rounding of
    the matrices' inputs to 8 bits does. ONNX Runtime's own operator is slower over such a cache.
    """
    return "fp16" if quantized and not kernels_lack(config) else "fp32"


def kernels_lack(config: ModelConfig) -> list[str]:
    """What attention, or the residual stream around it, has that no kernel computes."""
    parts = {
        f"attention {config.attention_kind}": config.attention_kind != "grouped_query",
        "no norm before a sublayer": not config.input_norms,
        "a norm of all heads together": config.joint_qk_norm,
        "heads that are rotated in part": config.rotary_dim is not None,
        "a parallel residual": config.parallel_residual,
        "bounded scores": config.attention_softcap is not None,
        "a context above 2^20 tokens": config.max_position_embeddings > 2**20,  # kLargest in runtime.h
    }
    return [part for part, given in parts.items() if given]


def kv_cache_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers cache for a token of one sequence, by precision of the cache."""
    return _cached_bytes(config, per_token=True)


def state_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers keep of one sequence however long it is, by precision; 0 for attention."""
    return _cached_bytes(config, per_token=False)


def _cached_bytes(config: ModelConfig, per_token: bool) -> dict[str, int]:
    values = sum(math.prod(state.shape) for state in block_state(config) if state.per_token == per_token)
    return {name: config.num_hidden_layers * values * size for name, size in _CACHE_BYTES.items()}


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

    `bytes` is one tensor's size and `layers` how many of it there are. A value of a weight or activation has
    `element_bytes`, a token id 8.
    """
    hidden, vocab, steps = config.hidden_size, config.vocab_size, (batch, length)
    shapes = [TensorShape("token ids", "input", steps, 8 * batch * length)]

    def add(name: str, kind: str, shape: tuple[int, ...], layers: int = 1, held: bool = True) -> None:
        shapes.append(TensorShape(name, kind, shape, math.prod(shape) * element_bytes, layers, held))

    def add_inner(item: Matrix | Activation, layers: int) -> None:
        if isinstance(item, Matrix):
            return add(f"{item.name}.weight", "weight", (item.rows, item.columns), layers)
        tokens = {
            "activation": (*steps, *item.shape),
            "cache": (batch, *item.shape[:-1], length, item.shape[-1]),
            "state": (batch, *item.shape),
            "scores": (batch, *item.shape, length, length),
        }
        return add(item.name, item.kind.replace("scores", "activation"), tokens[item.kind], layers, item.held)

    add("embed_tokens.weight", "weight", (vocab, hidden))
    add("hidden", "activation", (*steps, hidden))
    if config.positions:
        add("embed_positions.weight", "weight", (config.positions, hidden))
    elif config.position_kind == "rotary":
        add("rope cos, sin", "table", (2, length, config.rotary_size // 2))
    for part, layers in config.runs():
        for (name, sublayer), result in zip(sublayers(part).items(), ("attention", "feed-forward"), strict=True):
            if config.input_norms:
                add(NORMS[name], "activation", (*steps, hidden), layers)
            for item in sublayer.tensors:
                add_inner(item, layers)
            if config.output_norms:
                add(OUTPUT_NORMS[name], "activation", (*steps, hidden), layers)
            add(f"hidden + {result}", "activation", (*steps, hidden), layers)
    add("norm", "activation", (*steps, hidden))
    if not config.tie_word_embeddings:
        add("lm_head.weight", "weight", (vocab, hidden))
    add("logits, in chunks", "activation", (min(batch * length, LOSS_CHUNK_TOKENS), vocab))
    add("logits, whole", "activation", (*steps, vocab), held=False)
    return shapes
