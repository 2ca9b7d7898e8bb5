"""SHA-256 of files and of directories, by which stages know their inputs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sportsllm.errors import ArtifactError
from sportsllm.formats.manifest import FIRST_DIGEST, MANIFEST, read_manifest


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Digest of an input: a file's SHA-256, or for a directory that of its names and contents.

    A finished directory is identified by its manifest, so large weights are not read again, and by the files it was
    made with: a model card that was written later does not make it another input.

    Raises:
        ArtifactError: nothing is there.
    """
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        raise ArtifactError(f"{path}: not found; give an existing file or directory")
    if (path / MANIFEST).exists():
        entries = read_manifest(path)["files"]
        files = {name: entry.get(FIRST_DIGEST, entry["sha256"]) for name, entry in entries.items()}
    else:
        files = {
            str(item.relative_to(path)): file_sha256(item)
            for item in sorted(path.rglob("*"))
            if item.is_file() and not item.name.startswith(".")
        }
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
