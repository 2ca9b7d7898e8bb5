"""The base-model trainer: corpus in, checkpoint directory out; from scratch, or from another checkpoint's weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sportsllm.console import log
from sportsllm.errors import ArtifactError, UsageError
from sportsllm.formats.artifact import Stage, run_stage
from sportsllm.formats.changed_config import checkpoint_with
from sportsllm.formats.checkpoint import copy_tokenizer, load_checkpoint, save_checkpoint
from sportsllm.formats.huggingface.config import load_config
from sportsllm.formats.safetensors_files import quantization_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.language_model import SportsLLM
from sportsllm.models.presets import preset
from sportsllm.models.rope import with_rope_scaling
from sportsllm.models.shape import changed_shape, described_shape
from sportsllm.text.packing import PackedSequences, tokenize
from sportsllm.text.split import TextSplit, load_corpus
from sportsllm.text.tokenizer import TextTokenizer, check_digits, load_tokenizer, train_tokenizer
from sportsllm.training.loop import language_model_loss, train_model
from sportsllm.training.lora import Adapters, add_adapters, merge_adapters
from sportsllm.training.rate_trial import choose_rates, chosen_rates
from sportsllm.training.settings import TrainConfig
from sportsllm.training.setup import (
    held_out_setting,
    left_out,
    training_device,
    training_results,
    validation,
    validator,
)


@dataclass(frozen=True)
class Pretraining:
    """Text, output and settings of a training, whatever weights it starts from.

    Part of `corpus` is held out where `valid` is empty; what is `left_out` is not trained on either. 0 steps write the
    weights as they start. `rope_scaling` lengthens the context, see `sportsllm.models.rope.with_rope_scaling`.
    """

    corpus: Sequence[Path]
    valid: Sequence[Path]
    out: Path
    config: TrainConfig
    resume: bool = False
    rope_scaling: str | None = None
    left_out: Sequence[Path] = ()

    def shape(self, config: ModelConfig) -> ModelConfig:
        """The shape that is trained: that of the preset or checkpoint, its context lengthened if asked for."""
        return config if self.rope_scaling is None else with_rope_scaling(config, self.rope_scaling)

    def stage(self, start: dict[str, Any], options: dict[str, Any], inputs: Sequence[Path]) -> Stage:
        """The stage that starts from `start`, for example {"model": "small"}."""
        texts = {"corpus": [str(path) for path in self.corpus], "valid": [str(path) for path in self.valid]}
        scaling = {} if self.rope_scaling is None else {"rope_scaling": self.rope_scaling}
        texts |= held_out_setting(self.valid, self.left_out) if self.left_out else {}
        settings = {**start, **texts, **options, **scaling, **dataclasses.asdict(self.config)}
        return Stage("train", settings, inputs, seed=self.config.seed)

    def fit(
        self, network: SportsLLM, texts: TextSplit, words: TextTokenizer, directory: Path, stage: Stage
    ) -> dict[str, Any]:
        """Minimise next-token cross-entropy in place; the results that every training command reports."""
        batches = PackedSequences(
            tokenize(texts.train, words), self.config.sequence, self.config.batch_size, self.config.seed
        )
        config, judged = self.config, validation(texts, words, self.config, "init" in stage.settings)
        if config.try_rates and judged is not None:
            config = choose_rates(network, batches, language_model_loss, config, directory, judged.choosing)
        result = train_model(
            network,
            batches,
            language_model_loss,
            config,
            directory,
            validation=judged,
            identity=stage.fingerprint(),
            resume=self.resume,
            description=str(stage.settings.get("model") or stage.settings["init"]),
        )
        return training_results(network, result, batches) | chosen_rates(config)


def train_base(
    model: str,
    training: Pretraining,
    tokenizer: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    digits: str = "grouped",
) -> dict[str, Any]:
    """Train a preset, or the shape of a config.json, from scratch.

    Args:
        model: the preset's name, or a directory whose config.json alone is used.
        tokenizer: directory of a tokenizer to use; one is trained on the corpus if None.
        changes: of the shape, see `changed_shape`.
        digits: of the tokenizer that is trained, see `train_tokenizer`.

    Returns:
        The results, as `train --json` prints them.
    """
    check_digits(digits)
    named, shape_file = shape_of(model)
    shape = training.shape(changed_shape(named, changes or {}))
    config, own_tokenizer = training.config, [] if tokenizer is None else [tokenizer / "tokenizer.json"]
    inputs = [*training.corpus, *training.valid, *own_tokenizer, *shape_file]
    options: dict[str, Any] = {"tokenizer": None if tokenizer is None else str(tokenizer)}
    options |= {"shape": dict(changes)} if changes else {}
    options |= {"digits": digits} if digits != "grouped" else {}
    stage = training.stage({"model": model}, options, inputs)

    def make(directory: Path) -> dict[str, Any]:
        texts = load_corpus(training.corpus, training.valid)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, directory)
        elif not (directory / "tokenizer.json").exists():
            log(f"training a tokenizer of {shape.vocab_size:,} entries")
            train_tokenizer(texts.train, shape.vocab_size, directory, digits)
        words = load_tokenizer(directory)
        fitted = fit_vocabulary(shape, words.vocab_size, model).with_changes(
            bos_token_id=words.begin_id, eos_token_id=words.end_id, pad_token_id=words.pad_id
        )
        check_sequence(config.sequence, fitted)
        log(f"{training.out}: {described_shape(fitted)}")
        network = SportsLLM(fitted)
        network.initialize(config.seed)
        results = training.fit(network.to(training_device()), texts, words, directory, stage)
        save_checkpoint(directory, network)
        return results

    return run_stage(training.out, stage, make, training.resume)


def fine_tune(init: Path, training: Pretraining, adapters: Adapters | None = None) -> dict[str, Any]:
    """Train a checkpoint on another corpus, with its own tokenizer.

    Args:
        init: an unquantized checkpoint directory; read, never changed.
        adapters: train these instead of all weights, and merge them at the end.

    Returns:
        The results, as `train --json` prints them: those of `train_base`, `trained_parameters`, and
        `bits_per_byte_before`, of `init` on the held-out text (None with 0 steps).

    Raises:
        UsageError: the sequence is longer than the context, or the adapters do not fit the model.
        ArtifactError: the checkpoint is quantized or damaged.
    """
    if quantization_config(init) is not None:
        raise ArtifactError(f"{init}: is quantized; fine-tune the unquantized checkpoint, then quantize")
    shape, config = training.shape(load_config(init)), training.config
    check_sequence(config.sequence, shape)
    training = dataclasses.replace(training, left_out=left_out(training.valid, init))
    options = {"lora": None if adapters is None else dataclasses.asdict(adapters)}
    stage = training.stage({"init": str(init)}, options, [init, *training.corpus, *training.left_out])

    def make(directory: Path) -> dict[str, Any]:
        with checkpoint_with(init, shape) as source:
            network, words = load_checkpoint(source), load_tokenizer(init, shape)
        trained = shape.parameters
        if adapters is not None:
            trained = add_adapters(network, adapters.rank, adapters.targets, adapters.alpha, config.seed)
        texts = load_corpus(training.corpus, training.valid, training.left_out)
        network = network.to(training_device())
        before = validator(texts, words)(network) if config.steps else None
        results = training.fit(network, texts, words, directory, stage)
        merge_adapters(network)
        save_checkpoint(directory, network, init)
        return {**results, "trained_parameters": trained, "bits_per_byte_before": before}

    return run_stage(training.out, stage, make, training.resume)


def shape_of(name: str) -> tuple[ModelConfig, list[Path]]:
    """The shape of a preset or of a directory's config.json, and the file it was read from, if any."""
    directory = Path(name)
    if directory.is_dir():
        return load_config(directory), [directory / "config.json"]
    return preset(name), []


def fit_vocabulary(shape: ModelConfig, vocab_size: int, name: str) -> ModelConfig:
    """A preset with the vocabulary its tokenizer has; says so where that is another size."""
    if vocab_size == shape.vocab_size:
        return shape
    log(f"{name}: the tokenizer has {vocab_size:,} entries, so the embedding has too (preset: {shape.vocab_size:,})")
    return shape.with_changes(vocab_size=vocab_size)


def check_sequence(sequence: int, config: ModelConfig) -> None:
    """Training sequences must fit the context."""
    if sequence > config.max_position_embeddings:
        raise UsageError(
            f"--sequence is {sequence}; the model's context is {config.max_position_embeddings}, use that or less"
        )
