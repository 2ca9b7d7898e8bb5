"""Splits a corpus into training and held-out documents, and held-out ones into those that choose and those that judge.

A document goes to the held-out set by the hash of its own text, so the split survives renamed and reordered files,
and two copies of a document never end up on both sides. The pieces of a long plain file stay together.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sportsllm.console import log
from sportsllm.errors import ArtifactError
from sportsllm.text.documents import Piece, cut_text, read_documents, read_pieces

HELD_OUT_FRACTION = 0.02
_ENOUGH_FOR_TWO = 4  # documents of which two are held out


@dataclass(frozen=True)
class TextSplit:
    """Training and held-out documents; the held-out ones are never trained on."""

    train: list[str]
    held_out: list[str]

    def parts(self) -> tuple[list[str], list[str]]:
        """The held-out text for choices (the best step, a rate, a shape), and the one that is reported.

        Both are in the order of their hashes, so that the first few come from all files. Long documents are cut, and
        lie on one side as long as there are several.
        """
        ordered = sorted(set(self.held_out), key=_digest)
        if len(ordered) == 1:
            ordered = sorted(set(cut_text(ordered[0])), key=_digest)
        choosing, judging = ordered[1::2] or ordered, ordered[::2]
        return [*_cut(choosing)], [*_cut(judging)]


def load_corpus(corpus: Sequence[Path], valid: Sequence[Path], known: Sequence[Path] = ()) -> TextSplit:
    """Read the training text; held-out documents come from `valid`, or by hash out of the corpus itself.

    Args:
        corpus, valid: files.
        known: held-out text of the models that are trained or taught from: it is not trained on either.

    Documents of `valid` and `known` that the corpus holds too are left out of it, and counted in a line.

    Raises:
        ArtifactError: nothing to train on, or nothing to hold out.
    """
    documents = list(read_pieces(corpus))
    if not documents:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: the corpus is empty; give files with text in them")
    held_out = list(read_documents(valid)) if valid else []
    if valid and not held_out:
        raise ArtifactError(f"{', '.join(map(str, valid))}: the held-out text is empty; give files with text in them")
    further = [path for path in known if path not in valid]
    train = without(documents, [*held_out, *read_documents(further)])
    if not train:
        raise ArtifactError(f"{', '.join(map(str, corpus))}: all of it is held out; give other training text")
    if len(train) < len(documents):
        log(f"{len(documents) - len(train):,} of {len(documents):,} documents are held out and not trained on")
    if valid:
        return TextSplit([piece.text for piece in train], held_out)
    split = split_documents(train)
    if not split.held_out:
        raise ArtifactError("the corpus is a single document, so none can be held out; give --valid FILE too")
    log(f"no held-out text was given: {len(split.held_out):,} of {len(train):,} documents are held out")
    return split


def training_side(files: Sequence[Path], valid: Sequence[Path]) -> list[str]:
    """The documents of `files` that no split holds out: neither those of `valid`, nor those held out by hash.

    Raises:
        ArtifactError: all of them are held out.
    """
    documents = list(read_pieces(files))
    left = without(documents, read_documents(valid))
    if documents and not left:
        raise ArtifactError(f"{', '.join(map(str, files))}: all of it is held-out text; give other text")
    return split_documents(left).train


def without(documents: Sequence[Piece], held_out: Iterable[str]) -> list[Piece]:
    """The documents that are not held out, by their text or by the text that they were cut from."""
    known = {_digest(text) for text in held_out}
    return [piece for piece in documents if not known & {_digest(piece.text), _source_digest(piece.source)}]


def split_documents(documents: Sequence[Piece]) -> TextSplit:
    """About 2% of the documents held out, by the SHA-256 of the text that each was cut from.

    Where that leaves one side empty, or a single document of four or more to choose and to judge by, the last 2% are
    held out, at least one or, of four, two. A single document is trained on.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for piece in documents:
        draw = int.from_bytes(_source_digest(piece.source)[:8])
        parts[draw < HELD_OUT_FRACTION * 2**64].append(piece.text)
    least = 2 if len(documents) >= _ENOUGH_FOR_TWO else 1
    if (not parts[0] or len(parts[1]) < least) and len(documents) > 1:
        last = max(least, round(HELD_OUT_FRACTION * len(documents)))
        held_out = [piece.text for piece in documents[-last:]]
        return TextSplit([piece.text for piece in without(documents[:-last], held_out)], held_out)
    return TextSplit(*parts) if parts[0] or not documents else TextSplit(parts[1], [])


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


_source_digest = functools.lru_cache(maxsize=1)(_digest)  # pieces of one source come one after the other


def _cut(documents: Iterable[str]) -> Iterable[str]:
    pieces = (piece for text in documents for piece in cut_text(text))
    return sorted((piece for piece in pieces if piece.strip()), key=_digest)
