"""The verb `distill`: a student learns its teacher's next-token distribution, with the one training loop.

Resolve the teacher, choose the student's start, plan the training, train, write. Heavy imports are in the functions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import UsageError
from sportsllm.results import TrainingResult
from sportsllm.settings import DISTILLATION, TEXT, TRAINING, parse_settings, pick

if TYPE_CHECKING:
    from compress.distillation.starts import Fresh
    from compress.distillation.student import StudentTraining
    from sportsllm.files import JsonObject

_loss: Any = partial(typer.Option, rich_help_panel="Loss")
_shape: Any = partial(typer.Option, rich_help_panel="Shape")
_RARE = pick(DISTILLATION, ("hidden_weight", "teacher_precision"))
_SEQUENCE_TIMES_SELECTED = 4
_SELECTION_TOKENS = 1_000_000  # with --select-tokens, if no length is given
_STARTED = "start.json"  # in an unfinished directory: what a resumed run need not find again of the layers


@dataclass(frozen=True, kw_only=True)
class DistillResult(TrainingResult):
    """A distilled checkpoint. `bits_per_byte_before` is None if the student started from random weights."""


def distill(
    *,
    teacher: Annotated[str, typer.Option(help="A checkpoint, or PRESET for runs/PRESET."), options.BY_NAME],
    student: Annotated[
        str | None,
        typer.Option(help="A preset, or a checkpoint.", show_default="the teacher; required without --select-tokens"),
        options.BY_NAME,
    ] = None,
    corpus: options.Corpus = None,
    tokens: options.Tokens = None,
    out: Annotated[
        Path | None, typer.Option(help="New directory.", show_default="runs/<student>, runs/<student>-selected")
    ] = None,
    valid: options.Valid = None,
    start: Annotated[
        str | None,
        _shape(
            help="cut: the teacher, pruned to the student's shape; fresh: random weights. Both use only the "
            "shape of a checkpoint student.",
            show_default="the weights of a checkpoint student, else cut if the shape allows it",
        ),
    ] = None,
    select_tokens: Annotated[
        int | None,
        _shape(
            min=1,
            help="Experimental: each token attends to at most this many tokens, selected in blocks by an indexer. The "
            "first and the newest tokens are always included.",
            show_default="all tokens",
        ),
    ] = None,
    kl_weight: Annotated[
        float | None,
        _loss(
            min=0,
            max=1,
            help=f"{DISTILLATION['kl_weight'].help}.",
            show_default=DISTILLATION["kl_weight"].default,
        ),
    ] = None,
    signals: Annotated[
        Path | None,
        _loss(
            help="Directory of the teacher's cached predictions; created if missing.",
            show_default="the teacher runs in every step",
        ),
    ] = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    sequence: options.Sequence = None,
    learning_rate: options.LearningRate = None,
    settings: options.Settings = None,
    resume: options.Resume = False,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> DistillResult:
    """Train a smaller student on a teacher's next-token distribution.

    --steps 0 writes the student without training it.
    """
    from compress.distillation.starts import Checkpoint, check_no_larger, choose_start, plan_training, resolve_teacher
    from sportsllm.console import output
    from sportsllm.formats.artifact import began
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.manifest import plain_name
    from sportsllm.processors import use_processor
    from sportsllm.text.documents import take_reading
    from sportsllm.training.settings import Run

    use_processor(threads, device)
    found = parse_settings(settings, TRAINING, _RARE, TEXT)
    source = resolve_teacher(teacher)
    reading = take_reading(found, source)
    if student is None:
        if select_tokens is None:
            raise UsageError("give --student: a preset's name or a checkpoint directory")
        student = str(source)
    begin = choose_start(student, start, source)
    if select_tokens is not None:
        from compress.distillation.selection import selecting

        begin = selecting(begin, select_tokens)
        sequence = sequence or min(begin.shape.max_position_embeddings, _SEQUENCE_TIMES_SELECTED * select_tokens)
        tokens = _SELECTION_TOKENS if tokens is None and steps is None else tokens
    check_no_larger(begin.shape, load_config(source))  # before a line on settings
    already_trained = isinstance(begin, Checkpoint) and begin.already_trained
    run = Run(begin.kind, begin.shape, already_trained=already_trained, weights=begin.weights)
    found |= {"steps": steps, "batch_size": batch_size, "sequence": sequence, "learning_rate": learning_rate}
    found |= {"kl_weight": kl_weight, "signals": signals}
    holdouts = tuple(path for path in begin.inputs if path.is_dir())
    plan = plan_training(run, source, tokens, found, corpus, valid, seed, reading, holdouts)
    out = out or Path("runs") / (plain_name(Path(student)) + "-selected" * (select_tokens is not None))
    result = distill_student(student, begin, plan, out, resume or began(out))
    output().print(result.line())
    return result


def distill_student(
    student: str, start: Fresh, training: StudentTraining, out: Path, resume: bool = False
) -> DistillResult:
    """Train a student on a teacher's distribution.

    Args:
        student: its name, for the manifest.
        start: from `choose_start`.
        resume: continue an interrupted run; the saved state replaces the start's weights, which are not made again.

    Raises:
        UsageError: student larger than teacher, or settings out of range.
        ArtifactError: damaged inputs.
    """
    from compress.distillation.starts import check_no_larger
    from compress.distillation.student import RunDirectory, StudentText, train_student
    from sportsllm.files import atomic_write_text, read_json
    from sportsllm.formats.artifact import Stage, run_together
    from sportsllm.formats.checkpoint import copy_tokenizer, save_checkpoint
    from sportsllm.formats.huggingface import load_config
    from sportsllm.models.language_model import SportsLLM
    from sportsllm.training.settings import Start

    has_weights = start.kind is not Start.RANDOM
    check_no_larger(start.shape, load_config(training.teacher))
    training = start.matched(training)
    cache = training.prepare(start.shape)
    record = {**training.settings(), "student": student, **asdict(training.config), **start.record()}
    stage = Stage("distill", record, [training.teacher, *start.inputs, *training.inputs()], seed=training.config.seed)

    def make(directory: Path) -> JsonObject:
        text = StudentText.read(training, out)
        copy_tokenizer(training.teacher, directory)
        started = directory / _STARTED
        if resume and started.exists():
            found = read_json(started)
            types, pairs = found["layer_types"], found["layer_map"]
            model = SportsLLM(start.shape.with_changes(layer_types=types and tuple(types)))
            model.initialize(training.config.seed)
            layer_map = pairs and tuple((ours, theirs) for ours, theirs in pairs)
            known = replace(training, distillation=replace(training.distillation, layer_map=layer_map))
        else:
            model, known = start.build(training, text)
            found = {"layer_map": known.distillation.layer_map, "layer_types": model.config.layer_types}
            atomic_write_text(started, json.dumps(found))
        run = RunDirectory(directory, stage.identity(), resume)
        results = train_student(model, known, text, cache, run, f"distil {student}", has_weights)
        save_checkpoint(directory, model)
        started.unlink()
        return results

    return DistillResult.of(run_together(out, stage, make, resume))
