"""How the next token of a request is chosen: penalties, biases, constraints, then `draw_token`.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sportsllm.errors import UsageError
from sportsllm.files import clip
from sportsllm.inference.decoder import Logits
from sportsllm.inference.sampling import Sampling, draw_token, penalize
from sportsllm.models.config import ModelConfig
from sportsllm.serving.requests import ApiError
from sportsllm.text.tokenizer import TextTokenizer


class TokenScore(NamedTuple):
    """A token's log probability, None for the first of a text, and the most likely tokens in its place with theirs."""

    token: int
    log_probability: float | None
    top: list[tuple[int, float]]


@dataclass
class Sampler:
    """Chooses the tokens of one sequence.

    Attributes:
        sampling: temperature, filters, repetition penalty and seed.
        stream: number of the sequence among those of one seed; the first draws as `generate` does.
        min_p: smallest probability kept, as a fraction of the largest.
        presence, frequency: subtracted from logits of tokens generated before, once and each time.
        bias: added to logits by token id.
        constraint: of the text, see `Constraints`.
    """

    sampling: Sampling
    stream: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Any = None

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self._random = np.random.default_rng([seed, self.stream] if self.stream else seed)
        self._generated = Counter[int]()

    def choose(self, logits_V: Logits, seen: Sequence[int]) -> int:
        """The next token after those `seen`, prompt included.

        Raises:
            UsageError: the constraint has reached a bound of llguidance.
        """
        logits = penalize(logits_V, seen, self.sampling.repetition_penalty)
        if self.bias or self.constraint is not None or self.min_p or self.presence or self.frequency:
            logits = logits.copy()
        if self.presence or self.frequency:
            for token, times in self._generated.items():
                logits[token] -= self.presence + self.frequency * times
        for token, value in self.bias.items():
            logits[token] += value
        if self.constraint is not None:
            allowed = np.frombuffer(self.constraint.compute_bitmask(), dtype=np.uint8)
            logits[np.unpackbits(allowed, count=len(logits), bitorder="little") == 0] = -np.inf
        if self.min_p and self.sampling.temperature:
            logits[logits < logits.max() + self.sampling.temperature * math.log(self.min_p)] = -np.inf
        token = draw_token(logits, self.sampling, self._random.random())
        self._generated[token] += 1
        if self.constraint is not None:
            self.constraint.consume_token(token)
            if self.constraint.is_error():  # it would end the text as if that were complete
                raise UsageError(f"the constraint cannot be met: {clip(self.constraint.get_error(), 300)}")
        return token

    @property
    def complete(self) -> bool:
        """Whether the constraint allows no further token."""
        return self.constraint is not None and bool(self.constraint.is_stopped())


class Constraints:
    """Constraints on text by llguidance, for one model's tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, config: ModelConfig, stop_tokens: Sequence[int]) -> None:
        from llguidance import LLMatcher, LLTokenizer
        from llguidance.gbnf_to_lark import gbnf_to_lark

        def compile_schema(schema: dict[str, Any] | bool) -> str:
            compact = {"whitespace_flexible": False}  # in free white space small models lose themselves
            whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
            return str(LLMatcher.grammar_from_json_schema(whole, defaults=compact))

        self._matcher = LLMatcher
        self._compilers: dict[str, Callable[[Any], str]] = {
            "response_format": compile_schema,
            "json_schema": compile_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": lambda text: LLMatcher.grammar_from_lark(gbnf_to_lark(text)),
        }
        stops = list(stop_tokens) or [tokenizer.begin_id]  # llguidance needs one to end a text by
        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=config.vocab_size, eos_token=stops)

    def make(self, field: str, given: Any) -> Any:
        """What a field of a request says: a JSON schema, a regular expression, or a grammar in llama.cpp's GBNF.

        Raises:
            ApiError: llguidance refuses it.
        """
        try:
            matcher = self._matcher(self._tokenizer, self._compilers[field](given), log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # errors in a grammar are no ValueErrors
            problem = str(error)
        if problem:
            raise ApiError(400, f"the constraint cannot be used: {clip(problem, 300)}", param=field)
        return matcher


def score_token(log_probabilities_V: Logits, token: int, top: int) -> TokenScore:
    """One token's score among log probabilities."""
    best = np.argpartition(-log_probabilities_V, min(top, len(log_probabilities_V) - 1))[:top]
    ranked = sorted(((int(each), float(log_probabilities_V[each])) for each in best), key=lambda pair: -pair[1])
    return TokenScore(token, float(log_probabilities_V[token]), ranked)
