"""Teachers, and the starts of a student: random weights, a checkpoint, or the most important parts of the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from compress.distillation.loss import distillation_config
from compress.distillation.student import StudentText, StudentTraining
from compress.pruning.cut import SAMPLE_LENGTH, check_cut, cut_to_config
from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject, require_directory
from sportsllm.formats.checkpoint import load_checkpoint
from sportsllm.formats.huggingface import SPECIAL_IDS, load_config
from sportsllm.formats.manifest import GGUF_RECORD, Ancestor, ancestors, manifest_of
from sportsllm.formats.packed import quantization_config
from sportsllm.inference.calibration import calibration_samples, usual_samples
from sportsllm.inference.decoder import is_onnx_directory
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.settings import DISTILLATION, STEPS, TRAINING, pick
from sportsllm.text.documents import Reading, recorded_text, tokens_per_parameter
from sportsllm.text.tokenizer import load_tokenizer, same_tokenizer
from sportsllm.training import settings
from sportsllm.training.settings import fit_vocabulary, shape_of

_SHORT_RUN = 1e-3  # tokens per parameter below which matched hidden states lose; measured: 0.0004 loses, 0.01 gains
_BARELY_TRAINED = 5.0  # tokens a parameter below which a student takes the rates of random weights


def resolve_teacher(name: str) -> Path:
    """A teacher given as a directory, or as a preset's name, which means runs/<preset>.

    Raises:
        ArtifactError: there is none; for a preset the message says how to make it.
    """
    from sportsllm.models.presets import PRESETS

    found = next((path for path in (Path(name), Path("runs") / name) if path.is_dir()), Path(name))
    if name in PRESETS and not found.is_dir():
        raise ArtifactError(
            f"runs/{name}: no teacher there; make one with: sportsllm-compress train --model {name} --corpus PATH "
            "(--steps 0 writes an untrained one)"
        )
    require_directory(found, "the teacher's checkpoint, as train writes it")
    if is_onnx_directory(found):
        raise ArtifactError(f"{found}: is an export; give the checkpoint that it was made from")
    return found


def plan_training(
    run: settings.Run,
    teacher: Path,
    tokens: int | None,
    given: JsonObject,
    corpus: Sequence[Path] | None,
    valid: Sequence[Path] | None,
    seed: int,
    reading: Reading,
    extra_holdouts: tuple[Path, ...] = (),
) -> StudentTraining:
    """The training of a student by the options and settings of a verb, by name; text not given is the teacher's own."""
    lengths = {name: value for name, value in given.items() if name in TRAINING or name in STEPS or name == "steps"}
    taught = pick(given, DISTILLATION)
    if given.get("signals") is not None:
        taught["signals"] = Path(given["signals"])
    text = tuple(corpus or recorded_text(teacher, "corpus"))
    training = StudentTraining(
        teacher=teacher,
        corpus=text,
        valid=tuple(valid or ([] if corpus else recorded_text(teacher, "valid"))),
        distillation=distillation_config(run.start, teacher, taught, text),
        config=settings.train_config(run, tokens, lengths, seed=seed),  # last, since it prints the settings
        extra_holdouts=extra_holdouts,
        reading=reading,
    )
    if "hidden_weight" not in taught and training.tokens < _SHORT_RUN * run.model.parameters:
        training = replace(training, distillation=replace(training.distillation, hidden_weight=0.0))
    return training


@dataclass(frozen=True)
class Fresh:
    """A student with random weights, and what every other start has too.

    Attributes:
        name: for the manifest.
        shape: of the student.
        inputs: what is read for it beside the teacher.
        kind: decides how large the steps of its training may be.
        weights: for messages, if `kind` does not say what they are.
    """

    name: ClassVar[str] = "fresh"
    shape: ModelConfig
    inputs: list[Path]
    kind: settings.Start = settings.Start.RANDOM
    weights: str | None = None

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The student before training on `text`, and the training with what is known of the student's layers."""
        model = SportsLLM(self.shape)
        model.initialize(training.config.seed)
        return model, training

    def matched(self, training: StudentTraining) -> StudentTraining:
        """The training with what is known of the student's layers before it is built."""
        return training

    def record(self) -> JsonObject:
        """What is made of the weights before training, for the manifest."""
        return {"init": None, "start": self.name}


@dataclass(frozen=True)
class Cut(Fresh):
    """A student of the most important parts of its teacher, refitted to it."""

    name: ClassVar[str] = "cut"
    kind: settings.Start = settings.Start.PRUNED

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        """The calibration text is the training text; hidden states are matched at the layers that were kept."""
        teacher = load_checkpoint(training.teacher)
        tokenizer = load_tokenizer(training.teacher, teacher.config, training.reading)
        smaller = _inside(self.shape, teacher.config)
        length = min(SAMPLE_LENGTH, smaller.max_position_embeddings)
        most = usual_samples(teacher.config, length, training.tokens)
        source = training.corpus, training.valid, tokenizer, teacher.config
        samples = calibration_samples(*source, None, length, most, checkpoints=training.checkpoints)
        cut = cut_to_config(teacher, smaller, samples)
        kept = ", ".join(map(str, cut.layers))
        log(f"the student is cut out of {training.teacher}: layers {kept}, {self.shape.parameters:,} parameters")
        # Positions beyond the teacher's context have no weights. Each layer is of the type of the one it was.
        student = SportsLLM(self.shape.with_changes(layer_types=cut.model.config.layer_types))
        student.load_state_dict(cut.model.state_dict())
        return student, training.matching_kept(cut.layers)


