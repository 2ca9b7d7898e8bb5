"""What `plan` reports: the memory arithmetic of a model and, for a device, predictions. The model is not run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.devices.load import load_device
from benchmarks.devices.schema import Device
from benchmarks.devices.verdict import judge
from benchmarks.predict.latency import predict, predict_figures, reliability
from benchmarks.predict.model_size import CACHES, ModelFormat
from benchmarks.predict.plan_training import Cost, plan_training, usable_bytes
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.manifest import directory_bytes
from sportsllm.models import size
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import PLANNED, PRESETS
from sportsllm.models.size import PRECISIONS
from sportsllm.models.training_memory import TrainingStep, training_memory

DEFAULT_LENGTH = 512
_ZERO_POINTS = True  # of 4-bit blocks, as `quantize` rounds where nothing is said
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT])", re.IGNORECASE)
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a model.

    Attributes:
        device: a device's name or file; no predictions if not given.
        shapes: whether to list every tensor along the way.
        block_size, head_bits: of int8 and int4: weights that share a scale, and bits of embedding and head.
        kv_cache: format of the cache in predictions.
        cache_tokens, cache_sequences: tokens of a sequence in the cache, and how many of those, for memory in use.
        batch, length: sequences of a training step, and tokens of each: 512, or the context where that is shorter.
        precision: fp32, bf16 or fp16, of the training step (bf16 if not given) and of the tensors along the way (fp32).
        optimizer, optimizer_bits: of the training step.
        training: whether to report on the training step alone, in full.
        cost: of the training, see `plan_training`.
    """

    device: str | None = None
    shapes: bool = False
    block_size: int = 32
    head_bits: int = 8
    kv_cache: str = "fp32"
    cache_tokens: int | None = None
    cache_sequences: int = 1
    batch: int = 4
    length: int | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    optimizer_bits: int = 32
    training: bool = False
    cost: Cost = field(default_factory=Cost)


def parameter_count(text: str) -> int | None:
    """The number that a text such as 7B, 162.4M or 350m is; None where it is none."""
    found = _COUNT.fullmatch(text)
    return None if found is None else round(float(found[1]) * _FACTORS[found[2].upper()])


def read_model(model: str) -> tuple[ModelConfig, Path | None]:
    """The shape of a preset, or of a checkpoint or export directory, which is returned beside it.

    Raises:
        UsageError: neither a preset nor a directory.
        ArtifactError: the directory has no valid config.json.
    """
    named = PRESETS | PLANNED
    if model in named:
        return named[model], None
    directory = Path(model)
    if not directory.is_dir():
        raise UsageError(
            f"model {model!r} is no directory, no number of parameters such as 7B or 162M, and no shape; "
            f"the shapes are {', '.join(named)}"
        )
    return load_config(directory), directory


def plan(model: str, request: PlanRequest) -> dict[str, Any]:
    """`plan_count` of a bare number of parameters, else `plan_model`."""
    count = parameter_count(model)
    if count is None or model in PLANNED or Path(model).is_dir():
        return plan_model(model, request)
    return plan_count(model, count, request)


def plan_count(model: str, count: int, request: PlanRequest) -> dict[str, Any]:
    """Bytes of weights of which only the number is known, by precision, without and with the scales of blocks.

    Raises:
        UsageError: no parameters, or a question that only a shape can answer.
    """
    given = replace(PlanRequest(), block_size=request.block_size, head_bits=request.head_bits)
    if count < 1:
        raise UsageError(f"model {model!r}: has no parameters; give a number such as 7B")
    if request != given:
        named = f"; {model.lower()!r} is one" if model.lower() in PLANNED else ""
        raise UsageError(f"model {model!r}: a number of parameters has weights only; for the rest give a shape{named}")
    return {
        "model": model,
        "parameters": count,
        "weight_bytes": {name: size.count_bytes(count, name, request.block_size) for name in PRECISIONS},
        "weight_bytes_without_scales": {name: size.count_bytes(count, name) for name in PRECISIONS},
        "block_size": request.block_size,
    }


def plan_model(model: str, request: PlanRequest) -> dict[str, Any]:
    """Memory arithmetic of `model`, and what was asked about a device, a cache or training.

    Args:
        model: the name of a shape, or a checkpoint or export directory.
        request: what is asked.

    Returns:
        Sizes in bytes, times in ms; `training_memory_bytes` is without activation checkpointing.

    Raises:
        UsageError: an unknown name or value, or a length beyond the context.
        ArtifactError: a damaged directory or device file.
    """
    if request.kv_cache not in CACHES:
        raise UsageError(f"--kv-cache {request.kv_cache}: no export has such a cache; use one of {', '.join(CACHES)}")
    config, directory = read_model(model)
    device = None if request.device is None else load_device(request.device)
    step = _step(config, request, device)
    result = _sizes(model, config, request) | _training_memory(config, step, device)
    if directory is not None:
        result["file_bytes"] = directory_bytes(directory)
    if request.cache_tokens is not None:
        result["memory_in_use"] = _memory_in_use(config, request, result["weight_bytes"])
    if request.shapes:
        element_bytes = 4 if request.precision in (None, "fp32") else 2
        shapes = size.tensor_shapes(config, step.batch, step.length, element_bytes)
        result |= {"shapes": [shape._asdict() for shape in shapes], "shapes_precision": request.precision or "fp32"}
    if request.training:
        result["training"] = plan_training(config, step, device, request.cost)
    elif device is not None:
        result |= _predictions(config, device, request)
    return result


