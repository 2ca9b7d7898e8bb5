"""Peak memory of the process, and returning freed memory to the system."""

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path


def reset_peak_rss() -> None:
    """Reset `peak_rss_bytes`, on Linux."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_rss_bytes() -> int:
    """Peak resident memory of this process since `reset_peak_rss` (Linux) or since its start."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource  # only on Unix

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back() -> None:
    """Return freed memory to the system. Does nothing if the C library is not glibc."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
