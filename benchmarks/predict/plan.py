"""What `plan` reports: the memory arithmetic of a model and, for a device, predictions. The model is not run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.devices.limits import judge
from benchmarks.devices.load import load_device
from benchmarks.predict.coefficients import reliability
from benchmarks.predict.latency import predict, predict_figures
from benchmarks.predict.model_size import CACHES, ModelFormat
from sportsllm.errors import UsageError
from sportsllm.models import size
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.presets import PRESETS
from sportsllm.models.size import PRECISIONS
from sportsllm.storage.artifact import directory_bytes

DEFAULT_LENGTH = 512


def read_model(model: str) -> tuple[ModelConfig, Path | None]:
    """The shape of a preset, or of a checkpoint or export directory, which is returned beside it.

    Raises:
        UsageError: neither a preset nor a directory.
        ArtifactError: the directory has no valid config.json.
    """
    if model in PRESETS:
        return PRESETS[model], None
    directory = Path(model)
    if not directory.is_dir():
        raise UsageError(f"model {model!r} is neither a directory nor a preset; the presets are {', '.join(PRESETS)}")
    return load_config(directory), directory


def plan_model(
    model: str,
    device: str | None = None,
    batch: int = 4,
    length: int | None = None,
    shapes: bool = False,
    block_size: int = 32,
    head_bits: int = 8,
    kv_cache: str = "fp32",
    optimizer: str = "adamw",
    precision: str = "bf16",
) -> dict[str, Any]:
    """Memory arithmetic of `model`, and predictions for `device`.

    Args:
        model: a preset's name, or a checkpoint or export directory.
        device: a device's name or file; no predictions if not given.
        batch, length: sequences of a training step, and tokens of each: 512, or the context where that is shorter.
        shapes: whether to list every tensor along the way.
        block_size, head_bits: of int8 and int4: weights that share a scale, and bits of embedding and head.
        kv_cache: format of the cache in predictions.
        optimizer, precision: adamw or muon, and fp32, bf16 or fp16, for the training step.

    Returns:
        Sizes in bytes, times in ms; `training_memory_bytes` is without activation checkpointing.

    Raises:
        UsageError: an unknown name or value, or a length beyond the context.
        ArtifactError: a damaged directory or device file.
    """
    if kv_cache not in CACHES:
        raise UsageError(f"--kv-cache {kv_cache}: no export has such a cache; use {' or '.join(CACHES)}")
    config, directory = read_model(model)
    context = config.max_position_embeddings
    length = min(DEFAULT_LENGTH, context) if length is None else length
    if length > context:
        raise UsageError(f"--sequence {length} is longer than the context of {context} tokens")
    needed = size.training_memory(config, batch, length, precision, optimizer)
    training = {"batch": batch, "length": length, "precision": precision, "optimizer": optimizer}
    training |= {f"{name}_bytes": count for name, count in asdict(needed).items()}
    training |= {"total_bytes": needed.total, "total_checkpointed_bytes": needed.total_checkpointed}
    result: dict[str, Any] = {
        "model": model,
        "layers": config.num_hidden_layers,
        "context_length": context,
        "parameters": config.parameters,
        "parameters_by_component": config.parameters_by_component(),
        "parameters_per_block": size.block_parameters(config),
        "weight_bytes": {name: size.weight_bytes(config, name, block_size, head_bits) for name in PRECISIONS},
        "block_size": block_size,
        "head_bits": head_bits,
        "kv_cache_bytes_per_token": size.kv_cache_bytes_per_token(config),
        "training_memory_bytes": needed.total,
        "training_memory": training,
    }
    if directory is not None:
        result["file_bytes"] = directory_bytes(directory)
    if shapes:
        result["shapes"] = [shape._asdict() for shape in size.tensor_shapes(config, batch, length)]
    if device is not None:
        result |= _predictions(config, device, block_size, head_bits, kv_cache)
    return result


def _predictions(config: ModelConfig, name: str, block_size: int, head_bits: int, kv_cache: str) -> dict[str, Any]:
    device = load_device(name)
    formats = [ModelFormat(precision, block_size, head_bits, cache=kv_cache) for precision in PRECISIONS]
    return {
        "device": device.name,
        "predicted": [row for stored in formats for row in predict(config, device, stored)],
        "predicted_budget": {
            stored.precision: judge(device, {}, predict_figures(config, device, stored)) for stored in formats
        },
        "efficiency": reliability(device),
    }
