"""Flags that several commands take, declared once as a dataclass and expanded into each command's signature.

    @dataclass(frozen=True)
    class TextFlags(FlagGroup):
        corpus: Annotated[list[Path] | None, typer.Option(help="Training text.")] = None

    @expand_flag_groups
    def train(model: str, *, text: TextFlags) -> dict[str, Any]: ...

Typer and recipes see `train(*, model, corpus=None)`; the function is called with one `TextFlags`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sportsllm.errors import UsageError

R = TypeVar("R")


@dataclass(frozen=True)
class FlagGroup:
    """A group of flags. Every field is an `Annotated` typer option and has a default."""

    def given(self) -> dict[str, Any]:
        """The flags that differ from their defaults."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}


def check_not_given(owner: str, *groups: FlagGroup) -> None:
    """Refuse flags that have no effect without another one.

    Raises:
        UsageError: a flag of the groups was given; `owner` is the flag that it belongs to.
    """
    names = [f"--{name.replace('_', '-')}" for group in groups for name in group.given()]
    if names:
        raise UsageError(f"flags that belong to {owner}: {', '.join(names)}; add {owner} or leave them out")


def expand_flag_groups(function: Callable[..., R]) -> Callable[..., R]:
    """Replace each parameter whose type is a `FlagGroup` by the group's flags; all parameters become keywords."""
    groups: dict[str, tuple[type[FlagGroup], list[str]]] = {}
    expanded: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, FlagGroup):
            flags = list(inspect.signature(kind, eval_str=True).parameters.values())
            groups[parameter.name] = kind, [flag.name for flag in flags]
            expanded += flags
        else:
            expanded.append(parameter)

    @functools.wraps(function)
    def command(**given: Any) -> R:
        for name, (kind, flags) in groups.items():
            given[name] = kind(**{flag: given.pop(flag) for flag in flags if flag in given})
        return function(**given)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in expanded]
    command.__signature__ = inspect.Signature(keywords, return_annotation=dict[str, Any])  # type: ignore[attr-defined]
    return command
