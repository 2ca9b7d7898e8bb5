"""Tutorials and programs in the docs run as they stand: every shell block, in order, and the outputs that they show.

What differs from what a reader runs is all here: fewer tokens and rounds, a tiny chat model in place of SmolLM2-135M,
and stand-ins for commands that need a network, a Raspberry Pi or an hour.
"""

import configparser
import importlib
import json
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

from sportsllm.cli import build_app
from sportsllm.settings import GROUPS

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
HOW_TO = ("../how-to/run-without-this-package.md", "../how-to/target.md")
INSTEAD = {
    "--megabytes 5": "--megabytes 0.08",
    "--megabytes 1 ": "--megabytes 0.08 ",
    "--tokens 600k": "--tokens 20k",
    "--tokens 300k": "--tokens 10k",
    "samples=16": "samples=2",
    "bench student-onnx": "bench student-onnx --set rounds=1",
}
STAND_INS = ("make", "scp", "pip", "npm")
FENCE = re.compile(r'^```(\S*)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the readers work: the web page continues from the model for the Raspberry Pi."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "bin").mkdir()
    for name in STAND_INS:
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def run_page(name: str, folder: Path, instead: dict[str, str]) -> None:
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed: str | None = None  # by the last block, if it was run
    exports = ""  # a variable that is exported in one block is there in the next
    for language, title, text in FENCE.findall((TUTORIALS / name).read_text(encoding="utf-8")):
        if language == "sh":
            for word, other in instead.items():
                text = text.replace(word, other)
            exports += "".join(f"{line}\n" for line in text.splitlines() if line.startswith("export "))
            script = f"set -e\n{exports}{text}"
            run = subprocess.run(
                ["bash", "-c", script],
                cwd=folder,
                env=os.environ | {"PATH": path, "COLUMNS": "110"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=600,
            )
            printed = run.stdout
            missed_budget = run.returncode == 4 and "--target" in text  # a model trained for seconds
            assert run.returncode == 0 or missed_budget, f"{text}\n{printed}"
        elif language == "bash":  # needs a machine, a network or an hour that a test has not
            printed = None
        elif "." in title:
            (folder / title).write_text(text, encoding="utf-8")
        elif title == "Output" and printed is not None:
            left = iter(words(printed))
            assert all(word in left for word in words(text)), f"{name} shows\n{text}\nbut was printed\n{printed}"


def words(text: str) -> list[str]:
    """The words of an output, without figures and verdicts."""
    return [word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in ("pass", "fail", "uncertain")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raspberry-pi.md", "web-page.md", *HOW_TO])
def test_from_text_to_a_raspberry_pi_and_a_web_page(name: str, folder: Path) -> None:
    """The how-to pages continue from the tutorial's models; the files that they show are written first."""
    run_page(name, folder, INSTEAD)


@pytest.mark.slow
def test_from_a_checkpoint_to_a_phone(checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "chat-model")
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    run_page("phone.md", tmp_path, INSTEAD | {"HuggingFaceTB/SmolLM2-135M-Instruct": str(model)})


@pytest.mark.slow
def test_from_a_recipe_to_a_service(tmp_path: Path) -> None:
    """systemd is not run: its unit's command is, with the export and a free port in place of those on the Pi."""
    httpx, _ = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")
    recipe = (ROOT / "recipes" / "sports-desk.toml").read_text(encoding="utf-8")
    fewer = {"= 10\n": "= 0.08\n", "1_000_000": "5_000", "500_000": "5_000", "optional": "set = {rounds = 1}\noptional"}
    for word, other in fewer.items():
        assert word in recipe
        recipe = recipe.replace(word, other)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sports-desk.toml").write_text(recipe, encoding="utf-8")
    run_page("sports-desk.md", tmp_path, {})
    page = (TUTORIALS / "sports-desk.md").read_text(encoding="utf-8")
    blocks = {title: text for _, title, text in FENCE.findall(page)}
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(blocks["/etc/systemd/system/sports-desk.service"])
    program, *given = shlex.split(
        unit["Service"]["ExecStart"].replace("/opt/sports-desk/desk", "runs/sports-desk/desk")
    )
    with subprocess.Popen(
        [Path(sys.executable).parent / Path(program).name, *given, "--port", "0"],
        cwd=tmp_path,
        env=os.environ | {"SPORTSLLM_API_KEY": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            port = next(found[1] for line in server.stdout if (found := re.search(r"http://\S+:(\d+)", line)))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=6)) as client:
                while (health := client.get("/health")).status_code == 503:  # it is loading the model
                    time.sleep(0.1)
                assert health.text == blocks["Output"].strip()
                assert client.post("/v1/completions", json={"prompt": "Full-time"}).status_code == 401
        finally:
            server.terminate()


def test_files_named_in_the_docs_exist() -> None:
    named = re.compile(r"`((?:sportsllm|compress|export|benchmarks|tests|recipes)/[\w./-]+\.(?:py|toml|csv|h|cpp))`")
    for page in (ROOT / "docs").rglob("*.md"):
        for path in named.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


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
        command, words = app, list(line)
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
        inherited = {field.name for base in record.__bases__ for field in fields(base)}
        assert {field.name for field in fields(record)} - inherited == {*", ".join(entries).split(", ")} - {""}, name


def test_the_picture_of_the_readme_is_of_todays_results() -> None:
    plots = runpy.run_path(str(ROOT / "docs" / "plots.py"))
    assert plots["PICTURE"].read_text(encoding="utf-8") == plots["picture"](), "run python docs/plots.py"
