"""Held-out text in a training run: scores on the way, and the weights of the best step, which the model keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sportsllm.console import log
from sportsllm.inference.scoring import score_documents
from sportsllm.inference.torch_decoder import TorchDecoder
from sportsllm.models.language_model import SportsLLM
from sportsllm.text.documents import TextSplit
from sportsllm.text.tokenizer import TextTokenizer
from sportsllm.training.settings import TrainConfig
from sportsllm.training.state import RunState

Validate = Callable[[SportsLLM], float]  # bits per byte of held-out text
_REPORT_TOKENS = 65_536
_SELECTION_TOKENS = 4_096, 32_768


@dataclass(frozen=True)
class Validation:
    """How a run is scored.

    Attributes:
        selection: chooses the best step and the learning rates.
        report: other text, for the figure that is reported.
        keep_start: the start has useful weights: score it too, and keep it if no step is better.
    """

    selection: Validate
    report: Validate
    keep_start: bool = False


def validator(corpus: TextSplit, tokenizer: TextTokenizer) -> Validate:
    """Bits per byte on the report split, at most about 65,536 tokens of it."""
    return _scorer(corpus.parts()[1], tokenizer, _REPORT_TOKENS)


def validation(corpus: TextSplit, tokenizer: TextTokenizer, config: TrainConfig, keep_start: bool) -> Validation | None:
    """How a run is scored; None if it has no steps.

    Choices are made on as many tokens as a sixteenth of the run, in windows of the training sequence: positions beyond
    it are never trained. The report has windows of the whole context.
    """
    if not config.steps:
        return None
    least, most = _SELECTION_TOKENS
    tokens = min(most, max(least, config.steps * config.tokens_per_step // 16))
    selection_split, report_split = corpus.parts()
    if selection_split == report_split:
        log("the held-out text is one short document: the best step is chosen on the text that is reported")
    selection = _scorer(selection_split, tokenizer, tokens, config.sequence)
    return Validation(selection, _scorer(report_split, tokenizer, _REPORT_TOKENS), keep_start)


def _scorer(documents: Sequence[str], tokenizer: TextTokenizer, tokens: int, window: int | None = None) -> Validate:
    def validate(model: SportsLLM) -> float:
        return score_documents(
            TorchDecoder(model), tokenizer, documents, max_tokens=tokens, window=window, description="validate"
        ).bits_per_byte

    return validate


class BestStep:
    """The weights of the best step so far, in the run's state."""

    def __init__(self, model: SportsLLM, validation: Validation, state: RunState) -> None:
        self._model, self._validation, self._state = model, validation, state

    def start(self) -> float | None:
        """Score weights that are useful before the first step: for the report, and as step 0."""
        if not self._validation.keep_start:
            return None
        log("scoring held-out text before training")
        self._state.bits_per_byte_before = self._validation.report(self._model)
        return self.consider()

    def consider(self) -> float:
        """Score the current weights and keep them if they are the best; returns the score."""
        state, bits_per_byte = self._state, self._validation.selection(self._model)
        least = math.inf if state.best_bits_per_byte is None else state.best_bits_per_byte
        if bits_per_byte < least:
            state.best_step, state.best_bits_per_byte = state.step, bits_per_byte
            state.best = {name: weight.detach().clone() for name, weight in self._trained().items()}
        state.last_bits_per_byte = bits_per_byte
        return bits_per_byte

    @torch.no_grad()
    def finish(self) -> float:
        """Give the model its best weights, say so if those are not the last ones, and return the reported figure."""
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
        return self._validation.report(self._model)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
