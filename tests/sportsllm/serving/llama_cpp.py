"""Runs llama.cpp's own server tests against `serve`: python -m tests.sportsllm.serving.llama_cpp FOLDER

FOLDER is `tools/server/tests` of llama.cpp. Its requirements (openai, requests, wget, filelock, pytest) are installed
beside this program; nothing is fetched. Each test gets a server with the slots, context, key and name that it asks for.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
import uvicorn

import sportsllm
from export.runtime.slots import SlotDecoder
from sportsllm.serving.access import Access, TimedProtocol
from sportsllm.serving.app import Server
from sportsllm.serving.engine import Engine
from sportsllm.serving.models import ServedModel
from tests.support.models import STORIES

FILES = ("basic", "chat_completion", "completion", "stream", "security", "tokenize", "template", "metrics")
RANDOM = "expects the text that llama.cpp's random generator draws"
OPTION = "expects an option of llama-server"
MODEL = "needs another model, which the test downloads"
TEMPLATE = "needs a template of llama.cpp's repository, or one built into llama-server"
VERBOSE = "reads llama-server's debug output"
PROGRESS = "expects the progress of the prompt, which is not reported"
LISTED = {
    "test_basic.py::test_server_multiple_addresses": f"{OPTION}: several addresses",
    "test_basic.py::test_server_props": "expects the path of a GGUF file",
    "test_basic.py::test_server_slots": f"{OPTION}: /slots switched off",
    "test_basic.py::test_load_split_model": MODEL,
    "test_basic.py::test_no_ui": f"{OPTION}: no page",
    "test_basic.py::test_server_model_aliases_and_tags": f"{OPTION}: aliases",
    "test_security.py::test_access_static_assets_without_api_key": "asks for files of llama-server's page",
    "test_security.py::test_cors_options[origin-Access-Control-Allow-Credentials": "no credentials across origins",
    "test_security.py::test_cors_options[web.mydomain.fr-Access-Control-Allow-Methods": "there is nothing to delete",
    "test_security.py::test_cors_origins": f"{OPTION}: a router of several programs",
    "test_security.py::test_cors_proxy": f"{OPTION}: a proxy",
    "test_security.py::test_local_media_file": MODEL,
    "test_stream.py": f"{OPTION}: a router of several programs, and streams that go on without a client",
    "test_template.py": TEMPLATE,
    "test_metrics.py::test_metrics_disabled": f"{OPTION}: no metrics",
    "test_metrics.py::test_metrics_timings_on_prompt_progress": PROGRESS,
    "test_metrics.py::test_metrics_embedding_prompt_is_counted": MODEL,
    "test_completion.py::test_completion[": RANDOM,
    "test_completion.py::test_completion_stream[": f"{RANDOM}, and names its samplers",
    "test_completion.py::test_completion_stream_vs_non_stream": f"{OPTION}: a seed for requests without one",
    "test_completion.py::test_completion_with_openai_library": RANDOM,
    "test_completion.py::test_completion_stream_with_openai_library": RANDOM,
    "test_completion.py::test_n_probs_post": "probabilities are the model's, before sampling settings",
    "test_chat_completion.py::test_chat_completion[": RANDOM,
    "test_chat_completion.py::test_chat_completion_stream[": RANDOM,
    "test_chat_completion.py::test_chat_completion_with_openai_library": RANDOM,
    "test_chat_completion.py::test_chat_template": TEMPLATE,
    "test_chat_completion.py::test_apply_chat_template": TEMPLATE,
    "test_chat_completion.py::test_return_progress": PROGRESS,
    "test_chat_completion.py::test_invalid_chat_completion_req[messages7]": "replies by a model may follow each other",
    "test_chat_completion.py::test_verbose_debug": VERBOSE,
}
"""Beginnings of the names of tests that are left out, and why."""


class Plugin:
    """Starts this program's server when a test starts llama-server."""

    def __init__(self, export: Path) -> None:
        self._export, self.left_out = export, dict[str, str]()
        self._running: list[tuple[ServedModel, uvicorn.Server, Thread]] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the listed tests."""
        for item in items:
            name = item.nodeid.partition("unit/")[2]
            if reason := next((why for begin, why in LISTED.items() if name.startswith(begin)), None):
                self.left_out[name] = reason
        kept = [item for item in items if item.nodeid.partition("unit/")[2] not in self.left_out]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def start(self, wanted: Any, timeout_seconds: int = 60) -> None:
        """As ServerProcess.start."""
        slots, context = wanted.n_slots or 4, wanted.n_ctx or 512
        room = min(512, context if wanted.kv_unified else context // slots)  # the model's context
        model = ServedModel(
            wanted.model_alias,
            self._export,
            lambda: Engine(SlotDecoder(self._export, slots, room, 1), 10**8, 64, Lock()),
        )
        model.start(lambda: None)
        app = Server([model], Access(api_key=wanted.api_key, origins=("*",))).app()
        config = uvicorn.Config(app, port=wanted.server_port, lifespan="off", log_level="error", http=TimedProtocol)
        server = uvicorn.Server(config)
        thread = Thread(target=server.run)
        thread.start()
        while not (model.ready and server.started):
            assert model.problem is None and thread.is_alive(), model.problem
            time.sleep(0.005)
        self._running.append((model, server, thread))

    def stop(self, _wanted: Any = None) -> None:
        """As ServerProcess.stop."""
        for model, server, thread in self._running:
            server.should_exit = True
            model.stop()
            thread.join()
        self._running.clear()

    @pytest.fixture(autouse=True)
    def _stop_after_each(self) -> Iterator[None]:
        yield
        self.stop()


def main(folder: str, *more: str) -> int:
    """Run the tests; `more` are arguments to pytest."""
    os.environ.pop("DEBUG_EXTERNAL", None)
    sys.path.insert(0, folder)
    with tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch) / "stories"
        sportsllm.export(STORIES, out=export)
        plugin = Plugin(export)
        from requests.structures import CaseInsensitiveDict
        from utils import ServerProcess, ServerResponse  # type: ignore[import-not-found]

        ServerProcess.start, ServerProcess.stop = lambda self, *given: plugin.start(self, *given), plugin.stop
        # Names of HTTP's headers ignore case; the tests make a plain dict of them.
        ServerResponse.headers = property(
            lambda self: self.kept, lambda self, found: setattr(self, "kept", CaseInsensitiveDict(found))
        )
        files = [f"{folder}/unit/test_{name}.py" for name in FILES]
        arguments = [
            "-q", "-m", "not slow", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={folder}", *files, *more,
        ]  # fmt: skip
        code = pytest.main(arguments, plugins=[plugin])
    print(
        f"\n{len(plugin.left_out)} left out:", *(f"  {name}: {why}" for name, why in plugin.left_out.items()), sep="\n"
    )
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
