"""Take files out of the system's page cache, and see whether they went: for a load from a cold disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ALLOWED_SHARE = 0.01
"""A file counts as cold when no more than this share of its bytes stayed in memory."""


def drop_files(paths: Sequence[Path]) -> str | None:
    """Drop the pages of `paths` (`man 2 posix_fadvise`) and check it: None where they are cold now, else why not.

    The disk's own cache and that of a virtual machine's host are out of reach.
    """
    if not hasattr(os, "posix_fadvise"):
        return "this system cannot drop a file from its cache"
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # only written pages can be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            return f"{path.name}: {error.strerror}"
        finally:
            os.close(handle)
    left = resident_bytes(paths)
    if left is None:
        return "this system does not say which pages of a file are in memory"
    total = sum(path.stat().st_size for path in paths)
    if left > ALLOWED_SHARE * total:
        return f"{left / 1e6:.1f} of {total / 1e6:.1f} MB stayed in memory (in use, or a file system in memory)"
    return None


def resident_bytes(paths: Sequence[Path]) -> int | None:
    """Bytes of `paths` in the page cache by whole pages (`man 2 mincore`); None if it cannot be asked.

    All pages of files that this user may not write count.
    """
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError, TypeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for path in paths:
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            pages = np.zeros(-(-len(view) // mmap.PAGESIZE), dtype=np.uint8)
            failed = mincore(view.ctypes.data, len(view), pages.ctypes.data)
            del view  # a mapping that is looked at cannot be closed
            if failed:
                return None
            total += mmap.PAGESIZE * int(np.count_nonzero(pages & 1))
    return total
