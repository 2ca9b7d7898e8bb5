"""Every `sh` block of the README, the how-to and reference pages runs, and their programs, on a few thousand tokens.

Blocks marked `bash` are not run: they need a network, a GPU, a server, or other programs.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from sportsllm.commands import load_command
from sportsllm.simulator import simulate
from tests.support.pages import FENCE, MODEL, ROOT, chat_model, reader, run_page

LESS = {
    r"--megabytes \S+": "--megabytes 0.02",
    r"--questions 500": "--questions 4",
    r"--(tokens|recover|qad) \S+": r"--\1 2k",
    r"(quantize .*(?:--calibration \S+|--bits 4)|prune teacher --[pl]\S+ \S+)": r"\1 --set samples=2",
    "--model small --set layers=6 --set hidden=384": "--model tiny-300k --set layers=6 --set hidden=32",
    r" tokens=[\d_]+": " tokens=2000",
    r'out="student': 'out="my-student',
    r"--steps 20": "--steps 1 --batch-size 1 --set accumulation=1",
    r"bench ( *\S+onnx)": r"bench \1 --set rounds=1 --set most_rounds=1",
    r"fit --teacher": "fit --dry-run --teacher",
    r"my-model ": "student ",
    r" bench\.json": "",
    "= 5\n": "= 0.02\n",
    "= 700_000\nset = { warmup = 20 }": "= 2_000",
    r"--provider cuda --target \S+ --on-device": "--set rounds=1 --set most_rounds=1",
    "--provider cuda": "--provider cpu",
}
PAGES = [
    *("train", "distill", "prepare-text", "evaluate", "fine-tune", "fine-tune-instruct", "prune", "quantize", "fit"),
    *("export-onnx", "export-gguf", "bench", "plan", "inspect", "recipes-and-reports", "use-hub-and-gguf", "gpu"),
    *("../reference/json-results", "../reference/python-api"),
]
ELSEWHERE = {"run-in-cpp", "run-without-this-package", "target", "phone", "raspberry-pi", "sports-desk", "web-page"}


def write(file: Path, records: Iterable[object]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After the README, whose blocks all run, with files of one's own. The models have the tutorials' names too."""
    folder = reader(tmp_path_factory.mktemp("reader"))
    load_command("data simulate")(megabytes=0.02, questions=4, out=folder / "corpus")
    (folder / "my_text").mkdir()
    for name in ("my_text/train", "my_text", "long", "long_documents", "articles"):
        (folder / f"{name}.jsonl").symlink_to(folder / "corpus" / "train.jsonl")
    write(folder / "held_out.jsonl", ({"text": simulate(0, 500 + index).text} for index in range(20)))
    asked = ({"role": "user", "content": f"Who won match {number}?"} for number in range(40))
    write(folder / "chats.jsonl", ({"messages": [one, {"role": "assistant", "content": "Vestnes."}]} for one in asked))
    (folder / "questions.txt").write_text("Who won?\n", encoding="utf-8")
    (folder / "sportsllm_compress-1-py3-none-linux_aarch64.whl").touch()
    chat = chat_model(checkpoint, folder / "chat-model", "{{ message.role }}: {{ message.content }}")
    run_page("../../README.md", folder, LESS | {MODEL: str(chat)}, figures=False)
    for name, place in (("teacher", "runs/tiny-1m"), ("base", "runs/tiny-1m"), ("student", "runs/tiny-700k")):
        (folder / name).symlink_to(place)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to("smol-gguf/model.gguf")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_how_to(page: str, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "reader", symlinks=True))
    run_page(f"../how-to/{page}.md", folder, LESS | {MODEL: str(folder / "chat-model")}, figures=False)


def test_every_block_is_run_or_marked() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        languages = {language for language, *_ in FENCE.findall(page.read_text(encoding="utf-8"))}
        run = {re.sub(".*/", "", name) for name in PAGES} | ELSEWHERE
        assert "sh" not in languages or page.stem in run, page
