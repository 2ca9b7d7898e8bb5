"""The verb `train`: a tokenizer and a base model from a corpus, or a checkpoint trained further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm import options
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.results import TrainingResult
from sportsllm.settings import LORA, SHAPE, TOKENIZER, TRAINING, parse_settings, pick
from sportsllm.verbs.data import DEFAULT_CORPUS, SIMULATED_MEGABYTES, simulate

if TYPE_CHECKING:
    from sportsllm.models.config import ModelConfig
    from sportsllm.models.language_model import SportsLLM
    from sportsllm.text.documents import TextSplit
    from sportsllm.text.tokenizer import TextTokenizer
    from sportsllm.training.lora import Adapters
    from sportsllm.training.settings import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainResult(TrainingResult):
    """A trained checkpoint. `trained_parameters` are fewer than `parameters` with LoRA adapters."""

    trained_parameters: int | None = None


def train(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Fine-tune this unquantized checkpoint.", show_default="train --model from scratch"),
        options.BY_NAME,
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Train from scratch: a preset, or a directory whose config.json is used.",
            show_default="small if a dimension is given by --set",
        ),
        options.BY_NAME,
    ] = None,
    corpus: options.Corpus = None,
    valid: options.Valid = None,
    tokens: options.Tokens = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New directory.", show_default="runs/<model>, runs/custom or runs/<checkpoint>-tuned"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with a tokenizer to use.", show_default="a new one is trained", rich_help_panel="Shape"
        ),
        options.BY_NAME,
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Entries of the new tokenizer.", show_default="the preset's", rich_help_panel="Shape"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Longest sequence, in tokens.", show_default="the model's", rich_help_panel="Shape"),
    ] = None,
    rope_scaling: options.RopeScaling = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    sequence: options.Sequence = None,
    learning_rate: options.LearningRate = None,
    lora_rank: options.LoraRank = None,
    resume: options.Resume = False,
    settings: options.Settings = None,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> TrainResult:
    """Train a tokenizer (unless given one) and a base model, or fine-tune a checkpoint.

    --steps 0 writes the model without training it.
    """
    found = parse_settings(settings, TRAINING, SHAPE, TOKENIZER, LORA)
    changes = pick(found, SHAPE) | _given(context=context, vocab_size=vocab_size)
    model = _start(checkpoint, model, changes, tokenizer, lora_rank, found)
    corpus, valid = _text(corpus, valid)

    from sportsllm.console import output
    from sportsllm.formats.huggingface.config import load_config
    from sportsllm.formats.manifest import plain_name
    from sportsllm.models.rope import with_rope_scaling
    from sportsllm.models.shape import changed_shape
    from sportsllm.processors import set_threads
    from sportsllm.training.lora import adapter_settings
    from sportsllm.training.settings import DOCUMENTED_DROPOUT, Run, Start, train_config
    from sportsllm.training.setup import shape_of

    set_threads(threads)
    if found.get("documented") and checkpoint is None:
        changes.setdefault("dropout", DOCUMENTED_DROPOUT)
    shape = load_config(checkpoint) if checkpoint is not None else changed_shape(shape_of(str(model))[0], changes)
    if rope_scaling is not None:
        shape = with_rope_scaling(shape, rope_scaling)
    start = Start.RANDOM if checkpoint is None else Start.TRAINED
    given = pick(found, TRAINING) | {
        "steps": steps,
        "batch_size": batch_size,
        "sequence": sequence,
        "learning_rate": learning_rate,
    }
    config = train_config(Run(start, shape, lora_rank is not None), tokens, given, seed=seed, parallel=True)
    adapters = adapter_settings(lora_rank, found.get("lora_targets"), found.get("lora_alpha"), config.optimizer)
    if out is None:
        name = "custom" if changes.keys() - {"dropout"} else plain_name(Path(str(model)).resolve())
        out = Path("runs") / (name if checkpoint is None else f"{plain_name(checkpoint.resolve())}-tuned")
    text = _Text(corpus, valid, rope_scaling)
    if checkpoint is not None:
        result = _fine_tune(checkpoint, shape, text, out, config, adapters, resume)
    else:
        result = _train_base(str(model), shape, changes, tokenizer, found.get("digits"), text, out, config, resume)
    output().print(result.line(), markup=False)
    return result


@dataclass(frozen=True)
class _Text:
    """Training and held-out files, and how the context is lengthened to read them."""

    corpus: list[Path]
    valid: list[Path]
    rope_scaling: str | None

    def settings(self) -> dict[str, Any]:
        """For the manifest."""
        scaling = {} if self.rope_scaling is None else {"rope_scaling": self.rope_scaling}
        return {"corpus": list(map(str, self.corpus)), "valid": list(map(str, self.valid)), **scaling}


def _train_base(
    model: str,
    shape: ModelConfig,
    changes: Mapping[str, Any],
    tokenizer: Path | None,
    digits: str | None,
    text: _Text,
    out: Path,
    config: TrainConfig,
    resume: bool,
) -> TrainResult:
    """Train a model from random weights, and before that its tokenizer unless given one."""
    import dataclasses

    from sportsllm.console import log
    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.formats.checkpoint import copy_tokenizer, save_checkpoint
    from sportsllm.models.language_model import SportsLLM
    from sportsllm.models.shape import described_shape
    from sportsllm.processors import training_device
    from sportsllm.text.documents import load_corpus
    from sportsllm.text.tokenizer import load_tokenizer, train_tokenizer
    from sportsllm.training.setup import check_sequence, fit_vocabulary, shape_of

    record: dict[str, Any] = {
        "model": model,
        **text.settings(),
        "tokenizer": None if tokenizer is None else str(tokenizer),
    }
    record |= {"shape": dict(changes)} if changes else {}
    record |= {"digits": digits} if digits not in (None, "grouped") else {}
    inputs = [
        *text.corpus,
        *text.valid,
        *([] if tokenizer is None else [tokenizer / "tokenizer.json"]),
        *shape_of(model)[1],
    ]
    stage = Stage("train", {**record, **dataclasses.asdict(config)}, inputs, seed=config.seed)

    def make(directory: Path) -> dict[str, Any]:
        log(f"{out}: reading {', '.join(map(str, text.corpus))}")
        texts = load_corpus(text.corpus, text.valid)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, directory)
        elif not (directory / "tokenizer.json").exists():
            log(f"training a tokenizer of {shape.vocab_size:,} entries")
            train_tokenizer(texts.train, shape.vocab_size, directory, digits or "grouped")
        words = load_tokenizer(directory)
        fitted = fit_vocabulary(shape, words.vocab_size, model).with_changes(
            bos_token_id=words.begin_id, eos_token_id=words.end_id, pad_token_id=words.pad_id
        )
        check_sequence(config.sequence, fitted)
        log(f"{out}: {described_shape(fitted)}")
        network = SportsLLM(fitted)
        network.initialize(config.seed)
        results = _fit(
            network.to(training_device()), texts, words, config, directory, model, stage.fingerprint(), resume
        )
        save_checkpoint(directory, network)
        return results

    return TrainResult.of(run_stage(out, stage, make, resume))


def _fine_tune(
    checkpoint: Path,
    shape: ModelConfig,
    text: _Text,
    out: Path,
    config: TrainConfig,
    adapters: Adapters | None,
    resume: bool,
) -> TrainResult:
    """Train a checkpoint on another corpus with its own tokenizer: all weights, or adapters that are merged."""
    import dataclasses

    from sportsllm.formats.artifact import Stage, run_stage
    from sportsllm.formats.checkpoint import load_checkpoint, save_checkpoint
    from sportsllm.formats.model_directory import checkpoint_with
    from sportsllm.formats.safetensors import quantization_config
    from sportsllm.processors import training_device
    from sportsllm.text.documents import load_corpus
    from sportsllm.text.provenance import held_out_setting, left_out
    from sportsllm.text.tokenizer import load_tokenizer
    from sportsllm.training.lora import add_adapters, merge_adapters
    from sportsllm.training.setup import check_sequence

    if quantization_config(checkpoint) is not None:
        raise ArtifactError(f"{checkpoint}: is quantized; fine-tune the unquantized checkpoint, then quantize")
    check_sequence(config.sequence, shape)
    excluded = left_out(text.valid, checkpoint)
    record = {"init": str(checkpoint), **text.settings(), **held_out_setting(text.valid, excluded)}
    record |= {"lora": None if adapters is None else dataclasses.asdict(adapters), **dataclasses.asdict(config)}
    stage = Stage("train", record, [checkpoint, *text.corpus, *excluded], seed=config.seed)

    def make(directory: Path) -> dict[str, Any]:
        with checkpoint_with(checkpoint, shape) as source:
            network, words = load_checkpoint(source), load_tokenizer(checkpoint, shape)
        trained = shape.parameters
        if adapters is not None:
            trained = add_adapters(network, adapters.rank, adapters.targets, adapters.alpha, config.seed)
        texts = load_corpus(text.corpus, text.valid, excluded)
        network = network.to(training_device())
        name = str(checkpoint)
        results = _fit(network, texts, words, config, directory, name, stage.fingerprint(), resume, keep_start=True)
        merge_adapters(network)
        save_checkpoint(directory, network, checkpoint)
        return {**results, "trained_parameters": trained}

    return TrainResult.of(run_stage(out, stage, make, resume))


def _fit(
    network: SportsLLM,
    texts: TextSplit,
    tokenizer: TextTokenizer,
    config: TrainConfig,
    directory: Path,
    name: str,
    identity: str,
    resume: bool,
    keep_start: bool = False,
) -> dict[str, Any]:
    """Minimise next-token cross-entropy in place. `keep_start`: the start stays if no step is better."""
    from sportsllm.text.packing import PackedSequences, tokenize
    from sportsllm.training.loop import language_model_loss, train_model
    from sportsllm.training.rate_trial import choose_rates, chosen_rates
    from sportsllm.training.setup import training_results
    from sportsllm.training.validation import validation

    batches = PackedSequences(tokenize(texts.train, tokenizer), config.sequence, config.batch_size, config.seed)
    judged = validation(texts, tokenizer, config, keep_start)
    if config.try_rates and judged is not None:
        config = choose_rates(network, batches, language_model_loss, config, directory, judged.selection)
    result = train_model(
        network,
        batches,
        language_model_loss,
        config,
        directory,
        validation=judged,
        identity=identity,
        resume=resume,
        description=name,
    )
    return training_results(network, result, batches) | chosen_rates(config)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _start(
    checkpoint: Path | None,
    model: str | None,
    changes: Mapping[str, Any],
    tokenizer: Path | None,
    lora_rank: int | None,
    found: Mapping[str, Any],
) -> str | None:
    """The model to train from scratch, None if a checkpoint is fine-tuned; refuses options that do not go together."""
    from sportsllm.files import require_directory
    from sportsllm.models.presets import DEFAULT_PRESET, preset

    if checkpoint is None and model is None and changes:
        model = DEFAULT_PRESET
    if (model is None) == (checkpoint is None):
        raise UsageError("give --model PRESET to train from scratch or a CHECKPOINT to fine-tune, one of the two")
    if checkpoint is not None:
        if tokenizer is not None:
            raise UsageError(f"--tokenizer: {checkpoint} was trained with its own; leave it out")
        if changes:
            names = ", ".join(changes)
            raise UsageError(f"{names}: {checkpoint} has its shape already; give --model {checkpoint} for a new model")
        require_directory(checkpoint, "a checkpoint directory")
    elif not Path(str(model)).is_dir():
        preset(str(model))
    if checkpoint is None and lora_rank is not None:
        raise UsageError("--lora-rank adapts weights that are there; give a CHECKPOINT instead of --model")
    decided = {"digits": found.get("digits"), "--vocab-size": changes.get("vocab_size")}
    given = [name for name, value in decided.items() if value is not None]
    if given and (tokenizer or checkpoint):
        raise UsageError(
            f"{given[0]} is decided when a tokenizer is trained, and {tokenizer or checkpoint} has one; leave it out"
        )
    return model


def _text(corpus: list[Path] | None, valid: list[Path] | None) -> tuple[list[Path], list[Path]]:
    """Training and held-out files; simulated matches if none are given."""
    from sportsllm.console import log

    for path in [*(corpus or []), *(valid or [])]:
        if not path.exists():
            raise ArtifactError(f"{path}: not found; give existing files or folders of text")
    if corpus:
        return corpus, valid or []
    if not (DEFAULT_CORPUS / "train.jsonl").exists():
        log(f"no --corpus given: simulating {SIMULATED_MEGABYTES:g} MB of matches into {DEFAULT_CORPUS}")
        simulate(out=DEFAULT_CORPUS)
    return [DEFAULT_CORPUS / "train.jsonl"], valid or [DEFAULT_CORPUS / "valid.jsonl"]
