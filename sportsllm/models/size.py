"""Memory arithmetic: how many bytes a model needs on disk, in use and in training, without building it.

Imports no torch. Letters: B sequences, T tokens, D hidden_size, F intermediate_size, H query heads,
K key/value heads, E head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.storage.packed_weights import BLOCK_SIZES

PRECISIONS = ("fp32", "fp16", "int8", "int4")
CACHE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
LOSS_CHUNK_TOKENS = 1_024  # the default of `sportsllm.training.chunked_loss`; a test holds the two together
_DENSE_BYTES = {"fp32": 4, "fp16": 2}
_MATRIX_BITS = {"int8": 8, "int4": 4}


class Matrix(NamedTuple):
    """A weight matrix that is multiplied by, and how many layers have it: rows are outputs."""

    name: str
    rows: int
    columns: int
    layers: int


def block_matrices(config: ModelConfig) -> list[Matrix]:
    """The matrices inside the blocks."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    return [
        Matrix("q_proj", config.query_size, hidden, layers),
        Matrix("k_proj", config.key_value_size, hidden, layers),
        Matrix("v_proj", config.key_value_size, hidden, layers),
        Matrix("o_proj", hidden, config.query_size, layers),
        Matrix("gate_proj", inner, hidden, layers),
        Matrix("up_proj", inner, hidden, layers),
        Matrix("down_proj", hidden, inner, layers),
    ]


