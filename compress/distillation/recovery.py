"""Training after a cut or after rounding: a model learns from the one that it was made from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.distillation.settings import DistillationConfig
from compress.distillation.student_training import RunState, StudentText, StudentTraining, train_student
from compress.teacher_cache.read import TeacherCache
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.tokenizer import load_tokenizer, same_tokenizer
from sportsllm.training.settings import Adapters, TrainConfig


@dataclass(frozen=True)
class Recovery:
    """How a compressed model is trained afterwards; the fields are those of `StudentTraining`.

    `teacher` is None where it learns from the checkpoint that was compressed.
    """

    config: TrainConfig
    corpus: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    objective: DistillationConfig = field(default_factory=DistillationConfig)
    teacher: Path | None = None
    adapters: Adapters | None = None

    def training(self, checkpoint: Path) -> StudentTraining:
        """The same with the teacher named."""
        teacher = self.teacher or checkpoint
        beside = (checkpoint,) if teacher != checkpoint else ()
        return StudentTraining(teacher, self.config, self.corpus, self.valid, self.objective, self.adapters, beside)

    def settings(self, checkpoint: Path) -> dict[str, Any]:
        """For the manifest; the training loop's settings are under `recover`."""
        return {**self.training(checkpoint).settings(), "recover": dataclasses.asdict(self.config)}

    def inputs(self) -> list[Path]:
        """Everything that it reads beside the checkpoint."""
        signals = self.objective.signals
        return [*([self.teacher] if self.teacher else []), *([signals] if signals else []), *self.corpus, *self.valid]


def prepare_recovery(recovery: Recovery, checkpoint: Path, smaller: ModelConfig) -> TeacherCache | None:
    """Check the recovery against both models, and open or make its teacher cache.

    Args:
        recovery: how to train.
        checkpoint: the full model.
        smaller: shape of what is to be trained.
    """
    source = recovery.teacher or checkpoint
    if not same_tokenizer(source, checkpoint):
        raise ArtifactError(f"{source}: its tokenizer differs from {checkpoint}'s; recovery needs the same one")
    return recovery.training(checkpoint).prepare(smaller)


def recover(
    model: SportsLLM,
    recovery: Recovery,
    checkpoint: Path,
    *,
    directory: Path,
    identity: str,
    resume: bool,
    signals: TeacherCache | None,
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
    training = recovery.training(checkpoint)
    text = StudentText.read(training, load_tokenizer(checkpoint, model.config))
    results = train_student(model, training, text, signals, RunState(directory, identity, resume), "recover")
    return model, {"bits_per_byte_before_recovery": results.pop("bits_per_byte_before"), **results}
