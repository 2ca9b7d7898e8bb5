"""Memory arithmetic: bytes of a model on disk, in use and in training, from its shape alone. Imports no torch.

Letters: B sequences, T tokens of each, N = B T, D hidden_size, L layers, V vocabulary, P parameters, C tokens of a
chunk of the loss.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import (
    NORMS,
    OUTPUT_NORMS,
    Parameter,
    block_matrices,
    block_state,
    block_tensors,
    end_tensors,
    norms_of_block,
    parameters,
    sublayers,
)
from sportsllm.models.parts import Activation, Matrix, least_bits

PRECISIONS = ("fp32", "fp16", "int8", "int4")
TRAINING_PRECISIONS = ("fp32", "bf16", "fp16")
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Values of a packed matrix that may share a scale, as MatMulNBits allows."""
LOSS_CHUNK_TOKENS = 1_024
"""The most tokens of a chunk of the loss, on any processor."""
OPTIMIZERS, OPTIMIZER_BITS = ("adamw", "muon"), (32, 16, 8)
Processor = Literal["cpu", "gpu"]
SCALE_BYTES = 2
"""Of a block's scale, float16."""
_CACHE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
_DENSE_BYTES = {"fp32": 4, "fp16": 2}
_MATRIX_BITS = {"int8": 8, "int4": 4}
_CPU_CHUNK_TOKENS, _CPU_CHUNK_LOGITS = (128, 512), 8 * 2**20
_BLOCK_8BIT, _LEAST_8BIT = 256, 4_096
"""Of bitsandbytes' 8-bit states: values that share a scale, and the size below which a tensor's stay float32."""


