"""Memory arithmetic: how many bytes a model needs on disk, in use and in training, without building it.

Imports no torch. Letters: B sequences, T tokens, D hidden_size, L layers, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS, OUTPUT_NORMS, block_matrices, block_state, halves, norms_of_block
from sportsllm.models.parts import Matrix

PRECISIONS = ("fp32", "fp16", "int8", "int4")
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Numbers of a packed matrix that may share a scale, as MatMulNBits allows."""
CACHE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
LOSS_CHUNK_TOKENS = 1_024  # the default of `sportsllm.training.chunked_loss`; a test holds the two together
_DENSE_BYTES = {"fp32": 4, "fp16": 2}
_MATRIX_BITS = {"int8": 8, "int4": 4}


def block_numbers(config: ModelConfig, block_size: int = 1) -> int:
    """Numbers in the matrices inside the blocks, each row filled up to whole blocks of `block_size`."""
    padded = sum(m.rows * -(-m.columns // block_size) * block_size for m in block_matrices(config))
    return config.num_hidden_layers * padded


def block_parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in each part of one block, by the module's name; they add up to the whole block."""
    parts: dict[str, int] = {}
    norms: dict[str, int] = {}
    for half, kind in halves(config).items():
        matrices = kind.matrices(config)
        parts |= {matrix.name: matrix.numbers for matrix in matrices}
        parts |= {f"{matrix.name}.bias": matrix.rows for matrix in matrices if matrix.bias}
        norms |= {vector.name: vector.size for vector in kind.vectors(config)}
        norms[NORMS[half]] = config.norm_numbers
        if config.output_norms:
            norms[OUTPUT_NORMS[half]] = config.norm_numbers
    return parts | norms


def quantized_bytes(rows: int, columns: int, bits: int, block_size: int, zero_points: bool = False) -> int:
    """Exact size of a packed matrix: numbers, one float32 scale per block and, optionally, zero points.

    Rows are padded to whole blocks, and the zero points of a row to whole bytes, as
    `sportsllm.storage.packed_weights.QuantizedWeight` lays them out.
    """
    blocks = -(-columns // block_size)
    packed = rows * blocks * (block_size * bits // 8)
    scales = rows * blocks * 4
    zeros = rows * (-(-blocks * bits // 8)) if zero_points else 0
    return packed + scales + zeros


def weight_bytes(
    config: ModelConfig, precision: str, block_size: int = 32, head_bits: int = 8, zero_points: bool = False
) -> int:
    """Bytes of all weights on disk; a tied embedding counts once.

    Args:
        precision: fp32 or fp16 (everything), int8 or int4 (the blocks' matrices; norms and biases stay fp32).
        head_bits: bits of embedding and head when the rest is quantized: 4, 8, or 32 for float32.
        zero_points: whether 4-bit blocks have one each; 8-bit blocks have none.

    Raises:
        UsageError: an unknown precision, block size or number of bits.
    """
    if precision in _DENSE_BYTES:
        return config.parameters * _DENSE_BYTES[precision]
    if precision not in _MATRIX_BITS:
        raise UsageError(f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(str(size) for size in BLOCK_SIZES)
        raise UsageError(f"block size {block_size} is not supported; use one of {sizes}")
    if head_bits not in (4, 8, 32):
        raise UsageError(f"head bits {head_bits} are not supported; use 4, 8 or 32")
    bits = _MATRIX_BITS[precision]
    zeros = {number: zero_points and number == 4 for number in (bits, head_bits)}
    a_block = sum(quantized_bytes(m.rows, m.columns, bits, block_size, zeros[bits]) for m in block_matrices(config))
    table = 4 * config.vocab_size * config.hidden_size
    if head_bits != 32:
        table = quantized_bytes(config.vocab_size, config.hidden_size, head_bits, block_size, zeros[head_bits])
    tables = 1 if config.tie_word_embeddings else 2
    norms_and_biases = config.block_parameters - block_numbers(config)
    positions = config.positions * config.hidden_size
    return config.num_hidden_layers * a_block + 4 * (norms_and_biases + positions) + tables * table


def kv_cache_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers cache for a token of one sequence, by precision of the cache."""
    numbers = config.num_hidden_layers * sum(math.prod(state.shape) for state in block_state(config))
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
        fixed = self.weights + self.master_weights + self.gradients + self.optimizer_states + self.loss
        return fixed + self.activations

    @property
    def total_checkpointed(self) -> int:
        """Bytes with activation checkpointing."""
        return self.total - self.activations + self.activations_checkpointed


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

    P is the model's parameters, B = `batch` the sequences in memory at once (accumulation does not count) and T =
    `length` their tokens. bf16 and fp16 are autocast over float32 weights.

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

    Two norms keep x, x / rms(x) and 1 / rms(x) in float32: 2 (8 D + 4), and as much again those after the halves. The
    matrices that read the norms' results keep those (a D each). The kinds of attention and feed-forward add their own.
    """
    norms = norms_of_block(config) // len(NORMS)
    a_half = norms * (2 * 4 * config.hidden_size + 4) + (2 if mixed else 4) * config.hidden_size
    return sum(a_half + kind.activation_bytes(config, mixed) for kind in halves(config).values())


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
    hidden, vocab, layers, steps = config.hidden_size, config.vocab_size, config.num_hidden_layers, (batch, length)
    shapes = [TensorShape("token ids", "input", steps, 8 * batch * length)]

    def add(name: str, kind: str, shape: tuple[int, ...], layers: int = 1, held: bool = True) -> None:
        shapes.append(TensorShape(name, kind, shape, math.prod(shape) * element_bytes, layers, held))

    add("embed_tokens.weight", "weight", (vocab, hidden))
    add("hidden", "activation", (*steps, hidden))
    if config.positions:
        add("embed_positions.weight", "weight", (config.positions, hidden))
    else:
        add("rope cos, sin", "table", (2, length, config.head_dim // 2))
    for (half, described), result in zip(halves(config).items(), ("attention", "feed-forward"), strict=True):
        add(NORMS[half], "activation", (*steps, hidden), layers)
        for item in described.tensors(config):
            if isinstance(item, Matrix):
                add(f"{item.name}.weight", "weight", (item.rows, item.columns), layers)
            elif item.kind == "cache":
                add(item.name, "cache", (batch, *item.shape[:-1], length, item.shape[-1]), layers, item.held)
            elif item.kind == "scores":
                add(item.name, "activation", (batch, *item.shape, length, length), layers, item.held)
            else:
                add(item.name, "activation", (*steps, *item.shape), layers, item.held)
        if config.output_norms:
            add(OUTPUT_NORMS[half], "activation", (*steps, hidden), layers)
        add(f"hidden + {result}", "activation", (*steps, hidden), layers)
    add("norm", "activation", (*steps, hidden))
    if not config.tie_word_embeddings:
        add("lm_head.weight", "weight", (vocab, hidden))
    add("logits, in chunks", "activation", (min(batch * length, LOSS_CHUNK_TOKENS), vocab))
    add("logits, whole", "activation", (*steps, vocab), held=False)
    return shapes
