"""Steps that the training verbs share: the shape of a new model, and the record of a result."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.formats.huggingface.config import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import preset
from sportsllm.text.packing import PackedSequences
from sportsllm.training.loop import LoopResult


def shape_of(name: str) -> tuple[ModelConfig, list[Path]]:
    """The shape of a preset or of a directory's config.json, and the file it was read from, if any."""
    directory = Path(name)
    if directory.is_dir():
        return load_config(directory), [directory / "config.json"]
    return preset(name), []


def fit_vocabulary(shape: ModelConfig, vocab_size: int, name: str) -> ModelConfig:
    """A preset with the vocabulary of its tokenizer; logs a difference."""
    if vocab_size == shape.vocab_size:
        return shape
    log(f"{name}: the tokenizer has {vocab_size:,} entries, so the embedding has too (preset: {shape.vocab_size:,})")
    return shape.with_changes(vocab_size=vocab_size)


def check_sequence(sequence: int, config: ModelConfig) -> None:
    """Training sequences must fit the context."""
    if sequence > config.max_position_embeddings:
        raise UsageError(
            f"--sequence is {sequence}; the model's context is {config.max_position_embeddings}, use that or less"
        )


def training_results(model: SportsLLM, result: LoopResult, batches: PackedSequences) -> dict[str, Any]:
    """The keys that every training command reports."""
    return {
        "parameters": model.config.parameters,
        "tokens_per_parameter": round(result.tokens / model.config.parameters, 2),
        "epochs": round(result.tokens / batches.tokens_per_epoch, 2),
        **dataclasses.asdict(result),
    }
