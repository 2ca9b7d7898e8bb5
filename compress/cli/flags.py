"""Flags that `distill` and the recovery of `prune` share. Imports typer only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sportsllm.cli.flag_groups import FlagGroup

if TYPE_CHECKING:
    from compress.distillation.settings import Objective

TeacherPrecision = Annotated[
    str | None, typer.Option("--teacher-precision", help="auto, fp32, bf16, int8 or nf4; auto if not given.")
]
ExtraTeacher = Annotated[
    list[str] | None,
    typer.Option("--extra-teacher", help="DIR=WEIGHT: mix in another teacher; the first one weighs 1."),
]
Divergence = Annotated[
    str | None,
    typer.Option(
        "--divergence", help="forward-kl, reverse-kl, skew-kl, skew-reverse-kl or js; forward-kl if not given."
    ),
]
Mix = Annotated[float | None, typer.Option("--mix", help="Share of the mixture inside skew-*, 0.1, and js, 0.5.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Of both softmaxes; 1 if not given.")]
HiddenWeight = Annotated[
    float | None, typer.Option("--hidden-weight", help="Match hidden states too, with this weight.")
]
LayerMap = Annotated[
    str | None,
    typer.Option(
        "--layer-map",
        help="STUDENT:TEACHER,… of --hidden-weight; if not given, a pruned model's kept layers, else evenly spread.",
    ),
]
AttentionWeight = Annotated[
    float | None, typer.Option("--attention-weight", help="Match attention relations too, with this weight.")
]
RelationHeads = Annotated[
    int | None, typer.Option("--relation-heads", min=1, help="Heads of --attention-weight; the most that fit.")
]
Signals = Annotated[
    Path | None,
    typer.Option("--signals", help="Learn from teacher signals stored here; made first where there are none."),
]
SignalKind = Annotated[
    str | None, typer.Option("--signal-kind", help="sampled, or the baselines counts and top-k; sampled if not given.")
]
SignalTokens = Annotated[
    int | None, typer.Option("--signal-tokens", min=1, help="Tokens to store; as many as are trained on if not given.")
]
OnPolicy = Annotated[
    float | None, typer.Option("--on-policy", help="Share of the batches whose text the student writes itself.")
]
OnPolicyTokens = Annotated[
    int | None, typer.Option("--on-policy-tokens", min=1, help="Tokens that it writes in each row; 64 if not given.")
]

KlWeight = Annotated[
    str | None,
    typer.Option(
        "--kl-weight",
        help="Share of the divergence in the loss, or a range over training such as 0.5:1; the rest is cross-entropy. "
        "[default: 0.9 for a student with random weights, else 0.5]",
    ),
]

OBJECTIVE = (
    "divergence", "mix", "temperature", "hidden_weight", "layer_map", "attention_weight", "relation_heads", "signals",
    "signal_kind", "signal_tokens", "teacher_precision", "on_policy", "on_policy_tokens",
)  # fmt: skip
"""The parameters of a command that `make_objective` takes as they are."""


def make_objective(
    *, kl_weight: str | float | None, fresh: bool, extra_teacher: list[str] | None, **given: Any
) -> Objective:
    """The objective that flags describe; a flag that is None keeps the default.

    Args:
        kl_weight: the flag's text, or a recipe's number.
        fresh: whether the student starts from random weights.
        extra_teacher: the flag's texts.
        given: the other fields of `Objective`.

    Raises:
        UsageError: a value out of range, or flags that do not go together.
    """
    from compress.distillation.settings import Objective, chosen_kl_weight, parse_teachers

    return Objective(
        kl_weight=chosen_kl_weight(None if kl_weight is None else str(kl_weight), fresh),
        teachers=parse_teachers(extra_teacher or []),
        **{key: value for key, value in given.items() if value is not None},
    )


@dataclass(frozen=True)
class TeacherFlags(FlagGroup):
    """The share of the teacher in the loss, and where its answers come from."""

    kl_weight: KlWeight = None
    signals: Signals = None
    signal_tokens: SignalTokens = None

    def objective(self, fresh: bool) -> Objective:
        """What the student learns; `fresh` says whether it starts from random weights."""
        from compress.distillation.settings import Objective, chosen_kl_weight

        given = self.given()
        weight = given.pop("kl_weight", None)  # a recipe may give a number
        return Objective(kl_weight=chosen_kl_weight(None if weight is None else str(weight), fresh), **given)


@dataclass(frozen=True)
class DistillationFlags(TeacherFlags):
    """Everything about how a student learns from its teacher."""

    teacher_precision: TeacherPrecision = None
    divergence: Divergence = None
    mix: Mix = None
    temperature: Temperature = None
    hidden_weight: HiddenWeight = None
    layer_map: LayerMap = None
    on_policy: OnPolicy = None
    on_policy_tokens: OnPolicyTokens = None
