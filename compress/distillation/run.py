"""Distillation: a student learns the teacher's distribution over the next token, with the one training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.distillation.settings import Objective
from compress.distillation.student_loss import (
    check_teachers,
    guidance_inputs,
    guidance_settings,
    prepare_signals,
    train_student,
)
from sportsllm.console import say
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import PRESETS, preset
from sportsllm.storage.artifact import Stage, run_stage
from sportsllm.storage.checkpoint import copy_tokenizer, load_checkpoint, save_checkpoint
from sportsllm.storage.safetensors_files import quantization_config
from sportsllm.text.packing import tokenize
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer, same_tokenizer
from sportsllm.training.loop import TrainConfig
from sportsllm.training.lora import Adapters
from sportsllm.training.pretrain import check_sequence, fit_vocabulary, shape_of
from sportsllm.training.setup import manifest_setting, training_results, validator


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
    objective: Objective,
    adapters: Adapters | None = None,
    fresh: bool = False,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a student on a teacher's distribution.

    Args:
        teacher: checkpoint directory.
        student: a preset's name (fresh weights) or a checkpoint directory (its weights; with `fresh` its
            shape alone).
        init: a checkpoint whose weights a preset student starts from.
        corpus: training text.
        valid: held-out text; empty to hold out part of the corpus.
        out: directory to make.
        config: how to train.
        objective: what to learn.
        adapters: train these instead of all weights; the student must start from weights.
        fresh: start from random weights.
        resume: go on from an interrupted run.

    Raises:
        UsageError: student larger than teacher, or settings out of range.
        ArtifactError: different tokenizers, or damaged inputs.
    """
    if fresh and init is not None:
        raise UsageError(f"--start fresh makes its own weights; leave --init {init} out")
    start = init or (Path(student) if Path(student).is_dir() and not fresh else None)
    if adapters is not None and start is None:
        raise UsageError("--lora-rank adapts weights that are there; give --init CHECKPOINT or a checkpoint student")
    if init is not None and Path(student).is_dir():
        raise UsageError(f"--student {student} has weights of its own; give a preset's name with --init, or no --init")
    teacher_config = load_config(teacher)
    shape = _student_shape(teacher, teacher_config, student, start)
    if init is not None and shape.with_changes(vocab_size=preset(student).vocab_size) != preset(student):
        say(f"the student starts from {init} and has its shape; {student!r} only names the output")
    if shape.parameters > teacher_config.parameters:
        raise UsageError(
            f"the student ({shape.parameters:,} parameters) is larger than the teacher "
            f"({teacher_config.parameters:,}); choose a smaller --student"
        )
    for model_config in (shape, teacher_config):
        check_sequence(config.sequence, model_config)
    objective.check_models(shape, teacher_config)
    check_teachers(objective, teacher)
    signals = prepare_signals(objective, teacher=teacher, student=shape, corpus=corpus, valid=valid, config=config)
    settings = {
        "teacher": str(teacher),
        "student": student,
        "init": None if start is None else str(start),
        "start": "weights" if start else "fresh",
        "corpus": [str(path) for path in corpus],
        "valid": [str(path) for path in valid],
        **guidance_settings(objective, teacher, adapters),
        **dataclasses.asdict(config),
    }
    shape_file = shape_of(student)[1] if start is None else []
    inputs = [teacher, *([start] if start else []), *shape_file, *guidance_inputs(objective), *corpus, *valid]
    stage = Stage("distill", settings, inputs, seed=config.seed)

    def make(directory: Path) -> dict[str, Any]:
        words = load_tokenizer(teacher, teacher_config)
        texts = load_corpus(corpus, valid)
        documents = tokenize(texts.train, words)
        copy_tokenizer(teacher, directory)
        if start is not None:
            network = load_checkpoint(start)
        else:
            network = SportsLLM(shape)
            network.initialize(config.seed)
        before = validator(texts, words)(network) if config.steps and start else None
        network, result, batches = train_student(
            network,
            teacher=teacher,
            objective=objective,
            texts=texts,
            documents=documents,
            tokenizer=words,
            config=config,
            directory=directory,
            identity=stage.fingerprint(),
            resume=resume,
            description=f"distil {student}",
            signals=signals,
            adapters=adapters,
        )
        save_checkpoint(directory, network)
        results = training_results(network, result, batches)
        return results if before is None else {**results, "bits_per_byte_before": before}

    return run_stage(out, stage, make, resume)


def _student_shape(teacher: Path, teacher_config: ModelConfig, student: str, start: Path | None) -> ModelConfig:
    """The student's shape, with the teacher's vocabulary.

    Raises:
        ArtifactError: a quantized start, or one with another tokenizer.
    """
    if start is None:
        shape = fit_vocabulary(shape_of(student)[0], teacher_config.vocab_size, student)
        return shape.with_changes(
            bos_token_id=teacher_config.bos_token_id,
            eos_token_id=teacher_config.eos_token_id,
            pad_token_id=teacher_config.pad_token_id,
        )
    if quantization_config(start) is not None:
        raise ArtifactError(f"{start}: is quantized; distil into the unquantized checkpoint, then quantize")
    shape = load_config(start)
    if not same_tokenizer(teacher, start):
        raise ArtifactError(
            f"{start}: its tokenizer differs from the teacher's ({teacher}); distillation needs the same one"
        )
    if shape.vocab_size != teacher_config.vocab_size:
        raise ArtifactError(
            f"student has {shape.vocab_size} tokens, teacher {teacher_config.vocab_size}; they must be the same"
        )
    return shape
