"""Short distillations of a tiny student."""

import dataclasses
from pathlib import Path
from typing import Any

from compress.distill import DistillResult, distill_student
from compress.distillation.loss import DistillationConfig
from compress.distillation.starts import choose_start
from compress.distillation.student import StudentTraining
from sportsllm.training.settings import TrainConfig

CONFIG = TrainConfig(steps=3, batch_size=2, accumulation=1, sequence=32, precision="fp32", warmup=0)
FP32 = DistillationConfig(teacher_precision="fp32")


def run(teacher: Path, student: str, out: Path, corpus: Path, **changes: Any) -> DistillResult:
    """Three steps; `changes` are of the training."""
    training = StudentTraining(teacher, CONFIG, (corpus,), distillation=FP32)
    start = choose_start(student, "fresh" if student == "tiny-300k" else None, teacher)
    return distill_student(student, start, dataclasses.replace(training, **changes), out)
