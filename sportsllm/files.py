"""Files and directories: text written whole or not at all, models that are there. The device install uses it too."""

import os
from pathlib import Path

from sportsllm.errors import ArtifactError


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, then move it there in one step. Missing folders are made.

    Raises:
        OSError: the file cannot be written; what was at `path` before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def require_directory(directory: Path, wanted: str) -> None:
    """Refuse a path that is no directory.

    Args:
        directory: where a model is looked for.
        wanted: what to give instead, such as "a checkpoint".

    Raises:
        ArtifactError: nothing is there, or a file.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory; {gguf_hint(directory) or f'give {wanted}'}")


def gguf_hint(path: Path) -> str | None:
    """What to do with a GGUF file, or with a directory that holds one; None where there is none."""
    found = path if path.is_file() else next(iter(sorted(path.glob("*.gguf"))), None)
    if found is None or found.suffix.lower() != ".gguf":
        return None
    return f"give the GGUF file itself, {found}"
