"""`prune` as a stage: calibrate, choose what stays, write the smaller checkpoint, and recover it if asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.distill import distillation_loss
from compress.importance import importance_scores
from compress.prune import Shape, kept_layers, prune, shape_for_share
from compress.teacher import load_teacher
from sportsllm.artifacts import Stage, run_stage
from sportsllm.checkpoint import load_checkpoint, quantization_config, save_checkpoint
from sportsllm.config import ModelConfig, load_config
from sportsllm.console import say
from sportsllm.corpus import read_documents
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.evaluate import windows
from sportsllm.stages import (
    load_corpus,
    manifest_setting,
    packed_sequences,
    training_device,
    training_results,
    validator,
)
from sportsllm.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.train import TrainConfig, train_model


def calibration_samples(
    files: Sequence[Path], tokenizer: TextTokenizer, config: ModelConfig, count: int, length: int
) -> list[Tensor]:
    """Token ids of the first `count` pieces of calibration text, each (1, T) with T at most `length`."""
    samples: list[Tensor] = []
    for text in read_documents(files):
        ids = [tokenizer.begin_id, *tokenizer.encode(text)]
        for start, stop, _ in windows(len(ids), min(length, config.max_position_embeddings)):
            samples.append(torch.tensor([ids[start:stop]]))
            if len(samples) == count:
                return samples
    return samples


def target_shape(config: ModelConfig, share: float | None, given: dict[str, int | None]) -> Shape:
    """The shape that flags describe: a share of the parameters, or dimensions with the rest kept."""
    chosen = {key: value for key, value in given.items() if value is not None}
    if share is not None:
        if chosen:
            raise UsageError(f"give --params or dimensions ({', '.join('--' + key for key in chosen)}), not both")
        return shape_for_share(config, share)
    if not chosen:
        raise UsageError("say how small: --params SHARE, or --hidden, --intermediate, --heads, --kv-heads, --layers")
    return dataclasses.replace(Shape.of(config), **chosen)


def prune_stage(
    *,
    checkpoint: Path,
    out: Path,
    share: float | None,
    given: dict[str, int | None],
    calibration: Sequence[Path],
    samples: int,
    recover: TrainConfig | None,
    corpus: Sequence[Path],
    valid: Sequence[Path],
    resume: bool = False,
) -> dict[str, Any]:
    """Prune a checkpoint directory into a new one.

    Args:
        checkpoint: unquantized.
        out: directory to make.
        share: of the non-embedding parameters to keep, or None.
        given: dimensions to keep; None means all of it.
        calibration: text that importance is measured on.
        samples: pieces of calibration text, of at most the training sequence's length.
        recover: how to distil from the unpruned model afterwards, or None.
        corpus, valid: training and held-out text of the recovery.
        resume: go on with an interrupted recovery.
    """
    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; prune the unquantized checkpoint")
    config = load_config(checkpoint)
    shape = target_shape(config, share, given)
    smaller = shape.applied_to(config)
    if smaller.hidden_size != smaller.query_size:
        say(f"note: hidden size {smaller.hidden_size} is not heads x head_dim {smaller.query_size}; optimum needs that")
    settings = {
        "checkpoint": str(checkpoint),
        **dataclasses.asdict(shape),
        "calibration": [str(path) for path in calibration],
        "samples": samples,
        "corpus": [str(path) for path in corpus] or manifest_setting(checkpoint, "corpus"),
        "valid": [str(path) for path in valid] or manifest_setting(checkpoint, "valid"),
        "recover": None if recover is None else dataclasses.asdict(recover),
    }
    inputs = [checkpoint, *calibration, *(corpus if recover else []), *(valid if recover else [])]
    stage = Stage("prune", settings, inputs, seed=None if recover is None else recover.seed)

    def make(directory: Path) -> dict[str, Any]:
        started = time.perf_counter()
        model = load_checkpoint(checkpoint)
        words = load_tokenizer(checkpoint, config)
        length = recover.sequence if recover else 512
        calibrated = calibration_samples(calibration, words, config, samples, length)
        if len(calibrated) < samples:
            say(f"note: the calibration text gives {len(calibrated)} samples, {samples} were asked for")
        scores = importance_scores(model, calibrated)
        layers, tried = kept_layers(model, scores, shape.layers, calibrated)
        pruned = prune(model, scores, shape, layers)
        results: dict[str, Any] = {
            "parameters": smaller.parameters,
            "share_of_block_parameters": smaller.block_parameters / config.block_parameters,
            "shape": dataclasses.asdict(shape),
            "kept_layers": layers,
            "layers_tried": tried,
        }
        if recover is not None:
            texts, device = load_corpus(corpus, valid), training_device()
            validate = validator(texts, words)
            pruned = pruned.to(device)
            results["bits_per_byte_before_recovery"] = validate(pruned)
            batches = packed_sequences(texts, words, recover)
            result = train_model(
                pruned,
                batches,
                distillation_loss(load_teacher(checkpoint, "auto").to(device), 1.0, 1.0),
                recover,
                directory,
                validate=validate,
                identity=stage.fingerprint(),
                resume=resume,
                description="recover",
            )
            results |= training_results(pruned, result, batches)
        results["seconds"] = time.perf_counter() - started
        save_checkpoint(directory, pruned, checkpoint)
        return results

    return run_stage(out, stage, make, resume)
