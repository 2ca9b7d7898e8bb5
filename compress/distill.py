"""Distillation: a student learns the teacher's distribution over the next token, with the one training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.losses import mixed_chunk
from compress.teacher import load_teacher, teacher_logits
from sportsllm.artifacts import Stage, run_stage
from sportsllm.base import check_sequence, fit_vocabulary
from sportsllm.checkpoint import copy_tokenizer, load_checkpoint, quantization_config, save_checkpoint
from sportsllm.config import load_config
from sportsllm.console import say
from sportsllm.data import Batch
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.losses import head_loss
from sportsllm.model import SportsLLM
from sportsllm.presets import PRESETS, preset
from sportsllm.stages import (
    load_corpus,
    manifest_setting,
    packed_sequences,
    training_device,
    training_results,
    validator,
)
from sportsllm.tokenizer import load_tokenizer, same_tokenizer
from sportsllm.train import Loss, TrainConfig, train_model


def distillation_loss(teacher: SportsLLM, kl_weight: float, temperature: float) -> Loss:
    """kl_weight * T^2 * KL(teacher || student) + (1 - kl_weight) * cross-entropy, summed over scored tokens.

    Neither model's logits exist for more than one chunk of tokens.
    """

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        targets_N = batch.targets.flatten()
        chunk_loss = mixed_chunk(targets_N, teacher_logits(teacher, batch), kl_weight, temperature)
        hidden = student.hidden(batch.tokens, batch.documents)
        return head_loss(hidden.flatten(0, 1), student.head_weight, chunk_loss)

    return loss


def resolve_teacher(name: str) -> Path:
    """A teacher given as a directory, or as a preset's name, which means runs/<preset>.

    Raises:
        ArtifactError: a preset that was not trained yet; the message says how to make it.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if name in PRESETS:
        made = Path("runs") / name
        if not made.is_dir():
            raise ArtifactError(
                f"{made}: no teacher there; make one with: sportsllm-compress train --model {name} --corpus PATH "
                "(--steps 0 writes an untrained one)"
            )
        return made
    raise ArtifactError(f"teacher {name!r}: neither a directory nor a preset ({', '.join(PRESETS)})")


def teacher_corpus(teacher: Path, key: str) -> list[Path]:
    """The corpus (`corpus`) or held-out text (`valid`) that the teacher's manifest names."""
    paths = [Path(item) for item in manifest_setting(teacher, key) or []]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ArtifactError(f"{missing[0]}: named by {teacher}'s manifest but not found; give --corpus")
    if not paths and key == "corpus":
        raise UsageError(f"{teacher}: its manifest names no corpus; give --corpus PATH")
    return paths


def distill(
    *,
    teacher: Path,
    student: str,
    init: Path | None,
    corpus: Sequence[Path],
    valid: Sequence[Path],
    out: Path,
    config: TrainConfig,
    teacher_precision: str = "auto",
    kl_weight: float | None = None,
    temperature: float = 1.0,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a student on a teacher's distribution.

    Args:
        teacher: checkpoint directory.
        student: a preset's name (fresh weights) or a checkpoint directory (its weights).
        init: a checkpoint whose weights a preset student starts from.
        corpus: training text.
        valid: held-out text; empty to hold out part of the corpus.
        out: directory to make.
        config: how to train.
        teacher_precision: see `compress.teacher.load_teacher`.
        kl_weight: share of KL in the loss; 0.9 for a fresh student and 1 for one with weights if None
            (Minitron, https://arxiv.org/abs/2407.14679).
        temperature: of the KL.
        resume: go on from an interrupted run.

    Raises:
        UsageError: student larger than teacher, or settings out of range.
        ArtifactError: different tokenizers, or damaged inputs.
    """
    start = init or (Path(student) if Path(student).is_dir() else None)
    weight = kl_weight if kl_weight is not None else (1.0 if start else 0.9)
    if not 0.0 <= weight <= 1.0 or temperature <= 0.0:
        raise UsageError(f"--kl-weight {weight} must be in [0, 1] and --temperature {temperature} above 0")
    teacher_config = load_config(teacher)
    if init is not None and Path(student).is_dir():
        raise UsageError(f"--student {student} has weights of its own; give a preset's name with --init, or no --init")
    if start is not None:
        if quantization_config(start) is not None:
            raise ArtifactError(f"{start}: is quantized; distil into the unquantized checkpoint, then quantize")
        shape = load_config(start)
        if init is not None and shape.with_changes(vocab_size=preset(student).vocab_size) != preset(student):
            say(f"the student starts from {init} and has its shape; {student!r} only names the output")
        if not same_tokenizer(teacher, start):
            raise ArtifactError(
                f"{start}: its tokenizer differs from the teacher's ({teacher}); distillation needs the same one"
            )
    else:
        shape = fit_vocabulary(preset(student), teacher_config.vocab_size, student)
        shape = shape.with_changes(
            bos_token_id=teacher_config.bos_token_id,
            eos_token_id=teacher_config.eos_token_id,
            pad_token_id=teacher_config.pad_token_id,
        )
    if shape.vocab_size != teacher_config.vocab_size:
        raise ArtifactError(
            f"student has {shape.vocab_size} tokens, teacher {teacher_config.vocab_size}; they must be the same"
        )
    if shape.parameters > teacher_config.parameters:
        raise UsageError(
            f"the student ({shape.parameters:,} parameters) is larger than the teacher "
            f"({teacher_config.parameters:,}); choose a smaller --student"
        )
    for model_config in (shape, teacher_config):
        check_sequence(config.sequence, model_config)
    settings = {
        "teacher": str(teacher),
        "student": student,
        "init": None if start is None else str(start),
        "corpus": [str(path) for path in corpus],
        "valid": [str(path) for path in valid],
        "teacher_precision": teacher_precision,
        "kl_weight": weight,
        "temperature": temperature,
        **dataclasses.asdict(config),
    }
    inputs = [teacher, *([start] if start else []), *corpus, *valid]
    stage = Stage("distill", settings, inputs, seed=config.seed)

    def make(directory: Path) -> dict[str, Any]:
        words = load_tokenizer(teacher, teacher_config)
        texts = load_corpus(corpus, valid)
        copy_tokenizer(teacher, directory)
        network = load_checkpoint(start) if start is not None else SportsLLM(shape)
        if start is None:
            network.initialize(config.seed)
        device = training_device()
        frozen = load_teacher(teacher, teacher_precision).to(device)
        batches = packed_sequences(texts, words, config)
        result = train_model(
            network.to(device),
            batches,
            distillation_loss(frozen, weight, temperature),
            config,
            directory,
            validate=validator(texts, words) if config.steps else None,
            identity=stage.fingerprint(),
            resume=resume,
            description=f"distil {student}",
        )
        save_checkpoint(directory, network)
        return training_results(network, result, batches)

    return run_stage(out, stage, make, resume)
