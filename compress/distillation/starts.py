"""Teachers, and the starts of a student: random weights, a checkpoint, or (`compress.pruning`) a pruned teacher."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from compress.distillation.layer_matching import is_untrained_cut, layers_of_teacher, map_kept_layers
from compress.distillation.student_training import StudentText, StudentTraining
from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import load_config
from sportsllm.formats.safetensors import quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import PRESETS, preset
from sportsllm.text.provenance import manifest_setting
from sportsllm.text.tokenizer import same_tokenizer
from sportsllm.training import settings
from sportsllm.training.settings import fit_vocabulary, shape_of


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


def teacher_corpus(teacher: Path, key: str, option: str = "--corpus") -> list[Path]:
    """The corpus (`corpus`) or held-out text (`valid`) that the teacher's manifest names.

    Errors advise `option`. Where held-out text is not there any more, a part of the corpus is held out instead,
    and a line says so.
    """
    paths = [Path(item) for item in manifest_setting(teacher, key) or []]
    missing = [path for path in paths if not path.exists()]
    if missing and key == "valid":
        log(
            f"{missing[0]}: held-out text that {teacher} names, not found; 2% of the corpus is held out by hash instead"
        )
        return []
    if missing:
        raise ArtifactError(f"{missing[0]}: named by {teacher}'s manifest but not found; give {option}")
    if not paths and key == "corpus":
        raise UsageError(f"{teacher}: its manifest names no corpus; give {option} PATH")
    return paths


class Start(Protocol):
    """What a student starts from.

    Attributes:
        name: fresh, cut or weights, for the manifest.
        kind: decides how large the steps of its training may be.
        shape: of the student.
        inputs: what is read for it beside the teacher.
    """

    name: ClassVar[str]
    kind: ClassVar[settings.Start]

    @property
    def shape(self) -> ModelConfig: ...
    @property
    def inputs(self) -> list[Path]: ...
    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The student before training on `text`, and the training with what is known of the student's layers."""


@dataclass(frozen=True)
class Fresh:
    """A student with random weights: its shape, and the file that was read from, if any."""

    name: ClassVar[str] = "fresh"
    kind: ClassVar[settings.Start] = settings.Start.RANDOM
    shape: ModelConfig
    inputs: list[Path]

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The student before training."""
        model = SportsLLM(self.shape)
        model.initialize(training.config.seed)
        return model, training


@dataclass(frozen=True)
class Checkpoint:
    """A student that starts from a checkpoint's weights."""

    name: ClassVar[str] = "weights"
    kind: ClassVar[settings.Start] = settings.Start.PRUNED
    shape: ModelConfig
    inputs: list[Path]

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The student before training."""
        return load_checkpoint(self.inputs[0]), training

    def matched(self, training: StudentTraining) -> StudentTraining:
        """The training, with hidden states matched at the kept layers if the student was pruned out of the teacher."""
        kept = layers_of_teacher(self.inputs[0], training.teacher)
        if kept is None:
            return training
        mapped = map_kept_layers(training.distillation, kept, load_config(training.teacher).num_hidden_layers)
        if mapped is not training.distillation:
            log(f"hidden states are matched at the layers that were kept: {', '.join(map(str, kept))}")
        return dataclasses.replace(training, distillation=mapped)

    @property
    def already_trained(self) -> bool:
        """Whether the weights were trained after they were cut, or never cut, as far as is known."""
        return not is_untrained_cut(self.inputs[0])

    def record(self) -> dict[str, Any]:
        """What is made of the weights before training, for the manifest."""
        return {}


def resolve_start(student: str, init: Path | None, start: str | None, teacher: Path) -> Fresh | Checkpoint:
    """What --student, --init and --start ask for together, where nothing is cut out of the teacher.

    Args:
        student: a preset's name or a checkpoint directory.
        init: a checkpoint whose weights a preset student starts from.
        start: `fresh` or `cut` to take only the shape of a checkpoint student.
        teacher: whose vocabulary and tokenizer the student has.

    Raises:
        UsageError: flags that do not go together.
        ArtifactError: a quantized start, or one with another tokenizer.
    """
    if start not in (None, "fresh", "cut"):
        raise UsageError(f"--start {start!r} is not known; use cut or fresh, or leave it out")
    has_weights = start is None and has_tensors(Path(student))
    if init is not None and start is not None:
        raise UsageError(f"--start {start} makes the student's weights; leave --init {init} out")
    if init is not None and has_weights:
        raise UsageError(f"--student {student} has weights of its own; give a preset's name with --init, or no --init")
    if init is None and not has_weights:
        theirs = load_config(teacher)
        shape, inputs = shape_of(student)
        fitted = fit_vocabulary(shape, theirs.vocab_size, student).with_changes(
            bos_token_id=theirs.bos_token_id, eos_token_id=theirs.eos_token_id, pad_token_id=theirs.pad_token_id
        )
        return Fresh(fitted, inputs)
    directory = init or Path(student)
    shape = _checkpoint_shape(directory, teacher)
    if init is not None and shape.with_changes(vocab_size=preset(student).vocab_size) != preset(student):
        log(f"the student starts from {init} and has its shape; {student!r} only names the output")
    return Checkpoint(shape, [directory])


def check_no_larger(student: ModelConfig, teacher: ModelConfig) -> None:
    """Refuse a student that computes more for a token than its teacher; a mixture may store more, a selection chooses.

    Raises:
        UsageError: it does.
    """
    alike = {"attention_kind": teacher.attention_kind, "selection": teacher.selection} if student.selection else {}
    own, theirs = student.with_changes(**alike).active_parameters, teacher.active_parameters
    if own > theirs:
        active = "active " if student.experts or teacher.experts else ""
        raise UsageError(
            f"the student ({own:,} {active}parameters) is larger than the teacher ({theirs:,}); choose a smaller "
            "--student"
        )


def has_tensors(directory: Path) -> bool:
    """Whether a directory holds weights, and not a shape alone."""
    return any(directory.glob("*.safetensors")) or any(directory.glob("*.safetensors.index.json"))


def _checkpoint_shape(directory: Path, teacher: Path) -> ModelConfig:
    if quantization_config(directory) is not None:
        raise ArtifactError(f"{directory}: is quantized; distil into the unquantized checkpoint, then quantize")
    shape, theirs = load_config(directory), load_config(teacher)
    if not same_tokenizer(teacher, directory):
        raise ArtifactError(
            f"{directory}: its tokenizer differs from the teacher's ({teacher}); distillation needs the same one"
        )
    if shape.vocab_size != theirs.vocab_size:
        raise ArtifactError(
            f"student has {shape.vocab_size} tokens, teacher {theirs.vocab_size}; they must be the same"
        )
    return shape
