"""A student that is cut out of its teacher: where `distill` starts from wherever nothing of the teacher grows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from compress.distillation.layer_matching import map_kept_layers
from compress.distillation.starts import Fresh, Start, resolve_start
from compress.distillation.student_training import StudentText, StudentTraining
from compress.pruning.cut import SAMPLE_LENGTH, PruneConfig, check_cut, cut_to_config
from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.calibration import calibration_samples
from sportsllm.text.tokenizer import load_tokenizer
from sportsllm.training import settings


@dataclass(frozen=True)
class Cut:
    """A student of the most important parts of its teacher, refitted to it."""

    name: ClassVar[str] = "cut"
    kind: ClassVar[settings.Start] = settings.Start.PRUNED
    shape: ModelConfig
    inputs: list[Path]

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The student before training, whose calibration text is the training text; hidden states are matched at the
        layers that were kept.
        """
        teacher = load_checkpoint(training.teacher)
        words = load_tokenizer(training.teacher, teacher.config)
        context = min(self.shape.max_position_embeddings, teacher.config.max_position_embeddings)
        length = min(SAMPLE_LENGTH, context)
        samples = calibration_samples(training.corpus, training.left_out, words, teacher.config, None, length)
        smaller = self.shape.with_changes(max_position_embeddings=context)
        cut = cut_to_config(teacher, smaller, PruneConfig(), samples)
        kept = ", ".join(map(str, cut.layers))
        log(f"the student is cut out of {training.teacher}: layers {kept}, {self.shape.parameters:,} parameters")
        student = SportsLLM(self.shape)  # positions beyond the teacher's context have no weights
        student.load_state_dict(cut.model.state_dict())
        mapped = map_kept_layers(training.distillation, cut.layers, teacher.config.num_hidden_layers)
        return student, dataclasses.replace(training, distillation=mapped)


def choose_start(student: str, init: Path | None, start: str | None, teacher: Path) -> Start:
    """What --student, --init and --start ask for together; arguments and errors as in `resolve_start`.

    A student that is given by its shape alone is cut out of the teacher. Where that cannot be, it gets random weights,
    and a line says why; with `--start cut` that is an error.
    """
    plain = resolve_start(student, init, start, teacher)
    if not isinstance(plain, Fresh) or start == "fresh":
        return plain
    try:
        if quantization_config(teacher) is not None:
            raise UsageError(f"{teacher} is quantized")
        check_cut(load_config(teacher), _inside(plain.shape, load_config(teacher)))
    except UsageError as error:
        if start == "cut":
            raise UsageError(f"--start cut: {error}; choose another --student, or --start fresh") from None
        log(f"the student starts from random weights, since it cannot be cut out of the teacher: {error}")
        return plain
    return Cut(plain.shape, plain.inputs)


def _inside(shape: ModelConfig, teacher: ModelConfig) -> ModelConfig:
    """The shape with the teacher's context at most, which no weight depends on."""
    context = min(shape.max_position_embeddings, teacher.max_position_embeddings)
    return shape.with_changes(max_position_embeddings=context)
