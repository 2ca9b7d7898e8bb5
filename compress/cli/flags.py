"""Flags that `distill` and the recovery of `prune` share. Imports typer only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.cli.flag_groups import FlagGroup

if TYPE_CHECKING:
    from compress.distillation.settings import DistillationConfig

TeacherPrecision = Annotated[
    str | None, typer.Option("--teacher-precision", help="auto, fp32, bf16, int8 or nf4; auto if not given.")
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
Signals = Annotated[
    Path | None,
    typer.Option("--signals", help="Learn from teacher signals stored here; made first where there are none."),
]
SignalTokens = Annotated[
    int | None, typer.Option("--signal-tokens", min=1, help="Tokens to store; as many as are trained on if not given.")
]

KlWeight = Annotated[
    str | None,
    typer.Option(
        "--kl-weight",
        help="Share of the divergence in the loss, or a range over training such as 0.5:1; the rest is cross-entropy. "
        "[default: 0.9 for a student with random weights, else 0.5]",
    ),
]


@dataclass(frozen=True)
class TeacherFlags(FlagGroup):
    """The share of the teacher in the loss, and where its answers come from."""

    kl_weight: KlWeight = None
    signals: Signals = None
    signal_tokens: SignalTokens = None

    def config(self, fresh: bool) -> DistillationConfig:
        """What the student learns; `fresh` says whether it starts from random weights."""
        from compress.distillation.settings import DistillationConfig, chosen_kl_weight

        given = self.given()
        weight = given.pop("kl_weight", None)  # a recipe may give a number
        return DistillationConfig(kl_weight=chosen_kl_weight(None if weight is None else str(weight), fresh), **given)


@dataclass(frozen=True)
class DistillationFlags(TeacherFlags):
    """Everything about how a student learns from its teacher."""

    teacher_precision: TeacherPrecision = None
    divergence: Divergence = None
    mix: Mix = None
    temperature: Temperature = None
    hidden_weight: HiddenWeight = None
    layer_map: LayerMap = None
