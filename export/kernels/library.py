"""Where the built kernels lie, and of which version they are. Uses the standard library alone."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Graphs that call the operators name this version; it rises when their inputs, attributes or meaning change.
VERSION = re.findall(r'VERSION "([^"]+)"', (HERE / "version.h").read_text(encoding="utf-8"))[0]
VARIANT_VARIABLE = "SPORTSLLM_KERNELS"  # of the environment: names the variant that a library takes when it is loaded
_ENDING = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")


def library_name(version: str) -> str:
    """File name of the library of a version."""
    return f"libsportsllm_kernels-{version}.{_ENDING}"


def library_of(version: str) -> Path | None:
    """The built library of a version; None if it was not built."""
    path = HERE / library_name(version)
    return path if path.is_file() else None


def variant_of(library: Path) -> str:
    """The variant that this processor runs: `plain` if it lacks the instructions of all others.

    Raises:
        OSError: the library cannot be loaded here.
        AttributeError: it is older than this function.
    """
    name = ctypes.CDLL(str(library)).SportsllmVariant
    name.restype = ctypes.c_char_p
    return bytes(name()).decode()
