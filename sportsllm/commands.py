"""The table of commands. Each is a typed function, loaded by name, so that no package imports one above it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from sportsllm.errors import ResourceError
from sportsllm.options import BY_NAME

COMMANDS = {
    "train": "sportsllm.verbs.train",
    "distill": "compress.distill",
    "prune": "compress.prune",
    "quantize": "compress.quantize",
    "export": "export.export",
    "generate": "sportsllm.verbs.generate",
    "eval": "sportsllm.verbs.eval",
    "bench": "benchmarks.bench",
    "fit": "benchmarks.fit",
    "plan": "benchmarks.plan",
    "inspect": "benchmarks.inspect",
    "report": "benchmarks.report",
    "devices list": "benchmarks.device_commands",
    "devices show": "benchmarks.device_commands",
    "devices calibrate": "benchmarks.device_commands",
    "data simulate": "sportsllm.verbs.data",
    "data sample": "compress.sample",
    "data tokens": "sportsllm.verbs.data",
    "run": "sportsllm.verbs.run",
    "verify": "sportsllm.verbs.verify",
}
"""Command, and the module that has it as a function: of the command's last word, or of the name in `FUNCTIONS`."""

FUNCTIONS: dict[str, str] = {}
GROUPS = {
    "data": "Make training text, or count its tokens.",
    "devices": "List device budgets, explain one, or measure this machine.",
}
"""Commands that have commands of their own."""

Command = Callable[..., Any]


def load_command(name: str) -> Command:
    """The function behind a command; it takes strings for paths too.

    Raises:
        ResourceError: its package is missing, or another package of that name hides it.
    """
    module = COMMANDS[name]
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    here = Path(__file__).resolve().parents[1]
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent.parent != here:
        raise ResourceError(
            f"package {package!r} does not lie beside 'sportsllm' in {here}; another package may hide it: "
            "install sportsllm-compress into an environment of its own"
        )
    return _converting(getattr(importlib.import_module(module), FUNCTIONS.get(name, name.rpartition(" ")[2])))


def _converting(function: Command) -> Command:
    """The function, its paths made of strings, models given by name downloaded."""
    signature = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        bound = signature.bind(*args, **given)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _converted(signature.parameters[name].annotation, value)
        return function(*bound.args, **bound.kwargs)

    return command


def _converted(annotation: Any, value: Any) -> Any:
    kinds = _kinds(annotation)
    if BY_NAME in getattr(annotation, "__metadata__", ()) and value is not None:
        value = type(value)(find_directory(value))
    if Path in kinds and isinstance(value, str):
        return [Path(value)] if list in kinds else Path(value)
    if list in kinds and Path in kinds and isinstance(value, list | tuple):
        return [Path(item) for item in value]
    return value


def find_directory(model: str | Path) -> Path:
    """The directory of a model that is given by its path or its name in the hub; it is downloaded if need be."""
    from sportsllm.formats.model_directory import find_model

    return find_model(model)


def _kinds(annotation: Any) -> set[Any]:
    """All types in an annotation: of `list[Path] | None` list, Path and None."""
    parts = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _kinds(parts[0])
    origin = getattr(annotation, "__origin__", annotation)
    return {origin}.union(*(_kinds(part) for part in parts if not isinstance(part, str)))
