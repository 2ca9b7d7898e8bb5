"""Other people's tests of servers, over the tiny export. `make serve-check` installs what they need and runs them."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx

from tests.sportsllm.serving.test_server import export, served_by, start  # noqa: F401

REFUSED = {
    "chat-tool-calling": "there are no tools",
    "chat-image-input": "there are no images",
    "chat-error-handling": "requests without `model` are answered",
    "finish_reason: expected 'stop', got 'length'": "the model knows no end of a turn",
}
"""Tests and complaints of llm-comply that are left out, and why."""


@pytest.fixture(scope="module")
def client(export: Path) -> Iterator[httpx.Client]:  # noqa: F811
    model = start(export)
    with served_by(model) as client:
        yield client
    model.stop()


def test_llm_comply(client: httpx.Client) -> None:
    pytest.importorskip("llm_comply", reason="needs the package llm-comply")
    call = "from llm_comply.cli import main; main()"
    options = ["run", "--format", "openai-chat", "--json", "-m", "stories", "-k", "x", "-u", f"{client.base_url}/v1"]
    done = subprocess.run([sys.executable, "-c", call, *options], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    wrong = [(each["id"], error) for each in found["results"] for error in each.get("errors", ())
             if each["status"] == "failed" and each["id"] not in REFUSED and error not in REFUSED]  # fmt: skip
    assert found["summary"]["total"] >= 8 and wrong == []


def test_schemathesis_finds_no_server_error(client: httpx.Client) -> None:
    pytest.importorskip("schemathesis", reason="needs the package schemathesis")
    call = "from schemathesis.cli import schemathesis; schemathesis()"
    options = ["run", f"{client.base_url}/openapi.json", "-n", "800", "-c", "not_a_server_error"]
    options += ["-w", "1", "--request-timeout", "120"]  # in threads, Python 3.11's parser fails in hypothesis
    done = subprocess.run([sys.executable, "-c", call, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    cases = re.search(r"([0-9]+) generated, ([0-9]+) passed", done.stdout)
    assert cases is not None and int(cases[1]) == int(cases[2]) >= 10_000


try:
    from langchain_openai import ChatOpenAI
    from langchain_tests.integration_tests import ChatModelIntegrationTests
except ImportError:
    pass
else:

    class TestLangChain(ChatModelIntegrationTests):  # type: ignore[misc]
        """LangChain's own tests of a chat model."""

        @pytest.fixture(autouse=True)
        def _client(self, client: httpx.Client) -> None:
            self.url = f"{client.base_url}/v1"

        @property
        def chat_model_class(self) -> type[Any]:
            return ChatOpenAI

        @property
        def chat_model_params(self) -> dict[str, Any]:
            settings = {"model": "stories", "temperature": 0, "max_tokens": 64, "stream_usage": True}
            return {"base_url": self.url, "api_key": "x", **settings}

        has_tool_calling = False  # the server refuses none and follows none
        has_structured_output = False  # the model fills a string until the context is full
