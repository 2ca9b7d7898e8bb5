"""Builds the kernels with the compiler at hand: `python -m export.kernels.build`.

Uses the standard library alone, since the install runs it. The compiler is $CXX, g++, clang++ or c++, or the package
ziglang, whichever is found first. Each variant has a file and flags of its own, so that the library runs on every
processor of the family and chooses when it is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from export.kernels.library import HERE, VERSION, library_name

NAME = library_name(VERSION)
# Nothing is contracted, so that all variants round alike.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"]
VARIANTS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma"],
        "avx_vnni": ["-mavx2", "-mfma", "-mavxvnni"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma"],
    },
}
# x86_64 or aarch64: compile for that processor and Linux with glibc 2.28, whatever this machine is (`make wheels`).
TARGET = os.environ.get("SPORTSLLM_WHEEL")
_SHARED = ("dispatch", "layer", "library", "variant_plain")


class BuildError(Exception):
    """The library could not be built; the message is one line."""


def compilers() -> Iterator[list[str]]:
    """Commands of C++ compilers that are there, the preferred first."""
    zig = [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined"]
    has_zig = importlib.util.find_spec("ziglang") is not None
    if TARGET:
        if has_zig:
            yield [*zig, "-target", f"{TARGET}-linux-gnu.2.28"]
        return
    if os.environ.get("CXX"):
        yield shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            yield [name]
    if has_zig:
        yield zig


def build(directory: Path) -> Path:
    """Compile the library into a directory and return its path; an older one there is replaced at the end.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    command = next(compilers(), None)
    if command is None:
        raise BuildError("no C++ compiler; install g++ or clang, or the Python package ziglang")
    here = platform.machine().lower()
    machine = TARGET or {"amd64": "x86_64", "arm64": "aarch64"}.get(here, here)
    variants = {f"variant_{name}": flags for name, flags in VARIANTS.get(machine, {}).items()}
    with tempfile.TemporaryDirectory() as work:
        jobs = [
            [*command, *FLAGS, *variants.get(name, []), "-c", str(HERE / f"{name}.cpp"), "-o", f"{work}/{name}.o"]
            for name in (*_SHARED, *variants)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        made = Path(work) / NAME
        objects = [f"{work}/{name}.o" for name in (*_SHARED, *variants)]
        _run([*command, "-shared", "-o", str(made), *objects, *([] if sys.platform == "darwin" else ["-s"])])
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f"{NAME}.new"
        shutil.copyfile(made, new)  # then one step: a program that has the old one open keeps it
        new.replace(directory / NAME)
    return directory / NAME


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{shlex.join(command[:3])} … failed: {lines[0] if lines else 'no message'}")


if __name__ == "__main__":
    try:
        print(build(HERE))
    except BuildError as error:
        sys.exit(f"error: the kernels were not built: {error}")
