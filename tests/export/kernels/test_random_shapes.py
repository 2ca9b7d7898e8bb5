"""Kernels over random shapes: against float64, under sanitizers, and every variant's bits, Arm's under QEMU."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from export.kernels.build import HERE, VARIANTS, compile_sources, compilers, here

SOURCE = Path(__file__).with_name("random_shapes.cpp")
SANITIZERS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CASES = "60"


def compiled(out: Path, command: Sequence[str], machine: str, flags: Sequence[str] = ()) -> list[str]:
    objects = compile_sources(command, out, machine, flags)
    program = str(out / "random_shapes")
    base = [*command, "-std=c++17", "-O2", "-ffp-contract=off", *flags, f"-I{HERE}", str(SOURCE)]
    subprocess.run([*base, *objects, "-pthread", "-o", program], check=True)
    return [program]


def outcome(command: Sequence[str], variant: str, seed: str = "1") -> str | None:
    """The hash that a variant prints; None where this processor lacks it."""
    environment = {**os.environ, "SPORTSLLM_KERNELS": variant}
    done = subprocess.run([*command, seed, CASES], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        return None
    assert done.returncode == 0, done.stdout + done.stderr
    name, found = done.stdout.split()
    assert name == variant
    return found


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = next(compilers(), None)
    if command is None:
        pytest.skip("no C++ compiler")
    return compiled(tmp_path_factory.mktemp("native"), command, here(), SANITIZERS)


@pytest.mark.slow
def test_variants_give_the_plain_bits_and_touch_no_byte_that_is_not_theirs(native: list[str]) -> None:
    found = {name: outcome(native, name) for name in ("plain", *VARIANTS.get(here(), {}))}
    assert {bits for bits in found.values() if bits is not None} == {found["plain"]}
    assert found["plain"] is not None


@pytest.mark.slow
def test_arm_gives_the_bits_of_this_processor(native: list[str], tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    arm = [emulator, "-cpu", "max", *compiled(tmp_path, [compiler, "-static"], "aarch64")]
    found = {outcome(arm, variant) for variant in ("plain", *VARIANTS["aarch64"])}
    assert found == {outcome(native, "plain")}
