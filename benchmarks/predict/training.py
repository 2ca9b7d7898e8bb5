"""What a training takes before it is run: memory against a device's, time, energy and price."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.devices.schema import Device, Hardware
from benchmarks.measure.machine import this_machine
from benchmarks.model_size import forward_flops_per_token, training_flops_per_token
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import is_llama_like
from sportsllm.models.training_memory import TrainingStep, largest_batch, training_memory

UTILIZATION = 0.3
"""Model FLOPs over the processor's peak. Large models on accelerators reached 21 to 46% (PaLM, table 3,
https://arxiv.org/abs/2204.02311); models below 10M parameters on two cores 21 to 35%, `small` 57% (docs/results)."""
CHECKPOINT, SHARD = "--set checkpoint_activations=true", "--set shard=true"
_LAYOUT = "checkpointed", "shards", "tensor_parallel", "stages"
_TENSOR_PARALLEL = 2, 4, 8  # within a machine


@dataclass(frozen=True)
class Cost:
    """What time and price are worked out from.

    Attributes:
        tokens: to train on.
        price_per_hour: of the device, in any currency.
        utilization: model FLOPs as a share of the peak of the device's matrix products.
        gpus: devices that train together, each with the step's batch.
    """

    tokens: int | None = None
    price_per_hour: float | None = None
    utilization: float = UTILIZATION
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise UsageError(f"--set utilization={self.utilization} must be above 0 and at most 1")
        if self.price_per_hour is not None and self.tokens is None:
            raise UsageError("price_per_hour needs --tokens, the length of the training")


def plan_training(config: ModelConfig, step: TrainingStep, device: Device | None, cost: Cost) -> dict[str, Any]:
    """Memory of a training step, plain and with activation checkpointing, and on a device what fits and how long.

    With several GPUs `plain` and `checkpointed` are those of whole models, and figures of memory are for each GPU.

    Returns:
        The step's settings; `plain` and `checkpointed`, with several GPUs `sharded` and `sharded_checkpointed`, each
        with bytes by part, `total_bytes`, when its `peak` is and with a device `fits`, `largest_batch` and the figures
        of `_speed`; with several GPUs `layouts`, each with the same and its `flags` of `train`; `changes`, each with
        the `flags` that make the step fit; `flops_per_token`, and with tokens `flops`.

    Raises:
        UsageError: a price without a device, or several devices that are no GPUs.
    """
    if cost.gpus > 1 and step.processor != "gpu":
        raise UsageError(f"gpus={cost.gpus}: give --target NAME too, a GPU")
    if device is None and cost.price_per_hour is not None:
        raise UsageError("price_per_hour needs --target: how long a training takes depends on it")
    per_token = training_flops_per_token(config, step.length)
    result: dict[str, Any] = {
        "device": None if device is None else device.name,
        **{name: value for name, value in vars(step).items() if name not in _LAYOUT},
        "gpus": cost.gpus,
        "flops_per_token": per_token,
        "tokens": cost.tokens,
        "flops": None if cost.tokens is None else per_token * cost.tokens,
    }
    hardware, usable = None, 0
    if device is not None:
        hardware = device.hardware or this_machine()
        usable = round(1e6 * hardware.memory_usable.value)
        half = hardware.fp16_matmul_rate if step.mixed else None  # None too if the device file has no other rate
        result |= {"usable_bytes": usable, "utilization": cost.utilization}
        result["peak_flops_per_s"] = 1e9 * (half or hardware.fp32_matmul_rate).value
        result["peak_from"] = "fp16_matmul_rate" if half else "fp32_matmul_rate"

    def figures(each: TrainingStep) -> dict[str, Any]:
        needed = training_memory(config, each)
        parts = {f"{part}_bytes": count for part, count in needed.parts().items()}
        found = {**parts, "total_bytes": needed.total, "peak": needed.peak}
        if hardware is not None:
            found |= {"fits": needed.total <= usable, "largest_batch": largest_batch(config, each, usable)}
            found |= _speed(config, each, result["peak_flops_per_s"], hardware, cost)
        return found

    result |= {name: figures(each) for name, each in _layouts(step, cost.gpus).items()}
    if cost.gpus > 1:
        divided = _divided(config, step, cost.gpus).items()
        result["layouts"] = [{"flags": flags, **figures(each)} for flags, each in divided]
    if device is not None:
        result["changes"] = [] if result["plain"]["fits"] else _changes(config, step, usable, cost.gpus)
    return result


