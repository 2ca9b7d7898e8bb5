"""Kernels over random shapes and damaged graphs: against float64, under sanitizers, and every variant's bits."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from export.kernels.build import _SHARED, HERE, NAME, VARIANTS, compile_sources, compilers, here

SOURCE = Path(__file__).with_name("random_shapes.cpp")
# -O0 runs three times as long as -Og, and -O1 compiles four times as long. A session takes as long as operators are
# registered: 12 ms for one body of each, 90 ms for eight.
FAST = ["-Og", "-DSPORTSLLM_STRUCTURES=1"]
SANITIZERS = [*FAST, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CPU_FLAGS = {"avx512": "avx512_vnni", "avx_vnni": "avx_vnni"}
CASES = 60
FEW = 20


def compiled(command: Sequence[str], out: Path) -> str:
    """The program, without sanitizers: those of the library watch the memory that it hands out as well."""
    program = str(out / "random_shapes.o")
    flags = ["-std=c++17", "-ffp-contract=off", *FAST, f"-I{HERE}"]
    subprocess.run([*command, *flags, "-c", str(SOURCE), "-o", program], check=True)
    return program


def linked(out: Path, command: Sequence[str], objects: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    subprocess.run([*command, *flags, *objects, "-pthread", "-o", str(out / "random_shapes")], check=True)
    return [str(out / "random_shapes")]


def without_operators(
    out: Path, command: Sequence[str], program: str, machine: str, flags: Sequence[str] = FAST
) -> list[str]:
    """The program with the functions and layers alone."""
    with patch("export.kernels.build._SHARED", [name for name in _SHARED if name != "library"]):
        return linked(out, command, [*compile_sources(command, out, machine, flags), program], flags)


def outcome(command: Sequence[str], variant: str, *how: str, cases: int = CASES) -> list[str] | None:
    """The hashes that a variant prints, one for each case; None where this processor lacks it.

    With `hash` nothing is compared with float64: that was done with the same numbers if their hash is found elsewhere.
    """
    environment = {**os.environ, "SPORTSLLM_KERNELS": variant}
    done = subprocess.run(
        [*command, "1", str(cases), *how], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 3:
        return None
    assert done.returncode == 0, done.stdout + done.stderr
    name, *found = done.stdout.split()
    assert name == variant and len(found) == cases
    return found


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    command = next(compilers(), None)
    if command is None or "ziglang" in command:
        pytest.skip("no C++ compiler with sanitizers")
    return command


@pytest.fixture(scope="module")
def objects(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the library, with the address and undefined-behaviour sanitizers; no variants that this processor lacks."""
    cpu, known = Path("/proc/cpuinfo"), VARIANTS.get(here(), {})
    lacking = {name for name, flag in CPU_FLAGS.items() if cpu.exists() and flag not in cpu.read_text().split()}
    flags = [*SANITIZERS, *(f"-DSPORTSLLM_WITHOUT_{name.upper()}" for name in lacking)]
    with patch.dict(VARIANTS, {here(): {name: own for name, own in known.items() if name not in lacking}}):
        return compile_sources(compiler, tmp_path_factory.mktemp("objects"), here(), flags)


@pytest.fixture(scope="module")
def program(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(compiler, tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def native(
    compiler: list[str], objects: list[str], program: str, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    return linked(tmp_path_factory.mktemp("native"), compiler, [*objects, program], SANITIZERS)


@pytest.fixture(scope="module")
def plain_bits(native: list[str]) -> list[str]:
    """Of numbers that float64 agrees with."""
    found = outcome(native, "plain")
    assert found is not None
    return found


@pytest.mark.slow
def test_variants_give_the_plain_bits_and_touch_no_byte_that_is_not_theirs(
    native: list[str], plain_bits: list[str]
) -> None:
    for variant in VARIANTS.get(here(), {}):
        assert outcome(native, variant, "hash") in (plain_bits, None)


@pytest.mark.slow
def test_threads_do_not_race(compiler: list[str], program: str, plain_bits: list[str], tmp_path: Path) -> None:
    left_out = [f"-DSPORTSLLM_WITHOUT_{name.upper()}" for name in VARIANTS.get(here(), {})]
    flags = [*FAST, "-fsanitize=thread", *left_out]
    raced = without_operators(tmp_path, compiler, program, "plain C++ alone", flags)
    assert outcome(raced, "plain", "hash", cases=FEW) == plain_bits[:FEW]


@pytest.mark.slow
def test_damaged_graphs_touch_no_byte_that_is_not_theirs(
    compiler: list[str], objects: list[str], tmp_path: Path
) -> None:
    """The library as a whole, where a graph's sizes are checked, under the same sanitizers."""
    if Path(compiler[0]).name != "g++":
        pytest.skip("needs g++, whose sanitizers can be loaded before Python")
    built = tmp_path / NAME
    subprocess.run([*compiler, *SANITIZERS, "-shared", "-o", str(built), *objects], check=True)
    asked = [[*compiler, f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan")]
    found = [subprocess.run(one, check=True, capture_output=True, text=True).stdout.strip() for one in asked]
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    script = [sys.executable, str(Path(__file__).with_name("mutated_graphs.py")), str(built), "0", "300"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    count, ran = map(int, done.stdout.split())
    assert 0 < ran < count == 300


@pytest.mark.slow
def test_arm_gives_the_bits_of_this_processor(plain_bits: list[str], tmp_path: Path) -> None:
    """The kernels are compiled as they are shipped. Fewer cases of plain C++, which this processor has run."""
    cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if cross is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    command = [cross, "-static"]
    program = compiled(command, tmp_path)
    arm = [emulator, "-cpu", "max", *without_operators(tmp_path, command, program, "aarch64", FAST[1:])]
    for variant in ("plain", *VARIANTS["aarch64"]):
        cases = FEW if variant == "plain" else CASES
        assert outcome(arm, variant, "hash", cases=cases) == plain_bits[:cases]
