"""Calls of `plan` that give its figures."""

from typing import Any

from benchmarks.plan import plan as run_plan
from sportsllm.settings import TRAINING_STEP

_NAMES = {"device": "target", "batch": "batch_size", "length": "sequence", "block_size": "group_size", "shape": "model"}


def plan(**given: Any) -> dict[str, Any]:
    """The figures of `plan`, by its parameters' names or short ones; rare settings by name too."""
    named = {_NAMES.get(name, name): value for name, value in given.items()}
    rare = {name: named.pop(name) for name in list(named) if name in TRAINING_STEP}
    settings = {name: value for name, value in rare.items() if value is not None}
    return run_plan(**named, settings=settings).figures  # type: ignore[arg-type]
