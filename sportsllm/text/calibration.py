"""Calibration samples: text for importance scores, refits and scales. Never held-out text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sportsllm.errors import ArtifactError
from sportsllm.models.config import ModelConfig
from sportsllm.text.documents import read_documents
from sportsllm.text.tokenizer import TextTokenizer
from sportsllm.text.windows import windows

DEFAULT_SAMPLES = 256


def calibration_samples(
    files: Sequence[Path], tokenizer: TextTokenizer, config: ModelConfig, count: int | None, length: int
) -> list[Tensor]:
    """Token ids of the first `count` pieces of calibration text, each (1, T) with T at most `length`.

    Several files take turns, so that each has its share however long the first one is.

    Raises:
        ArtifactError: fewer pieces than asked for, or none; None asks for up to 256.
    """
    streams = [_pieces(path, tokenizer, min(length, config.max_position_embeddings)) for path in files]
    wanted = count or DEFAULT_SAMPLES
    samples: list[Tensor] = []
    while streams and len(samples) < wanted:
        turn = [(stream, next(stream, None)) for stream in streams]
        samples += [piece for _, piece in turn if piece is not None]
        streams = [stream for stream, piece in turn if piece is not None]
    if not samples:
        raise ArtifactError("there is no calibration text; give --calibration FILE with text in it")
    if count is not None and len(samples) < count:
        raise ArtifactError(
            f"the calibration text gives {len(samples)} samples, --samples asks for {count}; "
            "give more text or ask for fewer"
        )
    return samples[:wanted]


def _pieces(path: Path, tokenizer: TextTokenizer, length: int) -> Iterator[Tensor]:
    for text in read_documents([path]):
        ids = [tokenizer.begin_id, *tokenizer.encode(text)]
        for start, stop, _ in windows(len(ids), length):
            yield torch.tensor([ids[start:stop]])