def block_numbers(config: ModelConfig, block_size: int = 1) -> int:
    """Numbers in the matrices inside the blocks, each row filled up to whole blocks of so many."""
    return sum(
        matrix.layers * matrix.rows * -(-matrix.columns // block_size) * block_size for matrix in block_matrices(config)
    )


def block_parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in each part of one block, by the module's name; they add up to the whole block."""
    parts = {matrix.name: matrix.rows * matrix.columns for matrix in block_matrices(config)}
    if config.attention_bias:
        parts["q, k, v bias"] = config.query_size + 2 * config.key_value_size
    if config.attention_output_bias:
        parts["o bias"] = config.hidden_size
    if config.mlp_bias:
        parts["gate, up, down bias"] = 2 * config.intermediate_size + config.hidden_size
    if config.qk_norm:
        parts["q_norm, k_norm"] = 2 * config.head_dim
    return parts | dict.fromkeys(("input_layernorm", "post_attention_layernorm"), config.hidden_size)


def quantized_bytes(rows: int, columns: int, bits: int, block_size: int, zero_points: bool = False) -> int:
    """Exact size of a packed matrix: numbers, one float32 scale a block and, where asked for, zero points.

    Rows are padded to whole blocks, and the zero points of a row to whole bytes, as
    `sportsllm.storage.packed_weights.QuantizedWeight` lays them out.
    """
    blocks = -(-columns // block_size)
    packed = rows * blocks * (block_size * bits // 8)
    scales = rows * blocks * 4
    zeros = rows * (-(-blocks * bits // 8)) if zero_points else 0
    return packed + scales + zeros


def weight_bytes(
    config: ModelConfig,
    precision: str,
    block_size: int = 32,
    head_bits: int = 8,
    zero_points: bool = False,
) -> int:
    """Bytes of all weights on disk; a tied embedding counts once.

    Args:
        config: the model.
        precision: fp32 or fp16 (everything), int8 or int4 (the blocks' matrices; norms and biases stay fp32).
        block_size: numbers that share a scale.
        head_bits: bits of embedding and head when the rest is quantized: 4, 8, or 32 for float32.
        zero_points: whether each block stores a zero point.

    Raises:
        UsageError: an unknown precision, block size or number of bits.
    """
    tables = 1 if config.tie_word_embeddings else 2
    return _body_bytes(config, precision, block_size, zero_points) + tables * _table_bytes(
        config, precision, block_size, head_bits, zero_points
    )


def active_weight_bytes(
    config: ModelConfig,
    precision: str,
    block_size: int = 32,
    head_bits: int = 8,
    zero_points: bool = False,
) -> int:
    """Bytes of weights read to make one token: all of them, but a single row of an untied embedding."""
    table = _table_bytes(config, precision, block_size, head_bits, zero_points)
    row = 0 if config.tie_word_embeddings else table // config.vocab_size
    return _body_bytes(config, precision, block_size, zero_points) + table + row


def _body_bytes(config: ModelConfig, precision: str, block_size: int, zero_points: bool) -> int:
    if precision in _DENSE_BYTES:
        return config.block_parameters * _DENSE_BYTES[precision]
    if precision not in _MATRIX_BITS:
        raise UsageError(f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(str(size) for size in BLOCK_SIZES)
        raise UsageError(f"block size {block_size} is not supported; use one of {sizes}")
    bits = _MATRIX_BITS[precision]
    total = sum(
        matrix.layers * quantized_bytes(matrix.rows, matrix.columns, bits, block_size, zero_points)
        for matrix in block_matrices(config)
    )
    return total + 4 * (config.block_parameters - block_numbers(config))


def _table_bytes(config: ModelConfig, precision: str, block_size: int, head_bits: int, zero_points: bool) -> int:
    numbers = config.vocab_size * config.hidden_size
    if precision in _DENSE_BYTES:
        return numbers * _DENSE_BYTES[precision]
    if head_bits == 32:
        return 4 * numbers
    if head_bits not in (4, 8):
        raise UsageError(f"head bits {head_bits} are not supported; use 4, 8 or 32")
    return quantized_bytes(config.vocab_size, config.hidden_size, head_bits, block_size, zero_points)


def kv_cache_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """2 * layers * kv_heads * head_dim * bytes, by precision of the cache, for one sequence."""
    numbers = 2 * config.num_hidden_layers * config.key_value_size
    return {name: numbers * size for name, size in CACHE_BYTES.items()}


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes one training step needs, by what they are for.

    `weights` are the low-precision copies that matrices are multiplied by under mixed precision and
    `master_weights` the float32 originals; in plain float32 there is only `weights`. `activations` are what
    the forward pass keeps for the backward pass, `activations_checkpointed` the same with activation
    checkpointing, and `loss` what the chunked loss over the vocabulary holds.
    """

    weights: int
    master_weights: int
    gradients: int
    optimizer_states: int
    loss: int
    activations: int
    activations_checkpointed: int

    @property
    def total(self) -> int:
        """Bytes without activation checkpointing."""
        return self._fixed + self.activations

    @property
    def total_checkpointed(self) -> int:
        """Bytes with activation checkpointing."""
        return self._fixed + self.activations_checkpointed

    @property
    def _fixed(self) -> int:
        return self.weights + self.master_weights + self.gradients + self.optimizer_states + self.loss


def training_memory(
    config: ModelConfig, batch: int, length: int, precision: str = "bf16", optimizer: str = "adamw"
) -> TrainingMemory:
    """Memory of one training step of `sportsllm.models.language_model.SportsLLM`.

        weights + master weights   4 P in fp32; 2 * (numbers in matrices) + 4 P in bf16 or fp16
        gradients                  4 P
        optimizer states           AdamW 8 P; Muon 4 for each number in a block's matrix, 8 for the rest
        loss                       8 C V + 4 V D + 4 B T D  with chunks of C tokens
        activations                see `_layer_activation_bytes`; L layers, the final norm and its output
        activations, checkpointed  4 B T D for each layer's input, and one layer recomputed

    Temporary results of single operators and the allocator's own losses are not counted.

    Args:
        config: the model; P is its parameters.
        batch: B, sequences in memory at once (accumulation does not count).
        length: T, tokens of a sequence.
        precision: fp32, bf16 or fp16 (autocast over float32 weights).
        optimizer: adamw or muon.

    Raises:
        UsageError: an unknown precision or optimizer, or a batch or length below 1.
    """
    if batch < 1 or length < 1:
        raise UsageError(f"batch {batch} and length {length} must be at least 1")
    if precision not in ("fp32", "bf16", "fp16"):
        raise UsageError(f"training precision {precision!r} is not known; use fp32, bf16 or fp16")
    if optimizer not in ("adamw", "muon"):
        raise UsageError(f"optimizer {optimizer!r} is not known; use adamw or muon")
    mixed = precision != "fp32"
    parameters, tokens, hidden = config.parameters, batch * length, config.hidden_size
    in_blocks = block_numbers(config)
    table = config.vocab_size * hidden
    layer = _layer_activation_bytes(config, mixed)
    ends = 8 + (2 * 4 * hidden + 4) + 4 * hidden  # token ids, final norm, its output
    return TrainingMemory(
        weights=2 * (in_blocks + table) if mixed else 4 * parameters,
        master_weights=4 * parameters if mixed else 0,
        gradients=4 * parameters,
        optimizer_states=8 * parameters - (4 * in_blocks if optimizer == "muon" else 0),
        loss=8 * min(tokens, LOSS_CHUNK_TOKENS) * config.vocab_size + 4 * table + 4 * tokens * hidden,
        activations=tokens * (config.num_hidden_layers * layer + ends),
        activations_checkpointed=tokens * (config.num_hidden_layers * 4 * hidden + layer + ends),
    )


def _layer_activation_bytes(config: ModelConfig, mixed: bool) -> int:
    """Bytes one block keeps for each token, with a = 4 in float32 and 2 under mixed precision.

    Two norms keep x, x / rms(x) and 1 / rms(x) in float32: 2 (8 D + 4). The matrices keep their input: the two
    norms' results (a D each), the attention's output (a H E) and the feed-forward's product (a F). Attention
    computes in float32 on a CPU: it keeps q, k, v and its output (4 (2 H + 2 K) E; in float32 that output is also
    the next matrix's input and counts once) and a log-sum for each head (4 H), but no (T, T)
    scores; SwiGLU keeps gate, silu(gate) and up (3 a F).
    Per-head norms of q and k (Qwen3) keep twice their width and one number a head, in float32.
    """
    size = 2 if mixed else 4
    hidden, heads = config.hidden_size, config.num_attention_heads
    norms = 2 * (2 * 4 * hidden + 4)
    inputs = 2 * size * hidden
    attention = 4 * (2 * config.query_size + 2 * config.key_value_size) + 4 * heads
    if mixed:
        attention += size * config.query_size
    feed_forward = 4 * size * config.intermediate_size
    if config.qk_norm:
        attention += 2 * 4 * (config.query_size + config.key_value_size)
        attention += 4 * (heads + config.num_key_value_heads)
    return norms + inputs + attention + feed_forward


class TensorShape(NamedTuple):
    """A tensor on the way from tokens to logits; `held` is False for one that is never made whole."""

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    layers: int = 1
    held: bool = True


def tensor_shapes(config: ModelConfig, batch: int, length: int, element_bytes: int = 4) -> list[TensorShape]:
    """Every tensor along the way for a batch and length, weights first used where they stand.

    Args:
        config: the model.
        batch: B.
        length: T.
        element_bytes: bytes of one number of a weight or activation; token ids have 8.

    Returns:
        Tensors in order of use. `bytes` is one tensor's size and `layers` how many of it there are.
    """
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layers, steps = config.num_hidden_layers, (batch, length)
    rows: list[tuple[str, str, tuple[int, ...], int, bool]] = [
        ("embed_tokens.weight", "weight", (vocab, hidden), 1, True),
        ("hidden", "activation", (*steps, hidden), 1, True),
        ("rope cos, sin", "table", (2, length, width // 2), 1, True),
        ("input_layernorm", "activation", (*steps, hidden), layers, True),
        ("q_proj.weight", "weight", (config.query_size, hidden), layers, True),
        ("k_proj.weight", "weight", (config.key_value_size, hidden), layers, True),
        ("v_proj.weight", "weight", (config.key_value_size, hidden), layers, True),
        ("q", "activation", (*steps, heads, width), layers, True),
        ("k, cached", "cache", (batch, kv_heads, length, width), layers, True),
        ("v, cached", "cache", (batch, kv_heads, length, width), layers, True),
        ("attention scores", "activation", (batch, heads, length, length), layers, False),
        ("attention output", "activation", (*steps, heads, width), layers, True),
        ("o_proj.weight", "weight", (hidden, config.query_size), layers, True),
        ("hidden + attention", "activation", (*steps, hidden), layers, True),
        ("post_attention_layernorm", "activation", (*steps, hidden), layers, True),
        ("gate_proj.weight", "weight", (inner, hidden), layers, True),
        ("up_proj.weight", "weight", (inner, hidden), layers, True),
        ("gate", "activation", (*steps, inner), layers, True),
        ("up", "activation", (*steps, inner), layers, True),
        ("silu(gate) * up", "activation", (*steps, inner), layers, True),
        ("down_proj.weight", "weight", (hidden, inner), layers, True),
        ("hidden + feed-forward", "activation", (*steps, hidden), layers, True),
        ("norm", "activation", (*steps, hidden), 1, True),
    ]
    if not config.tie_word_embeddings:
        rows.append(("lm_head.weight", "weight", (vocab, hidden), 1, True))
    rows.append(("logits, in chunks", "activation", (min(batch * length, LOSS_CHUNK_TOKENS), vocab), 1, True))
    rows.append(("logits, whole", "activation", (*steps, vocab), 1, False))
    shapes = [TensorShape("token ids", "input", steps, 8 * batch * length)]
    for name, kind, shape, layers_with_it, held in rows:
        shapes.append(TensorShape(name, kind, shape, math.prod(shape) * element_bytes, layers_with_it, held))
    return shapes
