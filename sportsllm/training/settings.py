"""Settings of a training run: those that are given, and those that follow from its length, its model and its start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sportsllm.console import log
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig
from sportsllm.models.training_memory import OPTIMIZERS, check_optimizer_bits
from sportsllm.training.muon import MuonSettings
from sportsllm.training.optimizers import SCHEDULES


@dataclass(frozen=True)
class TrainConfig:
    """How to train. `batch_size` sequences are in memory at once; `accumulation` of those make a step.

    `parallel_batches` of a step's batches are computed side by side, each by its share of the CPU's threads: faster
    for models too small to keep all cores at work on one batch, for as many times the activations and gradients.
    `precision` is fp32, bf16, fp16 (with loss scaling) or auto: bf16 where the processor computes in it,
    else fp32. `optimizer_bits` are those of the optimizer's states: 32; 16, gradients too; or 8, AdamW's by
    bitsandbytes. Learning rates are peaks; `muon_learning_rate` is for Muon's matrices only; `min_lr_ratio` is the
    last rate divided by the peak, `decay_fraction` the part of a wsd run in which it falls. With `try_rates` the rates
    are those of three or four that do best in short runs. `muon_...` are the settings of Muon, see `MuonSettings`.

    The defaults are the documented set-up, which `train_config` keeps where that is asked for.
    """

    steps: int = 5_000
    batch_size: int = 4
    accumulation: int = 4
    parallel_batches: int = 1
    sequence: int = 512
    learning_rate: float = 3e-4
    muon_learning_rate: float = 0.02
    muon_momentum: float = MuonSettings.momentum
    muon_nesterov: bool = MuonSettings.nesterov
    muon_steps: int = MuonSettings.steps
    muon_coefficients: tuple[float, float, float] = MuonSettings.coefficients
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
    validate_every: int = 0
    try_rates: bool = False
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "parallel_batches", "sequence", "log_every", "muon_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.parallel_batches > self.accumulation:
            raise UsageError(
                f"parallel_batches is {self.parallel_batches}, the batches of a step are {self.accumulation}; "
                "add --set accumulation=N for as many"
            )
        if self.steps < 0 or self.warmup < 0 or self.validate_every < 0:
            raise UsageError("steps, warmup and validate_every must not be negative")
        if self.precision not in ("auto", "fp32", "bf16", "fp16"):
            raise UsageError(f"precision {self.precision!r} is not known; use auto, fp32, bf16 or fp16")
        if self.optimizer not in OPTIMIZERS or self.schedule not in SCHEDULES:
            raise UsageError(
                f"optimizer {self.optimizer!r} / schedule {self.schedule!r}: use one of {', '.join(OPTIMIZERS)} "
                f"and one of {', '.join(SCHEDULES)}"
            )
        check_optimizer_bits(self.optimizer, self.optimizer_bits)
        for name in ("learning_rate", "muon_learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay is {self.weight_decay}; it must be 0 or more")
        if not 0 <= self.muon_momentum < 1:
            raise UsageError(f"muon_momentum is {self.muon_momentum}; it must be from 0 to below 1")
        if len(self.muon_coefficients) != 3 or not all(map(math.isfinite, self.muon_coefficients)):
            raise UsageError(f"muon_coefficients are {self.muon_coefficients}; give three numbers, a,b,c")

    @property
    def muon(self) -> MuonSettings:
        """The settings of Muon but for its rate."""
        return MuonSettings(self.muon_momentum, self.muon_nesterov, self.muon_steps, self.muon_coefficients)

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step."""
        return self.batch_size * self.accumulation * self.sequence


class Start(Enum):
    """What a run starts from, which decides how large its steps may be."""

    RANDOM = "random weights"
    TRAINED = "trained weights"
    PRUNED = "pruned weights"
    QUANTIZED = "quantized weights"


@dataclass(frozen=True)
class Run:
    """What is known of a run before it is set up.

    Attributes:
        start: what it starts from.
        model: that is trained, or the one that it is cut from.
        adapters: only adapters are trained.
        already_trained: pruned weights were trained before, so that large steps would undo more than they mend.
    """

    start: Start
    model: ModelConfig
    adapters: bool = False
    already_trained: bool = False


