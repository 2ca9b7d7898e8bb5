"""What a student learns from its teacher, as settings; `compress.distillation.loss` makes a loss of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sportsllm.files import JsonObject
from sportsllm.models.config import ModelConfig
from sportsllm.settings import DISTILLATION, check_value
from sportsllm.text.documents import tokens_per_parameter
from sportsllm.training.settings import Start

HIDDEN_WEIGHT = 3.0
_WELL_TRAINED = 100.0  # tokens a parameter from which on text teaches a student less than its teacher does
_LEAST_TRAINING = 2.0  # tokens a parameter from which on states are worth copying; measured: 0.6 loses, 2.6 gains
LayerMap = tuple[tuple[int, int], ...]
"""(student's state, teacher's state), each from 0, the embedding's output, to the number of layers."""


def default_kl_weight(start: Start, tokens_per_parameter: float | None) -> float:
    """The share of the KL where none is asked for: by the student's start, and the teacher's training.

    A teacher that has read few tokens a parameter can still be surpassed by what the text says: with 20, a third cut
    and recovered on 5% of its tokens ends 2.1% behind it with 1, 1.4% with 0.5. One that has read thousands knows more
    than the text: at 200,000 tokens 0.5 ends 2.6% behind 1 (docs/results). Rounding is to be undone, not more to be
    learnt: 1. Fresh students take 0.9 (Minitron, https://arxiv.org/abs/2407.14679). Barely trained ones too: they are
    too far behind to surpass their teacher, and 0.5 leaves them up to 15% farther from it.
    """
    if start is Start.RANDOM:
        return 0.9
    if start is Start.QUANTIZED or tokens_per_parameter is None or tokens_per_parameter >= _WELL_TRAINED:
        return 1.0
    return 0.9 if start is Start.BARELY_TRAINED else 0.5


def default_hidden_weight(
    start: Start, kl_weight: float, signals: Path | None, tokens_per_parameter: float | None
) -> float:
    """The weight of hidden-state matching where none is asked for: of pruned weights, whose states the refit has made
    alike, where the teacher runs and has read enough for its states to be worth copying.

    A third cut and recovered on 300,000 tokens then ends 14.4 instead of 17.5%, and 18.5 instead of 20.3% behind the
    teacher; 1 and 10 give less. Of a teacher of 0.6 tokens a parameter the student ends 2.3% worse (docs/results).
    """
    taught = signals is None and kl_weight > 0.0
    barely = tokens_per_parameter is not None and tokens_per_parameter < _LEAST_TRAINING
    return HIDDEN_WEIGHT if start is Start.PRUNED and taught and not barely else 0.0


def distillation_config(start: Start, teacher: Path, given: Mapping[str, object]) -> DistillationConfig:
    """What a student learns that starts from `start`, by the options that were given, None for those that were not.

    The teacher's manifest says how much text it has read, which decides the defaults.
    """
    found: JsonObject = {name: value for name, value in given.items() if value is not None}
    read = tokens_per_parameter(teacher)
    weight = found.setdefault("kl_weight", default_kl_weight(start, read))
    found.setdefault("hidden_weight", default_hidden_weight(start, weight, found.get("signals"), read))
    return DistillationConfig(exact_logits=start is Start.QUANTIZED, **found)


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
        temperature: of both softmaxes.
        kl_weight: share of the KL; the rest is cross-entropy with the text.
        hidden_weight: of hidden-state matching, 0 for none; `layer_map` says which states, evenly spread if None.
        signals: directory of the teacher cache to learn from instead of the running teacher; made if missing.
        teacher_precision: see `load_teacher`.
        exact_logits: logits are float32 sums on a CPU too, for a KL near bfloat16's rounding error.
    """

    temperature: float = 1.0
    kl_weight: float = 1.0
    hidden_weight: float = 0.0
    layer_map: LayerMap | None = None
    signals: Path | None = None
    teacher_precision: str = "auto"
    exact_logits: bool = False

    def __post_init__(self) -> None:
        for name, setting in DISTILLATION.items():
            if (value := getattr(self, name)) is not None:
                check_value(f"{name}={value}", value, setting)

    @property
    def asks_the_teacher(self) -> bool:
        """Whether a teacher runs in every step; a cache and plain cross-entropy need none."""
        return bool((self.signals is None and self.kl_weight) or self.hidden_weight)

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
        return fields | {"signals": None if self.signals is None else str(self.signals)}
