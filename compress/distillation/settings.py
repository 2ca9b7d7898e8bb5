"""Settings of what a student learns from its teacher; `compress.distillation.loss` turns them into a loss."""

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
_WELL_TRAINED = 100.0  # tokens per parameter above which the teacher knows more than the text says
_LEAST_TRAINING = 2.0  # tokens per parameter above which states are worth copying; measured: 0.6 loses, 2.6 gains
LayerMap = tuple[tuple[int, int], ...]
"""(student's state, teacher's state), each from 0, the embedding's output, to the number of layers."""


def default_kl_weight(start: Start, tokens_per_parameter: float | None) -> float:
    """The KL's default share of the loss, by the student's start and the teacher's tokens per parameter.

    The text still teaches more than a teacher of few tokens per parameter knows: with 20, a student pruned by a third
    and recovered on 5% of the teacher's tokens ends 2.1% behind it with a share of 1, 1.4% with 0.5. With 200,000,
    0.5 ends 2.6% behind 1 (docs/results). Quantized weights only undo their rounding: 1. Random weights take 0.9
    (Minitron, https://arxiv.org/abs/2407.14679). So do barely trained ones, which cannot surpass their teacher yet:
    0.5 leaves them up to 15% farther from it.
    """
    if start is Start.RANDOM:
        return 0.9
    if start is Start.QUANTIZED or tokens_per_parameter is None or tokens_per_parameter >= _WELL_TRAINED:
        return 1.0
    return 0.9 if start is Start.BARELY_TRAINED else 0.5


def default_hidden_weight(
    start: Start, kl_weight: float, signals: Path | None, tokens_per_parameter: float | None
) -> float:
    """The default weight of hidden-state matching: above 0 for pruned weights, whose states the refit has made similar
    to the teacher's, if the teacher runs and has read enough for its states to be worth copying.

    With it students pruned by a third and recovered on 300,000 tokens end 14.4% instead of 17.5%, and 18.5% instead of
    20.3% behind their teachers; weights of 1 and 10 gain less. With a teacher of 0.6 tokens per parameter the student
    ends 2.3% worse (docs/results).
    """
    taught = signals is None and kl_weight > 0.0
    barely = tokens_per_parameter is not None and tokens_per_parameter < _LEAST_TRAINING
    return HIDDEN_WEIGHT if start is Start.PRUNED and taught and not barely else 0.0


def distillation_config(start: Start, teacher: Path, given: Mapping[str, object]) -> DistillationConfig:
    """The settings of a student that starts from `start`; `given` are options by name, None if not given.

    The defaults depend on how much text the teacher has read, which its manifest says.
    """
    found: JsonObject = {name: value for name, value in given.items() if value is not None}
    read = tokens_per_parameter(teacher)
    weight = found.setdefault("kl_weight", default_kl_weight(start, read))
    found.setdefault("hidden_weight", default_hidden_weight(start, weight, found.get("signals"), read))
    return DistillationConfig(exact_logits=start is Start.QUANTIZED, **found)


def default_layer_map(student_layers: int, teacher_layers: int) -> LayerMap:
    """Each student state and the teacher state at the same relative depth (TinyBERT's uniform map)."""
    return tuple(
        (layer, (2 * layer * teacher_layers + student_layers) // (2 * student_layers))
        for layer in range(student_layers + 1)
    )


@dataclass(frozen=True)
class DistillationConfig:
    """How a student is taught.

    Attributes:
        kl_weight: share of the KL; the rest is cross-entropy with the text.
        hidden_weight: of hidden-state matching, 0 for none; `layer_map` says which states, evenly spread if None.
        signals: directory of the teacher cache to learn from instead of the running teacher; made if missing.
        teacher_precision: see `load_teacher`.
        exact_logits: logits are float32 sums on a CPU too, for a KL near bfloat16's rounding error.
    """

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
        """The same for a student with the teacher's layers `kept`: the inputs of these layers are matched.

        So the layer before a dropped one learns to replace it too, as in the refit. A given map stays.
        """
        if not self.hidden_weight or self.layer_map is not None:
            return self
        return dataclasses.replace(self, layer_map=tuple(enumerate([*kept, layers])))

    def settings(self) -> JsonObject:
        """For a manifest."""
        return {**vars(self), "signals": None if self.signals is None else str(self.signals)}
