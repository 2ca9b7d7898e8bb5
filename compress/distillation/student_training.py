"""Train a student: open what it learns from, run the one training loop, and leave an ordinary model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.distillation.hidden_states import HiddenMatching, attached
from compress.distillation.settings import DistillationConfig
from compress.distillation.student_loss import distillation_loss, fit_matching
from compress.distillation.teacher import load_teacher, resolve_teacher_precision, running_teacher
from compress.teacher_cache.files import SIGNALS
from compress.teacher_cache.read import CacheKey, TeacherCache, open_teacher_cache
from compress.teacher_cache.write import CacheRequest, make_teacher_cache
from sportsllm.console import log
from sportsllm.formats.artifact import STATE_DIRECTORY, partial_directory
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.processors import training_device
from sportsllm.text.documents import TextSplit, load_corpus
from sportsllm.text.packing import PackedSequences, TokenizedDocuments, tokenize
from sportsllm.text.provenance import held_out_setting, left_out
from sportsllm.text.tokenizer import TextTokenizer
from sportsllm.training.loop import train_model
from sportsllm.training.lora import add_adapters, merge_adapters
from sportsllm.training.rate_trial import choose_rates
from sportsllm.training.settings import Adapters, TrainConfig, check_sequence
from sportsllm.training.validation import validation, validator


@dataclass(frozen=True)
class StudentTraining:
    """How a student is trained.

    Attributes:
        teacher: its checkpoint.
        config: of the training loop.
        corpus, valid: training and held-out text; without the latter a part of the corpus is held out.
        distillation: what to learn.
        adapters: train these instead of all weights, and merge them.
        extra_holdouts: further checkpoints whose held-out text is not trained on: where the student starts from.
    """

    teacher: Path
    config: TrainConfig
    corpus: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    adapters: Adapters | None = None
    extra_holdouts: tuple[Path, ...] = ()

    @property
    def left_out(self) -> tuple[Path, ...]:
        """All text that it never reads."""
        return left_out(self.valid, self.teacher, *self.extra_holdouts)

    def settings(self) -> dict[str, Any]:
        """For the manifest, without the training loop's."""
        return {
            "teacher": str(self.teacher),
            "corpus": [str(path) for path in self.corpus],
            "valid": [str(path) for path in self.valid],
            **held_out_setting(self.valid, self.left_out),
            **self.distillation.settings(),
            **({} if self.adapters is None else {"lora": dataclasses.asdict(self.adapters)}),
        }

    def inputs(self) -> list[Path]:
        """Everything that it reads beside the teacher."""
        signals = self.distillation.signals
        return [*([signals] if signals else []), *self.corpus, *self.left_out]

    def prepare(self, student: ModelConfig) -> TeacherCache | None:
        """Check the training against both models, and open the teacher cache; make it where it is missing.

        Raises:
            UsageError: a sequence longer than a context, or a layer map out of range.
            ArtifactError: a cache that was made by another teacher, or for another corpus, sequence or seed.
        """
        teacher = load_config(self.teacher)
        for shape in (student, teacher):
            check_sequence(self.config.sequence, shape)
        self.distillation.layers(student, teacher)
        directory = self.distillation.signals
        if directory is None:
            return None
        if not (directory / SIGNALS).exists():
            self._make_cache(directory)
        config = self.config
        key = CacheKey(
            self.teacher,
            self.corpus,
            self.valid,
            self.left_out,
            config.sequence,
            config.seed,
            student.vocab_size,
            self.distillation.temperature,
            resolve_teacher_precision(self.distillation.teacher_precision, training_device()),
        )
        cache = open_teacher_cache(directory, key)
        passes = self.config.steps * self.config.tokens_per_step / cache.info.tokens
        if passes > 1.005:
            log(f"{directory}: {cache.info.tokens:,} tokens, read {passes:.1f} times")
        return cache

    def _make_cache(self, directory: Path) -> None:
        log(f"{directory}: no teacher signals there yet, making them")
        config, distillation = self.config, self.distillation
        request = CacheRequest(
            teacher=self.teacher,
            corpus=self.corpus,
            valid=self.valid,
            left_out=self.left_out,
            tokens=distillation.signal_tokens or max(1, config.steps * config.tokens_per_step),
            sequence=config.sequence,
            seed=config.seed,
            temperature=distillation.temperature,
            teacher_precision=resolve_teacher_precision(distillation.teacher_precision, training_device()),
            batch_size=config.batch_size,
        )
        make_teacher_cache(
            request,
            directory,
            lambda: running_teacher(self.teacher, distillation.teacher_precision),
            resume=(partial_directory(directory) / STATE_DIRECTORY).exists(),
        )


