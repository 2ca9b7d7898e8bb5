"""The flags of `bench` that say how thoroughly to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sportsllm.cli import flags
from sportsllm.cli.flag_groups import FlagGroup
from sportsllm.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.measure.bench import BenchRequest


BOTH = "both"  # of --kernels: measure the native ones alone and in turns with the portable ones


@dataclass(frozen=True)
class MeasuringFlags(FlagGroup):
    """How often, at which lengths and for how long."""

    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="When a measuring process counts as hung.")
    ] = 900.0
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Fresh processes that measure each figure.", show_default="5"),
    ] = None
    most_rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Maximum number of rounds; three are added at a time until they agree within 5%.",
            show_default="8",
        ),
    ] = None
    prompt_lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="Further prompt lengths for the time to first token.")
    ] = None
    batch_size: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of sequences to decode together.")
    ] = None
    minutes: Annotated[
        float, typer.Option(min=0, metavar="MINUTES", help="Also decode for this long, to see if speed lasts.")
    ] = 0.0

    kernels: Annotated[
        str,
        typer.Option(
            help="What runs an export: native (this program's kernels), portable (ONNX Runtime's), auto; "
            "or both, in turns."
        ),
    ] = "auto"
    provider: flags.Provider = "cpu"

    def request(self, directory: Path, threads: int | None) -> BenchRequest:
        """What to measure of a directory."""
        from benchmarks.measure.bench import BenchRequest

        prompts = parse_numbers("--prompt-lengths", self.prompt_lengths)
        batches = parse_numbers("--batch-size", self.batch_size)
        timing = *round_numbers(self.rounds, self.most_rounds), self.timeout
        kernels = "native" if self.kernels == BOTH else self.kernels
        return BenchRequest(directory, threads, *timing, prompts, batches, self.minutes, kernels, self.provider)


def round_numbers(rounds: int | None, most_rounds: int | None) -> tuple[int, int]:
    """How often to measure at least and at most, where one of them or both were given.

    Raises:
        UsageError: more at least than at most.
    """
    from benchmarks.measure.bench import MOST_ROUNDS, ROUNDS

    if rounds is not None and most_rounds is not None and rounds > most_rounds:
        raise UsageError(f"--rounds {rounds} is more than --most-rounds {most_rounds}; lower one or raise the other")
    least = rounds or min(ROUNDS, most_rounds or ROUNDS)
    return least, most_rounds or max(MOST_ROUNDS, least)


def parse_numbers(flag: str, text: str | None) -> list[int]:
    """The numbers of a flag like `1,4`, each once and ascending; none where the flag was not given.

    Raises:
        UsageError: the text is something else.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} {text}: give whole numbers from 1, separated by commas, for example 1,4")
    return sorted({int(word) for word in words})
