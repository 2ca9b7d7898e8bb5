"""Bits per byte, perplexity and multiple choice, the same for PyTorch and ONNX (numpy only).

Bits per byte = -sum of log2 p(token | tokens before) / UTF-8 bytes of the scored text. The begin token is given,
never scored. A document longer than the context is read in windows of the context length that overlap by half;
only the new half of each window after the first counts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sportsllm.console import progress_bar
from sportsllm.errors import ArtifactError
from sportsllm.files import JsonObject, read_json_lines
from sportsllm.inference.decoder import Decoder, require_finite
from sportsllm.text.conversations import Document
from sportsllm.text.tokenizer import TextTokenizer

ROWS_AT_ONCE = 64
LEAST_DOCUMENTS = 16
"""Fewer give no interval: resampling a handful of documents says little about others."""
_RESAMPLES, _MOST_DRAWN = 4_000, 1_000_000  # draws of the bootstrap; documents drawn at a time, to bound the memory
_TAIL_PERCENT = 2.5  # of a 95% interval, on either side


@dataclass(frozen=True)
class TextScore:
    """Score of a set of documents; `bytes` are those of the scored text only, `documents` the nats of each."""

    nats: float
    tokens: int
    bytes: int
    documents: tuple[float, ...] = ()

    @property
    def bits_per_byte(self) -> float:
        """Comparable between models with different tokenizers."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """exp(mean nats per token); comparable only between models with one tokenizer."""
        return perplexity_of(self.nats / self.tokens)


def perplexity_of(nats: float) -> float:
    """exp(mean nats per token), or a ratio of two perplexities for a difference.

    Raises:
        ArtifactError: the exponential exceeds every number.
    """
    try:
        return math.exp(nats)
    except OverflowError:
        raise ArtifactError(f"a loss of {nats:,.0f} nats per token has no perplexity; the model is damaged") from None


def windows(length: int, context: int, stride: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Windows over `length` tokens as (start, stop, first scored token), every token but the first scored once.

    They start `stride` tokens apart, less than `context`; half of it if None.
    """
    start, scored = 0, 1
    while scored < length:
        stop = min(length, start + context)
        yield start, stop, scored
        scored, start = stop, start + (stride or context // 2)


class Window(NamedTuple):
    """Tokens that are read at once; those from place `first` on are scored, of a conversation the `scored` ones."""

    ids: list[int]
    first: int
    document: int
    scored: npt.NDArray[np.bool_]


class Windows(NamedTuple):
    """All windows of a text, the scored tokens of each document, and the bytes of all."""

    rows: list[Window]
    tokens: list[int]
    bytes: int


def document_windows(
    tokenizer: TextTokenizer,
    documents: Sequence[Document],
    context: int,
    max_tokens: int | None = None,
    stride: int | None = None,
) -> Windows:
    """Cut documents, each from its begin token, into windows of `context` tokens; see `score_documents`.

    Raises:
        ArtifactError: there is nothing to score.
    """
    rows, tokens, size = list[Window](), list[int](), 0
    for number, encoded in enumerate(tokenizer.encode_documents(documents)):
        ids, scored = encoded.ids, np.array([True] * len(encoded.ids) if encoded.scored is None else encoded.scored)
        size += encoded.bytes
        rows += [
            Window(ids[start:stop], first - start, number, scored[start:stop])
            for start, stop, first in windows(len(ids), context, stride)
        ]
        tokens.append(int(np.sum(scored[1:])))
        if max_tokens is not None and sum(tokens) >= max_tokens:
            break
    if not rows or not size:
        raise ArtifactError("the held-out text is empty; give text to score")
    return Windows(rows, tokens, size)


def score_documents(
    decoder: Decoder,
    tokenizer: TextTokenizer,
    documents: Sequence[Document],
    *,
    max_tokens: int | None = None,
    window: int | None = None,
    description: str = "score",
) -> TextScore:
    """Score whole documents, each from its begin token, and of conversations the assistant's tokens.

    Args:
        max_tokens: stop after the document that reaches this many tokens.
        window: tokens of windows side by side, as in training; if None they have the context and overlap by half.

    Raises:
        ArtifactError: there is nothing to score.
    """
    context = min(window or decoder.config.max_position_embeddings, decoder.config.max_position_embeddings)
    text = document_windows(tokenizer, documents, context, max_tokens, None if window is None else context - 1)
    nats = [0.0] * len(text.tokens)
    with progress_bar(description, len(text.rows)) as bar:
        for begin in range(0, len(text.rows), ROWS_AT_ONCE):
            part = text.rows[begin : begin + ROWS_AT_ONCE]
            for row, scores in zip(part, decoder.score([row.ids for row in part]), strict=True):
                counted = scores[row.first - 1 :][row.scored[row.first :]]
                nats[row.document] -= float(counted.sum(dtype=np.float64))
            bar.advance(len(part))
    return TextScore(sum(nats), sum(text.tokens), text.bytes, tuple(nats))


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of sum(over) / sum(under) by a paired bootstrap over documents; None for few documents.

    Documents without anything to score (`under` is 0) do not count. Pairs are resampled, so most of the variance
    between documents cancels. The interval is the percentiles of the resampled ratios (Efron and Tibshirani 1993, An
    Introduction to the Bootstrap, chapter 13; ratios of paired sums as in https://aclanthology.org/W04-3250).
    """
    pairs = np.array([pair for pair in zip(over, under, strict=True) if pair[1]], dtype=np.float64)
    if (size := len(pairs)) < LEAST_DOCUMENTS:
        return None
    ours, theirs = pairs.T
    rng, ratios = np.random.default_rng(0), list[npt.NDArray[np.float64]]()
    for start in range(0, _RESAMPLES, block := max(1, _MOST_DRAWN // size)):
        chosen = rng.integers(0, size, (min(block, _RESAMPLES - start), size))
        ratios.append(ours[chosen].sum(axis=1) / theirs[chosen].sum(axis=1))
    low, high = np.percentile(np.concatenate(ratios), [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return float(low), float(high)


@dataclass(frozen=True)
class Question:
    """A multiple-choice question; `answer` is the index of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Questions of a .jsonl file: `question`, `choices`, `answer` (index).

    Raises:
        ArtifactError: a line lacks one of them; the message names it.
    """
    if not path.exists():
        raise ArtifactError(f"{path}: not found; give a .jsonl file of questions")
    questions = []
    for number, record in read_json_lines(path):
        item = _question(record)
        if item is None:
            raise ArtifactError(f"{path}: line {number} needs 'question', 'choices' (two or more) and 'answer'")
        questions.append(item)
    if not questions:
        raise ArtifactError(f"{path}: holds no questions; give one in each line")
    return questions


def _question(record: JsonObject) -> Question | None:
    question, choices, answer = (record.get(key) for key in ("question", "choices", "answer"))
    if not isinstance(question, str) or not isinstance(choices, list) or not isinstance(answer, int):
        return None
    whole = all(isinstance(choice, str) and choice for choice in choices)
    return Question(question, tuple(choices), answer) if whole and 0 <= answer < len(choices) > 1 else None


@dataclass(frozen=True)
class TaskScore:
    """A task of lm-evaluation-harness.

    Attributes:
        metric, value, error: its first metric, and the standard error; None if the harness has none.
        metrics: each with its standard error.
        documents, shots: how many were scored, after how many examples each.
    """

    metric: str
    value: float
    error: float | None
    metrics: dict[str, tuple[float, float | None]]
    documents: int
    shots: int

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.error is None else f" ± {self.error:.4f}")


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95% interval of a share of `count` independent trials (Wilson 1927, https://doi.org/10.2307/2276774)."""
    z = 1.96
    middle, spread = share + z * z / (2 * count), z * math.sqrt((share * (1 - share) + z * z / (4 * count)) / count)
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def question_accuracy(decoder: Decoder, tokenizer: TextTokenizer, questions: Sequence[Question]) -> float:
    """Fraction of questions whose right choice has the highest log-probability per byte, given the question.

    A question too long for the context keeps its end, after the begin token.

    Raises:
        ArtifactError: a choice does not fit the context, or the logits are not finite.
    """
    context = decoder.config.max_position_embeddings
    right = 0
    with progress_bar("questions", len(questions)) as bar:
        for item in questions:
            prompt = tokenizer.encode(item.question)
            rows, counts = [], []
            texts = [choice if choice[:1].isspace() else " " + choice for choice in item.choices]
            for text in texts:
                ids = tokenizer.encode(text)
                if len(ids) + 2 > context:
                    raise ArtifactError(f"a choice has {len(ids)} tokens; it must fit the context of {context}")
                rows.append([tokenizer.begin_id, *prompt[-(context - 1 - len(ids)) :], *ids])
                counts.append(len(ids))
            scores = decoder.score(rows)
            per_byte = [
                float(score[-count:].sum()) / len(text.encode())
                for score, count, text in zip(scores, counts, texts, strict=True)
            ]
            require_finite(sum(per_byte))
            right += int(np.argmax(per_byte)) == item.answer
            bar.advance()
    return right / len(questions)
