"""The web page of the docs and the snippet of a web export's card, in headless Chromium: the text is `generate`'s.

transformers.js is not downloaded: SPORTSLLM_NODE_MODULES names the folder that `npm install` of the tutorial made.
"""

import http.server
import os
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import sportsllm
from compress.quantization.config import QuantizationConfig
from compress.quantize import quantize_checkpoint
from tests.support.browser import CHROMIUM, browser

MODULES = Path(os.environ.get("SPORTSLLM_NODE_MODULES", "missing"))
TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "web-page.md"
PROMPT, TOKENS = "Once upon a time", 20
FIGURES = "document.querySelector('.figures').textContent"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or not (MODULES / "@huggingface" / "transformers").is_dir(),
    reason="needs Chromium, and transformers.js in SPORTSLLM_NODE_MODULES",
)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, "queue.Queue[str]"]]:
    """The folder at an address, and what a page sends back to it."""
    sent: queue.Queue[str] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", sent
    server.shutdown()


def opened(folder: Path, page: str) -> str:
    """What the page sends back, in a browser of its own."""
    (folder / "index.html").write_text(page, encoding="utf-8")
    with served(folder) as (address, sent):
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
        browser = subprocess.Popen([CHROMIUM, *options, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return sent.get(timeout=180)
        finally:
            browser.kill()
            browser.wait()


@pytest.fixture(scope="module", params=["checkpoint", "stories"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the export and transformers.js, and the prompt as this program continues it.

    INT4 is that of a trained model: browsers round inputs to 8 bits in another way, which turns ties of random weights.
    """
    folder, source = tmp_path_factory.mktemp("site"), request.getfixturevalue(request.param)
    (folder / "node_modules").symlink_to(MODULES.resolve())
    if request.param == "stories":
        quantize_checkpoint(source, folder / "int4", QuantizationConfig(), "rtn")
        source = folder / "int4"
    out = folder / "models" / "student"
    sportsllm.export(source, out=out, threads=1, format="web")
    found = sportsllm.generate(out, prompt=PROMPT, max_new_tokens=TOKENS, temperature=0, kernels="portable", threads=1)
    return folder, PROMPT + found.text


def test_the_page_of_the_tutorial(site: tuple[Path, str]) -> None:
    folder, text = site
    page = re.search(r"<<'HTML'\n(.*?)^HTML$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    page = page.replace("max_new_tokens: 60", f"max_new_tokens: {TOKENS}").replace("Full-time", PROMPT)
    page = page.replace("await write();", "await write();\nfetch('/', { method: 'POST', body: text.textContent });")
    assert opened(folder, page) == text


def test_the_page_beside_the_export(site: tuple[Path, str], tmp_path: Path) -> None:
    """It loads, streams, stops, and says that a model is missing; nothing is asked of another host."""
    folder, text = site
    shutil.copytree(folder / "models" / "student", folder / "gone", ignore=shutil.ignore_patterns("*.onnx"))
    with served(folder) as (address, _), browser(tmp_path / "profile") as page:
        page.open(f"{address}/models/student/")
        page.wait("document.querySelector('h2')?.textContent === 'student'", 60)
        page.run("document.querySelector('[value=text]').click(); document.getElementById('temperature').value = 0")

        def write(tokens: int) -> None:
            page.run(
                f"document.getElementById('max_tokens').value = {tokens}; document.getElementById('input').value = ''"
            )
            page.run("document.getElementById('input').focus()")
            page.type(PROMPT)
            page.press("Enter", "\r")

        idle, log = "!document.getElementById('send').disabled", "document.querySelector('.log').textContent"
        write(TOKENS)
        page.wait(idle, 60)
        assert page.run(log) == text
        figures = page.wait(f"{FIGURES}.includes('Web') && {FIGURES}")
        assert f"{TOKENS} tokens" in figures and figures.endswith("WebAssembly")
        write(4000)
        page.wait(f"{log}.length > {len(PROMPT) + 5}")
        page.press("Escape")
        page.wait(f"{idle} && document.querySelector('.figures').textContent.includes('stopped')", 5)
        write(TOKENS)
        page.wait(idle, 60)
        assert page.run(log) == text and page.complaints == []
        page.open(f"{address}/gone/")
        page.wait("document.querySelector('[role=alert]')?.textContent.includes('The model cannot be loaded')", 60)
        assert all(url.startswith((address, "data:", "blob:")) for url in page.requested)


NO_DEVICE = "GPUAdapter.prototype.requestDevice = async () => { throw new Error('no device'); }"
NO_INFO = "delete GPUAdapter.prototype.info"  # as in Chromium before 127


@pytest.mark.parametrize(
    ("script", "query", "shown"),
    [
        ("", "?device=webgpu", "WebGPU"),
        (NO_DEVICE, "?device=webgpu", "WebAssembly, as WebGPU fails: no device"),
        (NO_INFO, "", "WebGPU"),
    ],
)
def test_the_page_with_webgpu(site: tuple[Path, str], tmp_path: Path, script: str, query: str, shown: str) -> None:
    """The same text, by WebAssembly if WebGPU fails."""
    folder, text = site
    with served(folder) as (address, _), browser(tmp_path / "profile", webgpu=True) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        page.open(f"{address}/models/student/{query}")
        page.wait("document.querySelector('h2')?.textContent === 'student'", 120)
        page.run("document.querySelector('[value=text]').click(); document.getElementById('temperature').value = 0")
        page.run(f"document.getElementById('max_tokens').value = {TOKENS}; document.getElementById('input').focus()")
        page.type(PROMPT)
        page.press("Enter", "\r")
        figures = page.wait(f"{FIGURES}.includes('Web') && {FIGURES}", 120)
        assert page.run("document.querySelector('.log').textContent") == text
        assert figures.endswith(shown), figures


def test_the_snippet_of_the_card(site: tuple[Path, str]) -> None:
    folder, text = site
    snippet = re.search(r"```js\n(.*?)```", (folder / "models" / "student" / "README.md").read_text(), re.DOTALL)[1]
    snippet = (
        snippet.replace("'DIR'", "'student'")
        .replace("Full-time", PROMPT)
        .replace("max_new_tokens: 100", f"max_new_tokens: {TOKENS}, do_sample: false")
    )
    offline = "env.backends.onnx.wasm.wasmPaths = location.href + 'node_modules/onnxruntime-web/dist/';"
    script = snippet.replace("const generate", f"{offline}\nconst generate")
    library = "./node_modules/@huggingface/transformers/dist/transformers.min.js"
    page = f"""<script type="importmap">{{ "imports": {{ "@huggingface/transformers": "{library}" }} }}</script>
<script type="module">{script}
fetch('/', {{ method: 'POST', body: answer.generated_text }});</script>"""
    assert opened(folder, page) == text
