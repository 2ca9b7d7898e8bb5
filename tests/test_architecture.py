"""The house's doors: which package may import which, and what the front door costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sportsllm.cli.flags import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "sportsllm": {"sportsllm"},
    "compress": {"sportsllm", "compress"},
    "export": {"sportsllm", "export"},
    "benchmarks": {"sportsllm", "compress", "export", "benchmarks"},
}
HEAVY = {"torch", "onnx", "onnx_ir", "safetensors", "bitsandbytes", "transformers", "plotly", "onnxruntime", "optimum"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the package's name in imports"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = {name.partition(".")[0] for name in imports(path)} & set(ALLOWED)
        assert ours <= ALLOWED[package], f"{path} imports {ours - ALLOWED[package]}"


def test_nobody_imports_the_front_door() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            if path != ROOT / "sportsllm" / "cli" / "__main__.py":
                assert "sportsllm.cli.main" not in imports(path), path


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom sportsllm.cli.main import build_app\nbuild_app()\n"
    code += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    assert run(code).strip() == "[]"


def test_importing_the_packages_costs_nothing() -> None:
    names = ", ".join(ALLOWED)
    assert (
        run(f"import sys, {names}\nprint(sorted({HEAVY | {'numpy', 'rich', 'typer'}!r} & set(sys.modules)))").strip()
        == "[]"
    )


def test_the_device_modules_need_no_torch() -> None:
    code = (
        "import sys\nimport export.runtime, sportsllm.inference.sampling, sportsllm.inference.evaluate\n"
        "import sportsllm.storage.artifact, sportsllm.text.documents, sportsllm.text.tokenizer\n"
        "import benchmarks.measure.bench, benchmarks.measure.worker\n"
        "import benchmarks.predict.calibrate, benchmarks.predict.probes, benchmarks.console_tables\n"
        "print(sorted({'torch', 'onnx', 'onnx_ir', 'safetensors'} & set(sys.modules)))"
    )
    assert run(code).strip() == "[]"


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`{name}" in readme, f"README does not mention `{name}`"
