"""The page of `serve` beside a web export, with the model running in the browser."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import sportsllm.serving
from sportsllm.console import log

_LIBRARY = "@huggingface/transformers/dist/transformers.min.js"
_RUNTIME = tuple(f"onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.{end}" for end in ("mjs", "wasm"))
_INSTALL = "npm install @huggingface/transformers@4.3.1 --ignore-scripts"


def library_files() -> list[Path]:
    """Files of transformers.js in `node_modules` here, or in SPORTSLLM_NODE_MODULES; none if one is missing."""
    files = [Path(os.environ.get("SPORTSLLM_NODE_MODULES", "node_modules")) / name for name in (_LIBRARY, *_RUNTIME)]
    return files if all(file.is_file() for file in files) else []


def write_page(directory: Path) -> None:
    """Write index.html and its script, and copy transformers.js to `lib` if it is installed."""
    source = Path(sportsllm.serving.__file__).parent
    begin, _, end = (source / "page.html").read_text(encoding="utf-8").rpartition("start();\n</script>")
    script = '</script>\n<script type="module" src="browser.js"></script>'
    (directory / "index.html").write_text(f"{begin}{script}{end}", encoding="utf-8")
    shutil.copyfile(source / "browser.js", directory / "browser.js")
    if not (files := library_files()):
        log(f"index.html lacks transformers.js: run `{_INSTALL}` here, and export to another --out")
        return
    (directory / "lib").mkdir(exist_ok=True)  # matrices with wider inputs are written over the first export
    for file in files:
        shutil.copyfile(file, directory / "lib" / file.name)
