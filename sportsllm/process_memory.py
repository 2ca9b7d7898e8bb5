"""Peak memory of the process, memory and processors that it may use, and returning freed memory to the system."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

# Of control groups, version 2 and 1, and the field of memory.stat beside it that counts what no file can give back.
_CONTAINER_LIMITS = {
    "/sys/fs/cgroup/memory.max": "anon",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "total_rss",
}
# Of version 2 and 1: the microseconds of processor time, which a container has in each of how many.
_CPU = "/sys/fs/cgroup/cpu"
_CPU_LIMITS = {f"{_CPU}.max": f"{_CPU}.max", f"{_CPU}/cpu.cfs_quota_us": f"{_CPU}/cpu.cfs_period_us"}


def reset_peak_rss() -> None:
    """Reset `peak_rss_bytes`, on Linux."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_rss_bytes(children: bool = False) -> int:
    """Peak resident memory of this process since `reset_peak_rss` (Linux) or since its start.

    `children`: of the largest process that it started and that has ended, 0 on Windows.
    """
    status = Path("/proc/self/status")
    if status.exists() and not children:
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return 0 if children else int(psutil.Process().memory_info().peak_wset)
    import resource  # only on Unix

    peak = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Memory that this process may take: what the machine has free, within the limit of a container."""
    import psutil

    found = int(psutil.virtual_memory().available)
    for limit, used in _CONTAINER_LIMITS.items():
        with suppress(OSError, ValueError, KeyError):  # "max" is no number, and fields differ
            stat = dict(line.split() for line in Path(limit).with_name("memory.stat").read_text("ascii").splitlines())
            found = min(found, int(Path(limit).read_text("ascii")) - int(stat[used]))
    return max(0, found)


def cpu_limit() -> int | None:
    """Whole processors, at least 1, whose time a container has; None if that is no less than the cores it may use."""
    for quota, period in _CPU_LIMITS.items():
        with suppress(OSError, ValueError):  # "max" is no number
            share = int(Path(quota).read_text("ascii").split()[0]) / int(Path(period).read_text("ascii").split()[-1])
            import psutil

            if 0 < share < min(psutil.cpu_count(logical=False) or sys.maxsize, len(os.sched_getaffinity(0))):
                return max(1, int(share))
    return None


def give_back() -> None:
    """Return freed memory to the system. Does nothing if the C library is not glibc."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
