"""Calls of `train` with the settings of a `TrainConfig`."""

import dataclasses
from typing import Any

from sportsllm.settings import TRAINING
from sportsllm.training.settings import TrainConfig

_OPTIONS = ("steps", "batch_size", "sequence", "learning_rate", "seed")


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments of `train` that give this configuration."""
    fields = dataclasses.asdict(config)
    rare = {name: value for name, value in fields.items() if name in TRAINING and value != getattr(TrainConfig, name)}
    rare |= {"documented": True}
    return {name: fields[name] for name in _OPTIONS} | {"settings": rare}
