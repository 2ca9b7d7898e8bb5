"""Text that a directory was made from, by its manifest: what was trained on, and what was held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sportsllm.console import log
from sportsllm.formats.lineage import ancestors
from sportsllm.formats.manifest import MANIFEST, read_manifest
from sportsllm.text.documents import document_digest, read_chunks, split_documents, without

HELD_OUT = "held_out"
"""In a manifest: all held-out text, if that is more than `valid`."""


def manifest_setting(directory: Path, key: str) -> Any:
    """A setting that a directory's manifest records, or None."""
    return read_manifest(directory)["settings"].get(key) if (directory / MANIFEST).exists() else None


def tokens_per_parameter(directory: Path) -> float | None:
    """Tokens per parameter that a checkpoint of `train` has read; None if that is not known."""
    if not (directory / MANIFEST).exists():
        return None
    manifest = read_manifest(directory)
    found = manifest["results"].get("tokens_per_parameter") if manifest["command"] == "train" else None
    return None if found is None or manifest["settings"].get("init") else float(found)


def held_out_files(directory: Path) -> list[Path]:
    """Held-out text that a directory's manifest names, if it exists."""
    named = manifest_setting(directory, HELD_OUT) or manifest_setting(directory, "valid") or []
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
    manifests: list[Mapping[str, Any]] = [read_manifest(directory)] if (directory / MANIFEST).exists() else []
    manifests += [each.manifest for each in ancestors(manifests[0], directory)] if manifests else []
    for settings in {str(each): each for each in (manifest.get("settings", {}) for manifest in manifests)}.values():
        corpus = [path for path in map(Path, settings.get("corpus") or ()) if path.exists()]
        named = settings.get(HELD_OUT) or settings.get("valid") or ()
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
