"""What a student learns from its teacher, as settings; `compress.distillation.loss` makes a loss of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sportsllm.errors import UsageError
from sportsllm.files import JsonObject
from sportsllm.models.config import ModelConfig
from sportsllm.text.documents import tokens_per_parameter
from sportsllm.training.settings import Start

DIVERGENCES: dict[str, float | None] = {
    "forward-kl": None,
    "reverse-kl": None,
    "skew-kl": 0.1,
    "skew-reverse-kl": 0.1,
    "js": 0.5,
}
"""The divergences of `compress.distillation.loss` and the default of `mix` where they have one."""
TEACHER_PRECISIONS = ("auto", "fp32", "bf16", "int8", "nf4")
HIDDEN_WEIGHT = 3.0
_WELL_TRAINED = 100.0  # tokens a parameter from which on text teaches a student less than its teacher does
_LEAST_TRAINING = 2.0  # tokens a parameter from which on states are worth copying; measured: 0.6 loses, 2.6 gains
LayerMap = tuple[tuple[int, int], ...]
"""(student's state, teacher's state), each from 0, the embedding's output, to the number of layers."""


@dataclass(frozen=True)
class KLWeight:
    """Share of the divergence in the loss, on a straight line from `start` to `end` over training."""

    start: float
    end: float

    def __post_init__(self) -> None:
        for value in (self.start, self.end):
            if not 0.0 <= value <= 1.0:
                raise UsageError(f"--kl-weight {value:g} must be in [0, 1]")

    def at(self, progress: float) -> float:
        """The share at `progress`, 0 at the first step and 1 at the last; exactly `start` and `end` there."""
        if progress >= 1.0:
            return self.end
        return self.start + max(0.0, progress) * (self.end - self.start)

    def __str__(self) -> str:
        return f"{self.start:g}" if self.start == self.end else f"{self.start:g}:{self.end:g}"


def parse_kl_weight(text: str) -> KLWeight:
    """`0.9`, or `0.5:1.0` for a weight that moves from the first to the second over training.

    Raises:
        UsageError: neither form, or a value out of [0, 1].
    """
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if len(values) not in (1, 2):
        raise UsageError(f"--kl-weight {text!r} is neither a number such as 0.9 nor a range such as 0.5:1.0")
    return KLWeight(values[0], values[-1])


def default_kl_weight(start: Start, tokens_per_parameter: float | None) -> KLWeight:
    """The share of the divergence where none is asked for: by the student's start, and the teacher's training.

    A teacher that has read few tokens a parameter can still be surpassed by what the text says: with 20, a third cut
    and recovered on 5% of its tokens ends 2.1% behind it with 1, 1.4% with 0.5. One that has read thousands knows more
    than the text: at 200,000 tokens 0.5 ends 2.6% behind 1 (docs/results). Rounding is to be undone, not more to be
    learnt: 1. Fresh students take 0.9 (Minitron, https://arxiv.org/abs/2407.14679).
    """
    if start is Start.RANDOM:
        return KLWeight(0.9, 0.9)
    undertrained = tokens_per_parameter is not None and tokens_per_parameter < _WELL_TRAINED
    return KLWeight(0.5, 0.5) if undertrained and start is not Start.QUANTIZED else KLWeight(1.0, 1.0)


def default_hidden_weight(
    start: Start, kl_weight: KLWeight, signals: Path | None, tokens_per_parameter: float | None
) -> float:
    """The weight of hidden-state matching where none is asked for: of pruned weights, whose states the refit has made
    alike, where the teacher runs and has read enough for its states to be worth copying.

    A third cut and recovered on 300,000 tokens then ends 14.4 instead of 17.5%, and 18.5 instead of 20.3% behind the
    teacher; 1 and 10 give less. Of a teacher of 0.6 tokens a parameter the student ends 2.3% worse (docs/results).
    """
    taught = signals is None and (kl_weight.start > 0.0 or kl_weight.end > 0.0)
    barely = tokens_per_parameter is not None and tokens_per_parameter < _LEAST_TRAINING
    return HIDDEN_WEIGHT if start is Start.PRUNED and taught and not barely else 0.0


def distillation_config(start: Start, teacher: Path, given: Mapping[str, object]) -> DistillationConfig:
    """What a student learns that starts from `start`, by the options that were given, None for those that were not.

    The teacher's manifest says how much text it has read, which decides the defaults.
    """
    found: JsonObject = {name: value for name, value in given.items() if value is not None}
    weight, read = found.pop("kl_weight", None), tokens_per_parameter(teacher)
    share = default_kl_weight(start, read) if weight is None else parse_kl_weight(str(weight))
    found.setdefault("hidden_weight", default_hidden_weight(start, share, found.get("signals"), read))
    return DistillationConfig(kl_weight=share, exact_logits=start is Start.QUANTIZED, **found)


