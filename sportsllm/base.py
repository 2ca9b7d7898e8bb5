"""The base-model trainer: corpus in, checkpoint directory out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sportsllm.artifacts import Stage, run_stage
from sportsllm.checkpoint import copy_tokenizer, save_checkpoint
from sportsllm.config import ModelConfig
from sportsllm.console import say
from sportsllm.errors import UsageError
from sportsllm.model import SportsLLM
from sportsllm.presets import preset
from sportsllm.stages import (
    load_corpus,
    packed_sequences,
    training_device,
    training_results,
    validator,
)
from sportsllm.tokenizer import load_tokenizer, train_tokenizer
from sportsllm.train import TrainConfig, language_model_loss, train_model


def train_base(
    *,
    model: str,
    corpus: Sequence[Path],
    valid: Sequence[Path],
    out: Path,
    tokenizer: Path | None,
    config: TrainConfig,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a preset from scratch.

    Args:
        model: the preset's name.
        corpus: training text.
        valid: held-out text; empty to hold out part of the corpus.
        out: directory to make.
        tokenizer: directory of a tokenizer to use; one is trained on the corpus if None.
        config: how to train; 0 steps write the untrained model.
        resume: go on from an interrupted run.

    Returns:
        The results, as `train --json` prints them.
    """
    shape = preset(model)
    settings = {
        "model": model,
        "corpus": [str(path) for path in corpus],
        "valid": [str(path) for path in valid],
        "tokenizer": None if tokenizer is None else str(tokenizer),
        **dataclasses.asdict(config),
    }
    inputs = [*corpus, *valid, *([tokenizer / "tokenizer.json"] if tokenizer else [])]
    stage = Stage("train", settings, inputs, seed=config.seed)

    def make(directory: Path) -> dict[str, Any]:
        texts = load_corpus(corpus, valid)
        if not (directory / "tokenizer.json").exists():
            if tokenizer is None:
                say(f"training a tokenizer of {shape.vocab_size:,} entries")
                train_tokenizer(texts.train, shape.vocab_size, directory)
            else:
                copy_tokenizer(tokenizer, directory)
        words = load_tokenizer(directory)
        fitted = fit_vocabulary(shape, words.vocab_size, model).with_changes(
            bos_token_id=words.begin_id, eos_token_id=words.end_id, pad_token_id=words.pad_id
        )
        check_sequence(config.sequence, fitted)
        network = SportsLLM(fitted)
        network.initialize(config.seed)
        batches = packed_sequences(texts, words, config)
        result = train_model(
            network.to(training_device()),
            batches,
            language_model_loss,
            config,
            directory,
            validate=validator(texts, words) if config.steps else None,
            identity=stage.fingerprint(),
            resume=resume,
            description=model,
        )
        save_checkpoint(directory, network)
        return training_results(network, result, batches)

    return run_stage(out, stage, make, resume)


def fit_vocabulary(shape: ModelConfig, vocab_size: int, name: str) -> ModelConfig:
    """A preset with the vocabulary its tokenizer has; says so where that is another size."""
    if vocab_size == shape.vocab_size:
        return shape
    say(f"{name}: the tokenizer has {vocab_size:,} entries, so the embedding has too (preset: {shape.vocab_size:,})")
    return shape.with_changes(vocab_size=vocab_size)


def check_sequence(sequence: int, config: ModelConfig) -> None:
    """Training sequences must fit the context."""
    if sequence > config.max_position_embeddings:
        raise UsageError(
            f"--sequence is {sequence}; the model's context is {config.max_position_embeddings}, use that or less"
        )
