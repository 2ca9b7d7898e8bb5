"""Text files that are there whole or not at all. Standard library only: the device install writes results too."""

import os
from pathlib import Path


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