def divergence_share(kind: str, mix: float | None) -> float:
    """The share of the mixture inside a divergence; 0 for those that have none.

    Raises:
        UsageError: an unknown kind, or a mix out of (0, 1) or where the kind has none.
    """
    if kind not in DIVERGENCES:
        raise UsageError(f"divergence {kind!r} is not known; use one of {', '.join(DIVERGENCES)}")
    default = DIVERGENCES[kind]
    if default is None:
        if mix is not None:
            shared = ", ".join(name for name, share in DIVERGENCES.items() if share is not None)
            raise UsageError(f"--set mix={mix:g} means nothing with {kind}; leave it out, or use one of {shared}")
        return 0.0
    share = default if mix is None else mix
    if not 0.0 < share < 1.0:
        raise UsageError(f"--set mix={share:g}: with {kind} it must be above 0 and below 1")
    return share


def default_layer_map(student_layers: int, teacher_layers: int) -> LayerMap:
    """Every student state with the teacher state at the same share of the depth (TinyBERT's uniform map)."""
    return tuple(
        (layer, (2 * layer * teacher_layers + student_layers) // (2 * student_layers))
        for layer in range(student_layers + 1)
    )


@dataclass(frozen=True)
class DistillationConfig:
    """How a student is taught.

    Attributes:
        divergence: one of DIVERGENCES, and `mix` the share of the mixture in it.
        temperature: of both softmaxes.
        kl_weight: share of the divergence; the rest is cross-entropy with the text.
        hidden_weight: of hidden-state matching, 0 for none; `layer_map` says which states, evenly spread if None.
        signals: directory of the teacher cache to learn from instead of the running teacher; made if missing.
        signal_tokens: tokens to cache; as many as are trained on if None.
        teacher_precision: one of TEACHER_PRECISIONS.
        exact_logits: logits are float32 sums on a CPU too, for divergences near bfloat16's rounding error.
    """

    divergence: str = "forward-kl"
    mix: float | None = None
    temperature: float = 1.0
    kl_weight: KLWeight = field(default_factory=lambda: KLWeight(1.0, 1.0))
    hidden_weight: float = 0.0
    layer_map: LayerMap | None = None
    signals: Path | None = None
    signal_tokens: int | None = None
    teacher_precision: str = "auto"
    exact_logits: bool = False

    def __post_init__(self) -> None:
        divergence_share(self.divergence, self.mix)
        if not 0.0 < self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature:g} must be above 0")
        if not 0.0 <= self.hidden_weight < math.inf:
            raise UsageError(f"--set hidden_weight={self.hidden_weight:g}: must be 0 or more")
        if self.teacher_precision not in TEACHER_PRECISIONS:
            known = ", ".join(TEACHER_PRECISIONS)
            raise UsageError(f"--set teacher_precision={self.teacher_precision}: use one of {known}")
        if self.signals is None and self.signal_tokens is not None:
            raise UsageError("--set signal_tokens belongs to --signals DIR; add it or leave it out")
        if self.signals is not None and self.divergence != "forward-kl":
            raise UsageError(
                "--signals hold samples of the teacher's probabilities: they give forward-kl alone; "
                "leave --divergence out"
            )

    @property
    def asks_the_teacher(self) -> bool:
        """Whether a teacher runs in every step; a cache and plain cross-entropy need none."""
        distils = self.signals is None and (self.kl_weight.start > 0.0 or self.kl_weight.end > 0.0)
        return bool(distils or self.hidden_weight)

    def layers(self, student: ModelConfig, teacher: ModelConfig) -> LayerMap:
        """The pairs of states that are matched."""
        return self.layer_map or default_layer_map(student.num_hidden_layers, teacher.num_hidden_layers)

    def matching_kept(self, kept: Sequence[int], layers: int) -> DistillationConfig:
        """The same for a student that has the layers `kept` of the teacher's: matched is what each of them reads.

        So the layer before a dropped one learns to stand in for it, as in the refit. A given map stays.
        """
        if not self.hidden_weight or self.layer_map is not None:
            return self
        return dataclasses.replace(self, layer_map=tuple(enumerate([*kept, layers])))

    def settings(self) -> JsonObject:
        """For a manifest."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        start, end = self.kl_weight.start, self.kl_weight.end
        return fields | {
            "kl_weight": start if start == end else str(self.kl_weight),
            "signals": None if self.signals is None else str(self.signals),
        }
