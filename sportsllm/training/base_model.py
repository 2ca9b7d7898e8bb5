"""A base model from text: random weights and a tokenizer, or a checkpoint's, and the training on next tokens."""

from __future__ import annotations

from pathlib import Path

from sportsllm.console import log
from sportsllm.files import JsonObject
from sportsllm.formats.artifact import Stage
from sportsllm.formats.checkpoint import copy_tokenizer, load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface import checkpoint_with
from sportsllm.models.config import ModelConfig
from sportsllm.models.description import described_shape
from sportsllm.models.language_model import SportsLLM
from sportsllm.processors import training_device
from sportsllm.text.conversations import plain_text
from sportsllm.text.packing import PackedSequences
from sportsllm.text.split import DocumentStream, TextSplit
from sportsllm.text.tokenizer import TextTokenizer, load_tokenizer
from sportsllm.text.tokenizer_training import train_tokenizer
from sportsllm.text.tokens import token_cache, tokenize
from sportsllm.training.loop import language_model_loss, train_model, training_record
from sportsllm.training.lora import add_adapters, merge_adapters
from sportsllm.training.rate_trial import choose_rates
from sportsllm.training.settings import TrainConfig, check_sequence, fit_vocabulary
from sportsllm.training.sharding import place
from sportsllm.training.state import validation

_TOKENIZER_CHARACTERS = 100_000_000  # of text that a tokenizer is trained on


def new_model(
    model: str,
    shape: ModelConfig,
    texts: TextSplit,
    config: TrainConfig,
    directory: Path,
    source: Path | None,
    digits: str,
) -> SportsLLM:
    """A model with random weights, for the tokenizer of `source` or a new one, which is written."""
    if source is not None:
        copy_tokenizer(source, directory)
    elif not (directory / "tokenizer.json").exists():
        sample = texts.train.sample(_TOKENIZER_CHARACTERS) if isinstance(texts.train, DocumentStream) else texts.train
        some = f" on {len(sample):,} of {len(texts.train):,} documents" if len(sample) < len(texts.train) else ""
        log(f"training a tokenizer of {shape.vocab_size:,} entries{some}")
        train_tokenizer(map(plain_text, sample), shape.vocab_size, directory, digits)
    tokenizer = load_tokenizer(directory)
    shape = fit_vocabulary(shape, tokenizer.vocab_size, model).with_changes(
        bos_token_id=tokenizer.begin_id, eos_token_id=tokenizer.end_id, pad_token_id=tokenizer.pad_id
    )
    check_sequence(config.sequence, shape)
    log(f"{model}: {described_shape(shape)}")
    made = SportsLLM(shape)
    made.initialize(config.seed)
    return made


def load_start(checkpoint: Path, shape: ModelConfig, lora_rank: int | None, seed: int) -> SportsLLM:
    """The model of the checkpoint, with adapters if asked for."""
    with checkpoint_with(checkpoint, shape) as source:
        model = load_checkpoint(source)
    if lora_rank is not None:
        add_adapters(model, lora_rank, seed)
    return model


def train_base_model(
    model: SportsLLM,
    tokenizer: TextTokenizer,
    texts: TextSplit,
    config: TrainConfig,
    out: Path,
    directory: Path,
    stage: Stage,
    source: Path,
    resume: bool,
) -> JsonObject:
    """Minimise next-token cross-entropy, and write the checkpoint; `source` has the tokenizer's files."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    place(model, training_device(), config.shard, config.tensor_parallel, config.pipeline)
    documents = tokenize(texts.train, tokenizer, token_cache(out))
    batches = PackedSequences(documents, config.sequence, config.batch_size, config.seed)
    scored = validation(texts, tokenizer, config, keep_start="init" in stage.settings)
    if config.try_rates and scored is not None:
        config = choose_rates(model, batches, language_model_loss, config, directory, scored.selection)
    result = train_model(
        model,
        batches,
        language_model_loss,
        config,
        directory,
        validation=scored,
        identity=stage.fingerprint(),
        resume=resume,
        description=str(stage.settings.get("init") or stage.settings["model"]),
    )
    if stage.settings.get("lora_rank"):
        merge_adapters(model)
    save_checkpoint(directory, model, None if source == directory else source)
    return {**training_record(result, model, batches), "trained_parameters": trained, "sides": texts.sides}
