"""From an `Objective` to training: the teachers that run, the insides that are matched, the text that is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from compress.distillation.divergences import KLWeight, TeacherLogits, mixed_chunk, mixed_teachers
from compress.distillation.hidden_states import (
    HiddenMatching,
    Projected,
    attach,
    attention_matching_loss,
    detach,
    parse_layer_map,
    projected,
    relation_heads,
)
from compress.distillation.on_policy import is_on_policy, written_batch
from compress.distillation.settings import Objective
from compress.distillation.teacher import load_teacher, teacher_logits
from compress.teacher_cache.files import SIGNALS
from compress.teacher_cache.read import Signals, open_signals
from compress.teacher_cache.write import make_signals
from sportsllm.console import say
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.storage.artifact import STATE_DIRECTORY, partial_directory
from sportsllm.text.packing import IGNORE, Batch, PackedSequences, TokenizedDocuments
from sportsllm.text.split import TextSplit
from sportsllm.text.tokenizer import TextTokenizer, same_tokenizer
from sportsllm.training.chunked_loss import cross_entropy, head_loss
from sportsllm.training.loop import Loss, TrainConfig, TrainResult, train_model
from sportsllm.training.lora import Adapters, add_adapters, merge_adapters
from sportsllm.training.setup import training_device, validator

Teachers = Sequence[tuple[SportsLLM, float]]


def guided_loss(
    objective: Objective,
    teachers: Teachers,
    batches: int,
    *,
    signals: Signals | None = None,
    seed: int = 0,
    end_id: int | None = None,
) -> Loss:
    """The training loss of an objective, summed over scored tokens; neither model's logits exist as a whole.

    w * T^2 * D(teacher, student) + (1 - w) * cross-entropy + hidden_weight * `HiddenMatching` + attention_weight *
    `attention_matching_loss`, w on its way over training. A batch that the student writes itself has no text to
    learn, so w is 1 there, and its sum is scaled to the tokens that the batch it replaces would have scored.

    Args:
        objective: with hidden_weight, the student's `matching` is attached.
        teachers: with their shares of the mixture, the one whose insides are matched first; empty if none has to run.
        batches: of the whole training, accumulated ones counted singly.
        signals: to learn from instead of the teachers' logits.
        seed, end_id: of what the student writes, and where that ends.
    """

    def loss(student: SportsLLM, batch: Batch) -> Tensor:
        if not is_on_policy(objective.on_policy, seed, batch.index):
            weight = objective.kl_weight.at(batch.index / max(1, batches - 1))
            return _batch_loss(student, batch, weight, objective, teachers, signals)
        written = written_batch(student, batch, objective.on_policy_tokens, seed, end_id)
        total = _batch_loss(student, written, 1.0, objective, teachers, signals)
        scored, replaced = (int((part.targets != IGNORE).sum()) for part in (written, batch))
        return total * (replaced / max(1, scored))

    return loss


def distillation_loss(teacher: SportsLLM, kl_weight: float = 1.0, temperature: float = 1.0) -> Loss:
    """`guided_loss` of forward KL and cross-entropy from one teacher."""
    objective = Objective(kl_weight=KLWeight(kl_weight, kl_weight), temperature=temperature)
    return guided_loss(objective, [(teacher, 1.0)], 1)


def _batch_loss(
    student: SportsLLM,
    batch: Batch,
    weight: float,
    objective: Objective,
    teachers: Teachers,
    signals: Signals | None,
) -> Tensor:
    matched = bool(objective.hidden_weight or objective.attention_weight)
    if signals is None and weight == 0.0 and not matched:
        return cross_entropy(student.hidden(batch.tokens, batch.documents), student.head_weight, batch.targets)
    states: tuple[list[Tensor], list[Tensor]] | None = ([], []) if objective.hidden_weight else None
    with ExitStack() as stack:
        caught: tuple[Projected, ...] = ()
        if objective.attention_weight:
            caught = tuple(
                stack.enter_context(projected(model, model.config.num_hidden_layers - 1))
                for model in (student, teachers[0][0])
            )
        logits = [
            (teacher_logits(teacher, batch, states[1] if states and number == 0 else None), share)
            for number, (teacher, share) in enumerate(teachers if signals is None else teachers[:1])
        ]
        hidden = student.hidden(batch.tokens, batch.documents, states=states[0] if states else None)
    if signals is not None:
        chunk_loss = signals.chunk_loss(batch, weight)
    else:
        teacher: TeacherLogits = logits[0][0] if len(logits) == 1 else mixed_teachers(logits)
        chunk_loss = mixed_chunk(
            batch.targets.flatten(), teacher, weight, objective.temperature, objective.divergence, objective.mix
        )
    total = head_loss(hidden.flatten(0, 1), student.head_weight, chunk_loss)
    if states:
        matching = cast(HiddenMatching, student.matching)
        total = total + objective.hidden_weight * matching(states[0], states[1], batch.targets)
    if caught:
        heads = relation_heads(student.config, teachers[0][0].config, objective.relation_heads)
        relations = attention_matching_loss(caught[0], caught[1], batch.targets, batch.documents, heads)
        total = total + objective.attention_weight * relations
    return total


def check_teachers(objective: Objective, main: Path) -> None:
    """Further teachers must share the first one's tokenizer.

    Raises:
        ArtifactError: one does not.
    """
    for path, _ in objective.teachers:
        if not path.is_dir():
            raise ArtifactError(f"--extra-teacher {path}: no such directory; give a checkpoint")
        if not same_tokenizer(path, main):
            raise ArtifactError(f"--extra-teacher {path}: its tokenizer differs from {main}'s; only one can be mixed")


def guidance_settings(objective: Objective, teacher: Path, adapters: Adapters | None) -> dict[str, Any]:
    """What a manifest records of an objective and of adapters: nothing where it says nothing."""
    settings = objective.settings()
    if objective.teachers:
        settings["teachers"] = [[str(path), share] for path, share in objective.all_teachers(teacher)]
    if adapters is not None:
        settings["lora"] = dataclasses.asdict(adapters)
    return settings


def guidance_inputs(objective: Objective) -> list[Path]:
    """The directories, beside the main teacher, that an objective reads."""
    return [*(path for path, _ in objective.teachers), *([objective.signals] if objective.signals else [])]


def prepare_signals(
    objective: Objective,
    *,
    teacher: Path,
    student: ModelConfig,
    corpus: Sequence[Path],
    valid: Sequence[Path],
    config: TrainConfig,
) -> Signals | None:
    """Open the objective's signals; make them first where the directory is not there. None where it has none.

    Raises:
        ArtifactError: they were made by another teacher, or for another tokenizer, corpus, sequence or seed.
    """
    directory = objective.signals
    if directory is None:
        return None
    if not (directory / SIGNALS).exists():
        say(f"{directory}: no teacher signals there yet, making them")
        make_signals(
            teachers=objective.all_teachers(teacher),
            corpus=corpus,
            valid=valid,
            out=directory,
            tokens=objective.signal_tokens or max(1, config.steps * config.tokens_per_step),
            sequence=config.sequence,
            seed=config.seed,
            kind=objective.signal_kind,
            temperature=objective.temperature,
            teacher_precision=objective.teacher_precision,
            batch_size=config.batch_size,
            resume=(partial_directory(directory) / STATE_DIRECTORY).exists(),
        )
    signals = open_signals(
        directory,
        teacher=teacher,
        tokenizer=teacher,
        corpus=corpus,
        valid=valid,
        sequence=config.sequence,
        seed=config.seed,
        vocab_size=student.vocab_size,
    )
    passes = config.steps * config.tokens_per_step / (signals.info.rows * config.sequence)
    if passes > 1.005:
        say(f"{directory}: {signals.info.rows * config.sequence:,} tokens, read {passes:.1f} times")
    return signals


def train_student(
    student: SportsLLM,
    *,
    teacher: Path,
    objective: Objective,
    texts: TextSplit,
    documents: TokenizedDocuments,
    tokenizer: TextTokenizer,
    config: TrainConfig,
    directory: Path,
    identity: str,
    resume: bool,
    description: str,
    signals: Signals | None = None,
    adapters: Adapters | None = None,
) -> tuple[SportsLLM, TrainResult, PackedSequences]:
    """Train a student as its objective says, with the one training loop.

    Args:
        student: on the CPU; changed.
        teacher: the main teacher's checkpoint.
        texts: what is held out; `documents` are its training texts' tokens.
        directory, identity, resume, description: see `train_model`.
        signals: from `prepare_signals`.
        adapters: train these only, and merge them.

    Returns:
        The trained model without helpers: adapters and projections are merged.
    """
    device = training_device()
    teachers: list[tuple[SportsLLM, float]] = []
    if objective.asks_the_teacher:
        listed = objective.all_teachers(teacher) if signals is None else [(teacher, 1.0)]
        teachers = [(load_teacher(path, objective.teacher_precision).to(device), share) for path, share in listed]
    if adapters is not None:
        trained = add_adapters(student, adapters.rank, adapters.targets, adapters.alpha, config.seed)
        say(f"{trained:,} numbers in adapters are trained")
    student = student.to(device)
    if objective.hidden_weight:
        theirs = teachers[0][0].config
        layers = (student.config.num_hidden_layers, theirs.num_hidden_layers)
        mapped = None if objective.layer_map is None else parse_layer_map(objective.layer_map, *layers)
        attach(student, HiddenMatching(student.config, theirs, mapped, seed=config.seed))
    batches = (
        PackedSequences(documents, config.sequence, config.batch_size, config.seed)
        if signals is None
        else signals.batches(documents, config.batch_size)
    )
    loss = guided_loss(
        objective,
        teachers,
        config.steps * config.accumulation,
        signals=signals,
        seed=config.seed,
        end_id=tokenizer.end_id,
    )
    result = train_model(
        student,
        batches,
        loss,
        config,
        directory,
        validate=validator(texts, tokenizer) if config.steps else None,
        identity=identity,
        resume=resume,
        description=description,
    )
    if objective.hidden_weight:
        detach(student)
    merge_adapters(student)
    return student, result, batches