@dataclass(frozen=True)
class Checkpoint(Fresh):
    """A student that starts from the weights of a checkpoint, the first of `inputs`."""

    name: ClassVar[str] = "weights"
    kind: settings.Start = settings.Start.PRUNED

    def build(self, training: StudentTraining, text: StudentText) -> tuple[SportsLLM, StudentTraining]:
        return load_checkpoint(self.inputs[0]), training

    def matched(self, training: StudentTraining) -> StudentTraining:
        """With hidden states matched at the kept layers if the student was pruned out of the teacher."""
        kept = layers_of_teacher(self.inputs[0], training.teacher)
        if kept is None:
            return training
        mapped = training.matching_kept(kept)
        if mapped != training:
            log(f"hidden states are matched at the layers that were kept: {', '.join(map(str, kept))}")
        return mapped

    @property
    def already_trained(self) -> bool:
        """Whether the weights were trained after they were cut, or never cut, as far as is known."""
        manifest = manifest_of(self.inputs[0])
        pruned = manifest.command == "prune" and "kept_layers" in manifest.results
        return not (pruned and manifest.settings.get("recover") is None)

    def record(self) -> JsonObject:
        return {"init": str(self.inputs[0]), "start": self.name}


def layers_of_teacher(student: Path, teacher: Path) -> list[int] | None:
    """The teacher's layers that a checkpoint has; None if it was not made from that very teacher.

    The manifests tell, of all stages between the two.
    """
    manifest = manifest_of(student)
    kept: list[int] | None = None
    for stage in (Ancestor(student, manifest), *ancestors(manifest, student)):
        if stage.directory.resolve() == teacher.resolve():
            return [*range(load_config(teacher).num_hidden_layers)] if kept is None else kept
        if stage.manifest.command == "distill" and stage.manifest.text("start") not in ("weights", "selection"):
            return None  # layers of random weights, or of a cut that is not recorded
        if (cut := stage.manifest.results.get("kept_layers")) is not None:
            kept = cut if kept is None else [cut[layer] for layer in kept]
    return None


def choose_start(student: str, start: str | None, teacher: Path) -> Fresh:
    """What --student and --start ask for together.

    A student that is given by its shape alone is cut out of the teacher. Where that cannot be, it gets random weights,
    and a line says why; with `--start cut` that is an error.

    Args:
        start: `fresh` or `cut` to take only the shape of a checkpoint student.

    Raises:
        UsageError: flags that do not go together.
        ArtifactError: an export, a quantized start, or one with another tokenizer.
    """
    if start not in (None, "fresh", "cut"):
        raise UsageError(f"--start {start!r} is not known; use cut or fresh, or leave it out")
    path, patterns = Path(student), ("*.safetensors", "*.index.json", GGUF_RECORD)
    if start is None and any(any(path.glob(pattern)) for pattern in patterns):  # a directory may hold a shape alone
        begin = Checkpoint(_checkpoint_shape(path, teacher), [path])
        if begin.already_trained and layers_of_teacher(path, teacher) is None:  # its hidden states are its own
            read = tokens_per_parameter(path)
            barely = read is not None and read < _BARELY_TRAINED
            return replace(begin, kind=settings.Start.BARELY_TRAINED if barely else settings.Start.TRAINED)
        uncut = begin.already_trained and begin.shape.parameters == load_config(teacher).parameters
        return replace(begin, weights=settings.Start.TRAINED.value if uncut else None)
    if start is None and is_onnx_directory(path):
        raise ArtifactError(f"{path}: is an export; give the checkpoint that it was made from")
    theirs = load_config(teacher)
    shape, inputs = shape_of(student)
    ids = {name: getattr(theirs, name) for name in SPECIAL_IDS}
    shape = fit_vocabulary(shape, theirs.vocab_size, student).with_changes(**ids)
    if start == "fresh":
        return Fresh(shape, inputs)
    try:
        if quantization_config(teacher) is not None:
            raise UsageError(f"{teacher} is quantized")
        check_cut(theirs, _inside(shape, theirs))
    except UsageError as error:
        if start == "cut":
            raise UsageError(f"--start cut: {error}; choose another --student, or --start fresh") from None
        log(f"the student starts from random weights, since it cannot be cut out of the teacher: {error}")
        return Fresh(shape, inputs)
    return Cut(shape, inputs)


def _inside(shape: ModelConfig, teacher: ModelConfig) -> ModelConfig:
    """The shape with the teacher's context at most, unless it has a table of positions."""
    longest = (shape if shape.positions else teacher).max_position_embeddings
    return shape.with_changes(max_position_embeddings=min(shape.max_position_embeddings, longest))


def _checkpoint_shape(directory: Path, teacher: Path) -> ModelConfig:
    if quantization_config(directory) is not None:
        raise ArtifactError(f"{directory}: is quantized; distil into the unquantized checkpoint, then quantize")
    shape, theirs = load_config(directory), load_config(teacher)
    if not same_tokenizer(teacher, directory):
        raise ArtifactError(
            f"{directory}: its tokenizer differs from the teacher's ({teacher}); distillation needs the same one"
        )
    if shape.vocab_size != theirs.vocab_size:
        raise ArtifactError(f"student has {shape.vocab_size} tokens, teacher {theirs.vocab_size}; they must be equal")
    return shape


def check_no_larger(student: ModelConfig, teacher: ModelConfig) -> None:
    """UsageError for a student that computes more for a token than its teacher; a mixture may store more."""
    alike = {"attention_kind": teacher.attention_kind, "selection": teacher.selection} if student.selection else {}
    own, theirs = student.with_changes(**alike).active_parameters, teacher.active_parameters
    if own > theirs:
        active = "active " if student.experts or teacher.experts else ""
        raise UsageError(
            f"the student ({own:,} {active}parameters) is larger than the teacher ({theirs:,}); choose a smaller "
            "--student"
        )
