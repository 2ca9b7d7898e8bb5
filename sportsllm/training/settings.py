"""Settings of a training run: a typed record, and the defaults that follow from length, model and start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.files import JsonObject
from sportsllm.formats.huggingface import load_config
from sportsllm.models.config import ModelConfig
from sportsllm.models.presets import preset
from sportsllm.settings import STEPS, TRAINING, check_optimizer_bits, check_value

_LEAST_TOKENS_PER_STEP, _MOST_TOKENS_PER_STEP = 1_024, 8_192


@dataclass(frozen=True)
class TrainConfig:
    """How to train; `sportsllm.settings.TRAINING` describes the fields. The defaults are the documented set-up.

    `batch_size` sequences are in memory at once; `accumulation` batches make a step. Learning rates are peaks;
    `muon_learning_rate` is for Muon's matrices only.
    """

    steps: int = 5_000
    batch_size: int = 4
    accumulation: int = 4
    sequence: int = 512
    learning_rate: float = 3e-4
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    warmup: int = 50
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    decay_fraction: float = 0.2
    optimizer: str = "adamw"
    optimizer_bits: int = 32
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    precision: str = "auto"
    seed: int = 0
    checkpoint_activations: bool = False
    shard: bool = False
    tensor_parallel: int = 1
    pipeline: int = 1
    validate_every: int = 0
    try_rates: bool = False
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("learning_rate", "muon_learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0")
        known = {**TRAINING, **STEPS}
        for name, value in vars(self).items():
            if name in known:
                check_value(f"{name}={value}", value, known[name])
        check_optimizer_bits(self.optimizer, self.optimizer_bits)
        if self.shard and self.optimizer_bits != 32:
            raise UsageError("--set shard=true: needs optimizer_bits=32")
        alone = (self.shard, self.optimizer_bits, self.precision == "fp16")
        if self.pipeline > 1 and alone != (False, 32, False):
            raise UsageError("--set pipeline: not with shard, optimizer_bits or precision=fp16")
        plain = (self.shard, self.optimizer) == (True, "adamw") and self.precision != "fp16"
        if self.tensor_parallel > 1 and not plain:
            raise UsageError("--set tensor_parallel: needs shard=true, optimizer=adamw and no precision=fp16")

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step."""
        return self.batch_size * self.accumulation * self.sequence


class Start(Enum):
    """Weights that a run starts from, which decide the size of its steps."""

    RANDOM = "random weights"
    BARELY_TRAINED = "barely trained weights"
    TRAINED = "trained weights"
    PRUNED = "pruned weights"
    QUANTIZED = "quantized weights"


@dataclass(frozen=True)
class Run:
    """What is known of a run before it is set up.

    Attributes:
        start: weights that it starts from.
        model: the model to train, or the model that it is pruned from.
        adapters: only adapters are trained.
        already_trained: pruned weights were trained since, so that large steps would undo more than they mend.
        weights: what messages call them, if not by `start`.
    """

    start: Start
    model: ModelConfig
    adapters: bool = False
    already_trained: bool = False
    weights: str | None = None


@dataclass(frozen=True)
class _Defaults:
    """Defaults of a start: peak rates at 100M parameters, Muon's momentum, scorings of held-out text on the way."""

    adamw: float
    muon: float
    adamw_alone: float  # without Muon, AdamW trains the matrices too
    momentum: float = 0.95
    weight_decay: float = 0.1
    validations: int = 4
    short_steps: bool = False  # 800 steps instead of 200, as long as Muon's are cheap
    short_run: float = 1.0  # what AdamW's rate is multiplied by at most


# Measured on 0.3M to 3M parameters, pruned weights also on 116M (docs/how-it-works/training.md).
_UNTRAINED = _Defaults(1e-3, 0.02, 3e-4, momentum=0.9, short_steps=True, short_run=5.0)
_DEFAULTS = {
    Start.RANDOM: replace(_UNTRAINED, validations=2),
    Start.BARELY_TRAINED: _UNTRAINED,
    Start.TRAINED: _Defaults(1e-4, 0.007, 1e-4),
    Start.PRUNED: _Defaults(1e-4, 0.005, 3e-4, momentum=0.93, weight_decay=0.0, validations=2, short_steps=True),
    Start.QUANTIZED: _Defaults(1e-5, 0.0005, 1e-5, weight_decay=0.0),
}
DOCUMENTED_DROPOUT = 0.1
"""Dropout of a new model in the documented set-up; presets have none."""
# Of a run that can read 1,024 tokens or more a step: at equal tokens, more steps help most (docs/results).
_LEAST_STEPS, _MANY_STEPS, _LONG_RUN = 200, 800, 1_000
_WARMUP_FRACTION, _MOST_WARMUP = 0.05, 50
_RATE_PARAMETERS, _LEAST_PARAMETERS = 1e8, 1e6
_MUON_TOKENS, _FEWER_MUON_TOKENS = 8, 4  # of a step per channel, so that Muon is cheap; the latter for new weights
_MUON_WIDTH = 768  # up to which Muon pays for new weights even if it is slow; measured at 576 and 1,024
_ADAPTER_RATIO = 10.0  # adapters start at zero and reach their size in a few steps


