"""Keep the best weights of a run, by held-out text; where no step is better than a good start, the start stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sportsllm.console import log
from sportsllm.models.language_model import SportsLLM
from sportsllm.training.state import RunState

Validate = Callable[[SportsLLM], float]  # bits per byte of held-out text


@dataclass(frozen=True)
class Validation:
    """How a run is judged.

    Attributes:
        choosing: picks the best step.
        judging: other text, for the figure that is reported.
        keep_start: score the start as well, which stays if no step is better: for weights that are good already.
    """

    choosing: Validate
    judging: Validate
    keep_start: bool = False


class BestStep:
    """The weights of the best step so far, in the run's state."""

    def __init__(self, model: SportsLLM, validation: Validation, state: RunState) -> None:
        self._model, self._validation, self._state = model, validation, state
        self.keeps_start = validation.keep_start

    def consider(self) -> float:
        """Score the current weights and keep them if they are the best; returns the score."""
        state, bits_per_byte = self._state, self._validation.choosing(self._model)
        least = math.inf if state.best_bits_per_byte is None else state.best_bits_per_byte
        if bits_per_byte < least:
            state.best_step, state.best_bits_per_byte = state.step, bits_per_byte
            state.best = {name: weight.detach().clone() for name, weight in self._trained().items()}
        state.last_bits_per_byte = bits_per_byte
        return bits_per_byte

    @torch.no_grad()
    def finish(self) -> float:
        """Give the model its best weights, say so if those are not the last ones, and return what is reported."""
        state = self._state
        if state.best_step not in (None, state.step):
            last = math.nan if state.last_bits_per_byte is None else state.last_bits_per_byte
            figures = f"{state.best_bits_per_byte:.4f} bits per byte, {last:.4f} when last scored"
            if state.best_step == 0:
                log(f"no step was better than the start on held-out text ({figures}): the start is kept")
            else:
                log(f"step {state.best_step} of {state.step} was the best on held-out text ({figures}): it is kept")
            trained = self._trained()
            for name, weight in (state.best or {}).items():
                trained[name].copy_(weight)
        return self._validation.judging(self._model)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
