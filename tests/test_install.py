"""The wheel: what is in it, and the device install without torch."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from export.kernels.build import compilers
from export.kernels.library import VERSION, library_name

ROOT = Path(__file__).resolve().parents[1]
ABSENT = ("torch", "onnx", "safetensors", "onnx_ir", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without isolation: the test extra has the build backend. The kernels are not optimized, and fewer.

    The compiler knows no newer processors, so that their variants are left out.
    """
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        target = source / name
        if (ROOT / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    environment = dict(os.environ)
    if (compiler := next(compilers(), None)) is not None:
        unoptimized = out / "c++"
        refuses = 'case "$*" in *" -mavx512"*|*" -mavxvnni"*|*" -march="*) exit 1;; esac'
        unoptimized.write_text(f'#!/bin/sh\n{refuses}\nexec {shlex.join(compiler)} "$@" -O0 -DSPORTSLLM_STRUCTURES=1\n')
        unoptimized.chmod(0o755)
        environment["CXX"] = str(unoptimized)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
        env=environment,
    )
    return next(out.glob("*.whl"))


def test_top_level_names_and_data_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"sportsllm", "compress", "export", "benchmarks"}
    for package in top:
        shipped = {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")}
        studies = ROOT / "benchmarks" / "studies"  # need the repository's results
        written = {path for path in (ROOT / package).rglob("*.py") if studies not in path.parents}
        assert shipped == {str(path.relative_to(ROOT)) for path in written}
        assert f"{package}/py.typed" in names
    assert "benchmarks/devices/raspberry-pi-5-8gb.toml" in names
    assert "sportsllm/simulator/football.toml" in names
    assert any(name.startswith("benchmarks/templates/") for name in names)
    built = next(compilers(), None) is not None
    assert (f"export/kernels/{library_name(VERSION)}" in names) == built
    assert wheel.name.endswith("py3-none-any.whl") != built


def dependencies(requirements: list[str]) -> Iterator[Path]:
    """What lies in this environment of the packages that are required, and of those that they require."""
    seen = set[str]()
    for requirement in map(Requirement, requirements):
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        package = metadata.distribution(requirement.name)
        requirements += package.requires or []
        tops = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
        yield from (Path(str(package.locate_file(name))) for name in tops)


@pytest.fixture(scope="module")
def device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and its own dependencies only; returns its bin directory."""
    directory = tmp_path_factory.mktemp("device") / "venv"
    venv.create(directory)
    binaries = directory / "bin"
    install = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "--quiet", "--no-deps"]
    # With the sources on PYTHONPATH pip would find the program installed already.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True, env=clean)
    (packages,) = directory.glob("lib/python*/site-packages")
    (installed,) = metadata.distributions(path=[str(packages)])
    for path in set(dependencies(list(installed.requires or []))):
        (packages / path.name).symlink_to(path)
    return binaries


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_set_up_says_that_it_needs_a_network(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "export"):
        (tmp_path / name).symlink_to(ROOT / name)
    venv.create(tmp_path / ".venv")
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "pip").symlink_to(str(metadata.distribution("pip").locate_file("pip")))  # faster than unpacking it
    make = ["make", "--no-print-directory", "quickstart", f"PYTHON={sys.executable}"]
    offline = os.environ | {"PIP_NO_INDEX": "1", "MAKEFLAGS": ""}
    run = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, env=offline)
    assert run.returncode == 2
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("error: "))
    assert "it needs a network" in line and "repeat this command" in line


@pytest.mark.slow
def test_a_device_needs_no_torch(device: Path, exported_int4: Path, corpus_file: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(device / "sportsllm-compress"), *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )

    check = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    found = subprocess.run([str(device / "python"), "-c", check], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.strip() == "[]"
    result = run("generate", exported_int4, "--prompt", "Goal", "--max-new-tokens", 5, "--json")
    assert result.returncode == 0, result.stderr
    generated = json.loads(result.stdout.splitlines()[-1])
    assert generated["tokens"] == 5
    assert generated["kernels"] == ("portable" if next(compilers(), None) is None else "native")
    chatty = shutil.copytree(exported_int4, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    result = run("generate", chatty, "--chat", "--prompt", "Goal", "--max-new-tokens", 5)
    assert result.returncode == 0, result.stderr
    text = tmp_path / "text.jsonl"  # short, since the kernels are slow
    text.write_text("".join(corpus_file.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    result = run("eval", exported_int4, "--text", text, "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["bits_per_byte"] > 0, result.stderr
    result = run("inspect", exported_int4, "--out", "parts.html")
    assert result.returncode == 0 and "q_proj" in (tmp_path / "parts.html").read_text(encoding="utf-8"), result.stderr
    result = run("verify", exported_int4, "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["ok"] is True, result.stderr
    result = run("bench", exported_int4, "--threads", 1, "--set", "rounds=1", "--set", "most_rounds=1", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["peak_rss_bytes"] > 0
    result = run("train", "--model", "tiny-1m", "--corpus", corpus_file, "--out", "x")
    assert result.returncode == 5 and "sportsllm-compress[compress]" in result.stderr