def peak_rates(run: Run, optimizer: str = "adamw", steps: int = _LONG_RUN) -> tuple[float, float]:
    """Peak rates of AdamW and Muon.

    AdamW's falls with the square root of the parameters, from a million upwards. Muon's steps have the same size in
    every matrix, so its rate does not. Below 1,000 `steps` of new weights AdamW's rises in proportion; alone below 200.
    """
    defaults = _DEFAULTS[run.start]
    alone = optimizer == "adamw" and not (run.already_trained and run.start is Start.PRUNED)
    size = max(run.model.parameters, _LEAST_PARAMETERS)
    scale = math.sqrt(_RATE_PARAMETERS / size) * (_ADAPTER_RATIO if run.adapters else 1.0)
    scale *= min(defaults.short_run, max(1.0, (_LEAST_STEPS if alone else _LONG_RUN) / max(1, steps)))
    return float(f"{(defaults.adamw_alone if alone else defaults.adamw) * scale:.2g}"), defaults.muon


def train_config(
    run: Run, tokens: int | None, flags: Mapping[str, object], *, seed: int = 0, staged: bool = False
) -> TrainConfig:
    """The settings of a run, printed in one line.

    With `tokens`, which are rounded up to whole steps, the tokens of a step follow from the length of the run: a
    two-hundredth, for random and pruned weights down to an eight-hundredth if Muon stays cheap, from 1,024 to 8,192.
    Pruned weights get 512 in short runs, or 1,024 if Muon needs that. With steps, a step has 4 x 4 x 512. The warm-up
    takes a twentieth of the steps, at most 50. With `documented`, `TrainConfig` has what is not given.

    Args:
        tokens: to train on; None if `flags` give steps, or for 5,000 steps.
        flags: options and parsed settings by the names of `TrainConfig`, and `documented`; None if not given.
        staged: whether the loss can be computed in pipeline stages.

    Raises:
        UsageError: a value out of range or without effect, or a pipeline although `staged` is false.
    """
    given: JsonObject = {key: value for key, value in flags.items() if value is not None}
    documented = given.pop("documented", False)
    if tokens is not None and "steps" in given:
        raise UsageError("give --steps or --tokens, not both")
    derived: JsonObject = {"seed": seed}
    if not documented:
        derived |= _derived(run, tokens, given)
    elif tokens is not None:
        derived["steps"] = -(-tokens // _tokens_per_step(given))
    config = TrainConfig(**derived | given)
    if run.adapters and config.optimizer == "muon":
        raise UsageError("--set optimizer=muon trains whole matrices, not the factors of adapters; use adamw")
    _check_effect(config, given)
    check_sequence(config.sequence, run.model)
    if config.pipeline > 1 and not staged:
        raise UsageError(f"--set pipeline={config.pipeline}: only train has stages; leave it out")
    if config.steps:
        log(described(config, run))
    return config


def _tokens_per_step(values: JsonObject) -> int:
    sizes = {name: values[name] for name in ("batch_size", "accumulation", "sequence") if name in values}
    return TrainConfig(**sizes).tokens_per_step


def _derived(run: Run, tokens: int | None, given: JsonObject) -> JsonObject:
    """The settings that follow from a run, by their names; those that are `given` count instead."""
    defaults = _DEFAULTS[run.start]
    found: JsonObject = {"sequence": min(TrainConfig.sequence, run.model.max_position_embeddings)}
    if tokens is not None:
        found |= _batches(tokens, (found | given)["sequence"], run, given)
        found["steps"] = -(-tokens // _tokens_per_step(found | given))
    pays = _always_muon(run) or _MUON_TOKENS * run.model.hidden_size <= _tokens_per_step(found | given)
    allowed = run.start is not Start.QUANTIZED and not run.adapters and given.get("optimizer_bits") != 8
    found["optimizer"] = "muon" if pays and allowed else "adamw"
    steps = (found | given).get("steps", TrainConfig.steps)
    found["learning_rate"], found["muon_learning_rate"] = peak_rates(run, (found | given)["optimizer"], steps)
    return found | {
        "muon_momentum": defaults.momentum,
        "weight_decay": defaults.weight_decay,
        "warmup": min(_MOST_WARMUP, max(1, round(_WARMUP_FRACTION * steps))) if steps > 1 else 0,
        "validate_every": -(-steps // defaults.validations),
        "try_rates": run.start is not Start.RANDOM and not {"learning_rate", "muon_learning_rate"} & given.keys(),
    }


def _always_muon(run: Run) -> bool:
    """Whether Muon pays in steps of any size, although it may take longer than the products."""
    return run.start in (Start.RANDOM, Start.BARELY_TRAINED) and run.model.hidden_size <= _MUON_WIDTH


def _batches(tokens: int, sequence: int, run: Run, given: JsonObject) -> dict[str, int]:
    """Sequences of a batch and batches of a step, for a run of `tokens` in sequences of `sequence`."""
    wanted = tokens / _LEAST_STEPS
    per_channel = _FEWER_MUON_TOKENS if _always_muon(run) else _MUON_TOKENS
    cheap = 2 ** math.ceil(math.log2(per_channel * run.model.hidden_size))
    if _DEFAULTS[run.start].short_steps:
        wanted = min(wanted, max(tokens / _MANY_STEPS, cheap))
    least = _LEAST_TOKENS_PER_STEP
    if run.start is Start.PRUNED or (run.start is Start.BARELY_TRAINED and cheap < least):
        least = cheap if cheap <= least else least // 2
    rows = max(1, 2 ** math.floor(math.log2(min(_MOST_TOKENS_PER_STEP, max(least, wanted)))) // sequence)
    batch_size = given.get("batch_size", max(1, min(TrainConfig.batch_size, rows // given.get("accumulation", 1))))
    return {"batch_size": batch_size, "accumulation": max(1, rows // batch_size)}


def _check_effect(config: TrainConfig, given: JsonObject) -> None:
    """Refuse settings of an optimizer or a schedule that the run does not have; say what looks like a mistake."""
    of_muon = [name for name in given if name.startswith("muon_")]
    if of_muon and config.optimizer != "muon":
        raise UsageError(f"{of_muon[0]} is for Muon, but the optimizer is {config.optimizer}; add --set optimizer=muon")
    if "decay_fraction" in given and config.schedule != "wsd":
        raise UsageError(f"decay_fraction is for wsd, but the schedule is {config.schedule}; add --set schedule=wsd")
    if config.warmup >= config.steps > 1:
        log(
            f"the run ends during warm-up: {config.steps} steps, {config.warmup} of warm-up; give more tokens, "
            "smaller steps or --set warmup=N"
        )
    if {"learning_rate", "muon_learning_rate"} & given.keys() == {"learning_rate"} and config.optimizer == "muon":
        log(f"--learning-rate applies to AdamW, for embedding and norms; Muon's is {config.muon_learning_rate:g}")


def described(config: TrainConfig, run: Run) -> str:
    """The line that a training starts with."""
    rates = f"AdamW {config.learning_rate:g}"
    if config.optimizer == "muon":
        rates = f"Muon {config.muon_learning_rate:g} and {rates}"
    fall = "" if config.schedule == "cosine" else f" over the last {config.decay_fraction:.0%}"
    return (
        f"training from {run.weights or run.start.value}: {config.steps:,} steps of {config.tokens_per_step:,} tokens, "
        f"{rates}, warm-up {config.warmup}, {config.schedule} to {config.min_lr_ratio:.0%}{fall}"
    )


def shape_of(name: str) -> tuple[ModelConfig, list[Path]]:
    """The shape of a preset or of a directory's config.json, and the file it was read from, if any."""
    directory = Path(name)
    if directory.is_dir():
        return load_config(directory), [directory / "config.json"]
    return preset(name), []


def fit_vocabulary(shape: ModelConfig, vocab_size: int, name: str) -> ModelConfig:
    """A preset with the vocabulary size of its tokenizer; logs a difference."""
    if vocab_size == shape.vocab_size:
        return shape
    log(f"{name}: the tokenizer has {vocab_size:,} entries, and so has the embedding (preset: {shape.vocab_size:,})")
    return shape.with_changes(vocab_size=vocab_size)


def check_sequence(sequence: int, config: ModelConfig) -> None:
    """Training sequences must fit the context."""
    if sequence > config.max_position_embeddings:
        context = config.max_position_embeddings
        raise UsageError(f"sequence={sequence} is longer than the model's context of {context}; use that or less")
