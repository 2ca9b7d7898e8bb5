"""What a student learns from its teachers, as settings; `compress.distillation.student_loss` turns them into a loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.distillation.divergences import KLWeight, check_divergence, parse_kl_weight
from compress.distillation.hidden_states import parse_layer_map, relation_heads
from compress.distillation.teacher import PRECISIONS
from compress.teacher_cache.sparse import KINDS
from sportsllm.errors import UsageError
from sportsllm.models.config import ModelConfig

_TEACHER_ALONE, _FRESH, _WITH_WEIGHTS = KLWeight(1.0, 1.0), KLWeight(0.9, 0.9), KLWeight(0.5, 0.5)


@dataclass(frozen=True)
class Objective:
    """How a student is taught.

    Attributes:
        divergence: one of `compress.distillation.divergences.DIVERGENCES`, and `mix` its share where it has one.
        temperature: of both softmaxes.
        kl_weight: share of the divergence; the rest is cross-entropy with the text.
        hidden_weight: of hidden-state matching, 0 for none; `layer_map` says which states, as `0:0,2:4`.
        attention_weight: of attention-relation matching in the last layers, 0 for none; `relation_heads` of it.
        signals: directory of stored teacher signals to learn from instead of the running teacher; made if missing.
        signal_kind, signal_tokens: how they are made: see `compress.teacher_cache.sparse`, and as many tokens as are
        trained on
            if None.
        teachers: further teachers and their weights; the first one's is 1.
        teacher_precision: one of `compress.distillation.teacher.PRECISIONS`.
        on_policy: share of the batches whose text the student writes itself, `on_policy_tokens` of each row.
    """

    divergence: str = "forward-kl"
    mix: float | None = None
    temperature: float = 1.0
    kl_weight: KLWeight = _TEACHER_ALONE
    hidden_weight: float = 0.0
    layer_map: str | None = None
    attention_weight: float = 0.0
    relation_heads: int | None = None
    signals: Path | None = None
    signal_kind: str = "sampled"
    signal_tokens: int | None = None
    teachers: tuple[tuple[Path, float], ...] = ()
    teacher_precision: str = "auto"
    on_policy: float = 0.0
    on_policy_tokens: int = 64

    def __post_init__(self) -> None:
        check_divergence(self.divergence, self.mix)
        if not 0.0 < self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature:g} must be above 0")
        for name in ("hidden_weight", "attention_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name):g} must be 0 or more")
        if not 0.0 <= self.on_policy <= 1.0:
            raise UsageError(f"--on-policy {self.on_policy:g} must be in [0, 1]: a share of the batches")
        if self.teacher_precision not in PRECISIONS:
            raise UsageError(
                f"--teacher-precision {self.teacher_precision!r} is not known; use one of {', '.join(PRECISIONS)}"
            )
        if self.signal_kind not in KINDS:
            raise UsageError(f"--signal-kind {self.signal_kind!r} is not known; use one of {', '.join(KINDS)}")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.layer_map is not None and not self.hidden_weight:
            raise UsageError("--layer-map belongs to --hidden-weight; add it or leave the map out")
        if self.relation_heads is not None and not self.attention_weight:
            raise UsageError("--relation-heads belongs to --attention-weight; add it or leave it out")
        if self.teachers and self.temperature != 1.0 and self.signals is None:
            raise UsageError("several teachers are mixed at temperature 1; leave --temperature out, or use --signals")
        if self.signals is not None:
            if self.divergence != "forward-kl" or self.on_policy:
                raise UsageError(
                    "--signals hold samples of the teacher on the corpus: they give forward-kl alone, and nothing "
                    "on-policy; leave --divergence and --on-policy out"
                )
        elif self.signal_kind != "sampled" or self.signal_tokens is not None:
            raise UsageError("--signal-kind and --signal-tokens belong to --signals DIR; add it or leave them out")

    @property
    def asks_the_teacher(self) -> bool:
        """Whether a teacher runs in every step; stored signals and plain cross-entropy need none."""
        distils = self.signals is None and (self.kl_weight.start > 0.0 or self.kl_weight.end > 0.0)
        return bool(distils or self.hidden_weight or self.attention_weight or self.on_policy)

    def check_models(self, student: ModelConfig, teacher: ModelConfig) -> None:
        """Whether the matching that is asked for fits two models.

        Raises:
            UsageError: a layer map out of range, or relation heads that do not fit.
        """
        if self.layer_map is not None:
            parse_layer_map(self.layer_map, student.num_hidden_layers, teacher.num_hidden_layers)
        if self.attention_weight:
            relation_heads(student, teacher, self.relation_heads)

    def settings(self) -> dict[str, Any]:
        """For a manifest. The main teacher is a setting of its own; with others all are listed by `all_teachers`."""
        start, end = self.kl_weight.start, self.kl_weight.end
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["teachers"]
        return fields | {
            "kl_weight": start if start == end else f"{start:g}:{end:g}",
            "signals": None if self.signals is None else str(self.signals),
        }

    def all_teachers(self, main: Path) -> list[tuple[Path, float]]:
        """All teachers with their shares of the mixture, which add up to 1."""
        weighted = [(main, 1.0), *self.teachers]
        total = sum(weight for _, weight in weighted)
        return [(path, weight / total) for path, weight in weighted]


def chosen_kl_weight(text: str | None, fresh: bool) -> KLWeight:
    """The weight of a flag; else 0.9 for a student with fresh weights, 0.5 for one that has some.

    Minitron (https://arxiv.org/abs/2407.14679) found pure divergence best for pruned models. With a teacher of 20
    tokens a parameter, which has more to learn from its text itself, half of each is better than either alone: a
    third cut and recovered on 5% of the tokens ends 2.1% behind the teacher with 1, 1.5% with 0.8, 1.4% with 0.5 and
    2.2% with 0 (docs/log.md).
    """
    if text is None:
        return _FRESH if fresh else _WITH_WEIGHTS
    return parse_kl_weight(text)


def parse_teachers(texts: Sequence[str]) -> tuple[tuple[Path, float], ...]:
    """`DIR=WEIGHT` or `DIR`, which weighs 1.

    Raises:
        UsageError: a weight that is no number above 0.
    """
    found = []
    for text in texts:
        name, separator, number = text.rpartition("=")
        try:
            weight = float(number) if separator else 1.0
        except ValueError:
            raise UsageError(f"--extra-teacher {text!r}: write DIR=WEIGHT, for example runs/other=0.5") from None
        if not 0.0 < weight < math.inf:
            raise UsageError(f"--extra-teacher {text!r}: the weight must be above 0")
        found.append((Path(name if separator else text), weight))
    return tuple(found)