@dataclass(frozen=True)
class StudentText:
    """The text of a training: its split, the training part's tokens, and the tokenizer."""

    split: TextSplit
    documents: TokenizedDocuments
    tokenizer: TextTokenizer

    @staticmethod
    def read(training: StudentTraining, tokenizer: TextTokenizer) -> StudentText:
        """Read and tokenize the training's files."""
        split = load_corpus(training.corpus, training.valid, training.left_out)
        return StudentText(split, tokenize(split.train, tokenizer), tokenizer)

    def bits_per_byte(self, model: SportsLLM) -> float:
        """Of the held-out text."""
        return validator(self.split, self.tokenizer)(model)


@dataclass(frozen=True)
class RunState:
    """Where a run keeps its state, for which settings, and whether it goes on from there; see `train_model`."""

    directory: Path
    identity: str
    resume: bool = False


def train_student(
    student: SportsLLM,
    training: StudentTraining,
    text: StudentText,
    cache: TeacherCache | None,
    state: RunState,
    description: str,
    has_weights: bool = True,
) -> dict[str, Any]:
    """Train a student in place with the one training loop; adapters are merged at the end.

    Args:
        student: on the CPU; moved to the training device.
        training: how.
        text: of the training.
        cache: from `StudentTraining.prepare`.
        state: of the run.
        description: of the progress bar.
        has_weights: the student is good already, and stays as it is if no step is better.

    Returns:
        The results that every training reports.
    """
    config, device = training.config, training_device()
    teacher = None
    if training.distillation.asks_the_teacher:
        teacher = load_teacher(training.teacher, training.distillation.teacher_precision, device)
    if cache is None:
        batches = PackedSequences(text.documents, config.sequence, config.batch_size, config.seed)
    else:
        batches = cache.batches(text.documents, config.batch_size)
    with adapted(student, training.adapters, config.seed):
        student.to(device)
        matching = None
        if teacher is not None and training.distillation.hidden_weight:
            layers = training.distillation.layers(student.config, teacher.config)
            matching = HiddenMatching(student.config, teacher.config, layers, config.seed)
            resumed = (state.directory / STATE_DIRECTORY).exists()  # the saved state has the projections
            if has_weights and not resumed and len(matching.projections):
                fit_matching(matching, student, teacher, batches.batch(0))
        judged = validation(text.split, text.tokenizer, config, has_weights)
        loss = distillation_loss(training.distillation, teacher, config.steps * config.accumulation, cache)
        with attached(student, matching):
            if config.try_rates and judged is not None:
                config = choose_rates(student, batches, loss, config, state.directory, judged.selection)
            result = train_model(
                student,
                batches,
                loss,
                config,
                state.directory,
                validation=judged,
                identity=state.identity,
                resume=state.resume,
                description=description,
            )
    return result.record(student, batches)


@contextmanager
def adapted(student: SportsLLM, adapters: Adapters | None, seed: int) -> Iterator[None]:
    """Inside the `with` only adapters are trained; they are merged behind it."""
    if adapters is not None:
        trained = add_adapters(student, adapters.rank, adapters.targets, adapters.alpha, seed)
        log(f"{trained:,} trainable parameters in adapters")
    yield
    merge_adapters(student)
