"""Flags that `distill` and the recovery of `prune` share. Imports typer only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.cli.flag_groups import FlagGroup, check_not_given

if TYPE_CHECKING:
    from compress.distillation.run import Start as StudentStart
    from compress.distillation.settings import DistillationConfig
    from sportsllm.training.settings import Start


@dataclass(frozen=True)
class TeacherFlags(FlagGroup):
    """The share of the teacher in the loss, and where its answers come from."""

    kl_weight: Annotated[
        str | None,
        typer.Option(
            help="Share of the divergence in the loss, or a range over training such as 0.5:1; the rest is "
            "cross-entropy.",
            show_default="0.5 for a teacher of less than 100 tokens a parameter, else 1; 0.9 for random weights",
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

    def config(self, start: Start, teacher: Path) -> DistillationConfig:
        """What a student learns that starts from `start`; the teacher's manifest says how much that has read."""
        from compress.distillation.settings import distillation_config

        return distillation_config(start, teacher, self.given())


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
        float | None,
        typer.Option(
            help="Weight of hidden-state matching in the loss.",
            show_default="3 for pruned weights, unless the teacher has read less than 5 tokens a parameter",
        ),
    ] = None
    layer_map: Annotated[
        str | None,
        typer.Option(
            metavar="STUDENT:TEACHER,...",
            help="Layers that --hidden-weight matches.",
            show_default="the layers that were kept after pruning, else evenly spread",
        ),
    ] = None


@dataclass(frozen=True)
class SelectionFlags(FlagGroup):
    """A student that attends to selected tokens."""

    select_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that a query attends to at most, chosen by an indexer in blocks; the first and the newest "
            "always.",
            show_default="all tokens",
        ),
    ] = None
    select_block: Annotated[int | None, typer.Option(min=1, help="Tokens of such a block.", show_default="16")] = None
    index_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of the indexer.", show_default="as many as the model has")
    ] = None
    index_parts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Parts of these heads and of the cached index key.",
            show_default="2, or 1 of a single key head",
        ),
    ] = None
    index_pairs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rotary pairs of such a part, the slowest of a head's.", show_default="half, but at least 16"
        ),
    ] = None
    index_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens from which the indexer learns full attention, alone.",
            show_default="0",
        ),
    ] = None

    def applied_to(self, start: StudentStart) -> StudentStart:
        """The start of a student that selects tokens, if that is asked for."""
        from compress.distillation.selection import selecting
        from compress.pruning.indexer import start_index

        if self.select_tokens is None:
            check_not_given("--select-tokens", self)
            return start
        sizes = {"tokens": self.select_tokens, "block": self.select_block}
        sizes |= {"heads": self.index_heads, "parts": self.index_parts, "pairs": self.index_pairs}
        return selecting(start, sizes, start_index, self.index_tokens or 0)

    def lengths(self) -> tuple[int, int]:
        """Tokens of the training behind the indexer's, and of a sequence, where they are not given."""
        from compress.distillation.selection import DEFAULT_TOKENS

        return DEFAULT_TOKENS, _SEQUENCE_TIMES_SELECTED * (self.select_tokens or 0)


_SEQUENCE_TIMES_SELECTED = 4
