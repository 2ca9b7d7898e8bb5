"""The flags of `fit` that say how much work a search may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.cli.flag_groups import FlagGroup

if TYPE_CHECKING:
    from benchmarks.search.stages import Effort


@dataclass(frozen=True)
class EffortFlags(FlagGroup):
    """Tokens, finalists and time."""

    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of the winner's recovery.", show_default="5% of the teacher's training"
        ),
    ] = None
    search_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of a candidate's brief recovery.", show_default="a tenth of --tokens"
        ),
    ] = None
    finalists: Annotated[int, typer.Option(min=1, metavar="N", help="Cut models to recover briefly and compare.")] = 4
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="MINUTES",
            help="Time limit of the whole search; fewer candidates are compared if it runs short.",
        ),
    ] = None

    def effort(self, teacher: Path) -> Effort:
        """The effort of a search from a teacher."""
        from benchmarks.search.stages import Effort, recovery_tokens

        tokens = self.tokens or recovery_tokens(teacher)
        return Effort(tokens, self.search_tokens or max(1, tokens // 10), self.finalists, self.minutes)
