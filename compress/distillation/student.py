"""The training of a student: its record, its text, and the one training loop, which leaves an ordinary model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from compress.distillation.loss import DistillationConfig, HiddenMatching, attached, distillation_loss
from compress.distillation.make_teacher_cache import make_teacher_cache
from compress.distillation.teacher import load_teacher, teacher_logits
from compress.distillation.teacher_cache import SIGNALS, TeacherCache, open_teacher_cache, wanted_info
from sportsllm import processes
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.huggingface import load_config
from sportsllm.inference.decoder import require_finite
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.processors import training_device
from sportsllm.text.documents import USUAL, Reading, held_out_setting, left_out
from sportsllm.text.packing import PackedSequences
from sportsllm.text.split import TextSplit, load_corpus
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.text.tokens import TokenizedDocuments, token_cache, tokenize
from sportsllm.training.loop import train_model, training_record
from sportsllm.training.rate_trial import choose_rates
from sportsllm.training.settings import TrainConfig, check_sequence
from sportsllm.training.sharding import place
from sportsllm.training.state import validation

_CHECKED = 256  # tokens whose logits must be finite before training


@dataclass(frozen=True)
class StudentTraining:
    """How a student is trained, in `distill` or after a cut or rounding.

    Attributes:
        teacher: its checkpoint.
        config: of the training loop.
        corpus, valid: training and held-out text; without the latter a part of the corpus is held out.
        distillation: what to learn.
        extra_holdouts: further checkpoints whose held-out text is not trained on, such as the student's start.
        reported: whether the report split is scored; not in a trial.
        reading: of all text.
    """

    teacher: Path
    config: TrainConfig
    corpus: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    extra_holdouts: tuple[Path, ...] = ()
    reported: bool = True
    reading: Reading = USUAL

    @property
    def tokens(self) -> int:
        """How many it reads."""
        return self.config.steps * self.config.tokens_per_step

    @property
    def left_out(self) -> tuple[Path, ...]:
        """All text that it never reads."""
        return left_out(self.valid, *self.checkpoints)

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """Those whose held-out text it never reads."""
        return self.teacher, *self.extra_holdouts

    def read_corpus(self) -> TextSplit:
        """Training and held-out text."""
        return load_corpus(self.corpus, self.valid, self.reading.text_field, self.checkpoints)

    def settings(self) -> JsonObject:
        """For the manifest, without the training loop's."""
        return {
            "teacher": str(self.teacher),
            "corpus": [str(path) for path in self.corpus],
            "valid": [str(path) for path in self.valid],
            **held_out_setting(self.valid, self.left_out),
            **self.distillation.settings(),
            **self.reading.record(),
        }

    def recovery_settings(self) -> JsonObject:
        """The same for a stage that trains after other work: the training loop's settings are under `recover`."""
        return {**self.settings(), "recover": dataclasses.asdict(self.config)}

    def inputs(self) -> list[Path]:
        """Everything that it reads beside the teacher."""
        signals = self.distillation.signals
        return [*([signals] if signals else []), *self.corpus, *self.left_out]

    def matching_kept(self, kept: list[int]) -> StudentTraining:
        """`DistillationConfig.matching_kept` of the training."""
        layers = load_config(self.teacher).num_hidden_layers
        return dataclasses.replace(self, distillation=self.distillation.matching_kept(kept, layers))

    def prepare(self, student: ModelConfig) -> TeacherCache | None:
        """Check the training against both models, and open the teacher cache; make it if it is missing.

        Raises:
            UsageError: a sequence longer than a context.
            ArtifactError: no cache, or one that was made by another teacher, or for another corpus, sequence or seed.
        """
        teacher = load_config(self.teacher)
        for shape in (student, teacher):
            check_sequence(self.config.sequence, shape)
        directory = self.distillation.signals
        if directory is None:
            return None
        if processes.count() > 1:
            raise UsageError("--signals: several processes cannot read it; leave it out, or train in one process")
        wanted = wanted_info(self)
        if not (directory / SIGNALS).exists():
            if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
                raise ArtifactError(f"{directory}: exists and holds no teacher signals; give --signals a new directory")
            make_teacher_cache(self, wanted, directory)
        return open_teacher_cache(self, dataclasses.replace(wanted, vocab_size=student.vocab_size), directory)


@dataclass(frozen=True)
class StudentText:
    """The text of a training: its split, the training part's tokens, and the tokenizer."""

    split: TextSplit
    documents: TokenizedDocuments
    tokenizer: TextTokenizer

    @staticmethod
    def read(training: StudentTraining, out: Path) -> StudentText:
        """Read and tokenize the training's files, with the teacher's tokenizer, for a run that writes `out`."""
        tokenizer = load_tokenizer(training.teacher, load_config(training.teacher), training.reading)
        split = training.read_corpus()
        return StudentText(split, tokenize(split.train, tokenizer, token_cache(out)), tokenizer)


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps its state, for which settings, and whether it goes on from there; see `train_model`."""

    directory: Path
    identity: JsonObject
    resume: bool = False


def train_student(
    student: SportsLLM,
    training: StudentTraining,
    text: StudentText,
    cache: TeacherCache | None,
    run: RunDirectory,
    description: str,
    has_weights: bool = True,
) -> JsonObject:
    """Train a student, which is moved to the training device, in place.

    Args:
        cache: from `StudentTraining.prepare`.
        has_weights: the student is good already, and stays as it is if no step is better.

    Returns:
        The results that every training reports.

    Raises:
        ArtifactError: the teacher's logits are not finite.
    """
    config, device, distillation = training.config, training_device(), training.distillation
    teacher = None
    if distillation.asks_the_teacher:
        teacher = load_teacher(training.teacher, distillation.teacher_precision, device, config.shard)
    if cache is None:
        batches = PackedSequences(text.documents, config.sequence, config.batch_size, config.seed)
    else:
        batches = cache.batches(text.documents, config.batch_size)
    if teacher is not None:
        logits = teacher_logits(teacher, batches.batch(0).to(device))
        require_finite(float(logits(0, _CHECKED).abs().max()), "the teacher")
    matching = None
    if teacher is not None and distillation.hidden_weight:
        layers = distillation.layers(student.config, teacher.config)
        matching = HiddenMatching(student.config, teacher.config, layers, config.seed)
    judged = validation(text.split, text.tokenizer, config, has_weights)
    judged = judged and dataclasses.replace(judged, reported=training.reported)
    loss = distillation_loss(distillation, teacher, cache)
    with attached(student, matching):
        place(student, device, config.shard, config.tensor_parallel)
        if matching is not None and teacher is not None and has_weights:  # a saved state has others
            matching.fit(student, teacher, batches.batch(0).to(device))
        if config.try_rates and judged is not None:
            config = choose_rates(student, batches, loss, config, run.directory, judged.selection)
        result = train_model(
            student,
            batches,
            loss,
            config,
            run.directory,
            validation=judged,
            identity=run.identity,
            resume=run.resume,
            description=description,
        )
    return {**training_record(result, student, batches), "sides": text.split.sides}


def recover(
    model: SportsLLM, training: StudentTraining, cache: TeacherCache | None, run: RunDirectory, text: StudentText
) -> JsonObject:
    """Train a model that was cut or rounded, in place: `train_student`, the score before under its own name."""
    results = train_student(model, training, text, cache, run, "recover")
    return {"bits_per_byte_before_recovery": results.pop("bits_per_byte_before"), **results}
