"""Text that a directory was made from, by its manifest: what was trained on, and what was held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sportsllm.console import log
from sportsllm.formats.manifest import ancestors, manifest_of
from sportsllm.text.documents import document_digest, read_chunks, split_documents, without

HELD_OUT = "held_out"
"""In a manifest: all held-out text, if that is more than `valid`."""


def manifest_setting(directory: Path, key: str) -> Any:
    """A setting that a directory's manifest records, or None."""
    return manifest_of(directory).settings.get(key)


def tokens_per_parameter(directory: Path) -> float | None:
    """Tokens per parameter that a checkpoint of `train` has read; None if that is not known."""
    manifest = manifest_of(directory)
    from_scratch = manifest.command == "train" and not manifest.text("init")
    return manifest.figure("tokens_per_parameter") if from_scratch else None


def held_out_files(directory: Path) -> list[Path]:
    """Held-out text that a directory's manifest names, if it exists."""
    manifest = manifest_of(directory)
    named = manifest.paths(HELD_OUT) or manifest.paths("valid")
    return [path for path in map(Path, named) if path.exists()]


def left_out(valid: Sequence[Path], *checkpoints: Path) -> tuple[Path, ...]:
    """Held-out text of a training, and of the checkpoints that it starts from or learns from."""
    return tuple(dict.fromkeys([*valid, *(path for one in checkpoints for path in held_out_files(one))]))


def held_out_setting(valid: Sequence[Path], left: Sequence[Path]) -> dict[str, list[str]]:
    """The manifest's entry for `left_out`, if that is more than `valid`."""
    return {HELD_OUT: [str(path) for path in left]} if set(left) - set(valid) else {}


def trained_on(directory: Path, documents: Sequence[str]) -> int:
    """How many documents were trained on, by a model or the models that it was made from.

    Documents are compared by hash. Training text that is gone is not compared.
    """
    asked = {document_digest(text) for text in documents}
    found: set[bytes] = set()
    manifest = manifest_of(directory)
    manifests = [manifest, *(each.manifest for each in ancestors(manifest, directory))]
    for made in {str(each.settings): each for each in manifests}.values():
        corpus = [path for path in map(Path, made.paths("corpus")) if path.exists()]
        named = made.paths(HELD_OUT) or made.paths("valid")
        if corpus:
            chunks = without(list(read_chunks(corpus)), _texts(path for path in map(Path, named) if path.exists()))
            texts = [chunk.text for chunk in chunks] if named else split_documents(chunks).train
            found |= asked & {document_digest(text) for text in texts}
    return sum(document_digest(text) in found for text in documents)


def warn_if_trained_on(directory: Path, documents: Sequence[str]) -> int:
    """Log how many of the documents to score were trained on, if any; returns their number."""
    count = trained_on(directory, documents)
    if count:
        log(
            f"{count} of {len(documents)} documents are training text of {directory}: their score says little about "
            "other text; score held-out text"
        )
    return count


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    return (chunk.text for chunk in read_chunks(list(paths)))
