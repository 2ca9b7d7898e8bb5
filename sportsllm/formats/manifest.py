"""Reads what `sportsllm.formats.artifact` writes last into a directory; the runtime does so, and holds no more than
that."""

from pathlib import Path
from typing import Any

from sportsllm.errors import ArtifactError
from sportsllm.formats.json_files import read_json

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
FIRST_DIGEST = "first_sha256"
"""Of a file that was written again, beside its `sha256`: what it was when the directory was made."""


def read_manifest(directory: Path) -> dict[str, Any]:
    """Parse and check the outline of a manifest.

    Raises:
        ArtifactError: missing, damaged, or written by a newer version.
    """
    path = directory / MANIFEST
    data = read_json(path)
    if data.get("format", 0) > MANIFEST_FORMAT:
        raise ArtifactError(f"{path}: written by a newer version (format {data['format']}); upgrade this program")
    files = data.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and {"sha256", "bytes"} <= set(entry) for entry in files.values()
    ):
        raise ArtifactError(f"{path}: has no list of files; make the directory again")
    return data
