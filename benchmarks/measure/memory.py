"""Physical memory of this process: its peak, and what it consists of. Standard library only, also loaded by path."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROC = Path("/proc/self")
SAMPLE_S = 0.02


def peak_rss_bytes(proc: Path = PROC) -> int:
    """The most physical memory this process has held since it started, file-backed pages included.

    Linux counts it for each address space as VmHWM (`man 5 proc`), so what the parent process held before
    it started this one does not enter, as it can with getrusage; elsewhere getrusage has to do.
    """
    peak = _kilobytes(proc / "status", ("VmHWM",)).get("VmHWM")
    if peak is not None:
        return peak
    import resource

    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024


def memory_split(proc: Path = PROC) -> dict[str, int] | None:
    """What this process holds now, in bytes; None where the system does not say (`smaps_rollup`, Linux 4.14).

    `rss_bytes` is all of it, and `anonymous_bytes` + `file_bytes`; pages of files can be dropped and read again.
    `pss_bytes` counts a page that n processes share as 1/n, `uss_bytes` only those no other process has.
    """
    private = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
    fields = _kilobytes(proc / "smaps_rollup", ("Rss", "Pss", "Anonymous", *private))
    if not {"Rss", "Pss", "Anonymous", "Private_Clean", "Private_Dirty"} <= fields.keys():
        return None
    return {
        "rss_bytes": fields["Rss"],
        "pss_bytes": fields["Pss"],
        "uss_bytes": sum(fields.get(name, 0) for name in private),
        "anonymous_bytes": fields["Anonymous"],
        "file_bytes": fields["Rss"] - fields["Anonymous"],
    }


@contextmanager
def watched_memory(proc: Path = PROC, every_s: float = SAMPLE_S) -> Iterator[dict[str, int]]:
    """Yield a dict that, after the block, has `memory_split` at the moment of the largest rss seen, and `samples`.

    The kernel keeps a peak of the whole only; its parts are sampled by a thread, so a peak shorter than
    `every_s` seconds can slip through. Not for a block that is timed. Empty where nothing can be read.
    """
    largest: dict[str, int] = {}
    stop = threading.Event()

    def sample() -> None:
        while True:
            last = stop.is_set()  # one more look after the block
            now = memory_split(proc)
            if now is None:
                return
            samples = largest.get("samples", 0) + 1
            if now["rss_bytes"] >= largest.get("rss_bytes", 0):
                largest.update(now)
            largest["samples"] = samples
            if last:
                return
            stop.wait(every_s)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield largest
    finally:
        stop.set()
        thread.join()


def _kilobytes(path: Path, names: Sequence[str]) -> dict[str, int]:
    """Those fields of a file of `name:  number kB` lines, in bytes."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in names if name in fields}
