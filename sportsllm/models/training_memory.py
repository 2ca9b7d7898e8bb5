"""Memory of a training step, from the model's shape alone. Imports no torch.

Letters: B sequences, T tokens of each, N = B T, D hidden_size, L layers, V vocabulary, P parameters, C tokens of a
chunk of the loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Literal

from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import NORMS, block_matrices, norms_of_block, parameters, sublayers
from sportsllm.models.memory import matrix_parameters
from sportsllm.processors import loss_chunk_tokens
from sportsllm.settings import check_optimizer_bits

Processor = Literal["cpu", "gpu"]
_BLOCK_8BIT, _LEAST_8BIT = 256, 4_096
"""In bitsandbytes' 8-bit states: values that share a scale, and the size below which a tensor's stay float32."""


@dataclass(frozen=True)
class TrainingStep:
    """What is trained at once, and how.

    `batch` sequences of `length` tokens are in memory at once; accumulation adds none. bf16 and fp16 are autocast over
    float32 weights. `optimizer_bits` are those of the optimizer's states: 32, or 8 by bitsandbytes.
    `shards` processes hold a part each of weights, gradients and states, by FSDP2; the batch is that of one, or of
    `tensor_parallel` of them together. `stages` processes hold some layers each, and as many batches are under way.

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
    shards: int = 1
    tensor_parallel: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        check_optimizer_bits(self.optimizer, self.optimizer_bits)
        if self.shards > 1 and self.optimizer_bits != 32:
            raise UsageError(f"optimizer_bits={self.optimizer_bits}: sharded states have 32; leave it or gpus out")

    @property
    def mixed(self) -> bool:
        """Whether the weights are float32 and products are made in 16 bits."""
        return self.precision != "fp32"


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step at its peak, by what they are for; they add up to `total`.

    `weights` are the 16-bit copies that products read under mixed precision and `master_weights` the float32
    originals; in plain float32 there is only `weights`. `gathered` are other processes' parts of weights and gradients,
    held for a moment. `activations` are what the forward pass keeps for the backward
    pass, `logits` the loss over the vocabulary and its gradients, `work` what the backward pass or the optimizer makes
    on the way. `peak` says when the peak is.
    """

    peak: Literal["loss", "backward", "optimizer"]
    weights: int
    master_weights: int
    gradients: int
    optimizer_states: int
    gathered: int = 0
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

        always       4 P weights; 4 P gradients; states
        copies       mixed: 2 bytes for each value of a block's matrix, one block's alone in a checkpointed
                     backward pass, and 2 V D while there is a loss
        states       AdamW two, Muon one for each value of a block's matrix but a router's: of 4 bytes, or of 1 byte
                     and a float32 scale for every 256 values
        activations  see `layer_activation_bytes`; checkpointed, each layer's input, 4 N D; rotary tables, ids
        loss         final norm and its output; logits C V, their gradient, N D and V D for its results
        backward     the gradients of a layer's widest activation; a tied head's gradient; checkpointed, one layer
        optimizer    Muon: for the matrix shape with the largest total, the float32 stack, two iterates and two Gram
                     products; AdamW: nothing
        stages       the first with the embedding and as many batches as stages, or the last with head and loss
        tensor       what is inside of a sublayer divided once more; what is outside is divided by groups alone
        sharded      weights, gradients, states and the optimizer's values divided; gathered are what lies outside of
                     the blocks' sublayers, from backward on with its gradients, and the largest sublayer: its weights,
                     in backward also those of the next, its gradients and twice what is sent of them; at its end
                     a tied head's gradient instead

    Not counted: results of single small operators, dropout's masks, and what the allocator and the driver keep.
    """
    table, batches = config.vocab_size * config.hidden_size, step.stages
    tied = 4 * table if config.tie_word_embeddings and step.stages == 1 else 0
    if step.stages > 1:  # with one of the two tables
        layers = -(-config.num_hidden_layers // step.stages)
        config = config.with_changes(num_hidden_layers=layers, tie_word_embeddings=True)
    root, sublayer = _gathered_bytes(config)
    total = (config.parameters + (step.tensor_parallel - 1) * root // 4) // step.shards
    value = 2 if step.mixed else 4
    tokens, hidden, layers = step.batch * step.length, config.hidden_size, config.num_hidden_layers
    kinds = step.mixed, step.processor, step.tensor_parallel
    each = [(layer_activation_bytes(part, *kinds), count) for part, count in config.runs()]
    copies = 2 * matrix_parameters(config) // step.tensor_parallel if step.mixed else 0
    states = _optimizer_state_bytes(config, step.optimizer, step.optimizer_bits)
    always = TrainingMemory(
        "optimizer",
        weights=0 if step.mixed else 4 * total,
        master_weights=4 * total if step.mixed else 0,
        gradients=4 * total,
        optimizer_states=states * total // config.parameters,
        work=_optimizer_work_bytes(config, step) * total // config.parameters,
    )
    in_layers = 4 * hidden * layers if step.checkpointed else sum(size * count for size, count in each)
    kept = tokens * (in_layers + 4 * config.head_dim + 16)
    widest = max(max(matrix.rows, matrix.columns) for part, _ in config.runs() for matrix in block_matrices(part))
    # A recomputed layer's first input is there already: it makes room for the gradient of its output.
    recomputed = tokens * max(each)[0] if step.checkpointed else 0
    root, sublayer = (root, sublayer // step.tensor_parallel) if step.shards > 1 else (0, 0)
    cached = 0 if step.shards > 1 and step.checkpointed else copies  # autocast keeps no copies of gathered weights
    loss = replace(
        always,
        peak="loss",
        weights=always.weights + cached + (2 * table if step.mixed else 0),
        activations=kept + tokens * (_norm_bytes(hidden, step.processor) + value * hidden),
        logits=_loss_bytes(config, tokens, step),
        gathered=root + sublayer,
        work=0,
    )
    backward = replace(
        always,
        peak="backward",
        weights=always.weights + (copies // layers if step.checkpointed else copies),
        activations=batches * kept + recomputed,
        gathered=2 * root + max(5 * sublayer, sublayer + tied) if step.shards > 1 else 0,
        work=(tied if step.shards == 1 else 0) + tokens * 2 * value * max(widest // step.tensor_parallel, hidden),
    )
    return max((loss, backward, always), key=lambda moment: moment.total)


def largest_batch(config: ModelConfig, step: TrainingStep, limit_bytes: float) -> int:
    """The most sequences whose step needs at most `limit_bytes`; 0 if one is too many."""
    return bisect_right(
        range(1, 2**40), limit_bytes, key=lambda batch: training_memory(config, replace(step, batch=batch)).total
    )


def layer_activation_bytes(config: ModelConfig, mixed: bool, processor: Processor, among: int = 1) -> int:
    """Bytes that one block keeps for each token, by `Kept` of its sublayers, which `among` processes share.

    Each sublayer has a norm in float32 before it, in some families another after it; its matrices keep the first one's
    result (2 D or 4 D).
    """
    value = 2 if mixed else 4
    norms = norms_of_block(config) * _norm_bytes(config.hidden_size, processor)
    total = norms + len(NORMS) * value * config.hidden_size
    for kept in (sublayer.kept for sublayer in sublayers(config).values()):
        inside = value * kept.computed + 4 * kept.float32 + (2 * kept.cast if mixed else 0)
        inside += (value if processor == "gpu" else 4) * kept.attended + (4 if processor == "gpu" else 8) * kept.normed
        total += inside // among
    return total


def _norm_bytes(size: int, processor: Processor) -> int:
    """RMSNorm of a token keeps x and 1 / rms(x); on a CPU, where it is not one kernel, x / rms(x) too."""
    return (4 if processor == "gpu" else 8) * size + 4


def _gathered_bytes(config: ModelConfig) -> tuple[int, int]:
    """Float32 weights outside of the blocks' sublayers, and of the largest sublayer."""
    runs = [
        (sum(matrix.numel for matrix in sublayer.matrices), layers)
        for part, layers in config.runs()
        for sublayer in sublayers(part).values()
    ]
    inside = sum(numel * layers for numel, layers in runs)
    return 4 * (config.parameters - inside), 4 * max(numel for numel, _ in runs)


def _loss_bytes(config: ModelConfig, tokens: int, step: TrainingStep) -> int:
    """The chunked loss with its gradients; a CPU adds the 16-bit gradient of the head by way of a float32 copy."""
    vocab, hidden = config.vocab_size, config.hidden_size
    chunk = min(tokens, loss_chunk_tokens(vocab, step.processor))
    if not step.mixed:
        return 4 * (chunk * vocab + (tokens + chunk) * hidden + vocab * hidden)
    product = 6 if step.processor == "cpu" else 2
    return 6 * chunk * vocab + 2 * tokens * hidden + (4 + product) * vocab * hidden


def _muon_values(config: ModelConfig, optimizer: str) -> Counter[tuple[int, int]]:
    """Parameters that Muon trains, by the shape of their matrices."""
    values: Counter[tuple[int, int]] = Counter()
    for part, layers in config.runs() if optimizer == "muon" else ():
        for matrix in block_matrices(part):
            values[matrix.rows, matrix.columns] += 0 if matrix.router else matrix.numel * layers
    return values


def _optimizer_work_bytes(config: ModelConfig, step: TrainingStep) -> int:
    """Temporary bytes of Muon's step, which iterates in bfloat16 on a GPU."""
    values, products = (10, 4) if step.processor == "gpu" else (12, 8)
    matrices = _muon_values(config, step.optimizer).items()
    return max((values * numel + products * numel * min(shape) // max(shape) for shape, numel in matrices), default=0)


def _optimizer_state_bytes(config: ModelConfig, optimizer: str, bits: int) -> int:
    """AdamW's two moments of every value; Muon's one of those inside the blocks' matrices."""
    if bits == 8:
        sizes = [item.numel for item in parameters(config)]
        packed = [size for size in sizes if size >= _LEAST_8BIT]
        scales = sum(-(-size // _BLOCK_8BIT) for size in packed)
        return 8 * (sum(sizes) - sum(packed)) + 2 * sum(packed) + 8 * scales
    return 4 * (2 * config.parameters - _muon_values(config, optimizer).total())