def matrix_parameters(config: ModelConfig, block_size: int = 1) -> int:
    """Values of the matrices inside the blocks, each row filled up to whole blocks of `block_size`."""
    return sum(
        layers * m.rows * -(-m.columns // block_size) * block_size
        for part, layers in config.runs()
        for m in block_matrices(part)
    )


def block_parameters(config: ModelConfig) -> dict[str, int]:
    """Values of each tensor of one block, by its module's name in the sublayer; they add up to the whole block."""
    return _by_module(config, {item.name: item.numel for item in block_tensors(config)})


def block_bytes(
    config: ModelConfig, precision: str, block_size: int = 32, head_bits: int = 8, zero_points: bool = False
) -> dict[str, int]:
    """Bytes of each tensor of one block, by the names of `block_parameters`; see `component_bytes`."""
    check_format(precision, block_size, head_bits)
    found = {item.name: _stored_bytes(item, precision, block_size, zero_points) for item in block_tensors(config)}
    return _by_module(config, found)


def _by_module(config: ModelConfig, found: dict[str, int]) -> dict[str, int]:
    """Sums over the tensors of a module, matrices and biases before norms."""
    sums: dict[str, int] = {}
    for item in sorted(block_tensors(config), key=lambda item: item.component == "norms"):
        name = item.name if item.component == "norms" else item.name.removesuffix(".weight")
        name = name.removeprefix("self_attn.").removeprefix("mlp.")
        name = name.rpartition(".")[0] if item.component == "norms" else name
        sums[name] = sums.get(name, 0) + found[item.name]
    return sums


def _stored_bytes(item: Parameter, precision: str, block_size: int, zero_points: bool) -> int:
    """Bytes of a tensor of a block."""
    if item.role != "matrix" or precision in _DENSE_BYTES:
        return _DENSE_BYTES.get(precision, 4) * item.numel
    bits = max(_MATRIX_BITS[precision], least_bits(item.name.removeprefix("mlp.").removesuffix(".weight")))
    rows, columns = item.shape
    return quantized_bytes(rows, columns, bits, block_size, zero_points and bits == 4)


def quantized_bytes(rows: int, columns: int, bits: int, block_size: int, zero_points: bool = False) -> int:
    """Exact size of a packed matrix: values, one float16 scale per block and, optionally, zero points.

    Rows are padded to whole blocks, and the zero points of a row to whole bytes, as
    `sportsllm.formats.packed.QuantizedWeight` lays them out.
    """
    blocks = -(-columns // block_size)
    zeros = -(-blocks * bits // 8) if zero_points else 0
    return rows * (blocks * (block_size * bits // 8) + SCALE_BYTES * blocks + zeros)


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
        block_size: values of a packed matrix that share a scale.
        head_bits: bits of embedding and head when the rest is quantized: 4, 8, or 32 for float32.
        zero_points: whether 4-bit blocks have one each; 8-bit blocks have none.

    Raises:
        UsageError: an unknown precision, block size or number of bits.
    """
    check_format(precision, block_size, head_bits)
    parts: dict[str, int] = dict.fromkeys(config.parameters_by_component(), 0)
    for part, layers in config.runs():
        for item in block_tensors(part):
            parts[item.component] += layers * _stored_bytes(item, precision, block_size, zero_points)
    packed = precision in _MATRIX_BITS and head_bits != 32
    for item in end_tensors(config):
        if packed and item.role in ("embedding", "head"):
            zeros = zero_points and head_bits == 4
            rows, columns = item.shape
            parts[item.component] += quantized_bytes(rows, columns, head_bits, block_size, zeros)
        else:
            parts[item.component] += _DENSE_BYTES.get(precision, 4) * item.numel
    return parts


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
    return packed + SCALE_BYTES * blocks + (-(-blocks // 2) if precision == "int4" else 0)


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
        raise UsageError(f"block size {block_size} is not supported; use one of {', '.join(map(str, BLOCK_SIZES))}")
    if head_bits not in (4, 8, 32):
        raise UsageError(f"head bits {head_bits} are not supported; use 4, 8 or 32")


def kv_cache_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers cache for a token of one sequence, by precision of the cache."""
    return _cached_bytes(config, per_token=True)


def state_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes that all layers keep of one sequence however long it is, by precision; 0 for attention."""
    return _cached_bytes(config, per_token=False)


def _cached_bytes(config: ModelConfig, per_token: bool) -> dict[str, int]:
    values = sum(math.prod(state.shape) for state in block_state(config) if state.per_token == per_token)
    return {name: config.num_hidden_layers * values * size for name, size in _CACHE_BYTES.items()}


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
        add("rope cos, sin", "table", (2, length, config.head_dim // 2))
    for part, layers in config.runs():
        for (name, sublayer), result in zip(sublayers(part).items(), ("attention", "feed-forward"), strict=True):
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


@dataclass(frozen=True)
class TrainingStep:
    """What is trained at once, and how.

    `batch` sequences of `length` tokens are in memory at once; accumulation adds none. bf16 and fp16 are autocast over
    float32 weights. `optimizer_bits` are those of the optimizer's states: 32; 16, gradients too; or 8, by bitsandbytes.

    Raises:
        UsageError: a value that no training has.
    """

    batch: int
    length: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    optimizer_bits: int = 32
    processor: Processor = "cpu"
    checkpointed: bool = False

    def __post_init__(self) -> None:
        for value, words in ((self.batch, "batch size"), (self.length, "sequence length")):
            if value < 1:
                raise UsageError(f"{words} {value} must be at least 1")
        if self.precision not in TRAINING_PRECISIONS:
            known = ", ".join(TRAINING_PRECISIONS)
            raise UsageError(f"training precision {self.precision!r} is not known; use {known}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer {self.optimizer!r} is not known; use {' or '.join(OPTIMIZERS)}")
        check_optimizer_bits(self.optimizer, self.optimizer_bits)

    @property
    def mixed(self) -> bool:
        """Whether the weights are float32 and products are made in 16 bits."""
        return self.precision != "fp32"


def check_optimizer_bits(optimizer: str, bits: int) -> None:
    """Refuse states that an optimizer cannot have.

    Raises:
        UsageError: another number of bits, or 8 with Muon.
    """
    if bits not in OPTIMIZER_BITS:
        raise UsageError(f"optimizer bits {bits} are not supported; use {', '.join(map(str, OPTIMIZER_BITS))}")
    if bits == 8 and optimizer == "muon":
        raise UsageError("optimizer bits 8 are for adamw: bitsandbytes has no Muon; use 16, or adamw")


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step at its peak, by what they are for; they add up to `total`.

    `weights` are the 16-bit copies that products read under mixed precision and `master_weights` the float32
    originals; in plain float32 there is only `weights`. `activations` are what the forward pass keeps for the backward
    pass, `logits` the loss over the vocabulary and its gradients, `work` what the backward pass or the optimizer makes
    on the way. `peak` says when the peak is.
    """

    peak: Literal["loss", "backward", "optimizer"]
    weights: int
    master_weights: int
    gradients: int
    optimizer_states: int
    activations: int = 0
    logits: int = 0
    work: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: value for name, value in asdict(self).items() if name != "peak"}


def training_memory(config: ModelConfig, step: TrainingStep) -> TrainingMemory:
    """Memory of a training step: the largest of three moments, after the first batch of an accumulation.

        always       4 P weights; 4 P gradients (2 P with 16-bit states); states
        copies       mixed: 2 bytes for each value of a block's matrix, one block's alone in a checkpointed
                     backward pass, and 2 V D while there is a loss
        states       AdamW two, Muon one for each value of a block's matrix but a router's: of 4 or 2 bytes, or of 1
                     byte and a float32 scale for every 256 values
        activations  see `layer_activation_bytes`; checkpointed, each layer's input, 4 N D; rotary tables, ids
        loss         final norm and its output; logits C V, their gradient, N D and V D for its results
        backward     the gradients of a layer's widest activation; a tied head's gradient; checkpointed, one layer
        optimizer    a float32 value for each of P, or three for each of the largest tensor where states are 16 bits

    Not counted: results of single small operators, dropout's masks, and what the allocator and the driver keep.
    """
    total, table, value = config.parameters, config.vocab_size * config.hidden_size, 2 if step.mixed else 4
    tokens, hidden, layers = step.batch * step.length, config.hidden_size, config.num_hidden_layers
    each = [(layer_activation_bytes(part, step.mixed, step.processor), count) for part, count in config.runs()]
    copies = 2 * matrix_parameters(config) if step.mixed else 0
    always = TrainingMemory(
        "optimizer",
        weights=0 if step.mixed else 4 * total,
        master_weights=4 * total if step.mixed else 0,
        gradients=(2 if step.optimizer_bits == 16 else 4) * total,
        optimizer_states=_optimizer_state_bytes(config, step.optimizer, step.optimizer_bits),
        work={32: 4 * total, 16: 12 * table, 8: 0}[step.optimizer_bits],
    )
    in_layers = 4 * hidden * layers if step.checkpointed else sum(size * count for size, count in each)
    kept = tokens * (in_layers + 4 * config.head_dim + 16)
    widest = max(max(matrix.rows, matrix.columns) for part, _ in config.runs() for matrix in block_matrices(part))
    # A recomputed layer's first input is there already: it makes room for the gradient of its output.
    recomputed = tokens * max(each)[0] if step.checkpointed else 0
    loss = replace(
        always,
        peak="loss",
        weights=always.weights + copies + (2 * table if step.mixed else 0),
        activations=kept + tokens * (_norm_bytes(hidden, step.processor) + value * hidden),
        logits=_loss_bytes(config, tokens, step),
        work=0,
    )
    backward = replace(
        always,
        peak="backward",
        weights=always.weights + (copies // layers if step.checkpointed else copies),
        activations=kept + recomputed,
        work=(4 * table if config.tie_word_embeddings else 0) + tokens * 2 * value * widest,
    )
    return max((loss, backward, always), key=lambda moment: moment.total)


def largest_batch(config: ModelConfig, step: TrainingStep, limit_bytes: float) -> int:
    """The most sequences whose step needs at most `limit_bytes`; 0 where one is too many."""
    few, many = 0, 1
    while training_memory(config, replace(step, batch=many)).total <= limit_bytes:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        fits = training_memory(config, replace(step, batch=middle)).total <= limit_bytes
        few, many = (middle, many) if fits else (few, middle)
    return few


def layer_activation_bytes(config: ModelConfig, mixed: bool, processor: Processor) -> int:
    """Bytes that one block keeps for each token, by `Kept` of its sublayers.

    Each sublayer has a norm in float32 before it, in some families another after it; its matrices keep the first one's
    result (2 D or 4 D).
    """
    value = 2 if mixed else 4
    norms = norms_of_block(config) * _norm_bytes(config.hidden_size, processor)
    total = norms + len(NORMS) * value * config.hidden_size
    for kept in (sublayer.kept for sublayer in sublayers(config).values()):
        total += value * kept.computed + 4 * kept.float32 + (2 * kept.cast if mixed else 0)
        total += (value if processor == "gpu" else 4) * kept.attended + (4 if processor == "gpu" else 8) * kept.normed
    return total


def _norm_bytes(size: int, processor: Processor) -> int:
    """RMSNorm of a token keeps x and 1 / rms(x); on a CPU, where it is not one kernel, x / rms(x) too."""
    return (4 if processor == "gpu" else 8) * size + 4


def _loss_bytes(config: ModelConfig, tokens: int, step: TrainingStep) -> int:
    """The chunked loss with its gradients; a CPU adds the 16-bit gradient of the head by way of a float32 copy."""
    vocab, hidden = config.vocab_size, config.hidden_size
    chunk = min(tokens, loss_chunk_tokens(vocab, step.processor))
    if not step.mixed:
        return 4 * (chunk * vocab + (tokens + chunk) * hidden + vocab * hidden)
    product = 6 if step.processor == "cpu" else 2
    return 6 * chunk * vocab + 2 * tokens * hidden + (4 + product) * vocab * hidden


def _optimizer_state_bytes(config: ModelConfig, optimizer: str, bits: int) -> int:
    """AdamW's two moments of every value; Muon's one of those inside the blocks' matrices."""
    if bits == 8:
        sizes = [item.numel for item in parameters(config)]
        packed = [size for size in sizes if size >= _LEAST_8BIT]
        scales = sum(-(-size // _BLOCK_8BIT) for size in packed)
        return 8 * (sum(sizes) - sum(packed)) + 2 * sum(packed) + 8 * scales
    with_muon = [m.numel * count for part, count in config.runs() for m in block_matrices(part) if not m.router]
    moments = 2 * config.parameters - (sum(with_muon) if optimizer == "muon" else 0)
    return moments * bits // 8
