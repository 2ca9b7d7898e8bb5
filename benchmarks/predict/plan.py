"""What `plan` reports: the memory arithmetic of a model and, for a device, predictions. Nothing is run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.devices.load import judge, load_device
from benchmarks.predict.latency import Stored, predict, predict_figures, reliability
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.presets import PRESETS
from sportsllm.models.size import (
    PRECISIONS,
    block_parameters,
    kv_cache_bytes_per_token,
    tensor_shapes,
    training_memory,
    weight_bytes,
)
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
    kv_cache: str | None = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
) -> dict[str, Any]:
    """Memory arithmetic of `model`, and predictions for `device`.

    Args:
        model: a preset's name, or a checkpoint or export directory.
        device: a device's name or file, or None for no predictions.
        batch: sequences in memory at once, for the training step and the shapes.
        length: tokens of a sequence, likewise; 512 or the context where that is shorter if not given.
        shapes: whether to list every tensor along the way.
        block_size: numbers that share a scale at int8 and int4.
        head_bits: bits of embedding and head there.
        kv_cache: precision of the cache in predictions; the device's usual one where not given.
        optimizer: adamw or muon, for the training step.
        precision: fp32, bf16 or fp16, for the training step.

    Returns:
        Sizes in bytes, times in ms. `training_memory_bytes` is without activation checkpointing;
        `training_memory` has its parts and the sum with it.

    Raises:
        UsageError: a name or value that is not known, or a length beyond the context.
        ArtifactError: a damaged directory or device file.
    """
    config, directory = read_model(model)
    context = config.max_position_embeddings
    length = min(DEFAULT_LENGTH, context) if length is None else length
    if length > context:
        raise UsageError(f"--sequence {length} is longer than the context of {context} tokens")
    needed = training_memory(config, batch, length, precision, optimizer)
    result: dict[str, Any] = {
        "model": model,
        "layers": config.num_hidden_layers,
        "context_length": context,
        "parameters": config.parameters,
        "parameters_by_component": config.parameters_by_component(),
        "parameters_per_block": block_parameters(config),
        "weight_bytes": {name: weight_bytes(config, name, block_size, head_bits) for name in PRECISIONS},
        "block_size": block_size,
        "head_bits": head_bits,
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config),
        "training_memory_bytes": needed.total,
        "training_memory": {
            "batch": batch,
            "length": length,
            "precision": precision,
            "optimizer": optimizer,
            **{f"{name}_bytes": size for name, size in asdict(needed).items()},
            "total_bytes": needed.total,
            "total_checkpointed_bytes": needed.total_checkpointed,
        },
    }
    if directory is not None:
        result["file_bytes"] = directory_bytes(directory)
    if shapes:
        result["shapes"] = [shape._asdict() for shape in tensor_shapes(config, batch, length)]
    if device is not None:
        result |= _predictions(config, device, block_size, head_bits, kv_cache)
    return result


def _predictions(
    config: ModelConfig, name: str, block_size: int, head_bits: int, kv_cache: str | None
) -> dict[str, Any]:
    device = load_device(name)
    predicted, budgets = [], {}
    for precision in PRECISIONS:
        stored = Stored(precision, block_size, head_bits, cache=kv_cache)
        predicted += [asdict(row) for row in predict(config, device, stored)]
        figures = predict_figures(config, device, stored)
        budgets[precision] = judge(device.limits, {}, figures).as_dict(device.name)
    return {
        "device": device.name,
        "predicted": predicted,
        "predicted_budget": budgets,
        "efficiency": reliability(device),
    }