DOCUMENTED_DROPOUT = 0.1
"""Of a new model in the documented set-up; the presets themselves have none."""
LEAST_STEPS = 200
"""Steps that a run has, as long as each reads 1,024 tokens or more: at equal tokens they are worth more than anything
else in the recipe (docs/log.md)."""
_MANY_STEPS = 800  # of what has much to learn, as long as Muon's are cheap
_SHAPE = ("batch_size", "accumulation", "sequence")  # of a step
_TOKENS_PER_STEP = (1_024, 8_192)
_WARMUP_SHARE, _MOST_WARMUP = 0.05, 50
_VALIDATIONS = 4  # on the way, of a run that starts from good weights
_VALIDATIONS_FROM_RANDOM = 2  # only to have something to keep where the rest fails

# Peak rates at 100M parameters, AdamW's and Muon's; measured on 0.3 to 3M, of pruned weights also on 116M
# (docs/how-it-works/training.md).
_RATES = {
    Start.RANDOM: (3e-4, 0.02),
    Start.TRAINED: (1e-4, 0.007),
    Start.PRUNED: (1e-4, 0.005),
    Start.QUANTIZED: (1e-5, 0.0005),
}
_CUT_BY_ADAMW_ALONE = 3.0  # times AdamW's rate for pruned weights, which beside Muon is for embedding and norms
_RATE_PARAMETERS, _LEAST_PARAMETERS = 1e8, 1e6
_MUON_TOKENS_PER_CHANNEL = 8
_ADAPTER_RATIO = 10.0  # adapters start at zero and reach their size in a few steps


def peak_rates(run: Run, optimizer: str = "adamw") -> tuple[float, float]:
    """AdamW's and Muon's peak rate for a run by an optimizer.

    AdamW's falls with the square root of the parameters, from a million upwards; Muon's steps have the same size in
    every matrix, so that its rate does not.
    """
    adamw, muon = _RATES[run.start]
    if run.start is Start.PRUNED and optimizer == "adamw" and not (run.adapters or run.already_trained):
        adamw *= _CUT_BY_ADAMW_ALONE
    size = max(run.model.parameters, _LEAST_PARAMETERS)
    scale = math.sqrt(_RATE_PARAMETERS / size) * (_ADAPTER_RATIO if run.adapters else 1.0)
    return float(f"{adamw * scale:.2g}"), muon


def default_optimizer(run: Run, tokens_per_step: int) -> str:
    """Muon where its steps are cheap beside the batch, AdamW for wide models, adapters and quantized weights.

    Orthogonalising a matrix takes about 3 * hidden_size / tokens of the time of its products in a step.
    """
    cheap = _MUON_TOKENS_PER_CHANNEL * run.model.hidden_size <= tokens_per_step
    return "muon" if cheap and not run.adapters and run.start is not Start.QUANTIZED else "adamw"


