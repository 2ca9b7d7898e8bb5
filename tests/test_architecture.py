"""The house's doors: which package may import which, and what the front door costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from sportsllm.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
FRONT_DOOR = ROOT / "sportsllm" / "__init__.py"  # names commands of all packages, loaded when asked for
ALLOWED = {
    "sportsllm": {"sportsllm"},
    "compress": {"sportsllm", "compress"},
    "export": {"sportsllm", "export"},
    "benchmarks": {"sportsllm", "compress", "export", "benchmarks"},
}
FLOORS = {
    "sportsllm": "__init__ errors console process_memory processors options settings slurm processes results < files < "
    "models < formats text simulator < inference < training serving < commands model < verbs cli",
    "export": "__init__ layout kernels < cache_scales runtime web_page < graph < parity < gguf request < export",
    "compress": "__init__ < layerwise < layer_fit < pruning < distillation < quantization < "
    "prune quantize distill sample",
    "benchmarks": "__init__ labels spread model_size < devices < measure < predict runtimes reporting < "
    "console_plan inspection quality < search < bench < device_commands inspect plan fit report < studies",
}
"""The rooms of each package from the lowest floor up; a room imports lower floors and its own."""
LONGEST = 80
MOST_LINES = {"sportsllm": 19_091, "compress": 7_460, "export": 6_350, "benchmarks": 9_113, "tests": 24_807}
"""Lines of Python in each folder: no more than there are. Lower a number when something goes."""
HEAVY = {"torch", "onnx", "onnx_ir", "safetensors", "bitsandbytes", "transformers", "plotly", "onnxruntime", "optimum"}


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _nodes(child)


@cache
def imports(path: Path) -> frozenset[str]:
    found = set[str]()
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the package's name in imports"
            module = node.module or ""
            is_package = (ROOT / Path(*module.split("."))).is_dir()
            found |= {f"{module}.{alias.name}" for alias in node.names} if is_package else {module}
    return frozenset(found)


def room_of(name: str) -> str:
    """The room, or the module beside the rooms, that a dotted name belongs to."""
    parts = name.split(".")
    lies_in_package = len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir()
    is_module = len(parts) > 1 and (ROOT / parts[0] / f"{parts[1]}.py").exists()
    return parts[1] if lies_in_package or is_module else "__init__"


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = {name.partition(".")[0] for name in imports(path)} & set(ALLOWED)
        assert ours <= ALLOWED[package], f"{path} imports {ours - ALLOWED[package]}"


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_no_floor_above(package: str) -> None:
    floors = FLOORS[package].split(" < ")
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms.split()}
    for path in (ROOT / package).rglob("*.py"):
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if path == FRONT_DOOR:
            continue
        for name in imports(path):
            if name.partition(".")[0] != package or (there := room_of(name)) == here:
                continue
            assert floor_of[there] <= floor_of[here], f"{path}: {here} imports {name}, a floor above"


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name; a package is its `__init__`."""
    found = {}
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def test_no_import_cycle() -> None:
    """Imports inside functions included, those for types only left out; a cycle is named by the error."""
    ours = {name: path for name, path in modules().items() if path != FRONT_DOOR}
    TopologicalSorter({name: (imports(path) & ours.keys()) - {name} for name, path in ours.items()}).prepare()


@pytest.mark.parametrize("package", ALLOWED)
def test_rooms_are_small_and_say_what_they_hold(package: str) -> None:
    for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 22, folder
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert docstring and len(docstring) > 20, folder


@pytest.mark.parametrize("package", ALLOWED)
def test_functions_fit_a_screen(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.body[0].lineno + 1  # a verb's parameters take a line or more each
                assert lines <= LONGEST, f"{path}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("folder", MOST_LINES)
def test_no_folder_outgrows_its_budget_of_lines(folder: str) -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= MOST_LINES[folder], f"{folder} has {lines} lines, its budget is {MOST_LINES[folder]}"


def test_nobody_imports_the_front_door() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            if path != ROOT / "sportsllm" / "cli.py":
                assert "sportsllm.cli" not in imports(path), path


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, sportsllm\nfrom sportsllm.cli import build_app\nbuild_app()\n"
    code += "[getattr(sportsllm, name) for name in sportsllm.__all__]\n"
    code += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    assert run(code).strip() == "[]"
    code = "import atexit, gc, sys\nfrom sportsllm.cli import main\ntry:\n    main(['--help'])\n"
    code += "except SystemExit:\n    print(sorted(sys.modules))\natexit._run_exitfuncs()\nprint(gc.get_freeze_count())"
    *_, loaded, frozen = run(code).splitlines()
    assert int(frozen) > 10_000, "the program's end visits every object"
    for name in ("compress", "export", "benchmarks", "sportsllm.verbs", "pydantic", "rich"):
        assert f"'{name}'" not in loaded, name


def test_importing_the_packages_costs_nothing() -> None:
    names = ", ".join(ALLOWED)
    assert (
        run(f"import sys, {names}\nprint(sorted({HEAVY | {'numpy', 'rich', 'typer'}!r} & set(sys.modules)))").strip()
        == "[]"
    )


def test_the_device_modules_need_no_torch() -> None:
    code = (
        "import sys\nimport export.runtime.decoder, sportsllm.inference.decoder, sportsllm.inference.scoring\n"
        "import sportsllm.formats.artifact, sportsllm.text.documents, sportsllm.text.tokenizer\n"
        "import benchmarks.measure.bench, benchmarks.measure.worker\n"
        "import benchmarks.predict.calibrate\n"
        "print(sorted({'torch', 'onnx', 'onnx_ir', 'safetensors'} & set(sys.modules)))"
    )
    assert run(code).strip() == "[]"


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`{name}" in readme, f"README does not mention `{name}`"
