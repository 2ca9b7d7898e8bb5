"""Which processors a measurement runs on, and keeping it there. Standard library only: other interpreters load it too,
by its path."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

CPU_FOLDER = Path("/sys/devices/system/cpu")


def choose_cpus(threads: int, allowed: Collection[int] | None = None, folder: Path = CPU_FOLDER) -> list[int] | None:
    """Ascending numbers of `threads` logical processors, one a core while cores last, the strongest first.

    Two threads on one core share its arithmetic, and the scheduler moves threads between strong and weak cores.
    `allowed` are those this process may use, the system's answer where None. None where the system pins no process.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        allowed = os.sched_getaffinity(0)
    siblings: dict[tuple[int, int], int] = {}  # logical processors seen so far of each core
    ranked = []
    for cpu in sorted(allowed):
        described = folder / f"cpu{cpu}"
        core_id = read_integer(described / "topology" / "core_id")
        package = read_integer(described / "topology" / "physical_package_id") or 0
        core = (package, cpu if core_id is None else core_id)
        siblings[core] = siblings.get(core, -1) + 1
        strength = read_integer(described / "cpu_capacity") or read_integer(described / "cpufreq/cpuinfo_max_freq") or 0
        ranked.append((siblings[core], -strength, cpu))
    return sorted(cpu for _, _, cpu in sorted(ranked)[:threads])


def pin(cpus: Sequence[int] | None) -> list[int] | None:
    """Keep this process on `cpus`; returns those the system then allows, None where it cannot be pinned."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        return None
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # a container's rules, or a processor that was taken away meanwhile
        return None
    return sorted(os.sched_getaffinity(0))


def read_integer(path: Path) -> int | None:
    """The number that a file of the system holds; None where it cannot be read."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
