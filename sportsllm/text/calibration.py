"""Calibration samples: text for importance scores, refits and scales. Never held-out text."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.text.documents import cut_text, training_side
from sportsllm.text.tokenizer import TextTokenizer

_LEAST_SAMPLES, _MOST_SAMPLES = 16, 256  # where no number is given
_SAMPLES_TIMES_PARAMETERS = 5e9  # a cut reads the model some ten times: minutes, also for a large one
_TOKENS_PER_NEURON = 4  # a refit solves for as many weights of an output as a feed-forward has neurons
JUDGED_SAMPLES = 8  # show whether the text is of the model's kind, see `check_familiar`
_LEAST_TOKENS = 8  # a shorter rest of a document says nothing about how it is read


def calibration_samples(
    files: Sequence[Path],
    valid: Sequence[Path],
    tokenizer: TextTokenizer,
    config: ModelConfig,
    count: int | None,
    length: int,
    most: int | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Token ids of random pieces of the training side of some text, each (1, T) with T at most `length`.

    No token is read twice, and no held-out document is read at all. Long documents are as likely as their length, and
    give one piece after the other only when every document has given one.

    Args:
        files: what the pieces come from.
        valid: held-out text, see `sportsllm.text.documents.training_side`.
        tokenizer, config: of the model that reads them.
        count: how many; None for as many as have `most` times `length` tokens together, or as there are.
        length: tokens of a piece, cut to the context.
        most: see `count`; None for `usual_samples`.
        seed: of the draws.

    Raises:
        ArtifactError: no text, or fewer pieces than `count`.
    """
    length = min(length, config.max_position_embeddings)
    if most is None:
        most = usual_samples(config, length)
    documents = training_side(files, valid) if files else []
    samples: list[Tensor] = []
    tokens = 0
    for piece in _pieces(documents, tokenizer, length, np.random.default_rng(seed)):
        if len(samples) == count or (count is None and tokens >= most * length):
            break
        samples.append(piece)
        tokens += piece.numel()
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    if count is not None and len(samples) < count:
        raise ArtifactError(
            f"the calibration text gives {len(samples)} samples, --samples asks for {count}; "
            "give more text or ask for fewer"
        )
    return samples


def usual_samples(config: ModelConfig, length: int) -> int:
    """Pieces of `length` tokens that a cut of a model reads: 256, and of more than 20M parameters fewer, in proportion,
    but at least 16, and four tokens for each neuron of a feed-forward.
    """
    fewest = max(_LEAST_SAMPLES, math.ceil(_TOKENS_PER_NEURON * config.intermediate_size / length))
    return max(fewest, min(_MOST_SAMPLES, round(_SAMPLES_TIMES_PARAMETERS / config.parameters)))


def check_familiar(samples: Sequence[Tensor], nats: float) -> None:
    """Say so where a model knows nothing of its calibration text, such as one in another language.

    That is where it predicts the tokens no better than their frequencies in the text would: at or above the entropy of
    those, which a short text makes look smaller than it is.

    Args:
        samples: token ids, (1, T) each.
        nats: the model's mean cross-entropy a token on them.
    """
    counts = torch.cat([tokens.flatten() for tokens in samples]).bincount().double()
    shares = counts[counts > 0] / counts.sum()
    entropy = -float((shares * shares.log()).sum())
    if nats >= entropy:
        log(
            f"the model knows nothing of the calibration text: {nats:.2f} nats a token, its tokens' frequencies alone "
            f"{entropy:.2f}; if that is not text like what it was trained on, give such text by --calibration; else "
            "train it longer"
        )


def _pieces(
    documents: Sequence[str], tokenizer: TextTokenizer, length: int, rng: np.random.Generator
) -> Iterator[Tensor]:
    """A random piece of each document, in an order that prefers long ones; then another one of each, and so on."""
    parts = [(part, not place) for text in documents for place, part in enumerate(cut_text(text))]
    # The largest of u ** (1 / w) is drawn with probability w / sum of w, and so on (doi.org/10.1016/j.ipl.2005.11.003).
    keys = rng.random(len(parts)) ** (1 / np.array([max(1, len(text)) for text, _ in parts]))
    left: list[list[Tensor]] = []
    for number in np.argsort(-keys):
        text, begins = parts[number]
        ids = [tokenizer.begin_id] * begins + tokenizer.encode(text)
        cut = [torch.tensor([ids[start : start + length]]) for start in range(0, len(ids), length)]
        cut = [piece for piece in cut if piece.numel() >= min(_LEAST_TOKENS, len(ids), length) > 1]
        order = rng.permutation(len(cut))
        if len(cut):
            yield cut[order[0]]
            left.append([cut[place] for place in order[:0:-1]])
    while left:
        left = [pieces for pieces in left if pieces]
        for pieces in left:
            yield pieces.pop()
