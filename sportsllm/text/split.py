"""Splits a corpus into training and held-out documents.

A document goes to the held-out set by the hash of its own text, so the split survives renamed and reordered files,
and two copies of a document never end up on both sides.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sportsllm.errors import ArtifactError
from sportsllm.text.documents import read_documents

HELD_OUT_FRACTION = 0.02


@dataclass(frozen=True)
class TextSplit:
    """Training and held-out documents; the held-out ones are never trained on."""

    train: list[str]
    held_out: list[str]


def load_corpus(corpus: Sequence[Path], valid: Sequence[Path]) -> TextSplit:
    """Read the training text; held-out documents come from `valid`, or by hash out of the corpus itself.

    Raises:
        ArtifactError: nothing to train on.
    """
    if valid:
        train, held_out = list(read_documents(corpus)), list(read_documents(valid))
    else:
        train, held_out = split_documents(read_documents(corpus), HELD_OUT_FRACTION)
        if not held_out and len(train) > 1:
            held_out = [train.pop()]
    if not train:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: the corpus is empty; give files with text in them")
    if not held_out:
        raise ArtifactError("the corpus is a single document, so none can be held out; give --valid FILE too")
    return TextSplit(train, held_out)


def split_documents(documents: Iterable[str], fraction: float) -> tuple[list[str], list[str]]:
    """Training and held-out documents; about `fraction` of them are held out, by the SHA-256 of their text."""
    parts: tuple[list[str], list[str]] = ([], [])
    for text in documents:
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        parts[draw < fraction * 2**64].append(text)
    return parts
