"""Builds the kernels with the compiler at hand: `python -m export.kernels.build [DIR]`.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from export.kernels.library import HERE, VERSION, library_name

NAME = library_name(VERSION)
# Nothing is contracted, so that all variants round alike.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"]
VARIANTS = {
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx_vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma"],
    },
    "aarch64": {
        "neon": [],
        "dotprod": ["-march=armv8.2-a+dotprod"],
        "i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    },
}
# x86_64 or aarch64: compile for that processor, whatever this machine is, with $CXX or for Linux with glibc 2.28.
TARGET = os.environ.get("SPORTSLLM_WHEEL")
# The oldest macOS that the library runs on; the first with Apple's own processors.
MACOS_TARGET = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0")
_MACOS = ["-arch", platform.machine(), f"-mmacosx-version-min={MACOS_TARGET}"] if sys.platform == "darwin" else []
_SHARED = ("variant_plain", "layer", "feed_forward", "selected", "latent", "library")


class BuildError(Exception):
    """The library could not be built; the message is one line."""


def compilers() -> Iterator[list[str]]:
    """Commands of C++ compilers that are there, the preferred first; $CXX alone if it is set."""
    zig = [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined"]
    has_zig = importlib.util.find_spec("ziglang") is not None
    if os.environ.get("CXX"):
        yield shlex.split(os.environ["CXX"])
        return
    if TARGET:
        if has_zig:
            yield [*zig, "-target", f"{TARGET}-linux-gnu.2.28"]
        return
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            yield [name]
    if has_zig:
        yield zig


def build(directory: Path) -> Path:
    """Compile the library into a directory and return its path; an older one there is replaced at the end.

    Raises:
        BuildError: there is no compiler, or all fail.
    """
    failed = "no C++ compiler; install g++ or clang, or the Python package ziglang"
    for command in compilers():
        try:
            return _build_with(command, directory)
        except (BuildError, OSError) as error:  # one that is too old for a variant's flags: perhaps the next is not
            failed = str(error)
    raise BuildError(failed)


def _build_with(command: Sequence[str], directory: Path) -> Path:
    with tempfile.TemporaryDirectory() as work:
        made = Path(work) / NAME
        objects = compile_sources(command, Path(work), TARGET or here())
        _run([*command, "-shared", "-o", str(made), *objects, *(_MACOS or ["-s"])])
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f"{NAME}.{os.getpid()}"
        shutil.copyfile(made, new)  # then one step: a program that has the old one open keeps it
        new.replace(directory / NAME)
    return directory / NAME


def here() -> str:
    """This machine's processor family, by the name that `VARIANTS` uses."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def compile_sources(command: Sequence[str], work: Path, machine: str, flags: Sequence[str] = ()) -> list[str]:
    """Compile all sources with `flags` and return the object files; a variant whose own flags fail is left out.

    Raises:
        BuildError: the compiler fails.
    """
    variants = {f"variant_{name}": own for name, own in VARIANTS.get(machine, {}).items()}
    if "ziglang" in command:  # it knows processors by names of its own
        variants = {
            name: [flag.replace("-march=armv8.2-a", "-mcpu=generic") for flag in own] for name, own in variants.items()
        }

    def compile_one(name: str, own: Sequence[str] = ()) -> str:
        path = str(work / f"{name}.o")
        _run([*command, *FLAGS, *_MACOS, *flags, *own, "-c", str(HERE / f"{name}.cpp"), "-o", path])
        return path

    def compile_variant(name: str) -> str | None:
        try:
            return compile_one(name, variants[name])
        except BuildError:
            if not variants[name]:
                raise
            print(f"note: {shlex.join(variants[name])}: unknown to {command[0]}; {name} is left out", file=sys.stderr)
            return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled, made = pool.map(compile_variant, variants), list(pool.map(compile_one, _SHARED))  # longest first
        optional = dict(zip(variants, compiled, strict=True))
    missing = [
        f"-DSPORTSLLM_WITHOUT_{name.removeprefix('variant_').upper()}" for name, path in optional.items() if not path
    ]
    return [*made, *filter(None, optional.values()), compile_one("dispatch", missing)]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{shlex.join(command[:3])} … failed: {lines[0] if lines else 'no message'}")


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE))
    except BuildError as error:
        sys.exit(f"error: the kernels were not built: {error}")
