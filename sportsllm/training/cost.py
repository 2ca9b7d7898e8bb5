"""What a training will take, said before it begins: time by this machine's speed, and memory by the model's shape."""

import time

import torch

from sportsllm import processes
from sportsllm.console import duration, log
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import sublayers
from sportsllm.models.training_memory import TrainingStep, training_memory
from sportsllm.processors import training_device
from sportsllm.training.loop import resolve_precision
from sportsllm.training.optimizers import computes_in
from sportsllm.training.settings import TrainConfig

_SHORT_S = 120.0  # a shorter run needs no warning
_REACHED = 0.4  # of the speed of large products; 0.21 to 0.57 were measured (docs/results/training.md)
_SIZE, _TIMED_S = 1_024, 0.05


def log_cost(model: ModelConfig, config: TrainConfig) -> None:
    """Log how long a run of more than two minutes will take, and the memory of a step, of each process if several run.

    Six FLOPs a token for each parameter that it is multiplied by (https://arxiv.org/abs/2001.08361), by the speed of a
    matrix product that is timed for a moment, in all processes at once. Stages of a pipeline wait for each other.
    """
    runs, count = model.runs(), processes.count()
    stages = config.pipeline if count > 1 else 1
    among = config.tensor_parallel if config.shard and count > 1 else stages  # processes with the same sequences
    active = sum(layers * kind.active_parameters for part, layers in runs for kind in sublayers(part).values())
    tokens = config.steps * config.tokens_per_step
    flops = 6 * (active + model.vocab_size * model.hidden_size) * tokens
    device = training_device(quiet=True)
    dtype = resolve_precision(config.precision, device) or torch.float32
    busy = count * config.accumulation / (config.accumulation + stages - 1)
    seconds = flops / (_REACHED * _flops_per_s(device, dtype) * busy)
    if seconds < _SHORT_S:
        return
    step = TrainingStep(
        min(config.batch_size, max(1, config.batch_size * config.accumulation * among // count)),
        config.sequence,
        {torch.float32: "fp32", torch.float16: "fp16"}.get(dtype, "bf16"),
        config.optimizer,
        config.optimizer_bits,
        "cpu" if device.type == "cpu" else "gpu",
        config.checkpoint_activations,
        shards=count if config.shard else 1,
        tensor_parallel=among if config.shard else 1,
        stages=stages,
    )
    memory = f"{training_memory(model, step).total / 1e9:.1f} GB of memory{' in each process' * (count > 1)}"
    log(
        f"{tokens:,} tokens through {model.parameters:,} parameters: about {duration(seconds)} here, and {memory}; "
        "`plan --training` plans other devices, fewer --tokens take less"
    )


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The speed of a large matrix product."""
    size = _SIZE if computes_in(dtype, device) else _SIZE // 4  # a large product takes a minute if it is emulated
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])  # the first product is slow, and reading a value waits for a GPU
    products, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < _TIMED_S:
        float((matrix @ matrix)[0, 0])
        products += 1
    return 2 * size**3 * products / taken
