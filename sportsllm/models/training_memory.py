"""Memory of one training step of `sportsllm.models.language_model.SportsLLM`, from its shape alone. Imports no torch.

Letters: B sequences, T tokens of each, N = B T, D hidden_size, L layers, V vocabulary, P parameters, C tokens of a
chunk of the loss. A number is 2 bytes where bf16 or fp16 is computed in, else 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.kinds import NORMS, block_matrices, norms_of_block, parameters, sublayers
from sportsllm.models.parts import Processor
from sportsllm.models.size import loss_chunk_tokens, matrix_parameters

PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "muon")
OPTIMIZER_BITS = (32, 16, 8)
BLOCK_8BIT, LEAST_8BIT = 256, 4_096
"""Of bitsandbytes' 8-bit states: numbers that share a scale, and the size below which a tensor's stay float32."""


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
        if self.precision not in PRECISIONS:
            raise UsageError(f"training precision {self.precision!r} is not known; use {', '.join(PRECISIONS)}")
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
        names = "weights", "master_weights", "gradients", "optimizer_states", "activations", "logits", "work"
        return {name: getattr(self, name) for name in names}


def training_memory(config: ModelConfig, step: TrainingStep) -> TrainingMemory:
    """Memory of a training step: the largest of three moments, after the first batch of an accumulation.

        always       4 P weights; 4 P gradients (2 P with 16-bit states); states
        copies       mixed: 2 bytes for each number in a block's matrix, one block's alone in a checkpointed
                     backward pass, and 2 V D while there is a loss
        states       AdamW two, Muon one for each number of a block's matrix but a router's: of 4 or 2 bytes, or of 1
                     byte and a float32 scale for every 256 numbers
        activations  see `layer_activation_bytes`; checkpointed, each layer's input, 4 N D
        loss         final norm and its output; logits C V, their gradient, N D and V D for its results
        backward     the gradients of a layer's widest activation; a tied head's gradient; checkpointed, one layer
        optimizer    a float32 number for each of P, or three for each of the largest tensor where states are 16 bits

    Not counted: results of single small operators, dropout's masks, and what the allocator and the driver keep.
    """
    total, in_blocks, table = config.parameters, matrix_parameters(config), config.vocab_size * config.hidden_size
    tokens, hidden, layers = step.batch * step.length, config.hidden_size, config.num_hidden_layers
    each = [(layer_activation_bytes(part, step.mixed, step.processor), count) for part, count in config.runs()]
    number, layer, all_layers = 2 if step.mixed else 4, max(each)[0], sum(size * count for size, count in each)
    copies = 2 * in_blocks if step.mixed else 0
    always = TrainingMemory(
        "optimizer",
        weights=0 if step.mixed else 4 * total,
        master_weights=4 * total if step.mixed else 0,
        gradients=(2 if step.optimizer_bits == 16 else 4) * total,
        optimizer_states=_state_bytes(config, step.optimizer, step.optimizer_bits),
        work=_optimizer_work_bytes(config, step.optimizer_bits),
    )
    kept = tokens * (
        (4 * hidden * layers if step.checkpointed else all_layers) + 4 * config.head_dim + 16
    )  # rotary, ids
    matrices = [matrix for part, _ in config.runs() for matrix in block_matrices(part)]
    widest = max(max(matrix.rows, matrix.columns) for matrix in matrices)
    waiting = 4 * table if config.tie_word_embeddings else 0
    in_use = copies // layers if step.checkpointed else copies
    # A recomputed layer's first input is there already: it makes room for the gradient of its output.
    recomputed = tokens * layer if step.checkpointed else 0
    loss = replace(
        always,
        peak="loss",
        weights=always.weights + copies + (2 * table if step.mixed else 0),
        activations=kept + tokens * (_norm_bytes(hidden, step.processor) + number * hidden),
        logits=_loss_bytes(config, tokens, step),
        work=0,
    )
    backward = replace(
        always,
        peak="backward",
        weights=always.weights + in_use,
        activations=kept + recomputed,
        work=waiting + tokens * 2 * number * widest,
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
    """Bytes that one block keeps for each token.

    Each sublayer has a norm in float32 before it, in some families another after it; its matrices keep the first one's
    result (2 D or 4 D). The kinds of attention and feed-forward add their own.
    """
    norms = norms_of_block(config) // len(NORMS)
    a_norm = norms * _norm_bytes(config.hidden_size, processor) + (2 if mixed else 4) * config.hidden_size
    return sum(a_norm + kind.activation_bytes(config, mixed, processor) for kind in sublayers(config).values())


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


def _state_bytes(config: ModelConfig, optimizer: str, bits: int) -> int:
    """AdamW's two moments of every number; Muon's one of those inside the blocks' matrices."""
    if bits == 8:
        sizes = [item.shape[0] * (item.shape[1] if len(item.shape) > 1 else 1) for item in parameters(config)]
        packed = [size for size in sizes if size >= LEAST_8BIT]
        scales = sum(-(-size // BLOCK_8BIT) for size in packed)
        return 8 * (sum(sizes) - sum(packed)) + 2 * sum(packed) + 8 * scales
    with_muon = [m.numel * count for part, count in config.runs() for m in block_matrices(part) if not m.router]
    moments = 2 * config.parameters - (sum(with_muon) if optimizer == "muon" else 0)
    return moments * bits // 8


def _optimizer_work_bytes(config: ModelConfig, bits: int) -> int:
    largest = config.vocab_size * config.hidden_size
    return {32: 4 * config.parameters, 16: 12 * largest, 8: 0}[bits]
