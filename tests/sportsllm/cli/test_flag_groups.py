"""Flag groups: what typer and recipes see, and what the command is called with."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from sportsllm.cli.flag_groups import FlagGroup, check_not_given, expand_flag_groups
from sportsllm.errors import UsageError


@dataclass(frozen=True)
class PaceFlags(FlagGroup):
    steps: Annotated[int | None, typer.Option(min=1, help="Steps.")] = None
    learning_rate: Annotated[float, typer.Option(help="Rate.")] = 0.1


@expand_flag_groups
def command(name: str, *, pace: PaceFlags, seed: int = 0) -> dict[str, Any]:
    return {"name": name, "pace": pace, "seed": seed}


def test_the_signature_has_the_flags_in_place_of_the_group() -> None:
    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["name", "steps", "learning_rate", "seed"]
    assert parameters["learning_rate"].default == 0.1 and parameters["name"].default is inspect.Parameter.empty
    assert parameters["steps"].annotation.__metadata__[0].min == 1


def test_the_command_gets_one_record() -> None:
    assert command(name="a", learning_rate=0.2, seed=3) == {"name": "a", "pace": PaceFlags(None, 0.2), "seed": 3}
    assert command(name="a")["pace"] == PaceFlags()
    with pytest.raises(TypeError, match="speed"):
        command(name="a", speed=1)


def test_given_flags_are_those_that_differ_from_their_defaults() -> None:
    assert PaceFlags(learning_rate=0.2).given() == {"learning_rate": 0.2}
    check_not_given("--qad TOKENS", PaceFlags())
    with pytest.raises(UsageError, match="belong to --qad TOKENS: --steps, --learning-rate; add --qad TOKENS or"):
        check_not_given("--qad TOKENS", PaceFlags(4, 0.2))
