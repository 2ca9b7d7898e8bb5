"""Training after a cut or after rounding: a model learns from the one that it was made from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
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
from compress.teacher_cache.read import Signals
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.hf_config import load_config
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.packing import tokenize
from sportsllm.text.split import load_corpus
from sportsllm.text.tokenizer import load_tokenizer, same_tokenizer
from sportsllm.training.loop import TrainConfig
from sportsllm.training.lora import Adapters
from sportsllm.training.pretrain import check_sequence
from sportsllm.training.setup import training_results, validator


@dataclass(frozen=True)
class Recovery:
    """How a compressed model is trained afterwards.

    Attributes:
        config: of the training loop.
        corpus, valid: training and held-out text; without the latter a part of the corpus is held out.
        objective: what to learn.
        teacher: from whom, if not the checkpoint that was compressed.
        adapters: train these instead of all weights, and merge them.
    """

    config: TrainConfig
    corpus: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    objective: Objective = field(default_factory=Objective)
    teacher: Path | None = None
    adapters: Adapters | None = None

    def settings(self, checkpoint: Path) -> dict[str, Any]:
        """For the manifest; the training loop's settings are under `recover`."""
        return {
            "teacher": str(self.teacher or checkpoint),
            "corpus": [str(path) for path in self.corpus],
            "valid": [str(path) for path in self.valid],
            "recover": dataclasses.asdict(self.config),
            **guidance_settings(self.objective, self.teacher or checkpoint, self.adapters),
        }

    def inputs(self) -> list[Path]:
        """Everything that it reads."""
        others = guidance_inputs(self.objective)
        return [*([self.teacher] if self.teacher else []), *others, *self.corpus, *self.valid]


def prepare_recovery(recovery: Recovery, checkpoint: Path, smaller: ModelConfig) -> Signals | None:
    """Check the recovery against both models, and open or make its signals.

    Args:
        recovery: how to train.
        checkpoint: the full model.
        smaller: shape of what is to be trained.
    """
    source = recovery.teacher or checkpoint
    if not same_tokenizer(source, checkpoint):
        raise ArtifactError(f"{source}: its tokenizer differs from {checkpoint}'s; recovery needs the same one")
    for shape in (load_config(source), smaller):
        check_sequence(recovery.config.sequence, shape)
    recovery.objective.check_models(smaller, load_config(source))
    check_teachers(recovery.objective, source)
    return prepare_signals(
        recovery.objective,
        teacher=source,
        student=smaller,
        corpus=recovery.corpus,
        valid=recovery.valid,
        config=recovery.config,
    )


def recover(
    model: SportsLLM,
    recovery: Recovery,
    checkpoint: Path,
    *,
    directory: Path,
    identity: str,
    resume: bool,
    signals: Signals | None,
) -> tuple[SportsLLM, dict[str, Any]]:
    """Train a compressed model.

    Args:
        model: on the CPU; changed.
        recovery: how.
        checkpoint: the full model.
        directory, identity, resume: see `sportsllm.training.loop.train_model`.
        signals: of `prepare_recovery`.

    Returns:
        The trained model, and results: those of every training, and `bits_per_byte_before_recovery`.
    """
    words = load_tokenizer(checkpoint, model.config)
    texts = load_corpus(recovery.corpus, recovery.valid)
    before = validator(texts, words)(model)
    model, result, batches = train_student(
        model,
        teacher=recovery.teacher or checkpoint,
        objective=recovery.objective,
        texts=texts,
        documents=tokenize(texts.train, words),
        tokenizer=words,
        config=recovery.config,
        directory=directory,
        identity=identity,
        resume=resume,
        description="recover",
        signals=signals,
        adapters=recovery.adapters,
    )
    return model, {"bits_per_byte_before_recovery": before, **training_results(model, result, batches)}