def _layouts(step: TrainingStep, gpus: int) -> dict[str, TrainingStep]:
    layouts = {"plain": step, "checkpointed": replace(step, checkpointed=True)}
    sharded = {"sharded" + f"_{name}" * each.checkpointed: replace(each, shards=gpus) for name, each in layouts.items()}
    return layouts | sharded if gpus > 1 else layouts


def _divided(config: ModelConfig, step: TrainingStep, gpus: int) -> dict[str, TrainingStep]:
    """The steps by the flags of `train`: sharded, with tensor parallelism if it divides the model, and in stages."""
    found = {SHARD: replace(step, shards=gpus)}
    plain = (step.optimizer, step.precision != "fp16") == ("adamw", True)
    sizes = [(part.num_attention_heads, part.num_key_value_heads, part.intermediate_size) for part, _ in config.runs()]
    for among in _TENSOR_PARALLEL if plain and is_llama_like(config) else ():
        if not any(size % among for size in (gpus, *itertools.chain(*sizes))):
            found[f"{SHARD} --set tensor_parallel={among}"] = replace(step, shards=gpus, tensor_parallel=among)
    whole_step = config.experts is None and config.selection is None
    if gpus <= config.num_hidden_layers and whole_step and step.precision != "fp16":
        found[f"--set pipeline={gpus}"] = replace(step, stages=gpus)
    return found | {f"{flags} {CHECKPOINT}": replace(each, checkpointed=True) for flags, each in found.items()}


def _speed(
    config: ModelConfig, step: TrainingStep, peak_flops_per_s: float, hardware: Hardware, cost: Cost
) -> dict[str, Any]:
    """Tokens a second and, for a number of tokens, hours, energy of the device alone and price.

    Of as many batches as GPUs, which are a step, the last stage waits for the first one and the first for the last.
    Checkpointing runs the blocks forward once more; the head's share of the forward pass is not repeated.
    """
    work = training_flops_per_token(config, step.length)
    if step.checkpointed:
        head = 2 * config.vocab_size * config.hidden_size
        work += forward_flops_per_token(config, step.length) - head
    busy = cost.gpus / (cost.gpus + step.stages - 1)
    rate = cost.gpus * peak_flops_per_s * cost.utilization * busy / work
    found: dict[str, Any] = {"tokens_per_s": rate, "step_ms": 1e3 * cost.gpus * step.batch * step.length / rate}
    if cost.tokens is not None:
        hours = cost.tokens / rate / 3_600
        watts, price = hardware.power, cost.price_per_hour
        found["hours"] = hours
        found["energy_kwh"] = None if watts is None else cost.gpus * hours * watts.value / 1e3
        found["price"] = None if price is None else cost.gpus * hours * price
    return found


def _changes(config: ModelConfig, step: TrainingStep, usable: int, gpus: int) -> list[dict[str, Any]]:
    """Changes to a step's settings with which it fits, the ones that cost least time and quality first.

    A smaller batch divides the given one, so that the accumulated step keeps its tokens. Smaller optimizer states are
    proposed if checkpointing alone is not enough.
    """
    tries: list[tuple[str, TrainingStep]] = []
    checkpointed = replace(step, checkpointed=True)

    def batches(size: int) -> tuple[str, ...]:
        """Options for batches of this size; the accumulation counts those of all GPUs."""
        given = gpus == 1 and size == step.batch
        return () if given else (f"--batch-size {size} --set accumulation={gpus * step.batch // size}",)

    if not step.mixed:
        tries += [(" ".join((*batches(step.batch), "--set precision=bf16")), replace(step, precision="bf16"))]
    alone = [(step, ()), (checkpointed, (CHECKPOINT,))]
    shared = [(replace(each, shards=gpus), (SHARD, *flags)) for each, flags in alone] if gpus > 1 else []
    for each, flags in (*shared, *alone):
        most = largest_batch(config, each, usable)
        batch = max((size for size in range(1, min(most, step.batch) + 1) if step.batch % size == 0), default=0)
        if batch:
            tries.append((" ".join((*batches(batch), *flags)), replace(each, batch=batch)))
    short = gpus == 1 and training_memory(config, checkpointed).total > usable
    if short and step.optimizer_bits == 32 and step.optimizer == "adamw":
        tries.append((f"{CHECKPOINT} --set optimizer_bits=8", replace(checkpointed, optimizer_bits=8)))
    needed = [(flags, changed, training_memory(config, changed).total) for flags, changed in tries]
    return [
        {"flags": flags, "batch": changed.batch, "checkpointed": changed.checkpointed, "total_bytes": total}
        for flags, changed, total in needed
        if total <= usable
    ]
