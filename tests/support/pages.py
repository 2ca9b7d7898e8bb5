"""Runs the shell blocks and programs that a page shows, as they stand."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoint_files import edit_json
from tests.support.forked import program

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STAND_INS = {
    "make": '[ "$1" != -C ] || cd "$2"; mkdir -p dist && touch dist/sportsllm_compress-1-py3-none-linux_aarch64.whl',
    "scp": 'test "$4" = pi@raspberrypi.local: && mkdir -p pi && cp -r "$2" "$3" pi',
    "pip": 'test -f "${2%\\[serve]}"',
    "npm": "",
    "ollama": "",
    "sbatch": "echo 1",
    "sudo": 'exec "$@"',
}
"""Shell scripts. The Raspberry Pi is a folder, and a wheel an empty file."""
FENCE = re.compile(r'^```(\S*)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def reader(folder: Path) -> Path:
    """A folder in which a reader works, with the stand-ins."""
    for name in ("bin", "sportsllm-compress"):
        (folder / name).mkdir()
    for name, script in STAND_INS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    program(folder / "bin" / "sportsllm-compress")
    return folder


def chat_model(checkpoint: Path, out: Path, turn: str = "{{ message.content }}") -> Path:
    """A copy of a checkpoint with a chat template."""
    shutil.copytree(checkpoint, out)
    template = f"{{% for message in messages %}}{turn}\n{{% endfor %}}"
    edit_json(out / "tokenizer_config.json", chat_template=template)
    return out


def run_page(name: str, folder: Path, instead: dict[str, str], figures: bool = True) -> str:
    """Run a page's blocks in a folder, those after `scp` on the Pi; returns what they printed.

    Args:
        name: of the page, from the tutorials' folder.
        folder: of `reader`.
        instead: patterns of what a reader runs, and what is run in its place.
        figures: compare the figures of shown outputs too, not only the words.
    """
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    machine = folder
    printed: str | None = None  # by the last block, if it was run
    everything = ""
    exports = ""  # a variable that is exported in one block is there in the next
    for language, title, text in FENCE.findall((TUTORIALS / name).read_text(encoding="utf-8")):
        for pattern, other in instead.items():
            text = re.sub(pattern, other, text)
        if language == "sh":
            exports += "".join(f"{line}\n" for line in text.splitlines() if line.startswith("export "))
            run = subprocess.run(
                ["bash", "-c", f"set -e\n{exports}{text}"],
                cwd=machine,
                env=os.environ | {"PATH": path, "HOME": str(folder), "COLUMNS": "110"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=3600,
            )
            printed = run.stdout
            everything += printed
            judged = "--on-device" in text or ("bench" in text and not figures)  # quality is not known well there
            missed_budget = run.returncode == 4 and judged
            assert run.returncode == 0 or missed_budget, f"{text}\n{printed}"
            if "scp -r" in text:
                machine = folder / "pi"
        elif language == "python" and not title:
            subprocess.run([folder / "bin" / "sportsllm-compress", "-c", text], cwd=machine, check=True)
        elif language == "bash":  # needs a machine, a network or an hour that a test has not
            printed = None
        elif "." in title:
            (folder / title.lstrip("/")).write_text(text, encoding="utf-8")
        elif title == "Output" and printed is not None:
            left = iter(parts(printed, figures))
            shown = parts(text, figures)
            assert all(any(alike(part, other) for other in left) for part in shown), (
                f"{name} shows\n{text}\nbut was printed\n{printed}"
            )
    return everything


def parts(text: str, figures: bool) -> list[str]:
    """The words and figures of an output, without times, rates and intervals; of another model's, words alone."""
    text = re.sub(r"[\d.,]+(?:-[\d.,]+)? (?:ms|s|tokens/s)\b|\([^()]* to [^()]*\)", "", text)
    if figures:
        return re.findall(r"[A-Za-z]{3,}|\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+|\s?%)?", text)
    return [word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in ("pass", "fail", "uncertain")]


def alike(shown: str, printed: str) -> bool:
    """Equal words and counts; other figures differ a little between processors, small losses and errors more."""
    if not (shown[0].isdigit() and printed[0].isdigit()) or "," in shown:
        return shown == printed
    one, other = (float(figure.strip("%").replace(",", "")) for figure in (shown, printed))
    return math.isclose(one, other, rel_tol=0.6 if re.search("[e%]", shown) else 0.15)
