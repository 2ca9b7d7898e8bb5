"""Flags that `distill` and the recovery of `prune` share. Imports typer only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.cli.flag_groups import FlagGroup

if TYPE_CHECKING:
    from compress.distillation.settings import DistillationConfig


@dataclass(frozen=True)
class TeacherFlags(FlagGroup):
    """The share of the teacher in the loss, and where its answers come from."""

    kl_weight: Annotated[
        str | None,
        typer.Option(
            help="Share of the divergence in the loss, or a range over training such as 0.5:1; the rest is "
            "cross-entropy.",
            show_default="0.9 for a student with random weights, else 0.5",
        ),
    ] = None
    signals: Annotated[
        Path | None,
        typer.Option(
            "--signals",
            "--teacher-cache",
            help="Learn from the teacher's predictions cached in this directory; made if missing.",
            show_default="the teacher runs in every step",
        ),
    ] = None
    signal_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to cache.", show_default="as many as are trained on")
    ] = None

    def config(self, fresh: bool) -> DistillationConfig:
        """What the student learns; `fresh` says whether it starts from random weights."""
        from compress.distillation.settings import DistillationConfig, chosen_kl_weight

        given = self.given()
        weight = given.pop("kl_weight", None)  # a recipe may give a number
        return DistillationConfig(kl_weight=chosen_kl_weight(None if weight is None else str(weight), fresh), **given)


@dataclass(frozen=True)
class DistillationFlags(TeacherFlags):
    """Everything about how a student learns from its teacher."""

    teacher_precision: Annotated[
        str | None, typer.Option(help="Teacher's weights: auto, fp32, bf16, int8 or nf4.", show_default="auto")
    ] = None
    divergence: Annotated[
        str | None,
        typer.Option(help="forward-kl, reverse-kl, skew-kl, skew-reverse-kl or js.", show_default="forward-kl"),
    ] = None
    mix: Annotated[
        float | None,
        typer.Option(
            help="Share of the first distribution in the mixture of skew-kl, skew-reverse-kl and js.",
            show_default="0.1; js 0.5",
        ),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Softmax temperature of teacher and student.", show_default="1")
    ] = None
    hidden_weight: Annotated[
        float | None, typer.Option(help="Weight of hidden-state matching in the loss.", show_default="0")
    ] = None
    layer_map: Annotated[
        str | None,
        typer.Option(
            metavar="STUDENT:TEACHER,...",
            help="Layers that --hidden-weight matches.",
            show_default="the layers that were kept after pruning, else evenly spread",
        ),
    ] = None