def _step(config: ModelConfig, request: PlanRequest, device: Device | None) -> TrainingStep:
    context = config.max_position_embeddings
    length = min(DEFAULT_LENGTH, context) if request.length is None else request.length
    if length > context:
        raise UsageError(f"--sequence {length} is longer than the context of {context} tokens")
    return TrainingStep(
        request.batch,
        length,
        request.precision or "bf16",
        request.optimizer,
        request.optimizer_bits,
        "cpu" if device is None else device.processor,
    )


def _sizes(model: str, config: ModelConfig, request: PlanRequest) -> dict[str, Any]:
    stored = request.block_size, request.head_bits, _ZERO_POINTS
    parts = config.parameters_by_component()
    by_component = {name: size.component_bytes(config, name, *stored) for name in PRECISIONS}
    return {
        "model": model,
        "layers": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "parameters": config.parameters,
        "active_parameters": config.active_parameters,
        "parameters_by_component": parts,
        "parameters_percent": {name: 100 * count / config.parameters for name, count in parts.items()},
        "parameters_per_block": size.block_parameters(config),
        "weight_bytes": {name: sum(sizes.values()) for name, sizes in by_component.items()},
        "weight_bytes_by_component": by_component,
        "weight_bytes_per_block": {name: size.block_bytes(config, name, *stored) for name in PRECISIONS},
        **_dense_blocks(config, stored),
        "block_size": request.block_size,
        "head_bits": request.head_bits,
        "kv_cache_bytes_per_token": size.kv_cache_bytes_per_token(config),
        "state_bytes": size.state_bytes(config),
    }


def _dense_blocks(config: ModelConfig, stored: tuple[int, int, bool]) -> dict[str, Any]:
    """The first layers of a mixture that have no experts, if there are any; per block are those of the others."""
    if not config.dense_layers:
        return {}
    part, layers = config.runs()[0]
    one = {name: sum(size.block_bytes(part, name, *stored).values()) for name in PRECISIONS}
    return {
        "dense_blocks": {
            "layers": layers,
            "parameters": layers * sum(size.block_parameters(part).values()),
            "weight_bytes": {name: layers * bytes_ for name, bytes_ in one.items()},
        }
    }


def _training_memory(config: ModelConfig, step: TrainingStep, device: Device | None) -> dict[str, Any]:
    plain, checkpointed = (training_memory(config, replace(step, checkpointed=each)) for each in (False, True))
    found: dict[str, Any] = {
        "batch": step.batch,
        "length": step.length,
        "precision": step.precision,
        "optimizer": step.optimizer,
        "optimizer_bits": step.optimizer_bits,
        "processor": step.processor,
        **{f"{name}_bytes": count for name, count in plain.parts().items()},
        "activations_checkpointed_bytes": checkpointed.activations,
        "total_bytes": plain.total,
        "total_checkpointed_bytes": checkpointed.total,
    }
    if device is not None:
        usable = usable_bytes(device)
        fits = {"fits": plain.total <= usable, "fits_checkpointed": checkpointed.total <= usable}
        found |= {"usable_bytes": usable, **fits}
    return {"training_memory_bytes": plain.total, "training_memory": found}


def _memory_in_use(config: ModelConfig, request: PlanRequest, weights: dict[str, int]) -> dict[str, Any]:
    """Weights and cache together, by the precision of either."""
    tokens, sequences = request.cache_tokens or 0, request.cache_sequences
    if tokens < 1 or sequences < 1:
        raise UsageError(f"cache_tokens={tokens} and cache_sequences={sequences} must be at least 1")
    if tokens > config.max_position_embeddings:
        raise UsageError(f"cache_tokens={tokens} is more than the context of {config.max_position_embeddings} tokens")
    states = size.state_bytes(config)
    cached = {
        name: sequences * (tokens * each + states[name]) for name, each in size.kv_cache_bytes_per_token(config).items()
    }
    return {
        "tokens": tokens,
        "sequences": sequences,
        "cache_bytes": cached,
        "total_bytes": {name: {cache: held + each for cache, each in cached.items()} for name, held in weights.items()},
    }


def _predictions(config: ModelConfig, device: Device, request: PlanRequest) -> dict[str, Any]:
    formats = [
        ModelFormat(
            precision,
            request.block_size,
            request.head_bits,
            zero_points=_ZERO_POINTS and precision == "int4",
            cache=request.kv_cache,
        )
        for precision in PRECISIONS
    ]
    return {
        "device": device.name,
        "predicted": [row for each in formats for row in predict(config, device, each)],
        "predicted_budget": {
            each.precision: judge(device, {}, predict_figures(config, device, each)).to_json() for each in formats
        },
        "efficiency": reliability(device),
    }
