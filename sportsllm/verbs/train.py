"""The verb `train`: a tokenizer and a base model from a corpus, or a checkpoint trained further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.results import TrainingResult
from sportsllm.settings import SHAPE, TEXT, TOKENIZER, TRAINING, parse_settings, pick
from sportsllm.verbs.data import DEFAULT_CORPUS, SIMULATED_MEGABYTES, simulate

if TYPE_CHECKING:
    from sportsllm.files import JsonObject

_shape: Any = partial(typer.Option, rich_help_panel="Shape")


@dataclass(frozen=True, kw_only=True)
class TrainResult(TrainingResult):
    """A trained checkpoint.

    Attributes:
        trained_parameters: trainable parameters, fewer than `parameters` with LoRA adapters.
    """

    trained_parameters: int | None = None


def train(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Fine-tune this unquantized checkpoint.", show_default="none: train --model from scratch"),
        options.BY_NAME,
        options.TRAINABLE,
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Train from scratch: a preset, or a directory whose config.json is used.",
            show_default="small, if --set changes its shape",
        ),
        options.BY_NAME,
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help=options.CORPUS_HELP, show_default="the checkpoint's, or simulated matches for --model"),
        options.READS_TEXT,
    ] = None,
    valid: options.Valid = None,
    tokens: options.Tokens = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New directory.", show_default="runs/<model>, runs/custom or runs/<checkpoint>-tuned"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        _shape(help="Directory with a tokenizer to use.", show_default="a new one is trained"),
        options.BY_NAME,
    ] = None,
    vocab_size: Annotated[
        int | None, _shape(min=1, help="Entries of the new tokenizer.", show_default="the preset's")
    ] = None,
    context: Annotated[
        int | None, _shape(min=2, help="Longest sequence, in tokens.", show_default="the model's")
    ] = None,
    rope_scaling: options.RopeScaling = None,
    chat_template: Annotated[
        str | None,
        _shape(metavar="chatml", help="Give a base model this chat template and its tokens.", show_default="its own"),
    ] = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    sequence: options.Sequence = None,
    learning_rate: options.LearningRate = None,
    lora_rank: options.LoraRank = None,
    resume: options.Resume = False,
    settings: options.Settings = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> TrainResult:
    """Train a model from scratch, with a new tokenizer unless one is given, or fine-tune a checkpoint.

    --steps 0 writes the model without training it.
    """
    found = parse_settings(settings, TRAINING, SHAPE, TOKENIZER, TEXT)
    changes = pick(found, SHAPE) | _given(context=context, vocab_size=vocab_size)
    model = _start(checkpoint, model, changes, tokenizer, lora_rank, found)

    from sportsllm.console import log, output
    from sportsllm.formats.artifact import Stage, began, run_together
    from sportsllm.formats.huggingface import load_config
    from sportsllm.formats.manifest import plain_name
    from sportsllm.models.presets import changed_shape
    from sportsllm.models.rope import with_rope_scaling
    from sportsllm.processors import use_processor
    from sportsllm.text.documents import held_out_setting, left_out, take_reading, tokens_per_parameter
    from sportsllm.text.split import load_corpus
    from sportsllm.text.tokenizer import load_tokenizer
    from sportsllm.text.tokenizer_training import check_vocabulary
    from sportsllm.training.base_model import check_format, load_start, log_cost, new_model, train_base_model
    from sportsllm.training.settings import DOCUMENTED_DROPOUT, Run, Start, shape_of, train_config

    check_format(checkpoint, chat_template, lora_rank is not None)
    use_processor(threads, device)
    checkpoints = [] if checkpoint is None else [checkpoint]
    reading, digits = take_reading(found, checkpoint), found.get("digits", "grouped")
    if checkpoint is not None:
        shape, files = load_config(checkpoint), list[Path]()
        origin: JsonObject = {"init": str(checkpoint), "lora_rank": lora_rank}
    else:
        if found.get("documented"):
            changes.setdefault("dropout", DOCUMENTED_DROPOUT)
        shape, files = shape_of(str(model))
        shape, files = changed_shape(shape, changes), [*([tokenizer / "tokenizer.json"] if tokenizer else []), *files]
        if tokenizer is None:
            check_vocabulary(shape.vocab_size)
        origin = {"model": model, "tokenizer": tokenizer and str(tokenizer)}
        origin |= _given(shape=changes or None, digits=None if digits == "grouped" else digits)
    shape = shape if rope_scaling is None else with_rope_scaling(shape, rope_scaling)
    given = {"steps": steps, "batch_size": batch_size, "sequence": sequence, "learning_rate": learning_rate}
    start = Start.RANDOM if checkpoint is None or tokens_per_parameter(checkpoint) == 0 else Start.TRAINED
    run, asked = Run(start, shape, lora_rank is not None), pick(found, TRAINING) | given
    config = train_config(run, tokens, asked, seed=seed, staged=True)
    log_cost(shape, config)
    training, held_out = (corpus, valid or []) if corpus else _default_text(checkpoint, valid)
    unread = left_out(held_out, *checkpoints)
    record = {
        "corpus": list(map(str, training)),
        "valid": list(map(str, held_out)),
        **_given(rope_scaling=rope_scaling, chat_template=chat_template),
        **reading.record(),
        **held_out_setting(held_out, unread),
        **origin,
    }
    inputs = [*checkpoints, *training, *unread, *files]
    stage = Stage("train", record | asdict(config), inputs, seed=seed)
    name = "custom" if changes.keys() - {"dropout"} else plain_name(Path(str(model)))
    out = out or Path("runs") / (f"{plain_name(checkpoint)}-tuned" if checkpoint is not None else name)

    def make(directory: Path) -> JsonObject:
        log(f"{out}: reading {', '.join(map(str, training))}")
        texts = load_corpus(training, held_out, reading.text_field, checkpoints)
        if checkpoint is not None:
            start, source = load_start(checkpoint, shape, lora_rank, seed, chat_template, directory)
        else:
            start, source = new_model(str(model), shape, texts, config, directory, tokenizer, digits), directory
        words = load_tokenizer(source, start.config, reading)
        return train_base_model(start, words, texts, config, out, directory, stage, source, resume)

    resume = resume or began(out)
    result = TrainResult.of(run_together(out, stage, make, resume))
    output().print(result.line())
    return result


def _start(
    checkpoint: Path | None,
    model: str | None,
    changes: Mapping[str, object],
    tokenizer: Path | None,
    lora_rank: int | None,
    found: Mapping[str, object],
) -> str | None:
    """The model to train from scratch, None if a checkpoint is fine-tuned; refuses options that do not go together."""
    from sportsllm.files import require_directory
    from sportsllm.formats.packed import quantization_config
    from sportsllm.models.presets import DEFAULT_PRESET, preset

    if checkpoint is None and model is None and changes:
        model = DEFAULT_PRESET
    if (model is None) == (checkpoint is None):
        raise UsageError("give either --model PRESET to train from scratch or a CHECKPOINT to fine-tune")
    if checkpoint is not None:
        if tokenizer is not None:
            raise UsageError(f"--tokenizer: {checkpoint} was trained with its own; leave it out")
        if changes:
            names = ", ".join(changes)
            raise UsageError(f"{names}: {checkpoint} has its shape already; give --model {checkpoint} for a new model")
        require_directory(checkpoint, "a checkpoint directory")
        if quantization_config(checkpoint) is not None:
            raise ArtifactError(f"{checkpoint}: is quantized; fine-tune the unquantized checkpoint, then quantize")
    elif not Path(str(model)).is_dir():
        preset(str(model))
    if checkpoint is None and lora_rank is not None:
        raise UsageError("--lora-rank adapts trained weights; give a CHECKPOINT instead of --model")
    decided = {"digits": found.get("digits"), "--vocab-size": changes.get("vocab_size")}
    given = [name for name, value in decided.items() if value is not None]
    if given and (tokenizer or checkpoint):
        raise UsageError(
            f"{given[0]} belongs to training a tokenizer, and {tokenizer or checkpoint} has one; leave it out"
        )
    return model


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _default_text(checkpoint: Path | None, valid: list[Path] | None) -> tuple[list[Path], list[Path]]:
    """The checkpoint's training text; for a new model the default corpus, which is made if it is not there."""
    from sportsllm.console import log
    from sportsllm.text.documents import recorded_text

    if checkpoint is not None:
        return recorded_text(checkpoint, "corpus"), valid or recorded_text(checkpoint, "valid")
    if not (DEFAULT_CORPUS / "train.jsonl").exists():
        log(f"no --corpus given: simulating {SIMULATED_MEGABYTES:g} MB of matches into {DEFAULT_CORPUS}")
        simulate(out=DEFAULT_CORPUS)
    return [DEFAULT_CORPUS / "train.jsonl"], valid or [DEFAULT_CORPUS / "valid.jsonl"]