def train_config(
    run: Run,
    tokens: int | None,
    flags: Mapping[str, Any],
    *,
    seed: int = 0,
    parallel: bool = False,
) -> TrainConfig:
    """The settings of a run, printed in one line.

    With a number of `tokens`, which is rounded up to whole steps, the tokens of a step follow from it: a two-hundredth,
    of random and pruned weights down to an eight-hundredth where Muon stays cheap, between 1,024 and 8,192. With steps
    they are 4 x 4 x 512. The warm-up takes a twentieth of the steps, at most 50. With `documented` what is not given is
    as in `TrainConfig`, whatever the run.

    Args:
        run: what is trained.
        tokens: to train on; None where `flags` give steps, or for 5,000.
        flags: options and parsed settings by the names of `TrainConfig`, and `documented`; None if not given.
        seed: of the run.
        parallel: whether the loss can be computed for several batches side by side.

    Raises:
        UsageError: a value out of range or without effect, or batches side by side where they cannot be.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    documented = given.pop("documented", False)
    if tokens is not None and "steps" in given:
        raise UsageError("give --steps or --tokens, not both")
    base: dict[str, Any] = {"seed": seed}
    if not documented:
        base |= _derived(run, tokens, given)
    elif tokens is not None:
        shape = {key: value for key, value in given.items() if key in _SHAPE}
        base["steps"] = -(-tokens // TrainConfig(**shape).tokens_per_step)
    config = TrainConfig(**base | given)
    _check_effect(config, given)
    if config.parallel_batches > 1 and not parallel:
        raise UsageError(
            f"--set parallel_batches={config.parallel_batches}: is for `train`; students see their batches one after "
            "another"
        )
    if config.steps:
        log(described(config, run))
    return config


def _derived(run: Run, tokens: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings that follow from a run, by their names."""
    base: dict[str, Any] = {}
    if run.start is Start.QUANTIZED:
        base["weight_decay"] = 0.0  # the weights are near their final values: decay would pull them away
    base["sequence"] = min(TrainConfig.sequence, run.model.max_position_embeddings)
    if tokens is not None:
        base |= _batches(tokens, given.get("sequence", base["sequence"]), run, given)
    shape = {key: value for key, value in (base | given).items() if key in _SHAPE}
    tokens_per_step = TrainConfig(**shape).tokens_per_step
    if tokens is not None:
        base["steps"] = -(-tokens // tokens_per_step)
    eight_bits = given.get("optimizer_bits") == 8  # Muon has no such states
    base["optimizer"] = "adamw" if eight_bits else default_optimizer(run, tokens_per_step)
    base["learning_rate"], base["muon_learning_rate"] = peak_rates(run, (base | given)["optimizer"])
    steps = (base | given).get("steps", TrainConfig.steps)
    base["warmup"] = min(_MOST_WARMUP, max(1, round(_WARMUP_SHARE * steps))) if steps > 1 else 0
    base["validate_every"] = -(-steps // (_VALIDATIONS_FROM_RANDOM if run.start is Start.RANDOM else _VALIDATIONS))
    if run.start is not Start.RANDOM:
        base["try_rates"] = not {"learning_rate", "muon_learning_rate"} & given.keys()
    return base


def _check_effect(config: TrainConfig, given: Mapping[str, Any]) -> None:
    """Refuse settings of an optimizer or a schedule that the run has not."""
    of_muon = [name for name in given if name.startswith("muon_")]
    if of_muon and config.optimizer != "muon":
        raise UsageError(
            f"{of_muon[0]} is Muon's, this run's optimizer is {config.optimizer}; add --set optimizer=muon"
        )
    if config.warmup >= config.steps > 1:
        log(
            f"the run ends inside its warm-up: {config.steps} steps, {config.warmup} of warm-up; give more tokens, "
            "smaller steps or --set warmup=N"
        )
    rates = {"learning_rate", "muon_learning_rate"} & given.keys()
    if rates == {"learning_rate"} and config.optimizer == "muon":
        log(f"--learning-rate is that of AdamW's part; matrices have Muon's, {config.muon_learning_rate:g}")
    if "decay_fraction" in given and config.schedule != "wsd":
        raise UsageError(f"decay_fraction is for wsd, the schedule is {config.schedule}; add --set schedule=wsd")


def _batches(tokens: int, sequence: int, run: Run, given: Mapping[str, Any]) -> dict[str, int]:
    """Sequences of a batch and batches of a step, for a run of `tokens` in sequences of `sequence`."""
    least, most = _TOKENS_PER_STEP
    share = tokens / LEAST_STEPS
    if run.start in (Start.RANDOM, Start.PRUNED):
        cheap = 2 ** math.ceil(math.log2(_MUON_TOKENS_PER_CHANNEL * run.model.hidden_size))
        share = min(share, max(tokens / _MANY_STEPS, cheap))
    wanted = 2 ** math.floor(math.log2(min(most, max(least, share))))
    rows = max(1, wanted // sequence)
    batch_size = given.get("batch_size", max(1, min(TrainConfig.batch_size, rows // given.get("accumulation", 1))))
    return {"batch_size": batch_size, "accumulation": max(1, rows // batch_size)}


def described(config: TrainConfig, run: Run) -> str:
    """The line that a training starts with."""
    rates = f"AdamW {config.learning_rate:g}"
    if config.optimizer == "muon":
        rates = f"Muon {config.muon_learning_rate:g} and {rates}"
    fall = "" if config.schedule == "cosine" else f" over the last {config.decay_fraction:.0%}"
    return (
        f"training from {run.start.value}: {config.steps:,} steps of {config.tokens_per_step:,} tokens, {rates}, "
        f"warm-up {config.warmup}, {config.schedule} to {config.min_lr_ratio:.0%}{fall}"
    )
