"""Models by name: `huggingface_hub` itself against a small server of the hub's interface, and a cache without one."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sportsllm.commands import find_model
from sportsllm.formats.manifest import origin, plain_name
from tests.support.command_line import CommandLine

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FORBIDDEN = ("pytorch_model.bin", "modeling_own.py", "original/params.json", "onnx/model.safetensors")


class Hub(ThreadingHTTPServer):
    """Repositories by name; `asked` is what clients have requested."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.asked = repositories, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        api, _, revision = self.path.removeprefix("/api/models/").partition("/revision/")
        if self.path.startswith("/api/models/"):
            if api == "org/gated":
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if api not in self.server.repositories:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if revision not in ("main", "v1", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            root = self.server.repositories[api]
            names = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
            listed = {"id": api, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            return self._send(200, json.dumps(listed).encode(), {})
        model, _, rest = self.path.removeprefix("/").partition("/resolve/")
        content = (self.server.repositories[model] / rest.partition("/")[2]).read_bytes()
        return self._send(200, content, {"ETag": f'"{abs(hash(content)):x}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    tiny = shutil.copytree(checkpoint, root / "tiny", ignore=shutil.ignore_patterns("manifest.json", "README.md"))
    for name in FORBIDDEN:
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_text("must not be asked for")
    pickled = shutil.copytree(tiny, root / "pickled", ignore=shutil.ignore_patterns("model.safetensors"))
    other = shutil.copytree(pickled, root / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    served = Hub({"org/tiny": tiny, "org/pickled": pickled, "org/other": other})
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    """The endpoint is read when `huggingface_hub` is imported, so each test has a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return {**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **more}


FIND = """
import sys
from sportsllm.errors import SportsLLMError
from sportsllm.commands import find_model
for name in sys.argv[1:]:
    try:
        print(find_model(name))
    except SportsLLMError as error:
        print(f"{error.exit_code} {error}")
"""


def found(names: str, variables: dict[str, str], folder: Path) -> str:
    """A line for each name."""
    command = [sys.executable, "-c", FIND, *names.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=variables, cwd=folder).stdout.strip()


@pytest.fixture(scope="module")
def home(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with org/tiny."""
    home = tmp_path_factory.mktemp("home")
    of_tag, newest = found("org/tiny@v1 org/tiny", environment(home, hub.url), home).splitlines()
    assert of_tag == newest and Path(newest).name == COMMIT
    return home


def test_only_weights_settings_and_tokenizer_are_downloaded(hub: Hub, home: Path, checkpoint: Path) -> None:
    (folder,) = home.glob(f"hub/*/snapshots/{COMMIT}")
    assert origin(folder) == {"model": "org/tiny", "revision": COMMIT} and plain_name(folder) == "tiny"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert not [path for path in hub.asked if path.endswith(FORBIDDEN)]
    assert not [name for name in FORBIDDEN if (folder / name).exists()]


def test_a_command_takes_a_name_and_its_manifest_says_which_commit(hub: Hub, home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sportsllm.cli", "quantize", "org/tiny@v1", "--method", "rtn", "--out", "out"]
    variables = environment(home, hub.url, PYTHONPATH=str(Path(__file__).resolve().parents[3]))
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (parent,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["parents"]
    assert (parent["model"], parent["revision"]) == ("org/tiny", COMMIT)
    assert f"org/tiny@{COMMIT}" in (tmp_path / "out" / "README.md").read_text()


def test_offline_the_cache_serves_and_nobody_is_asked(hub: Hub, home: Path) -> None:
    asked = len(hub.asked)
    tiny, unknown = found("org/tiny@v1 org/unknown", environment(home, hub.url, HF_HUB_OFFLINE="1"), home).splitlines()
    assert Path(tiny).name == COMMIT
    assert unknown.startswith("5 org/unknown: no directory here, and it cannot be downloaded")
    assert len(hub.asked) == asked


def test_what_goes_wrong_is_one_line_and_costs_no_download_of_weights(hub: Hub, tmp_path: Path) -> None:
    refused = "no directory here, and the model hub refuses it: "
    messages = {
        "org/none": f"3 org/none: {refused}",
        "org/gated": f"5 org/gated: {refused}",
        "org/tiny@v9": f"3 org/tiny@v9: {refused}",
        "org/pickled": "3 org/pickled: has no safetensors",
        "org/bad--name": f"3 org/bad--name: {refused}",
        "org/other": "3 ",
    }
    lines = found(" ".join(messages), environment(tmp_path, hub.url), tmp_path).splitlines()
    for line, message in zip(lines, messages.values(), strict=True):
        assert line.startswith(message), line
    assert "model_type 'bloom' is not supported" in lines[-1]
    assert not [path for path in hub.asked if path.startswith("/org/other") and path.endswith(".safetensors")]


def test_without_a_network_there_is_one_line(tmp_path: Path) -> None:
    line = found("org/tiny", environment(tmp_path, "http://127.0.0.1:9"), tmp_path)
    assert line.startswith("5 org/tiny: no directory here, and it cannot be downloaded")


def test_without_the_package_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    cli.refuses(5, "pip install 'sportsllm-compress[compress]'", "plan", "org/tiny")


def test_what_is_here_wins_and_paths_stay_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    # The last two are mistyped paths: `org` is a folder here, `runs` the one that this program writes to.
    for name in ("org/tiny", "large", str(tmp_path / "a" / "b"), "a/b/c", "../a", "org/missing", "runs/missing"):
        assert find_model(name) == Path(name)
    assert origin(tmp_path) is None and plain_name(tmp_path / "small") == "small"
    (tmp_path / "newest").symlink_to("large")
    assert plain_name(Path("newest")) == "newest" and plain_name(Path("org/..")) == tmp_path.name
