"""Calls of `train` with the settings of a `TrainConfig`, and trainings that are interrupted."""

import dataclasses
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.autograd.profiler import profile

from sportsllm.models.language_model import SportsLLM
from sportsllm.settings import TRAINING
from sportsllm.text.packing import Batch
from sportsllm.training.loop import Loss, _Run, language_model_loss
from sportsllm.training.settings import TrainConfig

_OPTIONS = ("steps", "batch_size", "sequence", "learning_rate", "seed")


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments of `train` that give this configuration."""
    fields = dataclasses.asdict(config)
    rare = {name: value for name, value in fields.items() if name in TRAINING and value != getattr(TrainConfig, name)}
    rare |= {"documented": True}
    return {name: fields[name] for name in _OPTIONS} | {"settings": rare}


def interrupted_at(batch: int, number: signal.Signals = signal.SIGINT) -> Loss:
    """The ordinary loss, which sends this process a signal at its nth batch."""
    calls = itertools.count(1)

    def loss(model: SportsLLM, of: Batch) -> Tensor:
        if next(calls) == batch:
            os.kill(os.getpid(), number)
        return language_model_loss(model, of)

    return loss


@contextmanager
def interrupted_in_step(number: int) -> Iterator[None]:
    """Ctrl-C in the nth step of a training, which that step still ends."""
    take_step = _Run.take_step

    def interrupted(run: _Run, *given: Any) -> Any:
        if run.state.step == number - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return take_step(run, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Run, "take_step", interrupted)
        yield


def diverging_at(*batches: int) -> Loss:
    """The ordinary loss, which is NaN at these batches, counted from 1."""
    calls = itertools.count(1)
    return lambda model, of: language_model_loss(model, of) * (math.nan if next(calls) in batches else 1)


def allocated_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has given out at once in a call, beyond those before it."""
    with profile(profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
